"""Writes a preprocessor's fields as JSON types, and reads and checks them again."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedbnr_jax.data import encoding
from fedbnr_jax.data.bounds import Interval
from fedbnr_jax.data.missing_cells import Imputation
from fedbnr_jax.data.scores import ScoreMap
from fedbnr_jax.errors import InputError


def to_json(value: Any) -> Any:
  """Turns tuples within a value into lists, and named ones into objects."""
  if isinstance(value, (Imputation, ScoreMap)):
    return {name: list(part) for name, part in value._asdict().items()}
  if isinstance(value, Mapping):
    return {name: to_json(part) for name, part in value.items()}
  return [to_json(part) for part in value] if isinstance(value, tuple) else value


def fields_of(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of a `Preprocessor` from the record that `to_json` made of them.

  Raises:
    InputError: If the record is malformed.
  """
  try:
    fields = {name: read(record[name]) for name, read in _REQUIRED.items()}
    # Folders of older versions lack some.
    for name, read in _OPTIONAL.items():
      fields[name] = read(record.get(name) or ())
    target = record.get("target_bounds")
    fields["target_bounds"] = _interval(target) if target else None
    given = record.get("imputation")
    fields["imputation"] = _imputation(given) if given else None
    _check(fields)
  except KeyError as error:
    raise InputError(
      f"preprocessing record lacks the field {error}: restore it or train again"
    ) from error
  except (TypeError, ValueError) as error:
    raise InputError(
      f"preprocessing record is malformed ({error}): restore it or train again"
    ) from error
  return fields


def _check(fields: Mapping[str, Any]) -> None:
  """Raises a ValueError for fields that do not go with each other."""
  numeric, categories = fields["numeric_columns"], fields["categories"]
  imputation = fields["imputation"]
  marked = imputation and imputation.marked
  num_inputs = len(encoding.input_names(numeric, categories, marked))
  if not num_inputs == len(fields["input_mean"]) == len(fields["input_std"]):
    raise ValueError("numbers of inputs, means and deviations differ")
  for name in ("input_bounds", "numeric_ranges"):
    if fields[name] and len(fields[name]) != len(numeric):
      raise ValueError("numbers of numeric columns and of their ranges differ")
  if fields["input_scores"] and len(fields["input_scores"]) != len(numeric):
    raise ValueError("numbers of numeric columns and of their scores differ")
  if imputation and len(imputation.medians) != len(numeric):
    raise ValueError("numbers of numeric columns and of their medians differ")
  if min(*fields["input_std"], fields["target_std"]) <= 0:
    raise ValueError("a standard deviation is not positive")


def _strings(values: Any) -> tuple[str, ...]:
  """Returns the values as a tuple, or raises a TypeError if one is not a string."""
  if isinstance(values, str) or not all(isinstance(value, str) for value in values):
    raise TypeError(f"{values!r} is not a list of strings")
  return tuple(values)


def _string(value: Any) -> str:
  return _strings([value])[0]


def _categories(values: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
  return tuple((_string(name), _strings(levels)) for name, levels in values)


def _floats(values: Any) -> tuple[float, ...]:
  """Returns the values as floats, or raises if one is not a finite number."""
  if not all(isinstance(value, (int, float)) for value in values):
    raise TypeError(f"{values!r} is not a list of numbers")
  numbers = tuple(float(value) for value in values)
  if not all(map(math.isfinite, numbers)):
    raise ValueError("a statistic is not finite")
  return numbers


def _float(value: Any) -> float:
  return _floats([value])[0]


def _interval(values: Any) -> Interval:
  """Returns the two numbers of an interval, or raises if there are not two."""
  low, high = _floats(values)
  return low, high


def _intervals(values: Any) -> tuple[Interval, ...]:
  return tuple(map(_interval, values))


def _score_maps(values: Any) -> tuple[ScoreMap, ...]:
  """Returns maps to normal scores, or raises if one does not rise."""
  maps = tuple(
    ScoreMap(_floats(one["values"]), _floats(one["scores"])) for one in values
  )
  for one in maps:
    if not len(one.values) == len(one.scores) > 0:
      raise ValueError("numbers of values and of their scores differ")
    if not (_rises(one.values) and _rises(one.scores)):
      raise ValueError("scores do not rise with their values")
  return maps


def _imputation(value: Any) -> Imputation:
  return Imputation(_floats(value["medians"]), _strings(value["marked"]))


def _rises(numbers: Sequence[float]) -> bool:
  return all(a <= b for a, b in itertools.pairwise(numbers))


_REQUIRED: dict[str, Callable[[Any], Any]] = {
  "numeric_columns": _strings,
  "categories": _categories,
  "input_mean": _floats,
  "input_std": _floats,
  "target_name": _string,
  "target_mean": _float,
  "target_std": _float,
}
_OPTIONAL: dict[str, Callable[[Any], Any]] = {
  "numeric_ranges": _intervals,
  "input_bounds": _intervals,
  "input_scores": _score_maps,
}
