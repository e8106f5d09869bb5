"""FedBNR: local evidence steps, aggregation of the kernel, exact last layer."""

from functools import partial
from typing import Any, NamedTuple

import jax
import ml_collections
import optax

from fedbnr_jax.algorithms import kernels, last_layer, settings, wide_layer
from fedbnr_jax.algorithms import noise as noise_lib
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated import aggregation
from fedbnr_jax.federated.aggregation import Aggregator
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.exchange import Exchange, Message, Own, Report, Stage
from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.local_steps import descend, keep_above, loss_report
from fedbnr_jax.federated.optimizers import adam
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.federated.state import ServerState
from fedbnr_jax.gp import urk
from fedbnr_jax.gp.kernel_model import ModelParams, evidence_loss


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
  noise: str = "constant",
  with_noise: bool = True,
  participation: Participation = Participation(),  # noqa: B008  Immutable.
  placement: Placement = Placement(),  # noqa: B008
) -> FederatedAlgorithm:
  """Builds the method; with `aggregation.mean` FedBNR, with `distillation` FedBNR-KD.

  Args:
    feature_map: The unifying random kernel.
    optimizer: The clients' optimiser; its state starts afresh every round.
    aggregator: How the clients' kernels become one.
    num_local_steps: Full-batch steps of each client in a round.
    initial_noise_std: σ at the start, in units of the target's std.
    initial_prior_std: λ at the start.
    min_noise_std: Floor of σ.
    scales: How σ and λ of the posterior are found: as trained, or from the summed
      statistics.
    feedback: Whether the next round's local steps start from these σ and λ.
    noise: Of predictions, one of `noise.NOISES`.
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
    feature_map,
    optimizer,
    aggregator,
    num_local_steps=num_local_steps,
    min_noise_std=min_noise_std,
  )
  everybody = participation.all_send_statistics
  conditioning = last_layer.condition(
    feature_map, everybody=everybody, scales=scales, feedback=feedback
  )
  learnt = noise_lib.learnt(noise, feature_map, everybody=everybody)
  return FederatedAlgorithm(
    init_server=last_layer.initial_state(
      feature_map,
      initial_noise_std,
      initial_prior_std,
      varying_noise=learnt.varies,
    ),
    stages=(Stage((learning, conditioning, *learnt.exchanges)),),
    train_nll=last_layer.train_nll,
    predict=last_layer.prediction(feature_map, with_noise=with_noise),
    held_out=learnt.held_out,
    participation=participation,
    placement=placement,
  )


class LearningMessage(NamedTuple):
  """Down: where a client's local steps start, and what the aggregator needs."""

  source: urk.Source  # From which ω is drawn.
  params: ModelParams
  inputs: Message  # [Q, D] the server's inputs for distillation, or ().


def learn_kernel(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  aggregator: Aggregator,
  *,
  num_local_steps: int,
  min_noise_std: float,
) -> Exchange:
  """Makes phase 1: local steps on the evidence, and one kernel made of all."""

  def broadcast(state: ServerState, server_set: ServerSet | None) -> LearningMessage:
    return LearningMessage(
      last_layer.source_of(state), state.params, aggregator.inputs(server_set)
    )

  def client(
    down: LearningMessage, own: Own, rows: Rows
  ) -> tuple[Message, Own, Report]:
    omega = urk.draw_omega(feature_map, down.source, rows.x)
    local, losses = local_evidence_steps(
      feature_map,
      optimizer,
      down.params,
      omega,
      rows,
      num_local_steps=num_local_steps,
      min_noise_std=min_noise_std,
    )
    message = aggregator.message(local, omega, rows, down.inputs)
    return message, own, loss_report(losses[-1], local, rows.y.dtype)

  def server(
    state: ServerState, server_set: ServerSet | None, total: Message
  ) -> ServerState:
    params = aggregator.combine(state.params, state.omega, total, server_set)
    return state.replace(params=params)

  return Exchange("kernel", broadcast, client, server)


def local_evidence_steps(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  params: ModelParams,
  omega: Any,
  rows: Rows,
  *,
  num_local_steps: int,
  min_noise_std: float,
) -> tuple[ModelParams, jax.Array]:
  """Raises the evidence of a client's own rows from `params`.

  Returns:
    The parameters reached, and the loss before each step [num_local_steps].
  """
  return descend(
    lambda params: evidence_loss(feature_map, params, omega, rows.x, rows.y, rows.mask),
    optimizer,
    num_local_steps,
    params,
    partial(keep_above, min_noise_std),
  )


# -------------------------------------------------------------------- from a config


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `fedbnr`."""
  return _build(config, mean_of(config), noise=config.noise)


def distilled_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `fedbnr-kd`."""
  return _build(config, distillation_of(config), noise=config.noise)


def evidence_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `fedbnr-ev`."""
  return _build(config, mean_of(config), **_evidence(config))


def distilled_evidence_from_config(
  config: ml_collections.ConfigDict,
) -> FederatedAlgorithm:
  """Builds method `fedbnr-kd-ev`."""
  return _build(config, distillation_of(config), **_evidence(config))


def mean_of(config: ml_collections.ConfigDict) -> Aggregator:
  """Builds the aggregator of `fedbnr`."""
  return aggregation.mean(scales=config.mean.scales, by_rows=config.mean.by_rows)


def distillation_of(config: ml_collections.ConfigDict) -> Aggregator:
  """Builds the aggregator of `fedbnr-kd`."""
  return aggregation.distillation(
    kernels.from_config(config),
    adam(config.kd.learning_rate),
    num_steps=config.kd.num_steps,
    alpha=config.kd.alpha,
    min_noise_std=config.min_noise_std,
    start=mean_of(config) if config.kd.warm_start else None,
  )


def learning_from_config(
  config: ml_collections.ConfigDict, aggregator: Aggregator
) -> Exchange:
  """Builds phase 1 alone, for methods that share it."""
  return learn_kernel(
    kernels.from_config(config),
    adam(config.learning_rate),
    aggregator,
    num_local_steps=config.num_local_steps,
    min_noise_std=config.min_noise_std,
  )


def common_settings(
  config: ml_collections.ConfigDict, *, local_kernels: bool = True
) -> dict[str, Any]:
  """Collects what every kernel method takes from the config.

  Args:
    config: Of a run.
    local_kernels: Whether clients train kernel parameters of their own.
  """
  shared = settings.from_config(config)
  factors = local_kernels and kernels.from_config(config).needs_inputs
  if factors and not config.client_batch_size:
    # Each client then factors a matrix of its own. A batch of them waits for ever in
    # XLA's thread pool where that has two threads, and would be no faster.
    shared["placement"] = shared["placement"]._replace(batch_size=1)
  return {
    "initial_noise_std": config.initial_noise_std,
    "initial_prior_std": config.initial_prior_std,
    "min_noise_std": config.min_noise_std,
    "with_noise": config.with_noise,
    **shared,
  }


def _evidence(config: ml_collections.ConfigDict) -> dict[str, Any]:
  return {
    "scales": last_layer.evidence_scales,
    "feedback": config.evidence.feedback,
    "noise": config.evidence.noise,
  }


def narrow_from_config(
  config: ml_collections.ConfigDict, aggregator: Aggregator, **scales: Any
) -> FederatedAlgorithm:
  """Builds the method with a last layer of the trained draws."""
  return fedbnr(
    kernels.from_config(config),
    adam(config.learning_rate),
    aggregator,
    num_local_steps=config.num_local_steps,
    **common_settings(config),
    **scales,
  )


def _build(
  config: ml_collections.ConfigDict, aggregator: Aggregator, **scales: Any
) -> FederatedAlgorithm:
  algorithm = narrow_from_config(config, aggregator, **scales)
  if scales.get("feedback") and config.posterior_samples:
    raise InputError(
      "config.evidence.feedback and config.posterior_samples do not go together: the "
      "kernel's own σ and λ are of other draws."
    )
  return wide_layer.from_config(
    config,
    algorithm,
    (Stage(algorithm.stages[0].exchanges[:1]),),  # Phase 1.
    scales=scales.get("scales", last_layer.trained_scales),
    noise=scales["noise"],
  )
