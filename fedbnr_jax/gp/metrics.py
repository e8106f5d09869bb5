"""Scores Gaussian predictions: their error, their likelihood, their calibration.

A prediction is a mean and a variance for each row, the variance being that of
the target itself, noise included. Every score is a plain mean over rows, so
none depends on the order of the rows. Calibration rests on one number a row:
the level of the smallest central interval of its own Gaussian that reaches the
target. For a calibrated model these numbers are uniform on [0, 1].

All functions are pure and may be jitted. Inputs of any float type are cast to
one common type first, float32 at least. NaN in gives NaN out: a prediction
that is not a number must not count as one that merely missed.
"""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.scipy import special
from jax.typing import ArrayLike


def _common_float(*arrays: ArrayLike) -> tuple[jax.Array, ...]:
  """Casts vectors [N] of one length to one float type, float32 or wider."""
  # NumPy decides the type, because JAX refuses to in its strict promotion mode.
  # JAX then narrows it where 64-bit types are switched off.
  given = (jnp.asarray(array).dtype for array in arrays)
  widest = functools.reduce(np.promote_types, given, np.dtype(np.float32))
  dtype = jax.dtypes.canonicalize_dtype(widest)
  cast = tuple(jnp.asarray(array, dtype) for array in arrays)
  chex.assert_rank(cast, 1)
  chex.assert_equal_shape(cast)
  chex.assert_axis_dimension_gt(cast[0], 0, 0)
  return cast


def rmse(mean: ArrayLike, targets: ArrayLike) -> jax.Array:
  """Returns the root mean squared error of the means, in the target's unit.

  Args:
    mean: [N] predicted means.
    targets: [N] true values.

  Returns:
    [] the error.

  Example:
    >>> from fedbnr_jax import metrics
    >>> round(float(metrics.rmse([1.0, 2.0], [1.0, 4.0])), 3)
    1.414
  """
  mean, targets = _common_float(mean, targets)
  return jnp.sqrt(jnp.mean(jnp.square(targets - mean)))


def nll(mean: ArrayLike, variance: ArrayLike, targets: ArrayLike) -> jax.Array:
  """Returns the mean negative log density of the targets under the predictions.

  Args:
    mean: [N] predicted means.
    variance: [N] predicted variances, positive.
    targets: [N] true values.

  Returns:
    [] nats a row. Targets in a unit c times smaller score log c higher.
  """
  mean, variance, targets = _common_float(mean, variance, targets)
  # The two logarithms stay apart so that a tiny variance does not underflow.
  log_normaliser = jnp.log(variance) + math.log(2.0 * math.pi)
  return 0.5 * jnp.mean(log_normaliser + jnp.square(targets - mean) / variance)


def crps(mean: ArrayLike, variance: ArrayLike, targets: ArrayLike) -> jax.Array:
  """Returns the mean continuous ranked probability score of the predictions.

  The score is the integral over t of (P(Y ≤ t) − 1[y ≤ t])², which has a closed
  form for a Gaussian. It is in the target's unit, and approaches the absolute
  error as the variance goes to zero.

  Args:
    mean: [N] predicted means.
    variance: [N] predicted variances, positive.
    targets: [N] true values.

  Returns:
    [] the score; smaller is better.
  """
  mean, variance, targets = _common_float(mean, variance, targets)
  std = jnp.sqrt(variance)
  z = (targets - mean) / std
  density = jnp.exp(-0.5 * jnp.square(z)) / math.sqrt(2.0 * math.pi)
  # erf(z/√2) is 2Φ(z) − 1 without the cancellation around z = 0.
  spread = z * special.erf(z / math.sqrt(2.0)) + 2.0 * density
  return jnp.mean(std * (spread - 1.0 / math.sqrt(math.pi)))


def central_level(
  mean: ArrayLike, variance: ArrayLike, targets: ArrayLike
) -> jax.Array:
  """Returns the level of the smallest central interval that reaches each target.

  Args:
    mean: [N] predicted means.
    variance: [N] predicted variances, positive.
    targets: [N] true values.

  Returns:
    [N] levels in [0, 1], 0 where the target is the mean and near 1 far out.
  """
  mean, variance, targets = _common_float(mean, variance, targets)
  return special.erf(jnp.abs(targets - mean) / jnp.sqrt(2.0 * variance))


def interval_levels(num_levels: int) -> np.ndarray:
  """Returns the grid of interval levels, (k − ½)/K for k = 1…K, as [K] float64."""
  if num_levels < 1:
    raise ValueError(f"num_levels must be at least 1, got {num_levels}.")
  return (np.arange(num_levels) + 0.5) / num_levels


def observed_coverage(reached: ArrayLike, levels: ArrayLike) -> jax.Array:
  """Returns the share of targets inside the central interval of each level.

  Args:
    reached: [N] levels that `central_level` returns.
    levels: [K] interval levels in [0, 1].

  Returns:
    [K] shares; all NaN as soon as one row is NaN.
  """
  reached = jnp.asarray(reached)
  levels = jnp.asarray(levels, reached.dtype)
  chex.assert_rank([reached, levels], 1)
  # One sort replaces an [N, K] table of comparisons. NaN sorts last and would
  # count as a miss, hence the explicit guard.
  inside = jnp.searchsorted(jnp.sort(reached), levels, side="right")
  share = inside.astype(reached.dtype) / reached.shape[0]
  return jnp.where(jnp.any(jnp.isnan(reached)), jnp.nan, share)


def coverage(
  mean: ArrayLike, variance: ArrayLike, targets: ArrayLike, level: float = 0.95
) -> jax.Array:
  """Returns the share of targets inside the central interval of one level.

  Unlike the calibration errors, the share has a direction: below `level` the
  model is over-confident, above it over-cautious.

  Args:
    mean: [N] predicted means.
    variance: [N] predicted variances, positive.
    targets: [N] true values.
    level: Probability that the interval claims to hold the target.

  Returns:
    [] the share.
  """
  reached = central_level(mean, variance, targets)
  return observed_coverage(reached, np.array([level]))[0]


def _calibration(share: jax.Array) -> dict[str, jax.Array]:
  """Computes the calibration scores from the shares [K] inside a grid of levels."""
  levels = jnp.asarray(interval_levels(len(share)), share.dtype)
  gap = jnp.abs(share - levels)
  # Over rows, the mean of (p − 1[u ≤ p])² is p² on the share outside plus
  # (1 − p)² on the share inside, so the rows are not needed again.
  squared = jnp.square(levels) * (1.0 - share) + jnp.square(1.0 - levels) * share
  return {"ece": jnp.mean(gap), "mce": jnp.max(gap), "bri": jnp.mean(squared)}


def calibration(
  mean: ArrayLike,
  variance: ArrayLike,
  targets: ArrayLike,
  num_levels: int = 100,
) -> dict[str, jax.Array]:
  """Compares observed with promised coverage over a grid of interval levels.

  Args:
    mean: [N] predicted means.
    variance: [N] predicted variances, positive.
    targets: [N] true values.
    num_levels: K, the size of the grid (k − ½)/K.

  Returns:
    `ece`, the mean gap between observed and promised coverage; `mce`, the
    largest gap; `bri`, the mean over levels and rows of the squared gap between
    the level and whether the row is covered. Each is []. ECE and MCE are 0 when
    calibrated; BRI is then 1/6, which is not its minimum.

  Example:
    >>> import numpy as np
    >>> from fedbnr_jax import metrics
    >>> targets = np.random.default_rng(0).normal(size=2000)
    >>> honest = metrics.calibration(np.zeros(2000), np.ones(2000), targets)
    >>> narrow = metrics.calibration(np.zeros(2000), np.full(2000, 0.01), targets)
    >>> bool(honest["ece"] < 0.03 < 0.3 < narrow["ece"])
    True
  """
  reached = central_level(mean, variance, targets)
  return _calibration(observed_coverage(reached, interval_levels(num_levels)))


class ScoreSums(struct.PyTreeNode):
  """Sums over rows that every score follows from; they add over clients."""

  count: jax.Array  # [] number of rows.
  squares: jax.Array  # [] squared errors of the means.
  nll: jax.Array  # [] negative log densities.
  crps: jax.Array  # [] continuous ranked probability scores.
  # [L] rows inside the central interval of each level of `_LEVELS`; NaN if one row is.
  inside: jax.Array

  def __add__(self, other: "ScoreSums") -> "ScoreSums":
    return jax.tree.map(jnp.add, self, other)


_GRIDS = (100, 10)  # Numbers of levels: ours, and that of the published extremes.
_LEVELS = np.concatenate([[0.95], *map(interval_levels, _GRIDS)])


def score_sums(mean: ArrayLike, variance: ArrayLike, targets: ArrayLike) -> ScoreSums:
  """Computes what a client tells of its rows, so that all clients can be scored.

  Args:
    mean: [N] predicted means.
    variance: [N] predicted variances, positive.
    targets: [N] true values.
  """
  mean, variance, targets = _common_float(mean, variance, targets)
  count = jnp.asarray(len(targets), targets.dtype)
  share = observed_coverage(central_level(mean, variance, targets), _LEVELS)
  return ScoreSums(
    count=count,
    squares=jnp.sum(jnp.square(targets - mean)),
    nll=count * nll(mean, variance, targets),
    crps=count * crps(mean, variance, targets),
    inside=count * share,
  )


def no_score_sums() -> ScoreSums:
  """Makes the sums of a client that has no rows to be scored."""
  zero = jnp.zeros(())
  return ScoreSums(zero, zero, zero, zero, jnp.zeros(len(_LEVELS)))


def shares_inside(sums: ScoreSums) -> jax.Array:
  """Returns the shares [100] inside central intervals of `interval_levels(100)`."""
  return (sums.inside / sums.count)[1 : 1 + _GRIDS[0]]


def scores(sums: ScoreSums) -> dict[str, jax.Array]:
  """Computes every score of this module from summed rows; see `evaluate`."""
  share = sums.inside / sums.count
  ours, published = jnp.split(share[1:], [_GRIDS[0]])
  return {
    "rmse": jnp.sqrt(sums.squares / sums.count),
    "nll": sums.nll / sums.count,
    "crps": sums.crps / sums.count,
    "coverage95": share[0],
    **_calibration(ours),
    "ece10": _calibration(published)["ece"],
  }


def evaluate(
  mean: ArrayLike, variance: ArrayLike, targets: ArrayLike
) -> dict[str, jax.Array]:
  """Computes every score of this module at once.

  Args:
    mean: [N] predicted means.
    variance: [N] predicted variances, positive.
    targets: [N] true values.

  Returns:
    `rmse`, `nll`, `crps`, `coverage95`, then `ece`, `mce`, `bri` over 100
    levels and `ece10` over 10, the grid that fits the published extremes. Each
    is [].

  Example:
    >>> from fedbnr_jax import metrics
    >>> scores = metrics.evaluate([0.0, 1.0], [1.0, 1.0], [0.0, 1.0])
    >>> sorted(scores)
    ['bri', 'coverage95', 'crps', 'ece', 'ece10', 'mce', 'nll', 'rmse']
    >>> float(scores["rmse"]), float(scores["coverage95"])
    (0.0, 1.0)
  """
  return scores(score_sums(mean, variance, targets))
