"""Says what the test rows tell of the 95 % intervals, and warns if it is not good."""

import warnings
from collections.abc import Mapping
from typing import Any

from scipy import special

_LEVEL = 0.95
# From this many test rows on, intervals that in truth cover 80 %, and so miss four
# times as often as promised, are found out in four cases of five: the range below
# excludes 95 %. With 20 test rows it is three of five, with 10 one of three.
FEWEST_ROWS = 40


class CoverageWarning(UserWarning):
  """The 95 % intervals do not cover 95 % of the test rows, or it cannot be told."""


def exact_range(share: float, num_rows: int) -> tuple[float, float]:
  """Returns the exact 95 % range (Clopper-Pearson) of an observed coverage.

  Coverages outside of it would have made the observed one, or one farther off, happen
  less than once in forty times.

  Args:
    share: The share of rows whose target is in its interval. It need not be a whole
      number of rows, as when it is a mean over the models of several clients.
    num_rows: The number of rows, at least 1.

  Returns:
    The lowest and the highest coverage.
  """
  inside = share * num_rows
  outside = num_rows - inside
  tail = (1 - _LEVEL) / 2
  # The quantiles of a Beta distribution, which has no end where all rows agree.
  low = special.betaincinv(inside, outside + 1, tail) if inside > 0 else 0.0
  high = special.betaincinv(inside + 1, outside, 1 - tail) if outside > 0 else 1.0
  return float(low), float(high)


def warn_of_coverage(summary: Mapping[str, Any]) -> None:
  """Warns if a run's 95 % intervals are too narrow, too wide, or cannot be judged.

  Args:
    summary: As `journal.summarise` makes it; one without scores is passed over.
  """
  if not {"test_coverage95", "test_rows"} <= set(summary):
    return
  share, rows, kind = _unseen(summary)
  low, high = exact_range(share, rows)
  likely = f"probably {low:.0%} to {high:.0%} of all"
  seen = f"{share:.0%} of {rows} {kind} rows, so {likely}"
  if high < _LEVEL or low > _LEVEL:
    fault = "narrow" if high < _LEVEL else "wide"
    message = (
      f"the error bars are too {fault}: 95 % intervals cover {seen}; more rows or "
      "another method may help"
    )
    if "test_coverage95_conformal" in summary:
      message += "; conformal intervals allow for it"
    else:
      message += ", or conformal intervals (config.data.calibration)"
  elif rows < FEWEST_ROWS:
    message = (
      f"{rows} {kind} rows are too few to judge the error bars: 95 % intervals cover "
      f"{seen}; {FEWEST_ROWS} would tell (a tenth of a table's rows are for testing)"
    )
  else:
    return
  warnings.warn(message, CoverageWarning, stacklevel=3)


def _unseen(summary: Mapping[str, Any]) -> tuple[float, int, str]:
  """Returns the share that is covered, of how many rows, and what these are called.

  Rows that intervals were calibrated with tell as much as test rows do, and more where
  these are few: a model that was not trained on them has predicted them too.
  """
  share, rows = summary["test_coverage95"], summary["test_rows"]
  more = summary.get("calibration_rows", 0)
  if not more:
    return share, rows, "test"
  inside = share * rows + summary["calibration_coverage95"] * more
  return inside / (rows + more), rows + more, "unseen"
