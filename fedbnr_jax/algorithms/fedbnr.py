"""FedBNR: local evidence steps, aggregation of the kernel, exact last layer."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax

from fedbnr_jax import aggregation, blr, urk
from fedbnr_jax.aggregation import Aggregator
from fedbnr_jax.algorithms.base import FederatedAlgorithm, RoundInfo, ServerState
from fedbnr_jax.clients import (
  ModelParams,
  descend,
  evidence_loss,
  features_of,
  local_stats,
  map_clients,
)
from fedbnr_jax.errors import InputError
from fedbnr_jax.federation import Clients, Federation


def fedbnr(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  aggregator: Aggregator,
  *,
  num_local_steps: int,
  initial_noise_std: float = 0.5,
  initial_prior_std: float = 1.0,
  min_noise_std: float = 1e-3,
  client_batch_size: int | None = None,
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
    client_batch_size: Clients batched at a time; all by default.
  """
  _check_positive(
    num_local_steps=num_local_steps,
    initial_noise_std=initial_noise_std,
    initial_prior_std=initial_prior_std,
    min_noise_std=min_noise_std,
    client_batch_size=1 if client_batch_size is None else client_batch_size,
  )
  loss = evidence_loss(feature_map)

  def init(key: chex.PRNGKey, federation: Federation) -> ServerState:
    feature_params = feature_map.init(key, federation.clients.x[0])
    dtype = federation.clients.x.dtype
    params = ModelParams(
      theta=feature_params.theta,
      log_noise_std=jnp.log(jnp.asarray(initial_noise_std, dtype)),
      log_prior_std=jnp.log(jnp.asarray(initial_prior_std, dtype)),
    )
    omega = feature_params.omega
    stats, posterior = last_layer(
      feature_map, params, omega, federation, client_batch_size
    )
    return ServerState(omega, params, stats, posterior, jnp.zeros((), jnp.int32))

  def round_fn(
    key: chex.PRNGKey, state: ServerState, federation: Federation
  ) -> tuple[ServerState, RoundInfo]:
    del key  # Full batches, full participation: nothing is random.
    omega, server = state.omega, federation.server

    def client(rows: Clients) -> tuple[Any, jax.Array]:
      local, losses = descend(
        lambda params: loss(params, omega, rows),
        optimizer,
        num_local_steps,
        min_noise_std,
        state.params,
      )
      message = aggregator.message(local, omega, rows, server)
      # A divergence in the last step shows in the parameters only.
      sound = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(local)]
      loss_now = jnp.where(jnp.all(jnp.stack(sound)), losses[-1], jnp.nan)
      return message, loss_now.astype(losses.dtype)

    total, client_loss = map_clients(client, federation.clients, client_batch_size)
    params = aggregator.combine(state.params, omega, total, server)
    stats, posterior = last_layer(
      feature_map, params, omega, federation, client_batch_size
    )
    new = ServerState(omega, params, stats, posterior, state.num_rounds + 1)
    return new, _info(new, client_loss, aggregator.floats(params, server))

  def predict(state: ServerState, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    features = features_of(feature_map, state.params, state.omega, x)
    return blr.predict(state.posterior, features)

  return FederatedAlgorithm(init, round_fn, predict)


def last_layer(
  feature_map: urk.FeatureMap,
  params: ModelParams,
  omega: Any,
  federation: Federation,
  client_batch_size: int | None,
) -> tuple[blr.SufficientStats, blr.Posterior]:
  """Phase 2, merged: every client's statistics up, one posterior."""

  def client(rows: Clients) -> tuple[blr.SufficientStats, None]:
    return local_stats(feature_map, params, omega, rows), None

  stats, _ = map_clients(client, federation.clients, client_batch_size)
  dtype = stats.gram.dtype
  noise_std, prior_std = params.noise_std.astype(dtype), params.prior_std.astype(dtype)
  return stats, blr.posterior(stats, noise_std, prior_std)


def _info(state: ServerState, client_loss: jax.Array, message_floats: int) -> RoundInfo:
  stats = state.stats
  nll = blr.negative_log_marginal_likelihood_from_stats(stats, state.posterior)
  return RoundInfo(
    client_loss=client_loss,
    train_nll=nll / stats.count,
    floats_up=jnp.asarray(message_floats + _floats(stats) + 2),
    floats_down=jnp.asarray(state.params.size + _floats(stats)),
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
    optax.adam(config.kd.learning_rate),
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
    optax.adam(config.learning_rate),
    aggregator,
    num_local_steps=config.num_local_steps,
    initial_noise_std=config.initial_noise_std,
    initial_prior_std=config.initial_prior_std,
    min_noise_std=config.min_noise_std,
    client_batch_size=config.client_batch_size or _batch_size(config.hidden_size),
  )


def _batch_size(hidden_size: int) -> int | None:
  """All clients at once, or one where a wide layer's activations would leave the cache.

  Measured on one CPU core: at width 200 both take the same time, at 2000 one at a time
  takes two thirds.
  """
  return 1 if hidden_size > 200 else None
