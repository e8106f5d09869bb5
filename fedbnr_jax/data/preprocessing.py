"""Standardises inputs and target by training rows alone, or by declared bounds."""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedbnr_jax.data import encoding, ranges
from fedbnr_jax.data.bounds import Bounds, Interval, clipped, even_spread
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing


@dataclasses.dataclass(frozen=True)
class Preprocessor:
  """A preprocessor turns raw columns into D standardised inputs, targets into z-scores.

  Numeric columns come first, then an indicator (0 or 1) for each category of each
  categorical column; every input is then standardised. All fields are plain Python
  values, so that two preprocessors compare by `==` and survive JSON unchanged.

  Attributes:
    numeric_columns: Names of numeric columns that vary over the training rows.
    categories: Pairs (categorical column, its sorted training categories).
    input_mean: `[D]` means of the inputs over the training rows.
    input_std: `[D]` standard deviations of the inputs over the training rows.
    target_name: Name of the target column.
    target_mean: Training mean of the target.
    target_std: Training standard deviation of the target.
    input_bounds: Declared bounds of the numeric columns, to which they are clipped; ()
      where nothing is declared. With bounds, the means and deviations above are those
      of values spread evenly over them, and say nothing of the rows.
    target_bounds: Declared bounds of the target, or None.
    numeric_ranges: Pairs (lowest, highest training value), one for each numeric column;
      () if they are not known, as in a record of an older version.
  """

  numeric_columns: tuple[str, ...]
  categories: tuple[tuple[str, tuple[str, ...]], ...]
  input_mean: tuple[float, ...]
  input_std: tuple[float, ...]
  target_name: str
  target_mean: float
  target_std: float
  numeric_ranges: tuple[tuple[float, float], ...] = ()
  input_bounds: tuple[Interval, ...] = ()
  target_bounds: Interval | None = None

  @classmethod
  def from_bounds(
    cls, features: pd.DataFrame, target_name: str, bounds: Bounds
  ) -> "Preprocessor":
    """Takes everything from declared bounds, and from the rows nothing.

    Args:
      features: `[N, columns]`, of which only the columns' names and kinds matter.
      target_name: Name of the target.
      bounds: Of every feature and of the target; others are passed over.

    Raises:
      InputError: If a column has no bounds, or those of another kind.
    """
    is_number = {c: pd.api.types.is_numeric_dtype(features[c]) for c in features}
    numeric = tuple(str(column) for column, number in is_number.items() if number)
    categories = tuple(
      (str(column), bounds.categories(str(column)))
      for column, number in is_number.items()
      if not number
    )
    intervals = tuple(bounds.interval(column) for column in numeric)
    spread = [even_spread(*interval) for interval in intervals]
    for _, values in categories:
      share = 1.0 / len(values)
      spread += [(share, math.sqrt(share * (1.0 - share)))] * len(values)
    target = bounds.interval(target_name)
    target_mean, target_std = even_spread(*target)
    return cls(
      numeric_columns=numeric,
      categories=categories,
      input_mean=tuple(mean for mean, _ in spread),
      input_std=tuple(std for _, std in spread),
      target_name=target_name,
      target_mean=target_mean,
      target_std=target_std,
      numeric_ranges=intervals,
      input_bounds=intervals,
      target_bounds=target,
    )

  @classmethod
  def fit(
    cls, features: pd.DataFrame, targets: np.ndarray, target_name: str
  ) -> "Preprocessor":
    """Learns the statistics from training rows.

    Args:
      features: `[N, columns]` raw features of the training rows, in numeric and string
        columns.
      targets: `[N]` raw targets of the training rows.
      target_name: Name of the target, for messages.

    Returns:
      The fitted preprocessor. Constant columns are left out with a warning.

    Raises:
      InputError: If the target or every column is constant, or a value is not finite.
    """
    numeric: list[str] = []
    categories: list[tuple[str, tuple[str, ...]]] = []
    constant: list[str] = []
    for column in features.columns:
      if features[column].nunique(dropna=False) < 2:
        constant.append(column)
      elif pd.api.types.is_numeric_dtype(features[column]):
        numeric.append(column)
      else:
        values = sorted(str(value) for value in features[column].unique())
        categories.append((column, tuple(values)))
    if not numeric and not categories:
      raise InputError(
        f"no feature varies over the {len(features)} training rows "
        f"(columns {listing(constant)}): add an input that does"
      )
    if constant:
      warnings.warn(
        f"dropped features that are constant over the training rows: "
        f"{listing(constant)}",
        UserWarning,
        stacklevel=2,
      )
    target_mean, target_std = encoding.moments(
      np.asarray(targets, np.float64)[:, None], [target_name]
    )
    raw = encoding.raw_inputs(features, numeric, categories)
    mean, std = encoding.moments(raw, encoding.input_names(numeric, categories))
    return cls(
      numeric_columns=tuple(numeric),
      categories=tuple(categories),
      input_mean=mean,
      input_std=std,
      target_name=target_name,
      target_mean=target_mean[0],
      target_std=target_std[0],
      numeric_ranges=ranges.numeric_ranges(features, numeric),
    )

  @property
  def num_inputs(self) -> int:
    """The number of inputs after encoding, D."""
    return len(self.input_mean)

  @property
  def input_names(self) -> tuple[str, ...]:
    """The names of the D inputs; an indicator is called `column=category`."""
    return tuple(encoding.input_names(self.numeric_columns, self.categories))

  @property
  def categorical_columns(self) -> tuple[str, ...]:
    """The names of categorical columns that vary over the training rows."""
    return tuple(column for column, _ in self.categories)

  @property
  def target_reach(self) -> float | None:
    """The largest size of a standardised target within bounds; None without bounds."""
    if self.target_bounds is None:
      return None
    return float(np.max(np.abs(self.standardise(np.array(self.target_bounds)))))

  def transform(self, features: pd.DataFrame) -> np.ndarray:
    """Encodes and standardises rows; values outside of declared bounds are clipped.

    Args:
      features: `[N, columns]` raw features. Columns that training did not have, or
        that were constant there, are ignored. A category that no training row had
        sets none of its column's indicators, with a warning; clipping warns too.

    Returns:
      `[N, D]` float64 inputs.

    Raises:
      InputError: If columns are missing or hold something that is not a number.
    """
    needed = (*self.numeric_columns, *self.categorical_columns)
    missing = [column for column in needed if column not in features.columns]
    if missing:
      raise InputError(
        f"columns {listing(missing)} are missing from the features: the model was "
        f"trained with {listing(needed)}"
      )
    raw = encoding.raw_inputs(features, self.numeric_columns, self.categories)
    for column, values in self.categories:
      unseen = sorted(set(features[column].astype(str)) - set(values))
      if unseen:
        known = "no training row had" if not self.target_bounds else "are not declared"
        warnings.warn(
          f"column {column!r} has values that {known}: "
          f"{listing(unseen)}; they count as none of {listing(values)}",
          UserWarning,
          stacklevel=2,
        )
    if self.input_bounds:
      columns = self.numeric_columns
      raw[:, : len(columns)] = clipped(
        raw[:, : len(columns)], columns, self.input_bounds
      )
    return (raw - np.array(self.input_mean)) / np.array(self.input_std)

  def outside(self, features: pd.DataFrame) -> pd.DataFrame:
    """Marks the cells of parsed features that lie outside what was trained on.

    Returns:
      `[N, columns]` truth values. Where the ranges are not known, no number is marked.
    """
    # Not strict: there may be no ranges, but there are never some of them.
    known = list(zip(self.numeric_columns, self.numeric_ranges, strict=False))
    return ranges.outside_cells(features, known, self.categories)

  def standardise(self, targets: np.ndarray, *, clip: bool = True) -> np.ndarray:
    """Converts targets `[N]` from the raw unit to z-scores `[N]`.

    Args:
      targets: In the raw unit.
      clip: Whether those outside of declared bounds are clipped, as rows to learn from
        are; rows to score by are not.
    """
    values = np.asarray(targets, np.float64)
    if clip and self.target_bounds is not None:
      values = np.clip(values, *self.target_bounds)
    return (values - self.target_mean) / self.target_std

  def warn_of_clipped_targets(self, targets: np.ndarray) -> None:
    """Warns of targets `[N]`, in the raw unit, that `standardise` clips."""
    if self.target_bounds is not None:
      clipped(targets[:, None], [self.target_name], [self.target_bounds])

  def unstandardise_mean(self, z: np.ndarray) -> np.ndarray:
    """Converts predicted means `[N]` from z-scores to the raw unit `[N]`."""
    return np.asarray(z, np.float64) * self.target_std + self.target_mean

  def to_json(self) -> dict[str, Any]:
    """Returns a record of JSON types, from which `from_json` restores every bit."""
    record = dataclasses.asdict(self)
    record["categories"] = [[name, list(values)] for name, values in self.categories]
    for field in ("numeric_columns", "input_mean", "input_std"):
      record[field] = list(record[field])
    record["input_bounds"] = [list(interval) for interval in self.input_bounds]
    target = self.target_bounds
    record["target_bounds"] = None if target is None else list(target)
    record["numeric_ranges"] = [list(pair) for pair in self.numeric_ranges]
    return record

  @classmethod
  def from_json(cls, record: Mapping[str, Any]) -> "Preprocessor":
    """Restores a preprocessor from the record that `to_json` returned.

    Raises:
      InputError: If the record is malformed.
    """
    try:
      made = cls(
        numeric_columns=_strings(record["numeric_columns"]),
        categories=tuple(
          (_strings([name])[0], _strings(values))
          for name, values in record["categories"]
        ),
        input_mean=_floats(record["input_mean"]),
        input_std=_floats(record["input_std"]),
        target_name=_strings([record["target_name"]])[0],
        target_mean=_floats([record["target_mean"]])[0],
        target_std=_floats([record["target_std"]])[0],
        numeric_ranges=tuple(
          (low, high) for low, high in map(_floats, record.get("numeric_ranges", ()))
        ),
        # Folders of older versions have no bounds.
        input_bounds=tuple(_interval(pair) for pair in record.get("input_bounds", ())),
        target_bounds=_interval(record["target_bounds"])
        if record.get("target_bounds")
        else None,
      )
      if not len(made.input_names) == len(made.input_mean) == len(made.input_std):
        raise ValueError("numbers of inputs, means and deviations differ")
      for pairs in (made.input_bounds, made.numeric_ranges):
        if pairs and len(pairs) != len(made.numeric_columns):
          raise ValueError("numbers of numeric columns and of their ranges differ")
      if min(*made.input_std, made.target_std) <= 0:
        raise ValueError("a standard deviation is not positive")
    except KeyError as error:
      raise InputError(
        f"preprocessing record lacks the field {error}: restore it or train again"
      ) from error
    except (TypeError, ValueError) as error:
      raise InputError(
        f"preprocessing record is malformed ({error}): restore it or train again"
      ) from error
    return made


def _strings(values: Any) -> tuple[str, ...]:
  """Returns the values as a tuple, or raises a TypeError if one is not a string."""
  if isinstance(values, str) or not all(isinstance(value, str) for value in values):
    raise TypeError(f"{values!r} is not a list of strings")
  return tuple(values)


def _interval(values: Any) -> Interval:
  """Returns the two numbers of an interval, or raises if there are not two."""
  low, high = _floats(values)
  return low, high


def _floats(values: Any) -> tuple[float, ...]:
  """Returns the values as floats, or raises if one is not a finite number."""
  if not all(isinstance(value, (int, float)) for value in values):
    raise TypeError(f"{values!r} is not a list of numbers")
  numbers = tuple(float(value) for value in values)
  if not all(map(math.isfinite, numbers)):
    raise ValueError("a statistic is not finite")
  return numbers
