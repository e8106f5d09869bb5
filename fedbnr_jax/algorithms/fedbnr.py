"""FedBNR: local evidence steps, aggregation of the kernel, exact last layer."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax

from fedbnr_jax import aggregation, blr, urk
from fedbnr_jax.aggregation import Aggregator
from fedbnr_jax.algorithms.base import (
  Exchange,
  FederatedAlgorithm,
  RoundInfo,
  ServerState,
)
from fedbnr_jax.clients import (
  ModelParams,
  descend,
  evidence_loss,
  features_of,
  local_stats,
)
from fedbnr_jax.errors import InputError
from fedbnr_jax.federation import Clients, Federation, ServerSet
from fedbnr_jax.mapping import Placement, client_mesh
from fedbnr_jax.optimizers import adam
from fedbnr_jax.participation import Participation


def fedbnr(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  aggregator: Aggregator,
  *,
  num_local_steps: int,
  initial_noise_std: float = 0.5,
  initial_prior_std: float = 1.0,
  min_noise_std: float = 1e-3,
  participation: Participation = Participation(),  # noqa: B008  Immutable.
  placement: Placement = Placement(),  # noqa: B008
) -> FederatedAlgorithm:
  """Builds the method; with `aggregation.mean` FedBNR, with `distillation` FedBNR-KD.

  Args:
    feature_map: The unifying random kernel.
    optimizer: Of the local steps; its state starts afresh every round.
    aggregator: How the clients' kernels become one.
    num_local_steps: Full-batch steps of each client in a round.
    initial_noise_std: σ at the start, in units of the target's std.
    initial_prior_std: λ at the start.
    min_noise_std: Floor of σ.
    participation: Who takes part in a round; everyone by default.
    placement: On which devices, and how many clients at a time.
  """
  _check_positive(
    num_local_steps=num_local_steps,
    initial_noise_std=initial_noise_std,
    initial_prior_std=initial_prior_std,
    min_noise_std=min_noise_std,
    batch_size=1 if placement.batch_size is None else placement.batch_size,
  )
  participation.check()

  def init(key: chex.PRNGKey, federation: Federation) -> ServerState:
    x = federation.clients.x
    # Only shape and type of the rows matter: one seed, one kernel, whoever has what.
    feature_params = feature_map.init(key, jnp.zeros(x.shape[1:], x.dtype))
    params = ModelParams(
      theta=feature_params.theta,
      log_noise_std=jnp.log(jnp.asarray(initial_noise_std, x.dtype)),
      log_prior_std=jnp.log(jnp.asarray(initial_prior_std, x.dtype)),
    )
    num_features = jax.eval_shape(feature_map.apply, feature_params, x[0]).shape[-1]
    stats, nobody = blr.empty_stats(num_features), jnp.zeros((), jnp.int32)
    posterior = _posterior(stats, params)
    state = ServerState(
      feature_params.omega, params, stats, posterior, nobody, jnp.zeros((), jnp.int32)
    )
    return placement.replicated(state)

  def describe(
    state: ServerState,
    server: ServerSet | None,
    reports: list[Any],
    answered: jax.Array,
  ) -> RoundInfo:
    stats = state.stats
    nll = blr.negative_log_marginal_likelihood_from_stats(stats, state.posterior)
    message_floats = aggregator.floats(state.params, server)
    return RoundInfo(
      answered=answered,
      client_loss=reports[0],
      train_nll=nll / jnp.maximum(stats.count, 1),
      floats_up=jnp.asarray(message_floats + _floats(stats) + 2),
      floats_down=jnp.asarray(state.params.size + _floats(stats)),
    )

  def predict(state: ServerState, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    features = features_of(feature_map, state.params, state.omega, x)
    return blr.predict(state.posterior, features)

  learning = learn_kernel(
    feature_map, optimizer, aggregator, num_local_steps, min_noise_std
  )
  conditioning = condition(feature_map, asks_all=not participation.statistics_too)
  return FederatedAlgorithm(
    init, (learning, conditioning), describe, predict, participation, placement
  )


def learn_kernel(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  aggregator: Aggregator,
  num_local_steps: int,
  min_noise_std: float,
) -> Exchange:
  """Phase 1: local steps on the evidence, and one kernel made of all."""
  loss = evidence_loss(feature_map)

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, jax.Array]:
    local, losses = descend(
      lambda params: loss(params, state.omega, rows),
      optimizer,
      num_local_steps,
      min_noise_std,
      state.params,
    )
    # A divergence in the last step shows in the parameters only.
    sound = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(local)]
    loss_now = jnp.where(jnp.all(jnp.stack(sound)), losses[-1], jnp.nan)
    message = aggregator.message(local, state.omega, rows, server)
    return message, loss_now.astype(losses.dtype)

  def combine(state: ServerState, server: ServerSet | None, total: Any) -> ServerState:
    params = aggregator.combine(state.params, state.omega, total, server)
    return state.replace(params=params)

  return Exchange(client, combine)


def condition(feature_map: urk.FeatureMap, *, asks_all: bool) -> Exchange:
  """Phase 2, merged: every client's statistics up, one posterior."""

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, None]:
    del server
    stats = local_stats(feature_map, state.params, state.omega, rows)
    return (stats, jnp.ones((), jnp.int32)), None

  def combine(state: ServerState, server: ServerSet | None, total: Any) -> ServerState:
    del server
    stats, num_clients = total
    posterior = _posterior(stats, state.params)
    return state.replace(stats=stats, posterior=posterior, num_clients=num_clients)

  return Exchange(client, combine, asks_all)


def _posterior(stats: blr.SufficientStats, params: ModelParams) -> blr.Posterior:
  dtype = stats.gram.dtype
  return blr.posterior(
    stats, params.noise_std.astype(dtype), params.prior_std.astype(dtype)
  )


def _floats(stats: blr.SufficientStats) -> int:
  """Floats of a Gram's triangle and a vector: phase 2 up, and its posterior down.

  Phase 2 is merged and run every round. The parameters go down once a round: phase 2
  and the next round's local steps start from the same ones. ω is a seed.
  """
  (num_features,) = stats.moment.shape
  return num_features * (num_features + 1) // 2 + num_features


def _check_positive(**settings: float) -> None:
  for name, value in settings.items():
    if not value > 0:
      raise InputError(f"{name} must be positive, got {value}.")


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `fedbnr`."""
  return _with(config, _mean(config))


def distilled_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `fedbnr-kd`."""
  aggregator = aggregation.distillation(
    urk.from_config(config),
    adam(config.kd.learning_rate),
    num_steps=config.kd.num_steps,
    alpha=config.kd.alpha,
    min_noise_std=config.min_noise_std,
    start=_mean(config) if config.kd.warm_start else None,
  )
  return _with(config, aggregator)


def _mean(config: ml_collections.ConfigDict) -> Aggregator:
  return aggregation.mean(scales=config.mean.scales, by_rows=config.mean.by_rows)


def _with(
  config: ml_collections.ConfigDict, aggregator: Aggregator
) -> FederatedAlgorithm:
  return fedbnr(
    urk.from_config(config),
    adam(config.learning_rate),
    aggregator,
    num_local_steps=config.num_local_steps,
    initial_noise_std=config.initial_noise_std,
    initial_prior_std=config.initial_prior_std,
    min_noise_std=config.min_noise_std,
    participation=Participation(
      config.participation, config.dropout, config.statistics == "answering"
    ),
    placement=Placement(config.client_batch_size or None, client_mesh(config.mesh)),
  )
