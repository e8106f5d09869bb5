"""Standard errors, and one-tailed paired Wilcoxon tests between methods."""

import math
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats

# With four pairs the smallest possible p is 1/16, so at least five are needed.
MIN_PAIRS = 5
_LEVELS = (0.05, 0.01)
_WORSE = ("↑", "⇑")  # For each of the levels.
_BETTER = ("↓", "⇓")


def sem(values: ArrayLike) -> float:
  """Returns the standard error of the mean; NaN below two values or if one is infinite.

  Args:
    values: [N], one per run; NaN is a missing value.
  """
  known = np.asarray(values, dtype=float)
  known = known[~np.isnan(known)]
  if known.size < 2 or not np.isfinite(known).all():
    return math.nan
  return float(np.std(known, ddof=1) / math.sqrt(known.size))


def wilcoxon(differences: ArrayLike, side: Literal["greater", "less"]) -> float:
  """Returns p of the one-tailed Wilcoxon signed-rank test of paired differences.

  p is exact up to 50 pairs, or up to 13 where some differences have the same size; a
  normal approximation is used beyond that. Pairs that do not differ are left out.

  Args:
    differences: [N], one per pair.
    side: The alternative: the differences tend to be greater than 0, or less.

  Returns:
    p, which is 1 if no pair differs.
  """
  unequal = np.asarray(differences, dtype=float)
  # With zeros among the differences SciPy would not use the exact distribution.
  unequal = unequal[unequal != 0]
  if unequal.size == 0:
    return 1.0
  return float(stats.wilcoxon(unequal, alternative=side).pvalue)


def mark(scores: pd.Series, reference: pd.Series) -> str:
  """Marks how a method compares with a reference, by the paper's signs.

  Args:
    scores: [N] of the method, lower is better. The index is the seed, by which scores
      are paired.
    reference: [N'] of the reference method, likewise.

  Returns:
    ↑ if the method is worse at p < .05, ⇑ at p < .01; ↓ and ⇓ if it is better; "" if
    there is no significant difference or there are fewer than `MIN_PAIRS` pairs.
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
