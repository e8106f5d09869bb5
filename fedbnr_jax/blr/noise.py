"""Noise that varies: a second regression on the same features, from sums as well.

Where the noise is unequal, one σ is right nowhere: intervals are too wide where rows
are quiet and too narrow where they are not. The logarithm of a squared residual tells
the log-variance at its row but for noise of its own, so a linear regression of it on
the features φ gives σ²(x) = σ² exp(φᵀu + c). Clients send sums, as in phase 2.
"""

import jax
import jax.numpy as jnp
from flax import struct

from fedbnr_jax.blr.evidence import fit_evidence
from fedbnr_jax.blr.posterior import (
  Posterior,
  noise_variance,
  num_determined,
  posterior,
)
from fedbnr_jax.blr.statistics import SufficientStats, masked, sufficient_stats

# Added to r²/σ²: a residual that happens to be zero says nothing of its variance.
_FLOOR = 1e-3


class NoiseMoments(struct.PyTreeNode):
  """What a client's residuals say about the noise; summable. g = log(r²/σ² + δ)."""

  by_features: jax.Array  # [M] Σ φ g
  features: jax.Array  # [M] Σ φ
  total: jax.Array  # [] Σ g
  energy: jax.Array  # [] Σ g²


def noise_moments(
  features: jax.Array,
  targets: jax.Array,
  fitted: Posterior,
  mask: jax.Array | None = None,
) -> NoiseMoments:
  """Of the rows ([N, M], [N]) that `mask` [N] admits, under the global posterior."""
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
  """The posterior with noise that varies, up to its scale: see `scale_noise`.

  Args:
    fitted: Global posterior.
    stats: Summed statistics of the same rows; their Gram is used.
    moments: Summed over clients.
  """
  eps = float(jnp.finfo(stats.gram.dtype).eps)
  mean = moments.total / stats.count
  centred = SufficientStats(
    gram=stats.gram,
    moment=moments.by_features - mean * moments.features,
    # Rounding may make it negative; and there is no evidence of nothing.
    energy=jnp.maximum(moments.energy - mean * moments.total, eps * stats.count),
    count=stats.count,
  )
  regression = posterior(centred, *fit_evidence(centred))
  return fitted.replace(noise_weights=regression.mean, noise_offset=mean)


def noise_ratio(
  features: jax.Array,
  targets: jax.Array,
  fitted: Posterior,
  mask: jax.Array | None = None,
) -> jax.Array:
  """Σ r²/σ²(x) [] of a client's rows: what it takes to bring the noise to scale."""
  dtype = fitted.mean.dtype
  features, targets, _ = masked(features.astype(dtype), targets.astype(dtype), mask)
  # Of padding the residual is zero.
  ratio = _squares(features, targets, fitted) / noise_variance(fitted, features)
  return jnp.sum(ratio)


def scale_noise(fitted: Posterior, ratio: jax.Array, count: jax.Array) -> Posterior:
  """The posterior whose noise is as large as its residuals, on average.

  Of N residuals of a fit with γ free weights, N − γ are worth of noise.
  """
  assert fitted.noise_offset is not None
  free = jnp.maximum(count - num_determined(fitted), 1.0)
  tiny = jnp.finfo(ratio.dtype).tiny
  offset = fitted.noise_offset + jnp.log(jnp.maximum(ratio / free, tiny))
  return fitted.replace(noise_offset=offset)


def held_out_noise(
  features: jax.Array, targets: jax.Array, fitted: Posterior
) -> Posterior:
  """The posterior with noise that varies as residuals of other rows do.

  Where the kernel has learnt its rows by heart, their residuals tell nothing.

  Args:
    features: [N, M], of rows that are not in the posterior.
    targets: [N].
    fitted: Global posterior.
  """
  stats = sufficient_stats(features, targets)
  moments = noise_moments(features, targets, fitted)
  shaped = fit_noise(fitted, stats, moments)
  assert shaped.noise_offset is not None
  # None of their residuals was spent on the fit.
  mean_ratio = noise_ratio(features, targets, shaped) / stats.count
  tiny = jnp.finfo(mean_ratio.dtype).tiny
  offset = shaped.noise_offset + jnp.log(jnp.maximum(mean_ratio, tiny))
  return shaped.replace(noise_offset=offset)


def _squares(features: jax.Array, targets: jax.Array, fitted: Posterior) -> jax.Array:
  mean = jnp.matmul(features, fitted.mean, precision="highest")
  return jnp.square(targets - mean)
