"""Turns counts of scores in public bins into intervals that keep their promise.

The score of a row is `|y − μ(x)|/σ(x)`. If N rows that had no part in the training and
a new one are drawn alike, then the new score is at most the ⌈(1 − α)(N + 1)⌉-th
smallest of theirs with a probability of at least 1 − α, whatever the model. Clients
send how many of their scores fall into each bin; the sum has all levels in it. Rounding
up to the edge of a bin keeps the promise, and widens an interval by 2.3 % at most.

The promise is for a row of the mixture of all clients: neither for one client's rows,
nor for those near one x.
"""

import fractions
import math

import numpy as np

_LOWEST, _HIGHEST, _NUM_EDGES = 1e-3, 1e2, 512
# [B] upper edges of the bins; one more bin holds what lies above the last of them.
EDGES = np.geomspace(_LOWEST, _HIGHEST, _NUM_EDGES)


def scores(mean: np.ndarray, variance: np.ndarray, targets: np.ndarray) -> np.ndarray:
  """Computes by how many standard deviations predictions miss their targets, [N]."""
  return np.abs(targets - mean) / np.sqrt(variance)


def count(scores: np.ndarray) -> np.ndarray:
  """Counts scores [N] in the public bins.

  Returns:
    [B + 1] integers, which add over clients. A score that is no number counts as one
    above all edges, and so can only widen intervals.
  """
  return np.bincount(np.searchsorted(EDGES, scores), minlength=_NUM_EDGES + 1)


def fewest_rows(level: float) -> int:
  """Computes from how many rows on a level between 0 and 1 is possible.

  Example:
    >>> from fedbnr_jax.gp import conformal
    >>> conformal.fewest_rows(0.95), conformal.fewest_rows(0.99)
    (19, 99)
  """
  exact = _exact(level)
  return math.ceil(exact / (1 - exact))


def highest_level(num_rows: int) -> float:
  """Computes the highest level that is possible with so many rows."""
  return num_rows / (num_rows + 1)


def threshold(counts: np.ndarray, level: float) -> float:
  """Finds the smallest edge that enough of the scores do not exceed.

  Args:
    counts: [B + 1] summed over clients.
    level: The probability with which a new score is to be below it, between 0 and 1.

  Returns:
    The edge; infinity where there are too few rows for the level, or where the score
    in question lies above all edges.

  Example:
    >>> import numpy as np
    >>> from fedbnr_jax.gp import conformal
    >>> mine, yours = np.arange(1, 100) / 50, np.arange(1, 100) / 25  # Scores.
    >>> counts = conformal.count(mine) + conformal.count(yours)
    >>> reach = conformal.threshold(counts, 0.9)  # 81/25 is the 180th of 198.
    >>> 81 / 25 <= reach < 1.023 * 81 / 25
    True
  """
  rank = math.ceil(_exact(level) * (int(np.sum(counts)) + 1))
  index = int(np.searchsorted(np.cumsum(counts), rank))
  return float(EDGES[index]) if index < _NUM_EDGES else math.inf


def share_within(counts: np.ndarray, reach: float) -> float:
  """Computes which share of the scores is at most `reach`, to the nearest edge."""
  index = int(np.argmin(np.abs(EDGES - reach)))
  return float(np.sum(counts[: index + 1]) / np.sum(counts))


def _exact(level: float) -> fractions.Fraction:
  """Takes 0.95 as 95/100, so that no rounding moves a rank."""
  return fractions.Fraction(repr(float(level)))
