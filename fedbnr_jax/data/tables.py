"""Turns any table with a column to predict into a `Dataset`, or raises one clear line.

The columns of a table have roles: one is the target, one may name the client that owns
the row, and the others are features, numeric or categorical.
"""

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbnr_jax.data.bounds import Bounds
from fedbnr_jax.data.columns import parse_column
from fedbnr_jax.data.dataset import Dataset
from fedbnr_jax.data.reader import read_table
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing, suggestion

__all__ = ["load_table", "parse_features", "read_table"]

# The columns that predictions add to a table, and so no column of a training may have.
RESERVED = (
  *("mean", "std", "lower95", "upper95", "outside"),
  *("lower95_conformal", "upper95_conformal"),
)
# Each category becomes an input. A column with more than this many is more likely an
# identifier or a date.
_MANY_CATEGORIES = 100


def load_table(
  path_or_frame: str | os.PathLike[str] | pd.DataFrame,
  *,
  target: str,
  client: str | None = None,
  features: Sequence[str] | None = None,
  categorical: Sequence[str] = (),
  name: str | None = None,
  bounds: Bounds | None = None,
  missing: str = "error",
) -> Dataset:
  """Loads features, target and owners of the rows from a table.

  A column with at least one number in it is numeric; one with none is categorical,
  unless its cells look like numbers or dates, which is an error. Columns of truth
  values in a typed table count as the numbers 0 and 1.

  Args:
    path_or_frame: A file that `read_table` reads, or a frame.
    target: The column to predict.
    client: The column that names the owner of each row, if there is one. It is not a
      feature.
    features: The columns to predict from; None for all that have no other role.
    categorical: Features to treat as categories although they look like numbers or
      dates.
    name: Name of the dataset; None for the name of the file, or "the table".
    bounds: Features of which it has levels are categories too.
    missing: "error" to refuse missing cells of features, "impute" to keep them.

  Returns:
    The dataset of N rows, neither split nor encoded.

  Raises:
    InputError: If a column does not exist or has a reserved name, or a cell is empty
      or of the wrong kind.

  Example:
    >>> import pandas as pd
    >>> from fedbnr_jax import data
    >>> frame = pd.DataFrame({"size": [1, 2], "site": ["a", "b"], "price": [3, 4]})
    >>> dataset = data.load_table(frame, target="price", client="site")
    >>> dataset.num_rows, list(dataset.features), dataset.targets.tolist()
    (2, ['size'], [3.0, 4.0])
  """
  if isinstance(path_or_frame, pd.DataFrame):
    frame = path_or_frame
    _check_frame(frame)
  else:
    frame = read_table(path_or_frame)
  source = frame.attrs.get("source", "the table")
  columns = [str(column) for column in frame.columns]
  _check_roles(source, columns, target, client)
  inputs = _inputs(source, columns, target, client or None, features)
  _check_reserved(source, inputs, client)
  _check_categorical(source, columns, inputs, categorical)
  targets = parse_column(frame, target, "numeric")
  labels = {*categorical, *(bounds.levels if bounds else ())}
  parsed = {
    column: parse_column(
      frame, column, "categorical" if column in labels else None, missing
    )
    for column in inputs
  }
  _warn_of_identifiers(parsed)
  owners = parse_clients(frame, client) if client else None
  table = _frame(parsed)
  if "source" in frame.attrs and frame.index.equals(table.index):
    table.attrs["source"] = source  # So that a message can name a row's line.
  return Dataset(
    name=name or Path(source).stem,
    features=table,
    targets=targets,
    target_name=target,
    clients=owners,
    missing=missing,
  )


def parse_features(
  raw: pd.DataFrame,
  numeric: Sequence[str],
  categorical: Sequence[str],
  missing: str | None = "error",
) -> pd.DataFrame:
  """Parses the features of rows to predict, with the column kinds of the training.

  Args:
    raw: A raw frame of N rows, with these columns and possibly others.
    numeric: Columns that must hold numbers.
    categorical: Columns to treat as categories.
    missing: "error" to refuse missing cells, "impute" to keep them; None to refuse
      them where nobody can choose to keep them.

  Returns:
    `[N, columns]` the named columns, as float64 and as strings.

  Raises:
    InputError: If a column is missing, or a cell is empty or of the wrong kind.
  """
  _check_frame(raw)
  absent = [column for column in (*numeric, *categorical) if column not in raw.columns]
  if absent:
    source = raw.attrs.get("source", "the table")
    raise InputError(
      f"{source}: columns {listing(absent)} are missing, which the model was trained "
      f"with: add them; there are {listing(map(str, raw.columns))}"
    )
  parsed = {c: parse_column(raw, c, "numeric", missing) for c in numeric}
  for column in categorical:
    parsed[column] = parse_column(raw, column, "categorical", missing)
  return _frame(parsed)


def parse_clients(raw: pd.DataFrame, client: str) -> np.ndarray:
  """Returns the owners `[N]` of rows, as strings."""
  return np.asarray(parse_column(raw, client, "categorical").astype(str))


def parse_target(raw: pd.DataFrame, target: str) -> np.ndarray:
  """Returns the targets `[N]` of rows, as float64.

  Raises:
    InputError: If the column is missing, or a cell is not a finite number.
  """
  source = raw.attrs.get("source", "the table")
  _check_exist(source, [str(c) for c in raw.columns], "target", [target])
  return parse_column(raw, target, "numeric")


def array_columns(num_columns: int) -> tuple[str, ...]:
  """The names that columns of an array get: x0, x1, ..."""
  return tuple(f"x{index}" for index in range(num_columns))


def array_frame(x: Any, num_columns: int | None = None) -> pd.DataFrame:
  """A frame of an array [N, D], its columns named by `array_columns`.

  Raises:
    InputError: If it is not a table of numbers, or D is not `num_columns`.
  """
  try:
    array = np.asarray(x)
    numbers = array.astype(np.float64) if array.dtype.kind in "fiubO" else None
  except (TypeError, ValueError):
    numbers = None
  if numbers is None:
    raise InputError(
      "x is not an array of numbers: give a frame if columns hold categories."
    )
  if numbers.ndim != 2:
    raise InputError(
      f"x has shape {numbers.shape}: give two dimensions, rows and columns, as by "
      "x.reshape(-1, 1) for one column."
    )
  if num_columns not in (None, numbers.shape[1]):
    raise InputError(
      f"x has {numbers.shape[1]} columns, but the model was trained on {num_columns}."
    )
  return pd.DataFrame(numbers, columns=list(array_columns(numbers.shape[1])))


def _frame(parsed: dict[str, np.ndarray]) -> pd.DataFrame:
  """Joins parsed columns, each `[N]`, into a frame."""
  # An explicit object dtype keeps pandas from converting the strings to its own type.
  return pd.DataFrame(
    {name: pd.Series(values, dtype=values.dtype) for name, values in parsed.items()}
  )


def _check_frame(frame: pd.DataFrame) -> None:
  """Raises if a frame has no rows, or a column name that is no string or not unique."""
  if frame.empty:
    raise InputError("the table has no rows: give at least one")
  odd = [column for column in frame.columns if not isinstance(column, str)]
  if odd:
    raise InputError(f"column name {odd[0]!r} is not a string: rename that column")
  twice = frame.columns[frame.columns.duplicated()]
  if len(twice):
    raise InputError(f"column name {twice[0]!r} occurs twice: rename one")


def _check_exist(
  source: str, columns: Sequence[str], role: str, wanted: Iterable[str]
) -> None:
  """Raises if one of the wanted columns does not exist, and names the nearest one."""
  for column in wanted:
    if column not in columns:
      raise InputError(
        f"{source} has no column {column!r}, which is named as {role}: "
        f"{suggestion(column, columns)}"
      )


def _check_roles(
  source: str, columns: Sequence[str], target: str, client: str | None
) -> None:
  """Raises unless target and client are two columns of the table."""
  if not target:
    raise InputError(
      f"{source}: no target is named: say which column to predict, one of "
      f"{listing(columns)}"
    )
  _check_exist(source, columns, "target", [target])
  if client:
    _check_exist(source, columns, "client", [client])
    if client == target:
      raise InputError(
        f"{source}: column {target!r} is named as target and as client: name two"
      )


def _inputs(
  source: str,
  columns: Sequence[str],
  target: str,
  client: str | None,
  features: Sequence[str] | None,
) -> list[str]:
  """Returns the columns to predict from, after checking those the user named."""
  if isinstance(features, str):
    raise InputError(
      f"{source}: features is the string {features!r}: give a list of columns"
    )
  if features is None:
    inputs = [column for column in columns if column not in (target, client)]
  else:
    inputs = list(features)
    _check_exist(source, columns, "feature", inputs)
    for role, column in (("target", target), ("client", client)):
      if column in inputs:
        raise InputError(
          f"{source}: column {column!r} is named as feature and as {role}: name it once"
        )
    if len(set(inputs)) < len(inputs):
      twice = next(column for column in inputs if inputs.count(column) > 1)
      raise InputError(f"{source}: feature {twice!r} is named twice: name it once")
  if not inputs:
    raise InputError(
      f"{source} has no feature left beside target and client: add a column to "
      "predict from"
    )
  return inputs


def _check_reserved(source: str, inputs: Sequence[str], client: str | None) -> None:
  """Raises if a feature or the client has the name of a column of predictions."""
  for role, names in (("feature", inputs), ("client", [client])):
    for column in names:
      if column in RESERVED:
        raise InputError(
          f"{source}: the {role} {column!r} has the name of a column that predictions "
          f"are written to: rename it to other than {listing(RESERVED)}"
        )


def _check_categorical(
  source: str,
  columns: Sequence[str],
  inputs: Sequence[str],
  categorical: Sequence[str],
) -> None:
  """Raises unless every categorical column is a feature."""
  if isinstance(categorical, str):
    raise InputError(
      f"{source}: categorical is the string {categorical!r}: give a list of columns"
    )
  _check_exist(source, columns, "categorical", categorical)
  for column in categorical:
    if column not in inputs:
      raise InputError(
        f"{source}: categorical column {column!r} is not a feature: take it out of "
        "`categorical` or into `features`"
      )


def _warn_of_identifiers(parsed: dict[str, np.ndarray]) -> None:
  """Warns of categorical columns with so many values that they look like names."""
  for column, values in parsed.items():
    if values.dtype == object:
      count = len(pd.unique(values))
      if count > _MANY_CATEGORIES:
        warnings.warn(
          f"column {column!r} is text with {count} different values, each of which "
          "becomes an input: leave it out or derive numbers from it",
          UserWarning,
          stacklevel=3,
        )
