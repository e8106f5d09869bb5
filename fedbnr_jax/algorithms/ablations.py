"""Ablations: what is left of FedBNR without its global kernel, or global last layer.

Named kernel + last layer. Each leaves a model a client; all are asked about the same
rows, and their scores averaged.
"""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import struct

from fedbnr_jax import blr, urk
from fedbnr_jax.algorithms import fedbnr, last_layer, settings
from fedbnr_jax.algorithms.base import (
  Exchange,
  FederatedAlgorithm,
  Floats,
  ServerState,
  Stage,
)
from fedbnr_jax.algorithms.personal import (
  check_everybody,
  copies,
  count_clients,
  no_floats,
)
from fedbnr_jax.clients import (
  ModelParams,
  descend,
  evidence_loss,
  features_of,
  keep_above,
  local_stats,
  unless_finite,
)
from fedbnr_jax.federation import Clients, Federation, ServerSet
from fedbnr_jax.mapping import Placement
from fedbnr_jax.optimizers import adam
from fedbnr_jax.participation import Participation


class Personal(struct.PyTreeNode):
  """A client's model; stacked [K, ...] in the state."""

  params: ModelParams | None  # Its own kernel; None where the global one serves.
  posterior: blr.Posterior
  nll: jax.Array  # [] per row, of the rows in the posterior.


def local_layers(
  feature_map: urk.FeatureMap,
  learning: Exchange,
  *,
  initial_noise_std: float = 0.5,
  initial_prior_std: float = 1.0,
  with_noise: bool = True,
  participation: Participation = Participation(),  # noqa: B008  Immutable.
  placement: Placement = Placement(),  # noqa: B008
) -> FederatedAlgorithm:
  """A global kernel, and a last layer of each client's own rows.

  Args:
    feature_map: The kernel.
    learning: `fedbnr.learn_kernel`, by mean or by distillation.
    initial_noise_std: σ at the start, in units of the target's std.
    initial_prior_std: λ at the start.
    with_noise: Whether predicted variances are of y, or of the function alone.
    participation: Who takes part in a round; everybody has a last layer.
    placement: On which devices, and how many clients at a time.
  """

  return _built(
    feature_map,
    (Stage((learning, _own_layers(feature_map))),),
    initial_noise_std,
    initial_prior_std,
    participation,
    placement,
    with_noise=with_noise,
    own_kernels=False,
  )


def local_kernels(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  *,
  num_local_steps: int,
  global_layer: bool,
  initial_noise_std: float = 0.5,
  initial_prior_std: float = 1.0,
  min_noise_std: float = 1e-3,
  with_noise: bool = True,
  participation: Participation = Participation(),  # noqa: B008  Immutable.
  placement: Placement = Placement(),  # noqa: B008
) -> FederatedAlgorithm:
  """A kernel a client, never aggregated, and a last layer of its own rows or of all.

  Args:
    feature_map: The kernel.
    optimizer: Of the local steps; its state starts afresh every round.
    num_local_steps: Full-batch steps of each client in a round.
    global_layer: Whether every client's statistics under each kernel are summed, so
      that K kernels go to K clients.
    initial_noise_std: σ at the start, in units of the target's std.
    initial_prior_std: λ at the start.
    min_noise_std: Floor of σ.
    with_noise: Whether predicted variances are of y, or of the function alone.
    participation: Who takes part in a round.
    placement: On which devices, and how many clients at a time.
  """
  settings.check_positive(num_local_steps=num_local_steps, min_noise_std=min_noise_std)
  loss = evidence_loss(feature_map)

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, Any]:
    del server
    params, losses = descend(
      lambda params: loss(params, state.omega, rows),
      optimizer,
      num_local_steps,
      rows.memory.params,
      partial(keep_above, min_noise_std),
    )
    told = unless_finite(params, losses[-1], rows.y.dtype)
    return jnp.ones((), jnp.int32), (told, rows.memory.replace(params=params))

  learning = Exchange(client, count_clients, no_floats, keeps=True)
  layers = _statistics_of_all if global_layer else _own_layers
  return _built(
    feature_map,
    (Stage((learning, layers(feature_map))),),
    initial_noise_std,
    initial_prior_std,
    participation,
    placement,
    with_noise=with_noise,
    own_kernels=True,
  )


def _own_layers(feature_map: urk.FeatureMap) -> Exchange:
  """Last layers of own rows, under the own kernel or the global one."""

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, Any]:
    del server
    own = rows.memory
    params = state.params if own.params is None else own.params
    stats = local_stats(feature_map, params, state.omega, rows)
    kept = own.replace(**_conditioned(stats, params))
    return jnp.ones((), jnp.int32), (None, kept)

  def floats(state: ServerState, server: ServerSet | None) -> Floats:
    del server
    # A global kernel goes down; the rest stays at home.
    own_kernels = state.personal.params is not None
    return Floats(0, 0 if own_kernels else state.params.size)

  return Exchange(client, count_clients, floats, asks_all=True, keeps=True)


def _statistics_of_all(feature_map: urk.FeatureMap) -> Exchange:
  """Every client's statistics under every client's kernel: K² messages."""

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, None]:
    del server
    stats = jax.lax.map(
      lambda params: local_stats(feature_map, params, state.omega, rows),
      state.personal.params,
    )
    return (stats, jnp.ones((), jnp.int32)), None

  def combine(state: ServerState, server: ServerSet | None, total: Any) -> ServerState:
    del server
    stats, num_clients = total
    fitted = jax.vmap(_conditioned)(stats, state.personal.params)
    personal = state.personal.replace(**fitted)
    return state.replace(personal=personal, num_clients=num_clients)

  def floats(state: ServerState, server: ServerSet | None) -> Floats:
    del server
    num_clients, num_features = state.personal.posterior.mean.shape
    statistics = num_features * (num_features + 1) // 2 + num_features
    # Every kernel up once and down to all, and statistics under each of them.
    return Floats(
      state.params.size + num_clients * (statistics + 2),
      num_clients * state.params.size + statistics,
    )

  return Exchange(client, combine, floats, asks_all=True)


def _conditioned(stats: blr.SufficientStats, params: ModelParams) -> dict[str, Any]:
  """The last layer of some rows, and how likely they are."""
  dtype = stats.gram.dtype
  fitted = blr.posterior(
    stats, params.noise_std.astype(dtype), params.prior_std.astype(dtype)
  )
  nll = blr.negative_log_marginal_likelihood_from_stats(stats, fitted)
  return {"posterior": fitted, "nll": nll / jnp.maximum(stats.count, 1)}


def _built(
  feature_map: urk.FeatureMap,
  stages: tuple[Stage, ...],
  initial_noise_std: float,
  initial_prior_std: float,
  participation: Participation,
  placement: Placement,
  *,
  with_noise: bool,
  own_kernels: bool,
) -> FederatedAlgorithm:
  """The parts that all ablations share."""
  settings.check(
    participation,
    placement,
    initial_noise_std=initial_noise_std,
    initial_prior_std=initial_prior_std,
  )
  check_everybody(participation)
  start = last_layer.initial_state(
    feature_map, initial_noise_std, initial_prior_std, placement
  )

  def init(key: chex.PRNGKey, federation: Federation) -> ServerState:
    state = start(key, federation)
    params = state.params if own_kernels else None
    own = Personal(params, state.posterior, jnp.zeros_like(state.posterior.noise_std))
    own_each = copies(own, federation.num_clients)
    state = state.replace(stats=(), posterior=(), personal=own_each)
    return placement.replicated(state)

  def predict(state: ServerState, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def one(own: Personal) -> tuple[jax.Array, jax.Array]:
      params = state.params if own.params is None else own.params
      features = features_of(feature_map, params, state.omega, x)
      return blr.predict(own.posterior, features, with_noise=with_noise)

    if own_kernels:
      return jax.lax.map(one, state.personal)
    return jax.vmap(one)(state.personal)  # The features are computed once.

  def scales(state: ServerState) -> tuple[Any, Any]:
    posterior = state.personal.posterior
    return posterior.noise_std.mean(), posterior.prior_std.mean()

  return FederatedAlgorithm(
    init=init,
    stages=stages,
    train_nll=lambda state: jnp.mean(state.personal.nll),
    predict=predict,
    participation=participation,
    placement=placement,
    one_model_each=True,
    scales=scales,
  )


def average_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `avg+local`: the kernel of `fedbnr`."""
  return _with_local_layers(config, fedbnr.from_config(config))


def distilled_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `kd+local`: the kernel of `fedbnr-kd`."""
  return _with_local_layers(config, fedbnr.distilled_from_config(config))


def _with_local_layers(
  config: ml_collections.ConfigDict, method: FederatedAlgorithm
) -> FederatedAlgorithm:
  shared = fedbnr.common_settings(config)
  del shared["min_noise_std"]  # It is in the exchange.
  learning = method.stages[0].exchanges[0]
  return local_layers(urk.from_config(config), learning, **shared)


def local_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `local+local`."""
  return _with_local_kernels(config, global_layer=False)


def local_global_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `local+global`."""
  return _with_local_kernels(config, global_layer=True)


def _with_local_kernels(
  config: ml_collections.ConfigDict, *, global_layer: bool
) -> FederatedAlgorithm:
  return local_kernels(
    urk.from_config(config),
    adam(config.learning_rate),
    num_local_steps=config.num_local_steps,
    global_layer=global_layer,
    **fedbnr.common_settings(config),
  )
