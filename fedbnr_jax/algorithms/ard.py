"""FedBNR-ARD: a stationary kernel, whose scales maximise the exact global evidence.

Every input has a length-scale. Features are those of inducing inputs, which nobody's
rows are, drawn from what sums say of the inputs. The scales are learnt by L-BFGS at the
server, on statistics and gradients that clients sum: at first with a few hundred
inducing inputs, which find the way, then with more, without which short length-scales
and small noise are not seen. The last layer takes more still. The result does not
depend on who holds which rows.
"""

import ml_collections

from fedbnr_jax.algorithms import exact, fedbnr, kernels, last_layer, wide_layer
from fedbnr_jax.algorithms.proposals import follow_gradient
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.optimizers import lbfgs


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `fedbnr-ard`; config.sparse has its options."""
  options = config.sparse
  wide = kernels.wide_from_config(config)
  shared = fedbnr.common_settings(config, local_kernels=False)
  optimizer = lbfgs()

  def trained(num_samples: int, num_steps: int, noise: str) -> FederatedAlgorithm:
    feature_map = kernels.from_config(config, num_samples)
    step = follow_gradient(
      feature_map, optimizer, min_noise_std=config.min_noise_std, safeguard=True
    )
    return exact.exact(
      feature_map,
      step,
      optimizer,
      num_steps=num_steps,
      safeguard=True,
      fresh=not shared["participation"].is_full,
      trace=options.trace,
      noise=noise,
      **shared,
    )

  start = None
  if options.start_samples and wide:
    start = trained(options.start_samples, options.start_steps, "constant")
  main = trained(
    options.num_samples, options.num_steps, "constant" if wide else options.noise
  )
  return wide_layer.from_config(
    config,
    main,
    main.stages,
    start=start,
    scales=last_layer.evidence_scales,
    noise=options.noise,
  )
