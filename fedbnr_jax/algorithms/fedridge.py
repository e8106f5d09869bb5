"""One-shot ridge: a kernel that nobody trains, one message of sums, one last layer.

It is what a federation can have for the price of a single exchange: random features
from a seed, statistics under them from every client, σ and λ by the evidence of the
sums. The result does not depend on who holds which rows.
"""

import jax.numpy as jnp
import ml_collections

from fedbnr_jax.algorithms import fedbnr, kernels, last_layer, settings
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.exchange import Exchange, Message, Own, Report, Stage
from fedbnr_jax.federated.federation import Rows
from fedbnr_jax.federated.local_steps import loss_report
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.gp import urk


def fedridge(
  feature_map: urk.FeatureMap,
  *,
  initial_noise_std: float = 0.5,
  initial_prior_std: float = 1.0,
  with_noise: bool = True,
  participation: Participation = Participation(),  # noqa: B008  Immutable.
  placement: Placement = Placement(),  # noqa: B008
) -> FederatedAlgorithm:
  """Builds the method; a second round would be the first again.

  Args:
    feature_map: The kernel, which stays as its seed has made it.
    initial_noise_std: σ before the first round.
    initial_prior_std: λ before the first round.
    with_noise: Whether predicted variances are of y, or of the function alone.
    participation: Who takes part in a round; everyone by default.
    placement: On which devices, and how many clients at a time.
  """
  settings.check(
    participation,
    placement,
    initial_noise_std=initial_noise_std,
    initial_prior_std=initial_prior_std,
  )
  statistics = last_layer.condition(
    feature_map,
    everybody=participation.all_send_statistics,
    scales=last_layer.evidence_scales,
  )
  return FederatedAlgorithm(
    init_server=last_layer.initial_state(
      feature_map, initial_noise_std, initial_prior_std
    ),
    stages=(Stage((_reported(statistics),)),),
    train_nll=last_layer.train_nll,
    predict=last_layer.prediction(feature_map, with_noise=with_noise),
    participation=participation,
    placement=placement,
    remedy="other draws (seed), or a larger ard.length_scale",
  )


def _reported(statistics: Exchange) -> Exchange:
  """Lets a client report its mean squared target, or NaN where its sums are not finite.

  There is no loss: nobody takes a step.
  """

  def client(down: Message, own: Own, rows: Rows) -> tuple[Message, Own, Report]:
    message, own, _ = statistics.client(down, own, rows)
    loss = message.energy / jnp.maximum(message.count, 1.0)
    return message, own, loss_report(loss, message, rows.y.dtype)

  return statistics._replace(client=client)


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `fedridge`; config.ridge has its kernel and draws."""
  shared = fedbnr.common_settings(config, local_kernels=False)
  del shared["min_noise_std"]  # σ is that of the evidence.
  return fedridge(kernels.of_last_layer(config), **shared)
