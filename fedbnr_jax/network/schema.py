"""The schema: the columns that people agree on before any site is asked for a sum.

It is a file that people edit and show to each other. Numbers of a column are summed in
a unit, a power of ten near their spread, so that sums in fixed point keep their digits.
Categories are all listed, because which ones there are is no sum.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbnr_jax.data import tables
from fedbnr_jax.data.column_sums import Columns
from fedbnr_jax.data.columns import MISSING
from fedbnr_jax.data.encoding import MISSING_LABEL, Categories
from fedbnr_jax.data.reader import place
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import require_choice, suggestion
from fedbnr_jax.network import strict_json

FORMAT = "fedbnr-jax schema 1"
_WHAT = "schema"
_LARGEST_EXPONENT = 300  # Of a unit; float64 has few powers of ten more.
_LONGEST_SHOWN = 40


class Quantity(NamedTuple):
  """A column of numbers, and the unit in which they are summed."""

  name: str
  unit: float  # A power of ten.


@dataclasses.dataclass(frozen=True)
class Schema:
  """What every site's table must have.

  Attributes:
    name: Name of the table in messages and reports.
    target: The column to predict.
    numeric: Columns of numbers, in the order of the inputs.
    categorical: Pairs (categorical column, all its categories); these are sorted.
    missing: "error", or "impute" where cells of features may be missing.
  """

  name: str
  target: Quantity
  numeric: tuple[Quantity, ...]
  categorical: tuple[Categories, ...]
  missing: str = "error"

  def __post_init__(self) -> None:
    """Raises an InputError if no table can be read by it."""
    strict_json.require_text(self.name, "the name of the table")
    strict_json.require_text(self.missing, "missing")
    require_choice("missing", self.missing, MISSING)
    numbers = (self.target, *self.numeric)
    for column in numbers:
      strict_json.require_text(column.name, "the name of a column")
      _require_unit(column)
    for name, labels in self.categorical:
      strict_json.require_text(name, "the name of a column")
      _require_categories(name, labels)
    _require_features(self.target.name, self.features)
    # One way to write what means the same: 1 is 1.0, and categories have no order.
    target, *numeric = (one._replace(unit=float(one.unit)) for one in numbers)
    listed = tuple((name, tuple(sorted(labels))) for name, labels in self.categorical)
    object.__setattr__(self, "target", target)
    object.__setattr__(self, "numeric", tuple(numeric))
    object.__setattr__(self, "categorical", listed)

  @property
  def features(self) -> tuple[str, ...]:
    """The names of the columns to predict from, those of numbers first."""
    return (
      *(one.name for one in self.numeric),
      *(name for name, _ in self.categorical),
    )

  def to_json(self) -> dict[str, Any]:
    """Returns what `from_json` reads: JSON types, columns in lists to keep order."""
    return {
      "format": FORMAT,
      "name": self.name,
      "target": self.target._asdict(),
      "numeric": [column._asdict() for column in self.numeric],
      "categorical": [
        {"name": name, "categories": list(labels)} for name, labels in self.categorical
      ],
      "missing": self.missing,
    }

  @classmethod
  def from_json(cls, content: Mapping[str, Any], where: str = _WHAT) -> "Schema":
    """Reads what `to_json` returned, or what people have made of it.

    Args:
      content: An object of JSON.
      where: How messages call it, such as the name of its file.

    Raises:
      InputError: If a field is missing, unknown, or cannot be right.
    """
    fields = ("format", "name", "target", "numeric", "categorical", "missing")
    strict_json.require_fields(content, fields, where)
    if content["format"] != FORMAT:
      raise InputError(
        f"{where}: format is {content['format']!r}, and this version reads {FORMAT!r}: "
        "let all sites have the same version."
      )
    for field in ("numeric", "categorical"):
      if not isinstance(content[field], list):
        raise InputError(f"{where}: {field} is no list: give it columns in [ ].")
    categorical = []
    for column in content["categorical"]:
      own = f"{where}: a column in categorical"
      strict_json.require_fields(column, ("name", "categories"), own)
      if not isinstance(column["categories"], list):
        raise InputError(f"{own} has categories that are no list: give them in [ ].")
      categorical.append((column["name"], tuple(column["categories"])))
    try:
      return cls(
        content["name"],
        _quantity(content["target"], "target"),
        tuple(_quantity(c, "a column in numeric") for c in content["numeric"]),
        tuple(categorical),
        content["missing"],
      )
    except InputError as error:
      raise InputError(f"{where}: {error}") from error


class SiteTable(NamedTuple):
  """The parsed rows of one site, of which none needs to differ from the others."""

  features: pd.DataFrame  # [n, columns], in the order of `Schema.features`.
  targets: np.ndarray  # [n] float64, in the raw unit.


def read(path: str | os.PathLike[str]) -> Schema:
  """Reads a schema.

  Raises:
    InputError: If the file is missing, damaged, or no schema.
  """
  return Schema.from_json(strict_json.read(path, _WHAT), str(path))


def write(path: str | os.PathLike[str], schema: Schema) -> None:
  """Writes a schema as a file that people can edit.

  Raises:
    InputError: If the file cannot be written.
  """
  strict_json.write(path, schema.to_json(), _WHAT)


def columns(schema: Schema) -> Columns:
  """Returns what sums over columns need to know of the schema.

  Where cells may be missing, this is a category of its own.
  """
  missing = (MISSING_LABEL,) if schema.missing == "impute" else ()
  return Columns(
    schema.target.name,
    tuple(column.name for column in schema.numeric),
    tuple((name, (*missing, *labels)) for name, labels in schema.categorical),
    schema.missing,
  )


def units(schema: Schema) -> np.ndarray:
  """Returns the units `[1 + numeric]` of the target and of the columns of numbers."""
  return np.array([column.unit for column in (schema.target, *schema.numeric)])


def read_table(
  schema: Schema, path_or_frame: str | os.PathLike[str] | pd.DataFrame
) -> SiteTable:
  """Parses the table of a site; columns that the schema does not name are not read.

  Messages may show cells: they are for people at the site.

  Args:
    schema: What was agreed on.
    path_or_frame: A file that `data.read_table` reads, or a frame.

  Raises:
    InputError: If a column is missing, or a cell is empty, of the wrong kind, or of a
      category that was not agreed on.
  """
  if isinstance(path_or_frame, pd.DataFrame):
    frame = path_or_frame
  else:
    frame = tables.read_table(path_or_frame)
  _require_columns(schema, frame)
  agreed = columns(schema)
  categorical = [name for name, _ in schema.categorical]
  missing = "impute" if schema.missing == "impute" else None
  features = tables.parse_features(frame, agreed.numeric, categorical, missing)
  targets = tables.parse_target(frame, schema.target.name)
  for name, labels in agreed.categories:
    _refuse_others(frame, name, features[name], labels)
  if "source" in frame.attrs and frame.index.equals(features.index):
    features.attrs["source"] = frame.attrs["source"]  # For messages about rows.
  return SiteTable(features, targets)


def power_of_ten(exponent: int) -> float:
  """Returns the float nearest to a power of ten, within what units may be."""
  return float(f"1e{max(-_LARGEST_EXPONENT, min(exponent, _LARGEST_EXPONENT))}")


def _quantity(content: Any, where: str) -> Quantity:
  strict_json.require_fields(content, Quantity._fields, where)
  return Quantity(content["name"], content["unit"])


def _require_unit(column: Quantity) -> None:
  unit = column.unit
  number = isinstance(unit, int | float) and not isinstance(unit, bool)
  if number and 0 < unit < math.inf and unit == power_of_ten(round(math.log10(unit))):
    return
  raise InputError(
    f"the unit of column {column.name!r} is {unit!r}: give a power of ten near its "
    "spread, such as 0.01, 1 or 1000."
  )


def _require_categories(column: str, labels: Sequence[str]) -> None:
  if not labels:
    raise InputError(f"column {column!r} has no categories: list them all.")
  for label in labels:
    strict_json.require_text(label, f"a category of column {column!r}")
  if len(set(labels)) < len(labels):
    twice = next(label for label in labels if labels.count(label) > 1)
    raise InputError(f"column {column!r} has category {twice!r} twice: list it once.")


def _require_features(target: str, features: Sequence[str]) -> None:
  if not features:
    raise InputError("there is no column to predict from: add at least one.")
  names = [target, *features]
  if len(set(names)) < len(names):
    twice = next(name for name in names if names.count(name) > 1)
    raise InputError(f"column {twice!r} is named twice: give it one role.")
  for name in features:
    if name in tables.RESERVED:
      raise InputError(
        f"column {name!r} has the name of a column that predictions are written to: "
        "rename it at all sites."
      )


def _require_columns(schema: Schema, frame: pd.DataFrame) -> None:
  """Raises InputError for the first agreed column that a site's table lacks."""
  source = frame.attrs.get("source", "the table")
  there = [str(column) for column in frame.columns]
  for name in (schema.target.name, *schema.features):
    if name not in there:
      raise InputError(
        f"{source} has no column {name!r}, which all sites have agreed on: add it, or "
        f"rename the column that is meant; {suggestion(name, there)}."
      )


def _refuse_others(
  frame: pd.DataFrame, name: str, cells: pd.Series, labels: Sequence[str]
) -> None:
  """Raises InputError at the first cell that is of no agreed category."""
  strange = ~cells.isin(labels).to_numpy()
  if strange.any():
    row = int(np.argmax(strange))
    label = str(cells.iloc[row])
    shown = label if len(label) <= _LONGEST_SHOWN else label[:_LONGEST_SHOWN] + "…"
    raise InputError(
      f"{place(frame, row)}, column {name!r}: {shown!r} is no category that was agreed "
      "on: correct the cell, or let all sites agree on a schema that lists it; "
      f"{suggestion(label, labels)}."
    )
