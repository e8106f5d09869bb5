"""Sets error bars by rows that nobody trains on, from sums that clients can add up.

A kernel that has learnt its own rows by heart leaves residuals that say nothing about
the noise. Held-out rows do say it: by the moments of their residuals, or by how many of
them are off by how many of the predicted deviations.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fedbnr_jax.gp.blr.noise import fit_noise, noise_moments, noise_ratio
from fedbnr_jax.gp.blr.posterior import Posterior, predict
from fedbnr_jax.gp.blr.statistics import masked, sufficient_stats

# Error bars count as right for so many rows before held-out ones are looked at: a scale
# by N rows is off by about 1/√N, and bars of a sound model seldom by more than a third.
_AS_PREDICTED = 20.0
_TENTHS = 9  # Of the rows are inside the intervals that held-out rows set.
_APART = 3.0  # By which these and the mean of squares may differ at most.
# [B] upper edges of the bins in which errors are counted, each 0.5 % above the one
# before it; one more bin holds what lies above.
_EDGES = np.geomspace(1e-4, 1e4, 4096)


class ErrorSums(struct.PyTreeNode):
  """Sums over held-out rows of their errors in predicted deviations; they add."""

  count: jax.Array  # [] rows.
  squares: jax.Array  # [] squared errors.
  bins: jax.Array  # [B + 1] rows in each public bin.


def error_sums(
  features: jax.Array,
  targets: jax.Array,
  fitted: Posterior,
  mask: jax.Array | None = None,
) -> ErrorSums:
  """Sums up how far one client's held-out rows are off.

  Args:
    features: [N, M] features of rows that the posterior was not conditioned on.
    targets: [N] targets of these rows.
    fitted: The global posterior.
    mask: [N] bool, false for padding.
  """
  dtype = fitted.mean.dtype
  features, targets, count = masked(features.astype(dtype), targets.astype(dtype), mask)
  mean, variance = predict(fitted, features)
  # The error of padding is zero, and nothing in the sum.
  off = jnp.abs(targets - mean) / jnp.sqrt(variance)
  one = jnp.ones_like(off) if mask is None else mask.astype(dtype)
  place = jnp.searchsorted(jnp.asarray(_EDGES, dtype), off)
  bins = jnp.zeros(len(_EDGES) + 1, dtype).at[place].add(one)
  return ErrorSums(count, jnp.sum(off**2), bins)


def rescaled(fitted: Posterior, sums: ErrorSums) -> Posterior:
  """Returns the posterior with all error bars scaled to the errors of held-out rows.

  σ and λ have one factor, so that the mean, which depends on their ratio, is still that
  of the statistics. The 90 % intervals then cover about 90 % of these rows: where
  errors have long tails, a mean of their squares would make every interval but the
  widest too wide. Few rows change the bars less than their own chance would.

  Args:
    fitted: The global posterior.
    sums: Of held-out rows of all clients, under this posterior.
  """
  count = sums.count
  by_squares = jnp.sqrt((sums.squares + _AS_PREDICTED) / (count + _AS_PREDICTED))
  rank = jnp.minimum(jnp.ceil(_TENTHS * (count + 1.0) / 10.0), count)
  reach = jax.scipy.stats.norm.ppf(jnp.asarray(0.5 + 0.05 * _TENTHS, count.dtype))
  by_quantile = _quantile(sums.bins, rank) / reach
  # Where nine rows in ten are predicted exactly, the tenth still tells of errors.
  by_quantile = jnp.clip(by_quantile, by_squares / _APART, by_squares * _APART)
  few = _AS_PREDICTED / (count + _AS_PREDICTED)
  factor = jnp.exp((1.0 - few) * jnp.log(by_quantile) + few * jnp.log(by_squares))
  return fitted.replace(
    noise_std=factor * fitted.noise_std, prior_std=factor * fitted.prior_std
  )


def _quantile(bins: jax.Array, rank: jax.Array) -> jax.Array:
  """Finds the error [] of a rank, as if those in a bin were spread evenly over it."""
  logs = np.log(np.concatenate([_EDGES[:1], _EDGES, _EDGES[-1:]]))
  edges = jnp.asarray(logs, bins.dtype)
  up_to = jnp.cumsum(bins)
  place = jnp.minimum(jnp.searchsorted(up_to, rank), len(bins) - 1)
  inside = jnp.maximum(bins[place], 1.0)
  share = jnp.clip((rank - 0.5 - (up_to[place] - bins[place])) / inside, 0.0, 1.0)
  return jnp.exp((1.0 - share) * edges[place] + share * edges[place + 1])


def scale_held_out_noise(
  fitted: Posterior, ratio: jax.Array, count: jax.Array
) -> Posterior:
  """Returns the posterior with its noise scaled to the size of held-out residuals.

  The posterior was not fitted to these rows, so their Σ r²/σ²(x) is N on average.

  Args:
    fitted: The global posterior, as `fit_noise` returns it.
    ratio: [] what `noise_ratio` returns, summed over clients.
    count: [] N, the number of held-out rows of all clients.
  """
  assert fitted.noise_offset is not None
  tiny = jnp.finfo(ratio.dtype).tiny
  offset = fitted.noise_offset + jnp.log(jnp.maximum(ratio / count, tiny))
  return fitted.replace(noise_offset=offset)


def held_out_noise(
  features: jax.Array, targets: jax.Array, fitted: Posterior
) -> Posterior:
  """Returns the posterior with noise that varies as the residuals of these rows do.

  Args:
    features: [N, M] features of rows that the posterior was not conditioned on.
    targets: [N] targets of these rows.
    fitted: The global posterior.
  """
  stats = sufficient_stats(features, targets)
  shaped = fit_noise(fitted, stats, noise_moments(features, targets, fitted))
  ratio = noise_ratio(features, targets, shaped)
  return scale_held_out_noise(shaped, ratio, stats.count)
