"""Turns columns into inputs: numbers as they are, an indicator for each category."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing

# The category of missing cells; that of a cell with text is never empty.
MISSING_LABEL = ""
Categories = tuple[str, tuple[str, ...]]  # A categorical column, and its categories.


class Kinds(NamedTuple):
  """The columns of training rows, by what becomes of them; constant ones are left out.

  A column of one number that lacks cells is in `marked` alone.
  """

  numeric: tuple[str, ...]
  marked: tuple[str, ...]  # Columns of numbers that lack cells.
  categories: tuple[Categories, ...]


def kinds_of(features: pd.DataFrame) -> Kinds:
  """Sorts the columns of training rows `[N, columns]`, and warns of constant ones.

  Raises:
    InputError: If all of them are constant.
  """
  numeric, marked, categories, constant = [], [], [], []
  for column in features.columns:
    values = features[column]
    if values.nunique(dropna=False) < 2:
      constant.append(column)
    elif pd.api.types.is_numeric_dtype(values):
      numeric += [column] * (values.nunique() > 1)
      marked += [column] * bool(values.isna().any())
    else:
      labels = sorted(str(value) for value in values.unique())
      categories.append((column, tuple(labels)))
  if len(constant) == features.shape[1]:
    raise InputError(
      f"no feature varies over the {len(features)} training rows "
      f"(columns {listing(constant)}): add an input that does"
    )
  if constant:
    warnings.warn(
      f"dropped features that are constant over the training rows: {listing(constant)}",
      UserWarning,
      stacklevel=3,
    )
  return Kinds(tuple(numeric), tuple(marked), tuple(categories))


def raw_inputs(
  features: pd.DataFrame,
  numeric: Sequence[str],
  categories: Sequence[Categories],
  marked: Sequence[str] | None = None,
) -> np.ndarray:
  """Stacks numeric columns and 0/1 indicators, `[N, D]`, before standardising.

  Args:
    features: `[N, columns]`.
    numeric: Columns that become inputs as they are.
    categories: Pairs (categorical column, its categories), an indicator each.
    marked: Columns whose missing cells have an indicator; None where no cell may be
      missing. Numbers that are missing remain so, NaN.
  """
  may_miss = marked is not None
  blocks = [numbers(features, c, may_miss=may_miss)[:, None] for c in numeric]
  for column in marked or ():
    is_missing = np.isnan(numbers(features, column, may_miss=True))
    blocks.append(is_missing.astype(np.float64)[:, None])
  for column, values in categories:
    # get_indexer returns -1 for an unknown value, which leaves the row no indicator.
    labels = pd.Index(features[column].astype(str), dtype=object)
    codes = pd.Index(values, dtype=object).get_indexer(labels)
    blocks.append((codes[:, None] == np.arange(len(values))).astype(np.float64))
  return np.concatenate(blocks, axis=1)


def warn_of_unseen(
  features: pd.DataFrame, categories: Sequence[Categories], known: str
) -> None:
  """Warns of categories that have no indicator; `known` says why.

  Cells that are missing are not meant, they are counted elsewhere.
  """
  for column, values in categories:
    unseen = sorted(set(features[column].astype(str)) - {*values, MISSING_LABEL})
    if unseen:
      warnings.warn(
        f"column {column!r} has values that {known}: "
        f"{listing(unseen)}; they count as none of {listing(values)}",
        UserWarning,
        stacklevel=3,
      )


def numbers(
  features: pd.DataFrame, column: str, *, may_miss: bool = False
) -> np.ndarray:
  """Returns one numeric column `[N]` as float64, and refuses a value not finite."""
  series = features[column]
  if not pd.api.types.is_numeric_dtype(series):
    raise InputError(
      f"column {column!r} is to be numeric but holds {series.dtype} values: parse "
      "the table with parse_features first"
    )
  values = series.to_numpy(np.float64, na_value=np.nan)
  finite = np.isfinite(values)
  if may_miss:
    finite |= np.isnan(values)
  if not finite.all():
    raise InputError(
      f"column {column!r} is missing or not finite in row "
      f"{int(np.argmin(finite)) + 1}: correct or drop that row"
    )
  return values


def moments(
  values: np.ndarray, names: list[str]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Returns mean and standard deviation of each column of values `[N, D]`, NaN aside.

  Raises:
    InputError: If a column is constant, or too wide for float64 to square.
  """
  with np.errstate(over="ignore", invalid="ignore"):
    mean, std = values.mean(axis=0), values.std(axis=0)
    for d in np.flatnonzero(np.isnan(values).any(axis=0)):
      observed = values[~np.isnan(values[:, d]), d]
      mean[d], std[d] = observed.mean(), observed.std()
  for name, low, high, deviation in zip(
    names, np.nanmin(values, axis=0), np.nanmax(values, axis=0), std, strict=True
  ):
    if low == high:
      raise InputError(
        f"column {name!r} is constant (value {float(low)}) over the training rows: "
        "nothing to predict"
      )
    if not (np.isfinite(deviation) and deviation > 0):
      raise InputError(
        f"column {name!r} runs from {float(low)} to {float(high)}, too far or too "
        "little for float64 statistics: rescale it"
      )
  return tuple(mean.tolist()), tuple(std.tolist())


def input_names(
  numeric: Sequence[str],
  categories: Sequence[Categories],
  marked: Sequence[str] | None = None,
) -> list[str]:
  """Returns the names of the D inputs, in the order of `raw_inputs`."""
  indicators = [
    f"{column}={value}" for column, values in categories for value in values
  ]
  return [*numeric, *(f"{column} is missing" for column in marked or ()), *indicators]
