"""Fits noise that varies with the input, by a second regression on the same features.

Where the noise is unequal, a single σ is right nowhere: intervals are too wide where
the noise is small and too narrow where it is large. The logarithm of a squared
residual is a noisy observation of the log-variance at its row, so its linear
regression on the features φ gives σ²(x) = σ² exp(φᵀu + c). Like the posterior, this
regression needs nothing of the clients but sums.
"""

import jax
import jax.numpy as jnp
from flax import struct

from fedbnr_jax.gp.blr.evidence import fit_evidence
from fedbnr_jax.gp.blr.posterior import (
  MeanAndNoise,
  Posterior,
  noise_variance,
  num_determined,
  posterior,
)
from fedbnr_jax.gp.blr.statistics import SufficientStats, masked

# δ, added to r²/σ², bounds the logarithm where a residual happens to be zero.
_FLOOR = 1e-3


class NoiseMoments(struct.PyTreeNode):
  """Sums over a client's rows that describe its noise; they add over clients.

  Each row contributes its features φ and the level g = log(r²/σ² + δ) of its residual.
  """

  by_features: jax.Array  # [M] Σ φ g
  features: jax.Array  # [M] Σ φ
  total: jax.Array  # [] Σ g
  energy: jax.Array  # [] Σ g²


def noise_moments(
  features: jax.Array,
  targets: jax.Array,
  fitted: Posterior | MeanAndNoise,
  mask: jax.Array | None = None,
) -> NoiseMoments:
  """Returns the noise moments of one client's rows under the global posterior.

  Args:
    features: [N, M].
    targets: [N].
    fitted: The global posterior.
    mask: [N] bool, false for padding.
  """
  dtype = fitted.mean.dtype
  features, targets, _ = masked(features.astype(dtype), targets.astype(dtype), mask)
  squares = _squares(features, targets, fitted)
  level = jnp.log(squares / fitted.noise_std**2 + _FLOOR)
  if mask is not None:
    level = jnp.where(mask, level, jnp.zeros_like(level))
  return NoiseMoments(
    by_features=jnp.matmul(level, features, precision="highest"),
    features=jnp.sum(features, axis=0),
    total=jnp.sum(level),
    energy=jnp.sum(level**2),
  )


def fit_noise(
  fitted: Posterior, stats: SufficientStats, moments: NoiseMoments
) -> Posterior:
  """Returns the posterior with noise that varies; `scale_noise` then sets its scale.

  Args:
    fitted: The global posterior.
    stats: Summed statistics of the same rows, of which Gram and count are used.
    moments: Noise moments summed over clients.
  """
  eps = float(jnp.finfo(stats.gram.dtype).eps)
  mean = moments.total / stats.count
  centred = SufficientStats(
    gram=stats.gram,
    moment=moments.by_features - mean * moments.features,
    # Rounding may make the difference negative, and `fit_evidence` needs some energy.
    energy=jnp.maximum(moments.energy - mean * moments.total, eps * stats.count),
    count=stats.count,
  )
  regression = posterior(centred, *fit_evidence(centred))
  return fitted.replace(noise_weights=regression.mean, noise_offset=mean)


def noise_ratio(
  features: jax.Array,
  targets: jax.Array,
  fitted: Posterior | MeanAndNoise,
  mask: jax.Array | None = None,
) -> jax.Array:
  """Returns Σ r²/σ²(x) [] over one client's rows, from which the noise is scaled.

  Args:
    features: [N, M].
    targets: [N].
    fitted: The global posterior, with noise that varies.
    mask: [N] bool, false for padding.
  """
  dtype = fitted.mean.dtype
  features, targets, _ = masked(features.astype(dtype), targets.astype(dtype), mask)
  # Padded rows are zero now, so their residuals add nothing.
  ratio = _squares(features, targets, fitted) / noise_variance(fitted, features)
  return jnp.sum(ratio)


def scale_noise(fitted: Posterior, ratio: jax.Array, count: jax.Array) -> Posterior:
  """Returns the posterior with its noise scaled to the size of its residuals.

  A fit with γ determined weights has made its N residuals smaller than the noise:
  Σ r²/σ²(x) is N − γ on average, and the scale makes it exactly that.

  Args:
    fitted: The global posterior, as `fit_noise` returns it.
    ratio: [] what `noise_ratio` returns, summed over clients.
    count: [] N, the number of rows of all clients.
  """
  assert fitted.noise_offset is not None
  free = jnp.maximum(count - num_determined(fitted), 1.0)
  tiny = jnp.finfo(ratio.dtype).tiny
  offset = fitted.noise_offset + jnp.log(jnp.maximum(ratio / free, tiny))
  return fitted.replace(noise_offset=offset)


def _squares(
  features: jax.Array, targets: jax.Array, fitted: Posterior | MeanAndNoise
) -> jax.Array:
  """Returns squared residuals [N] under the posterior mean."""
  mean = jnp.matmul(features, fitted.mean, precision="highest")
  return jnp.square(targets - mean)
