"""How sure a difference is: standard errors and one-tailed paired Wilcoxon tests."""

import math
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats

# With four pairs the smallest p is 1/16, so fewer than five can show nothing.
MIN_PAIRS = 5
_LEVELS = (0.05, 0.01)
_WORSE = ("↑", "⇑")
_BETTER = ("↓", "⇓")


def sem(values: ArrayLike) -> float:
  """Standard error of the mean; NaN below two values, or if one is infinite.

  Args:
    values: [N] one a run; NaN is a value that is missing.
  """
  known = np.asarray(values, dtype=float)
  known = known[~np.isnan(known)]
  if known.size < 2 or not np.isfinite(known).all():
    return math.nan
  return float(np.std(known, ddof=1) / math.sqrt(known.size))


def wilcoxon(differences: ArrayLike, side: Literal["greater", "less"]) -> float:
  """p of the one-tailed Wilcoxon signed-rank test of paired differences.

  Exact up to 50 pairs, or up to 13 where some differences have the same size; a
  normal approximation beyond that. Pairs that do not differ are left out.

  Args:
    differences: [N] one a pair.
    side: The alternative: the differences tend to be greater than 0, or less.

  Returns:
    p, which is 1 if no pair differs.
  """
  unequal = np.asarray(differences, dtype=float)
  # Left to SciPy, pairs that do not differ would cost the exact distribution.
  unequal = unequal[unequal != 0]
  if unequal.size == 0:
    return 1.0
  return float(stats.wilcoxon(unequal, alternative=side).pvalue)


def mark(scores: pd.Series, reference: pd.Series) -> str:
  """How a method compares with a reference, in the paper's signs.

  Args:
    scores: Of the method, less is better; the index is the seed, which makes pairs.
    reference: Of the method that it is compared with, likewise.

  Returns:
    ↑ if it is worse at p < .05, ⇑ at p < .01; ↓ and ⇓ if it is better; else, and
    with fewer than `MIN_PAIRS` pairs, nothing.
  """
  differences = (scores - reference).dropna()
  if len(differences) < MIN_PAIRS:
    return ""
  sides: tuple[tuple[Literal["greater", "less"], tuple[str, str]], ...]
  sides = (("greater", _WORSE), ("less", _BETTER))
  for side, signs in sides:
    p = wilcoxon(differences, side)
    passed = sum(p < level for level in _LEVELS)
    if passed:
      return signs[passed - 1]
  return ""
