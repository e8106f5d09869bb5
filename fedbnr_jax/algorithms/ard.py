"""FedBNR-ARD: a stationary kernel, whose scales maximise the exact global evidence.

Every input has a length-scale. Features are those of inducing inputs, which nobody's
rows are, drawn from what sums say of the inputs; a few hundred of them are enough to
learn the scales, by L-BFGS at the server on statistics and gradients that clients sum,
and the last layer then takes more. The result does not depend on who holds which rows.
"""

import ml_collections

from fedbnr_jax.algorithms import exact, fedbnr, kernels, last_layer, wide_layer
from fedbnr_jax.algorithms.proposals import follow_gradient
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.optimizers import lbfgs


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `fedbnr-ard`; config.sparse has its options."""
  options = config.sparse
  feature_map, wide = kernels.from_config(config), kernels.wide_from_config(config)
  shared = fedbnr.common_settings(config, local_kernels=False)
  optimizer = lbfgs()
  step = follow_gradient(
    feature_map, optimizer, min_noise_std=config.min_noise_std, safeguard=True
  )
  trained = exact.exact(
    feature_map,
    step,
    optimizer,
    num_steps=options.num_steps,
    safeguard=True,
    fresh=not shared["participation"].is_full,
    trace=options.trace,
    noise="constant" if wide else options.noise,
    **shared,
  )
  return wide_layer.from_config(
    config,
    trained,
    trained.stages,
    scales=last_layer.evidence_scales,
    noise=options.noise,
  )
