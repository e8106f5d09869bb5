"""FedBNR: local evidence steps, aggregation of the kernel, exact last layer."""

from functools import partial
from typing import Any

import jax
import ml_collections
import optax

from fedbnr_jax import aggregation, urk
from fedbnr_jax.aggregation import Aggregator
from fedbnr_jax.algorithms import last_layer, settings
from fedbnr_jax.algorithms.base import (
  Exchange,
  FederatedAlgorithm,
  Floats,
  ServerState,
  Stage,
)
from fedbnr_jax.clients import descend, evidence_loss, keep_above, unless_finite
from fedbnr_jax.federation import Clients, ServerSet
from fedbnr_jax.mapping import Placement
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
  scales: last_layer.Scales = last_layer.trained_scales,
  feedback: bool = False,
  varying_noise: bool = False,
  with_noise: bool = True,
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
    scales: How σ and λ of the posterior are found: as trained, or from the summed
      statistics.
    feedback: Whether the next round's local steps start from these σ and λ.
    varying_noise: Whether the noise of predictions depends on the input.
    with_noise: Whether predicted variances are of y, or of the function alone.
    participation: Who takes part in a round; everyone by default.
    placement: On which devices, and how many clients at a time.
  """
  settings.check(
    participation,
    placement,
    num_local_steps=num_local_steps,
    initial_noise_std=initial_noise_std,
    initial_prior_std=initial_prior_std,
    min_noise_std=min_noise_std,
  )
  learning = learn_kernel(
    feature_map, optimizer, aggregator, num_local_steps, min_noise_std
  )
  asks_all = not participation.statistics_too
  conditioning = last_layer.condition(
    feature_map, asks_all=asks_all, scales=scales, feedback=feedback
  )
  noise = last_layer.learn_noise(feature_map, asks_all=asks_all)
  return FederatedAlgorithm(
    init=last_layer.initial_state(
      feature_map,
      initial_noise_std,
      initial_prior_std,
      placement,
      varying_noise=varying_noise,
    ),
    stages=(Stage((learning, conditioning, *(noise if varying_noise else ()))),),
    train_nll=last_layer.train_nll,
    predict=last_layer.prediction(feature_map, with_noise=with_noise),
    participation=participation,
    placement=placement,
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
      state.params,
      partial(keep_above, min_noise_std),
    )
    message = aggregator.message(local, state.omega, rows, server)
    # A divergence in the last step shows in the parameters only.
    return message, unless_finite(local, losses[-1], rows.y.dtype)

  def combine(state: ServerState, server: ServerSet | None, total: Any) -> ServerState:
    params = aggregator.combine(state.params, state.omega, total, server)
    return state.replace(params=params)

  def floats(state: ServerState, server: ServerSet | None) -> Floats:
    # The parameters are there: phase 2 of the round before has sent them.
    return Floats(aggregator.floats(state.params, server), 0)

  return Exchange(client, combine, floats)


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `fedbnr`."""
  return _with(config, _mean(config))


def distilled_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `fedbnr-kd`."""
  return _with(config, _distillation(config))


def evidence_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `fedbnr-ev`."""
  return _with(config, _mean(config), **_evidence(config))


def distilled_evidence_from_config(
  config: ml_collections.ConfigDict,
) -> FederatedAlgorithm:
  """Method `fedbnr-kd-ev`."""
  return _with(config, _distillation(config), **_evidence(config))


def _evidence(config: ml_collections.ConfigDict) -> dict[str, Any]:
  return {
    "scales": last_layer.evidence_scales,
    "feedback": config.evidence.feedback,
    "varying_noise": config.evidence.noise == "varying",
  }


def _mean(config: ml_collections.ConfigDict) -> Aggregator:
  return aggregation.mean(scales=config.mean.scales, by_rows=config.mean.by_rows)


def _distillation(config: ml_collections.ConfigDict) -> Aggregator:
  return aggregation.distillation(
    urk.from_config(config),
    adam(config.kd.learning_rate),
    num_steps=config.kd.num_steps,
    alpha=config.kd.alpha,
    min_noise_std=config.min_noise_std,
    start=_mean(config) if config.kd.warm_start else None,
  )


def _with(
  config: ml_collections.ConfigDict, aggregator: Aggregator, **scales: Any
) -> FederatedAlgorithm:
  return fedbnr(
    urk.from_config(config),
    adam(config.learning_rate),
    aggregator,
    num_local_steps=config.num_local_steps,
    **common_settings(config),
    **scales,
  )


def common_settings(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """What every kernel method takes from the config."""
  return {
    "initial_noise_std": config.initial_noise_std,
    "initial_prior_std": config.initial_prior_std,
    "min_noise_std": config.min_noise_std,
    "with_noise": config.with_noise,
    **settings.from_config(config),
  }
