"""Declares what each column may hold, beforehand and not by reading the rows.

Means and deviations of rows say something of every row: whoever knows all others can
compute the last one. Bounds that people declare say nothing, so a model that is to be
released privately is standardised by them.
"""

import dataclasses
import json
import math
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import read_json

Interval = tuple[float, float]
Declared = Mapping[str, Any] | str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Bounds:
  """Bounds of columns, the target among them.

  Attributes:
    intervals: By numeric column, the least and the greatest value it may hold.
    levels: By categorical column, the values it may hold.
  """

  intervals: Mapping[str, Interval]
  levels: Mapping[str, tuple[str, ...]]

  @property
  def text(self) -> str:
    """The bounds as one line of JSON, which `read_bounds` reads."""
    columns = {name: list(v) for name, v in {**self.intervals, **self.levels}.items()}
    return json.dumps(columns, sort_keys=True, ensure_ascii=False)

  def interval(self, column: str) -> Interval:
    """Returns the bounds of a numeric column.

    Raises:
      InputError: If there are none, or they are levels.
    """
    if column not in self.intervals:
      raise self._missing(column, "[low, high]", "numbers")
    return self.intervals[column]

  def categories(self, column: str) -> tuple[str, ...]:
    """Returns the levels of a categorical column.

    Raises:
      InputError: If there are none, or they are numbers.
    """
    if column not in self.levels:
      raise self._missing(column, '["a", "b"]', "text")
    return self.levels[column]

  def preprocessing(self, features: pd.DataFrame, target_name: str) -> dict[str, Any]:
    """Returns the fields of a `Preprocessor` of these columns, from bounds alone.

    Raises:
      InputError: If a column has no bounds, or those of another kind.
    """
    is_number = {c: pd.api.types.is_numeric_dtype(features[c]) for c in features}
    numeric = tuple(str(column) for column, number in is_number.items() if number)
    categories = tuple(
      (str(column), self.categories(str(column)))
      for column, number in is_number.items()
      if not number
    )
    intervals = tuple(self.interval(column) for column in numeric)
    spread = [even_spread(*interval) for interval in intervals]
    for _, values in categories:
      share = 1.0 / len(values)
      spread += [(share, math.sqrt(share * (1.0 - share)))] * len(values)
    target = self.interval(target_name)
    target_mean, target_std = even_spread(*target)
    return {
      "numeric_columns": numeric,
      "categories": categories,
      "input_mean": tuple(mean for mean, _ in spread),
      "input_std": tuple(std for _, std in spread),
      "target_name": target_name,
      "target_mean": target_mean,
      "target_std": target_std,
      "numeric_ranges": intervals,
      "input_bounds": intervals,
      "target_bounds": target,
    }

  def _missing(self, column: str, example: str, kind: str) -> InputError:
    declared = column in self.intervals or column in self.levels
    found = "others" if declared else "none"
    return InputError(
      f"data.bounds has {found} for column {column!r}, which holds {kind}: declare "
      f'"{column}": {example}'
    )


def read_bounds(declared: Declared) -> Bounds:
  """Reads bounds from a mapping, from its JSON text, or from a file that holds that.

  Args:
    declared: Such as `{"age": [0, 120], "sex": ["f", "m"]}`, or a file's name.

  Raises:
    InputError: If the file does not exist, or a column has neither two numbers in
      ascending order nor at least two different texts.
  """
  content: Any = declared
  if isinstance(declared, str) and declared.lstrip().startswith("{"):
    try:
      content = json.loads(declared)
    except json.JSONDecodeError as error:
      raise InputError(f"data.bounds is not readable JSON ({error})") from error
  elif isinstance(declared, str | os.PathLike):
    path = pathlib.Path(declared)
    if not path.is_file():
      raise InputError(
        f"the file of data.bounds, {path}, does not exist: write one, such as "
        '{"age": [0, 120], "sex": ["f", "m"]}'
      )
    content = read_json(path)
  if not isinstance(content, Mapping) or not content:
    raise InputError(
      'data.bounds must hold columns, such as {"age": [0, 120], "sex": ["f", "m"]}'
    )
  intervals: dict[str, Interval] = {}
  levels: dict[str, tuple[str, ...]] = {}
  for column, values in content.items():
    listed = list(values) if isinstance(values, list | tuple) else []
    if len(listed) >= 2 and all(isinstance(value, str) for value in listed):
      levels[column] = _levels(column, listed)
    else:
      intervals[column] = _interval(column, listed)
  return Bounds(intervals, levels)


def even_spread(low: float, high: float) -> tuple[float, float]:
  """Returns mean and standard deviation of values spread evenly from low to high."""
  return 0.5 * (low + high), (high - low) / math.sqrt(12.0)


def clipped(
  values: np.ndarray, columns: Sequence[str], intervals: Sequence[Interval]
) -> np.ndarray:
  """Clips values `[N, C]` of C columns to their bounds; a warning counts which."""
  low, high = np.transpose(intervals)
  inside = np.clip(values, low, high)
  outside = np.sum(inside != values, axis=0)
  found = [
    f"{column!r} ({count} of {len(values)})"
    for column, count in zip(columns, outside, strict=True)
    if count
  ]
  if found:
    warnings.warn(
      f"values outside of the declared bounds are clipped: {', '.join(found)}",
      UserWarning,
      stacklevel=3,
    )
  return inside


def _levels(column: str, values: list[str]) -> tuple[str, ...]:
  if len(set(values)) < len(values):
    twice = next(value for value in values if values.count(value) > 1)
    raise InputError(f"data.bounds names {twice!r} twice for column {column!r}")
  return tuple(sorted(values))


def _interval(column: str, values: list[Any]) -> Interval:
  numbers = [
    float(value)
    for value in values
    if isinstance(value, int | float) and not isinstance(value, bool)
  ]
  if len(numbers) == len(values) == 2:
    low, high = numbers
    if math.isfinite(high - low) and low < high:
      return low, high
  raise InputError(
    f"data.bounds of column {column!r} must be [low, high], two finite numbers with "
    "low < high, or a list of at least two texts"
  )
