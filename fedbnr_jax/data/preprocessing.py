"""Standardises inputs and target by training rows alone, or by declared bounds."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedbnr_jax.data import (
  encoding,
  missing_cells,
  preprocessing_record,
  ranges,
  scores,
)
from fedbnr_jax.data.bounds import Bounds, Interval, clipped
from fedbnr_jax.data.missing_cells import Imputation
from fedbnr_jax.data.scores import ScoreMap
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing

# What becomes of numeric columns: mean zero and deviation one, or normal scores.
INPUTS = ("standard", "scores")


@dataclasses.dataclass(frozen=True)
class Preprocessor:
  """A preprocessor turns raw columns into D standardised inputs, targets into z-scores.

  Numeric columns come first, then an indicator (0 or 1) for each of them that lacked
  cells in training, and for each category of each categorical column; every input is
  then standardised, and numeric ones may be mapped to normal scores. All fields are
  plain Python values, so that two preprocessors compare by `==` and survive JSON
  unchanged.

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
    input_scores: Maps of the standardised numeric columns to normal scores, one for
      each; () where they are left standardised.
    imputation: What stands in for missing cells, and which columns have an input that
      says where; None where no cell may be missing.
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
  input_scores: tuple[ScoreMap, ...] = ()
  imputation: Imputation | None = None

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
    return cls(**bounds.preprocessing(features, target_name))

  @classmethod
  def fit(
    cls,
    features: pd.DataFrame,
    targets: np.ndarray,
    target_name: str,
    inputs: str = "standard",
    missing: str = "error",
  ) -> "Preprocessor":
    """Learns the statistics from training rows.

    Args:
      features: `[N, columns]` raw features of the training rows, in numeric and string
        columns.
      targets: `[N]` raw targets of the training rows.
      target_name: Name of the target, for messages.
      inputs: One of `INPUTS`, what becomes of numeric columns.
      missing: "error", or "impute" where cells of features may be missing.

    Returns:
      The fitted preprocessor. Constant columns are left out with a warning.

    Raises:
      InputError: If the target or every column is constant, or a value is not finite.
    """
    kinds = encoding.kinds_of(features)
    numeric, num_numeric = kinds.numeric, len(kinds.numeric)
    marked = kinds.marked if missing == "impute" else None
    target_mean, target_std = encoding.moments(
      np.asarray(targets, np.float64)[:, None], [target_name]
    )
    raw = encoding.raw_inputs(features, numeric, kinds.categories, marked)
    names = encoding.input_names(numeric, kinds.categories, marked)
    mean, std = encoding.moments(raw, names)
    # All rows at once: what is used of them are sums, the same in any parts.
    maps: tuple[ScoreMap, ...] = ()
    if inputs == "scores":
      maps = scores.fit([_standardised(raw, mean, std)], numeric)
    imputation = None
    if marked is not None:
      medians = map(missing_cells.median, raw.T[:num_numeric, None], mean, std)
      imputation = Imputation(tuple(medians), marked)
    return cls(
      numeric_columns=numeric,
      categories=kinds.categories,
      input_mean=mean,
      input_std=std,
      target_name=target_name,
      target_mean=target_mean[0],
      target_std=target_std[0],
      numeric_ranges=ranges.numeric_ranges(features, numeric),
      input_scores=maps,
      imputation=imputation,
    )

  @property
  def num_inputs(self) -> int:
    """The number of inputs after encoding, D."""
    return len(self.input_mean)

  @property
  def input_names(self) -> tuple[str, ...]:
    """The names of the D inputs; an indicator is called `column=category`."""
    return tuple(
      encoding.input_names(self.numeric_columns, self.categories, self._marked)
    )

  @property
  def _marked(self) -> tuple[str, ...] | None:
    return None if self.imputation is None else self.imputation.marked

  @property
  def missing(self) -> str:
    """What becomes of missing cells: "error" or "impute"."""
    return "error" if self.imputation is None else "impute"

  @property
  def number_columns(self) -> tuple[str, ...]:
    """The names of columns of numbers, also of those that only say what they lack."""
    return tuple(dict.fromkeys([*self.numeric_columns, *(self._marked or ())]))

  @property
  def categorical_columns(self) -> tuple[str, ...]:
    """The names of categorical columns that vary over the training rows."""
    return tuple(column for column, _ in self.categories)

  @property
  def num_categories(self) -> int:
    """The number of inputs that stand for a category."""
    return sum(len(values) for _, values in self.categories)

  @property
  def largest_input(self) -> float | None:
    """The largest size of an input of any row; None where numbers are not bounded."""
    num_numeric = len(self.numeric_columns)
    ends = (*self.input_bounds, *[(0.0, 1.0)] * (self.num_inputs - num_numeric))
    if self.input_scores:
      ends = (*[(0.0, 0.0)] * num_numeric, *ends)  # Scores have a reach of their own.
    if len(ends) < self.num_inputs:
      return None
    reach = np.abs(_standardised(np.transpose(ends), self.input_mean, self.input_std))
    scored = [one.reach for one in self.input_scores]
    return float(max([*scored, *reach[:, len(scored) :].flat]))

  @property
  def target_reach(self) -> float | None:
    """The largest size of a standardised target within bounds; None without bounds."""
    if self.target_bounds is None:
      return None
    return float(np.max(np.abs(self.standardise(np.array(self.target_bounds)))))

  def transform(self, features: pd.DataFrame) -> np.ndarray:
    """Makes the inputs of rows, as `standardised` and `scored` do one after the other.

    Args:
      features: `[N, columns]` raw features.

    Returns:
      `[N, D]` float64 inputs.
    """
    return self.scored(self.standardised(features))

  def scored(self, inputs: np.ndarray) -> np.ndarray:
    """Maps standardised inputs `[N, D]` to normal scores, where these are wanted."""
    return scores.apply(self.input_scores, inputs) if self.input_scores else inputs

  def standardised(self, features: pd.DataFrame) -> np.ndarray:
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
    needed = (*self.number_columns, *self.categorical_columns)
    absent = [column for column in needed if column not in features.columns]
    if absent:
      raise InputError(
        f"columns {listing(absent)} are missing from the features: the model was "
        f"trained with {listing(needed)}"
      )
    raw = encoding.raw_inputs(
      features, self.numeric_columns, self.categories, self._marked
    )
    if self.imputation is not None:
      raw = self.imputation.filled(raw)
      missing_cells.warn_of_fresh(self._fresh_cells(features))
    known = "no training row had" if not self.target_bounds else "are not declared"
    encoding.warn_of_unseen(features, self.categories, known)
    if self.input_bounds:
      columns = self.numeric_columns
      raw[:, : len(columns)] = clipped(
        raw[:, : len(columns)], columns, self.input_bounds
      )
    return _standardised(raw, self.input_mean, self.input_std)

  def outside(self, features: pd.DataFrame) -> pd.DataFrame:
    """Marks the cells of parsed features that lie outside what was trained on.

    Returns:
      `[N, columns]` truth values. Where the ranges are not known, no number is marked.
    """
    # Not strict: there may be no ranges, but there are never some of them.
    known = list(zip(self.numeric_columns, self.numeric_ranges, strict=False))
    cells = ranges.outside_cells(features, known, self.categories)
    if self.imputation is None:
      return cells
    fresh = self._fresh_cells(features)
    return cells | fresh.reindex(columns=cells.columns, fill_value=False)

  def _fresh_cells(self, features: pd.DataFrame) -> pd.DataFrame:
    """Marks missing cells of columns that lacked none in training."""
    whole = [c for c in self.numeric_columns if c not in (self._marked or ())]
    return missing_cells.fresh(features, whole, self.categories)

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
    return preprocessing_record.to_json(dataclasses.asdict(self))

  @classmethod
  def from_json(cls, record: Mapping[str, Any]) -> "Preprocessor":
    """Restores a preprocessor from the record that `to_json` returned.

    Raises:
      InputError: If the record is malformed.
    """
    return cls(**preprocessing_record.fields_of(record))


def _standardised(
  raw: np.ndarray, mean: Sequence[float], std: Sequence[float]
) -> np.ndarray:
  """Centres and scales values `[N, D]`; what float64 cannot hold becomes infinite."""
  with np.errstate(over="ignore"):
    return (raw - np.array(mean)) / np.array(std)
