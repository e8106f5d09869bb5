"""Fits noise that varies with the input, by a second regression on the same features.

Where the noise is unequal, a single σ is right nowhere: intervals are too wide where
the noise is small and too narrow where it is large. The logarithm of a squared
residual is a noisy observation of the log-variance at its row, so its linear
regression on the features φ gives σ²(x) = σ² exp(φᵀu + c). Like the posterior, this
regression needs nothing of the clients but sums.
"""

import math

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
  predict,
)
from fedbnr_jax.gp.blr.statistics import SufficientStats, masked, sufficient_stats

# δ, added to r²/σ², bounds the logarithm where a residual happens to be zero.
_FLOOR = 1e-3
# Error bars count as right for so many rows before held-out ones are looked at: a scale
# by N rows is off by about 1/√N, and bars of a sound model seldom by more than a third.
_AS_PREDICTED = 20.0
_LEVEL = 0.9  # Of the intervals that held-out rows set.
_APART = 3.0  # By which these and the mean of squares may differ at most.


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


def held_out_noise(
  features: jax.Array, targets: jax.Array, fitted: Posterior
) -> Posterior:
  """Returns the posterior with noise that varies, learnt from held-out rows.

  This helps where the kernel has memorised its training rows, whose residuals then
  say nothing about the noise.

  Args:
    features: [N, M] features of rows that the posterior was not conditioned on.
    targets: [N] targets of these rows.
    fitted: The global posterior.
  """
  stats = sufficient_stats(features, targets)
  moments = noise_moments(features, targets, fitted)
  shaped = fit_noise(fitted, stats, moments)
  assert shaped.noise_offset is not None
  # The posterior was not fitted to these rows, so no γ is subtracted from N.
  mean_ratio = noise_ratio(features, targets, shaped) / stats.count
  tiny = jnp.finfo(mean_ratio.dtype).tiny
  offset = shaped.noise_offset + jnp.log(jnp.maximum(mean_ratio, tiny))
  return shaped.replace(noise_offset=offset)


def rescaled(features: jax.Array, targets: jax.Array, fitted: Posterior) -> Posterior:
  """Returns the posterior with all error bars scaled to the errors of held-out rows.

  σ and λ have one factor, so that the mean, which depends on their ratio, is still that
  of the statistics. The 90 % intervals then cover about 90 % of these rows: where
  errors have long tails, a mean of their squares would make every interval but the
  widest too wide. Few rows change the bars less than their own chance would.

  Args:
    features: [N, M] features of rows that the posterior was not conditioned on.
    targets: [N] targets of these rows.
    fitted: The global posterior.
  """
  mean, variance = predict(fitted, features)
  off = jnp.abs(targets.astype(mean.dtype) - mean) / jnp.sqrt(variance)
  (num_rows,) = off.shape
  by_squares = jnp.sqrt((jnp.sum(off**2) + _AS_PREDICTED) / (num_rows + _AS_PREDICTED))
  place = min(math.ceil(_LEVEL * (num_rows + 1)), num_rows)
  reach = jax.scipy.stats.norm.ppf(jnp.asarray(0.5 * (1.0 + _LEVEL), off.dtype))
  by_quantile = jnp.sort(off)[place - 1] / reach
  # Where nine rows in ten are predicted exactly, the tenth still tells of errors.
  by_quantile = jnp.clip(by_quantile, by_squares / _APART, by_squares * _APART)
  few = _AS_PREDICTED / (num_rows + _AS_PREDICTED)
  factor = jnp.exp((1.0 - few) * jnp.log(by_quantile) + few * jnp.log(by_squares))
  return fitted.replace(
    noise_std=factor * fitted.noise_std, prior_std=factor * fitted.prior_std
  )


def _squares(
  features: jax.Array, targets: jax.Array, fitted: Posterior | MeanAndNoise
) -> jax.Array:
  """Returns squared residuals [N] under the posterior mean."""
  mean = jnp.matmul(features, fitted.mean, precision="highest")
  return jnp.square(targets - mean)
