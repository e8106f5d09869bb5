"""FedAvg and FedProx: a network with a scalar head, averaged; no Gaussian process."""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import linen as nn
from flax import struct

from fedbnr_jax.algorithms import settings
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated import aggregation
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.exchange import Exchange, Message, Own, Report, Stage
from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.local_steps import descend, loss_report
from fedbnr_jax.federated.optimizers import adam
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.federated.state import ServerState, State
from fedbnr_jax.gp import blr, networks


class NetworkParams(struct.PyTreeNode):
  """A network, and the one σ of its error bars."""

  theta: Any
  log_noise_std: jax.Array  # []

  @property
  def noise_std(self) -> jax.Array:
    """σ []."""
    return jnp.exp(self.log_noise_std)


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
  """Builds the method: local steps on the squared error, then the mean of all networks.

  Its error bars have one width, the σ of the training rows' residuals: it has no other
  notion of what it does not know.

  Args:
    network: Maps x [N, D] to predictions [N].
    optimizer: The clients' optimiser; its state starts afresh every round.
    num_local_steps: Full-batch steps of each client in a round.
    mu: Pull of a client's parameters towards the broadcast ones; 0 is FedAvg.
    by_rows: Whether each client weighs as much as it has rows; plain mean otherwise.
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

  def init_server(
    key: chex.PRNGKey, num_clients: int, rows: Rows, inputs: Any = ()
  ) -> ServerState:
    del num_clients, inputs
    zero = jnp.zeros((), jnp.int32)
    theta = network.init(key, rows.x)
    params = NetworkParams(theta, jnp.zeros((), rows.x.dtype))
    return ServerState(num_rounds=zero, num_clients=zero, params=params)

  def predict(state: State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    params, dtype = state.server.params, blr.statistics_dtype()
    mean = outputs(network, params.theta, x).astype(dtype)
    return mean, jnp.full_like(mean, params.noise_std.astype(dtype) ** 2)

  def train_nll(state: ServerState) -> jax.Array:
    # The NLL of rows whose mean squared residual is σ².
    return state.params.log_noise_std + 0.5 * (1.0 + math.log(2.0 * math.pi))

  learning = learn_network(network, optimizer, num_local_steps, mu, by_rows)
  noise = learn_noise(network, everybody=participation.all_send_statistics)
  return FederatedAlgorithm(
    init_server=init_server,
    stages=(Stage((learning, noise)),),
    train_nll=train_nll,
    predict=predict,
    participation=participation,
    placement=placement,
    scales=lambda state: (state.server.params.noise_std, 0.0),  # There is no prior.
    remedy="a smaller fedprox.learning_rate (0: as learning_rate)",
  )


def learn_network(
  network: nn.Module,
  optimizer: optax.GradientTransformation,
  num_local_steps: int,
  mu: float,
  by_rows: bool,
) -> Exchange:
  """Makes an exchange: the network down, local steps, the mean of all networks."""

  def broadcast(state: ServerState, server_set: ServerSet | None) -> Any:
    del server_set
    return state.params.theta

  def client(down: Any, own: Own, rows: Rows) -> tuple[Message, Own, Report]:
    def loss(theta: Any) -> jax.Array:
      error = squared_residuals(network, theta, rows)
      value = jnp.sum(error) / jnp.sum(rows.mask, dtype=error.dtype)
      if mu:
        gaps = jax.tree.map(lambda a, b: jnp.sum(jnp.square(a - b)), theta, down)
        value = value + 0.5 * mu * sum(jax.tree.leaves(gaps))
      return value

    theta, losses = descend(loss, optimizer, num_local_steps, down)
    message = aggregation.weighted(theta, rows, by_rows=by_rows)
    return message, own, loss_report(losses[-1], theta, rows.y.dtype)

  def server(
    state: ServerState, server_set: ServerSet | None, total: aggregation.Weighted
  ) -> ServerState:
    del server_set
    return state.replace(params=state.params.replace(theta=total.mean))

  return Exchange("network", broadcast, client, server)


class ResidualSums(struct.PyTreeNode):
  """Up: what a client's residuals say about σ; summable."""

  squares: jax.Array  # [] sum of squared residuals.
  count: jax.Array  # [] rows.
  num_clients: jax.Array  # [] int32, one.


def learn_noise(network: nn.Module, *, everybody: bool) -> Exchange:
  """Makes an exchange that finds σ from the sum of all squared residuals."""

  def broadcast(state: ServerState, server_set: ServerSet | None) -> Any:
    del server_set
    return state.params.theta

  def client(down: Any, own: Own, rows: Rows) -> tuple[ResidualSums, Own, Report]:
    dtype = blr.statistics_dtype()
    squares = jnp.sum(squared_residuals(network, down, rows).astype(dtype))
    count = jnp.sum(rows.mask, dtype=dtype)
    return ResidualSums(squares, count, jnp.ones((), jnp.int32)), own, {}

  def server(
    state: ServerState, server_set: ServerSet | None, total: ResidualSums
  ) -> ServerState:
    del server_set
    dtype = state.params.log_noise_std.dtype
    floor = float(jnp.finfo(dtype).tiny)  # A perfect fit has no logarithm.
    log_noise_std = 0.5 * jnp.log(jnp.maximum(total.squares / total.count, floor))
    params = state.params.replace(log_noise_std=log_noise_std.astype(dtype))
    return state.replace(params=params, num_clients=total.num_clients)

  return Exchange("residuals", broadcast, client, server, everybody)


def outputs(network: nn.Module, theta: Any, x: jax.Array) -> jax.Array:
  """Computes the network's predictions [N] of rows x [N, D]."""
  mean: Any = network.apply(theta, x)
  chex.assert_shape(mean, x.shape[:1])
  return jnp.asarray(mean)


def squared_residuals(network: nn.Module, theta: Any, rows: Rows) -> jax.Array:
  """Computes squared residuals [N] of one client's rows; zero for padding."""
  error = jnp.square(outputs(network, theta, rows.x) - rows.y)
  return jnp.where(rows.mask, error, jnp.zeros_like(error))


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `fedavg`."""
  return _build(config, 0.0)


def prox_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `fedprox`."""
  return _build(config, config.fedprox.mu)


def _build(config: ml_collections.ConfigDict, mu: float) -> FederatedAlgorithm:
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
