"""FedAvg and FedProx: a network with a scalar head, averaged; no Gaussian process."""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import linen as nn

from fedbnr_jax import aggregation, blr, networks
from fedbnr_jax.algorithms import settings
from fedbnr_jax.algorithms.base import (
  Exchange,
  FederatedAlgorithm,
  Floats,
  ServerState,
  Stage,
)
from fedbnr_jax.clients import ModelParams, descend, unless_finite
from fedbnr_jax.errors import InputError
from fedbnr_jax.federation import Clients, Federation, ServerSet
from fedbnr_jax.mapping import Placement
from fedbnr_jax.optimizers import adam
from fedbnr_jax.participation import Participation


def fedprox(
  network: nn.Module,
  optimizer: optax.GradientTransformation,
  *,
  num_local_steps: int,
  mu: float = 0.0,
  by_rows: bool = False,
  participation: Participation = Participation(),  # noqa: B008  Immutable.
  placement: Placement = Placement(),  # noqa: B008
) -> FederatedAlgorithm:
  """Builds the method: local steps on the squared error, then the mean of all.

  Its error bars are those of one σ, the residuals of the training rows: it has no other
  notion of what it does not know.

  Args:
    network: Maps x [N, D] to predictions [N].
    optimizer: Of the local steps; its state starts afresh every round.
    num_local_steps: Full-batch steps of each client in a round.
    mu: Pull of a client's parameters towards the broadcast ones; 0 is FedAvg.
    by_rows: Weight each client by its number of rows; plain mean otherwise.
    participation: Who takes part in a round; everyone by default.
    placement: On which devices, and how many clients at a time.
  """
  settings.check(
    participation,
    placement,
    num_local_steps=num_local_steps,
  )
  if not 0 <= mu < math.inf:
    raise InputError(f"mu must not be negative, got {mu}.")

  def init(key: chex.PRNGKey, federation: Federation) -> ServerState:
    x = federation.clients.x
    theta = network.init(key, jnp.zeros(x.shape[1:], x.dtype))
    zero = jnp.zeros((), jnp.int32)
    scales = (jnp.zeros((), x.dtype),) * 2
    state = ServerState((), ModelParams(theta, *scales), (), (), zero, zero)
    return placement.replicated(state)

  def predict(state: ServerState, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    dtype = blr.statistics_dtype()
    mean = outputs(network, state.params.theta, x).astype(dtype)
    return mean, jnp.full_like(mean, state.params.noise_std.astype(dtype) ** 2)

  def train_nll(state: ServerState) -> jax.Array:
    # Of N rows whose mean squared residual is σ².
    return state.params.log_noise_std + 0.5 * (1.0 + math.log(2.0 * math.pi))

  learning = learn_network(network, optimizer, num_local_steps, mu, by_rows)
  noise = learn_noise(network, asks_all=not participation.statistics_too)
  return FederatedAlgorithm(
    init=init,
    stages=(Stage((learning, noise)),),
    train_nll=train_nll,
    predict=predict,
    participation=participation,
    placement=placement,
    scales=lambda state: (state.params.noise_std, 0.0),  # There is no prior.
    remedy="a smaller fedprox.learning_rate (0: as learning_rate)",
  )


def learn_network(
  network: nn.Module,
  optimizer: optax.GradientTransformation,
  num_local_steps: int,
  mu: float,
  by_rows: bool,
) -> Exchange:
  """Local steps, and the mean of what all have come to."""

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, jax.Array]:
    del server
    start = state.params.theta

    def loss(theta: Any) -> jax.Array:
      error = squared_residuals(network, theta, rows)
      value = jnp.sum(error) / jnp.sum(rows.mask, dtype=error.dtype)
      if mu:
        gaps = jax.tree.map(lambda a, b: jnp.sum(jnp.square(a - b)), theta, start)
        value = value + 0.5 * mu * sum(jax.tree.leaves(gaps))
      return value

    theta, losses = descend(loss, optimizer, num_local_steps, start)
    message = aggregation.weighted(theta, rows, by_rows=by_rows)
    return message, unless_finite(theta, losses[-1], rows.y.dtype)

  def combine(
    state: ServerState, server: ServerSet | None, total: aggregation.Weighted
  ) -> ServerState:
    del server
    return state.replace(params=state.params.replace(theta=total.mean))

  def floats(state: ServerState, server: ServerSet | None) -> Floats:
    del server
    size = state.params.size - 2
    return Floats(size, size)

  return Exchange(client, combine, floats)


def learn_noise(network: nn.Module, *, asks_all: bool) -> Exchange:
  """One σ, from the sum of all squared residuals under the new network."""
  dtype = blr.statistics_dtype

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, None]:
    del server
    error = squared_residuals(network, state.params.theta, rows)
    total = jnp.sum(error.astype(dtype()))
    count = jnp.sum(rows.mask, dtype=dtype())
    return (total, count, jnp.ones((), jnp.int32)), None

  def combine(state: ServerState, server: ServerSet | None, total: Any) -> ServerState:
    del server
    squares, count, num_clients = total
    # A perfect fit has no logarithm.
    floor = float(jnp.finfo(state.params.log_noise_std.dtype).tiny)
    log_noise_std = 0.5 * jnp.log(jnp.maximum(squares / count, floor))
    params = state.params.replace(
      log_noise_std=log_noise_std.astype(state.params.log_noise_std.dtype)
    )
    return state.replace(params=params, num_clients=num_clients)

  def floats(state: ServerState, server: ServerSet | None) -> Floats:
    del state, server
    return Floats(2, 1)  # σ comes back.

  return Exchange(client, combine, floats, asks_all)


def outputs(network: nn.Module, theta: Any, x: jax.Array) -> jax.Array:
  """[N] what the network says of rows x [N, D]."""
  mean: Any = network.apply(theta, x)
  chex.assert_shape(mean, x.shape[:1])
  return jnp.asarray(mean)


def squared_residuals(network: nn.Module, theta: Any, rows: Clients) -> jax.Array:
  """[N] of one client's rows; zero for padding."""
  error = jnp.square(outputs(network, theta, rows.x) - rows.y)
  return jnp.where(rows.mask, error, jnp.zeros_like(error))


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `fedavg`."""
  return _with(config, 0.0)


def prox_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `fedprox`."""
  return _with(config, config.fedprox.mu)


def _with(config: ml_collections.ConfigDict, mu: float) -> FederatedAlgorithm:
  if not config.with_noise:
    raise InputError(
      f"method {config.method!r} has no error bars but those of the noise: leave "
      "config.with_noise as it is."
    )
  network = networks.Regressor(
    config.hidden_size,
    config.latent_size,
    config.num_hidden_layers,
    jnp.dtype(config.dtype),
  )
  return fedprox(
    network,
    adam(config.fedprox.learning_rate or config.learning_rate),
    num_local_steps=config.num_local_steps,
    mu=mu,
    by_rows=config.mean.by_rows,
    **settings.from_config(config),
  )
