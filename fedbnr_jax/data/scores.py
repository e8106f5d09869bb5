"""Maps numeric inputs to normal scores, so that long tails do not squash the rest.

A score is the quantile of the standard normal at the level that a value has among the
training rows. Levels come from sums over clients (`marginals`), never from sorted rows.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedbnr_jax.data import marginals
from fedbnr_jax.names import listing

# Of values whose scores lie in one step of this size, the outermost two are kept.
_STEP = 0.01


class ScoreMap(NamedTuple):
  """A rising function of one standardised input, linear between given points.

  Below the first point and above the last one it is constant.
  """

  values: tuple[float, ...]  # [P] ascending.
  scores: tuple[float, ...]  # [P] ascending.

  def __call__(self, x: np.ndarray) -> np.ndarray:
    """Maps standardised values `[N]` to scores `[N]`."""
    return np.interp(x, self.values, self.scores)

  @property
  def reach(self) -> float:
    """What the size of no score exceeds."""
    return max(marginals.CLIP, *map(abs, self.scores))


class TwoValuesWarning(UserWarning):
  """A column with two values has no normal scores, and is left standardised."""


@contextlib.contextmanager
def unasked() -> Iterator[None]:
  """Leaves out what only somebody who has asked for scores wants to know."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", TwoValuesWarning)
    yield


def fit(inputs: Sequence[np.ndarray], names: Sequence[str]) -> tuple[ScoreMap, ...]:
  """Finds the map of each of D numeric inputs.

  Args:
    inputs: Standardised inputs `[n_c, D]` of each client's training rows, NaN where a
      cell is missing. What is used of them are sums over the clients, so that all rows
      at once do as well.
    names: `[D]`, for the warning of `maps_of`.
  """
  found = [
    marginals.fit([_observed(rows[:, d]) for rows in inputs]) for d in range(len(names))
  ]
  return maps_of(found, names)


def maps_of(
  found: Sequence[marginals.Marginal], names: Sequence[str]
) -> tuple[ScoreMap, ...]:
  """Makes the maps of inputs whose marginals are known.

  A column with two values has no tail; it is left as it is, standardised, and a warning
  says so.

  Args:
    found: `[D]`.
    names: `[D]`, for the warning.
  """
  maps, left = [], []
  for marginal, name in zip(found, names, strict=True):
    if len(marginal.values) > 2:
      maps.append(_thinned(marginal))
    else:
      ends = tuple(marginal.values.tolist())
      maps.append(ScoreMap(ends, ends))
      left.append(name)
  if left:
    warnings.warn(
      f"columns with two values have no normal scores and are standardised instead: "
      f"{listing(left)}",
      TwoValuesWarning,
      stacklevel=3,
    )
  return tuple(maps)


def apply(maps: Sequence[ScoreMap], inputs: np.ndarray) -> np.ndarray:
  """Maps the first inputs of `[N, D]`, one for each map, and leaves the others."""
  columns = [one(inputs[:, d]) for d, one in enumerate(maps)]
  return np.concatenate([np.stack(columns, axis=1), inputs[:, len(maps) :]], axis=1)


def _observed(values: np.ndarray) -> np.ndarray:
  """Leaves out missing values."""
  return values[~np.isnan(values)]


def _thinned(marginal: marginals.Marginal) -> ScoreMap:
  """Leaves out points of a marginal between others of nearly the same score.

  Which ones follows from counts alone, and so to the bit from any partition. No score
  changes by more than a step, because maps rise.
  """
  scores = marginals.normal_scores(marginal.levels)
  step = np.floor(scores / _STEP)
  first = np.append(True, step[1:] != step[:-1])
  kept = first | np.append(first[1:], True)
  return ScoreMap(tuple(marginal.values[kept].tolist()), tuple(scores[kept].tolist()))
