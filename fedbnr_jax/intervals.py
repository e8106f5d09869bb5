"""Intervals of predictions at any level: Gaussian, and conformal by counted scores."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import conformal

DEFAULT_LEVELS = (0.95,)


class Calibration(NamedTuple):
  """What rows that a model has not seen say of its error bars.

  Attributes:
    counts: [B + 1] scores of these rows in public bins, summed over clients.
    by: "rows" that were set aside; or "folds", in which every training row was scored
      by a model that was trained without it.
    outdated: Whether rows have joined or left the model since.
  """

  counts: np.ndarray
  by: str
  outdated: bool = False

  @property
  def num_rows(self) -> int:
    """How many rows were scored."""
    return int(np.sum(self.counts))

  def threshold(self, level: float = 0.95) -> float:
    """Finds how many standard deviations a conformal interval reaches from the mean.

    Args:
      level: The share of new rows that it is to cover, between 0 and 1.

    Raises:
      InputError: If the level is none, or the scored rows are too few or too far off.
    """
    require_level(level)
    what = f"there is no conformal interval of {percent(level)} %"
    if self.outdated:
      raise InputError(
        f"{what}: rows have joined or left the model since it was calibrated. Train "
        "again to calibrate it anew."
      )
    fewest = conformal.fewest_rows(level)
    if self.num_rows < fewest:
      highest = 100 * conformal.highest_level(self.num_rows)
      more = (
        ", or set more aside (config.data.calibration)" if self.by == "rows" else ""
      )
      raise InputError(
        f"{what}: it takes {fewest} rows, and the model was calibrated with "
        f"{self.num_rows}, enough for {highest:.4g} %. Train on more rows{more}."
      )
    reach = conformal.threshold(self.counts, level)
    if np.isinf(reach):
      raise InputError(
        f"{what}: too many rows lie more than {conformal.EDGES[-1]:g} standard "
        "deviations off; the model's error bars are of no use."
      )
    return reach


def gaussian_reach(level: float) -> float:
  """Computes how many standard deviations a Gaussian interval reaches from the mean."""
  return float(special.ndtri((1 + level) / 2))


def require_level(level: float) -> None:
  """Raises InputError unless a level lies between 0 and 1."""
  if not 0 < level < 1:
    raise InputError(
      f"the level of an interval must lie between 0 and 1, as 0.95 does, got {level:g}."
    )


def percent(level: float) -> str:
  """Writes a level in percent, as in the names of columns: 0.95 is 95."""
  return f"{100 * level:g}"


def columns(
  mean: np.ndarray,
  std: np.ndarray,
  levels: Sequence[float] | float | None,
  calibration: Calibration | None,
  *,
  warn: bool = True,
) -> dict[str, np.ndarray]:
  """Computes the columns of all intervals, such as lower95 and upper95_conformal.

  Args:
    mean: [N].
    std: [N], noise included.
    levels: Between 0 and 1; None for 95 %, whose conformal columns are left out, with
      a warning, where they cannot be had.
    calibration: None for a model without one: then all intervals are Gaussian.
    warn: Whether to warn.

  Raises:
    InputError: If a level is none, or a conformal interval was asked for, and cannot
      be had.
  """
  asked = DEFAULT_LEVELS if levels is None else tuple(np.atleast_1d(levels))
  reaches: dict[str, float] = {}
  for level in map(float, asked):
    require_level(level)
    reaches[percent(level)] = gaussian_reach(level)
    if calibration is None:
      continue
    try:
      reaches[f"{percent(level)}_conformal"] = calibration.threshold(level)
    except InputError as error:
      if levels is not None:
        raise
      if warn:
        warnings.warn(str(error), stacklevel=3)
  return {
    f"{side}{name}": mean + sign * reach * std
    for name, reach in reaches.items()
    for side, sign in (("lower", -1.0), ("upper", 1.0))
  }
