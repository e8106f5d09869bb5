"""Any table with one column to predict becomes a `Dataset`, or one clear error."""

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedbnr_jax.data.columns import parse_column
from fedbnr_jax.data.dataset import Dataset
from fedbnr_jax.data.reader import read_table
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing, suggestion

__all__ = ["load_table", "parse_features", "read_table"]

# One input a category: beyond this many a column is rather an identifier or a date.
_MANY_CATEGORIES = 100


def load_table(
  path_or_frame: str | os.PathLike[str] | pd.DataFrame,
  *,
  target: str,
  client: str | None = None,
  features: Sequence[str] | None = None,
  categorical: Sequence[str] = (),
  name: str | None = None,
) -> Dataset:
  """Takes features, target and owners out of a table.

  A column with at least one number in it is numeric; one with none is categorical.
  Columns of truth values in a typed table count as the numbers 0 and 1.

  Args:
    path_or_frame: A file that `read_table` understands, or a frame.
    target: The column to predict.
    client: The column that says who owns the row, if any. It is not a feature.
    features: The columns to predict from; None for all others.
    categorical: Features to take as categories although they look numeric.
    name: What to call the dataset; None for the name of the file, if any.

  Returns:
    The dataset, with neither split nor encoding.

  Raises:
    InputError: If a column does not exist or a cell cannot be used.
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
  _check_categorical(source, columns, inputs, categorical)
  targets = parse_column(frame, target, "numeric")
  parsed = {
    column: parse_column(
      frame, column, "categorical" if column in categorical else None
    )
    for column in inputs
  }
  _warn_of_identifiers(parsed)
  owners = parse_clients(frame, client) if client else None
  return Dataset(
    name=name or Path(source).stem,
    features=_frame(parsed),
    targets=targets,
    target_name=target,
    clients=owners,
  )


def parse_features(
  raw: pd.DataFrame, numeric: Sequence[str], categorical: Sequence[str]
) -> pd.DataFrame:
  """Parses the features of rows to predict for, whose kinds training has settled.

  Args:
    raw: A raw frame, with these columns and possibly others.
    numeric: Columns that must hold numbers.
    categorical: Columns to take as categories.

  Returns:
    The named columns: float64 and strings.

  Raises:
    InputError: If columns are missing or a cell cannot be used.
  """
  _check_frame(raw)
  missing = [column for column in (*numeric, *categorical) if column not in raw.columns]
  if missing:
    source = raw.attrs.get("source", "the table")
    raise InputError(
      f"{source}: columns {listing(missing)} are missing, which the model was trained "
      f"with: add them; there are {listing(map(str, raw.columns))}"
    )
  parsed = {column: parse_column(raw, column, "numeric") for column in numeric}
  for column in categorical:
    parsed[column] = parse_column(raw, column, "categorical")
  return _frame(parsed)


def parse_clients(raw: pd.DataFrame, client: str) -> np.ndarray:
  """The owners [N] of rows, as strings."""
  return np.asarray(parse_column(raw, client, "categorical").astype(str))


def parse_target(raw: pd.DataFrame, target: str) -> np.ndarray:
  """The targets [N] of rows with the same columns as those of a training.

  Raises:
    InputError: If the column is missing or a cell cannot be used.
  """
  source = raw.attrs.get("source", "the table")
  _check_exist(source, [str(c) for c in raw.columns], "target", [target])
  return parse_column(raw, target, "numeric")


def _frame(parsed: dict[str, np.ndarray]) -> pd.DataFrame:
  # An explicit object type keeps strings plain whatever pandas would make of them.
  return pd.DataFrame(
    {name: pd.Series(values, dtype=values.dtype) for name, values in parsed.items()}
  )


def _check_frame(frame: pd.DataFrame) -> None:
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
  for column in wanted:
    if column not in columns:
      raise InputError(
        f"{source} has no column {column!r}, which is named as {role}: "
        f"{suggestion(column, columns)}"
      )


def _check_roles(
  source: str, columns: Sequence[str], target: str, client: str | None
) -> None:
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
  """Settles which columns to predict from."""
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


def _check_categorical(
  source: str,
  columns: Sequence[str],
  inputs: Sequence[str],
  categorical: Sequence[str],
) -> None:
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
