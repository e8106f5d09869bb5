"""Proposes a schema by reading one table; people look it over before others see it.

Of the rows it tells category labels, and the spread of columns to the next power of
ten. Columns whose labels look like names are left out.
"""

import math
import os
import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedbnr_jax.data.encoding import MISSING_LABEL, Categories
from fedbnr_jax.data.tables import load_table
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing
from fedbnr_jax.network.schema import Quantity, Schema, power_of_ten

# Each category becomes an input; a column with more than this many is more likely one
# of names, unless somebody says that it is not.
_MANY_CATEGORIES = 100
# Below this share of the mean, spread is too small a unit: large sums must still fit.
_SMALLEST_SPREAD = 1e-9


def propose(
  path_or_frame: str | os.PathLike[str] | pd.DataFrame,
  target: str,
  categorical: Sequence[str] = (),
  name: str | None = None,
  features: Sequence[str] | None = None,
  missing: str = "error",
) -> Schema:
  """Reads a schema off a table; warnings say what people must look over.

  Args:
    path_or_frame: A file that `data.read_table` reads, or a frame.
    target: The column to predict.
    categorical: Columns of labels that look like numbers or dates.
    name: Name of the table; None for the name of the file, or "the table".
    features: The columns to predict from; None for all others.
    missing: "error", or "impute" where cells of features may be missing.

  Raises:
    InputError: If the table cannot be used, or labels that were asked for look like
      names.
  """
  with warnings.catch_warnings(action="ignore"):  # Of many labels; see below.
    dataset = load_table(
      path_or_frame,
      target=target,
      features=features,
      categorical=categorical,
      name=name,
      missing=missing,
    )
  numeric: list[Quantity] = []
  labelled: list[Categories] = []
  left_out: list[str] = []
  for column, cells in dataset.features.items():
    column = str(column)
    if pd.api.types.is_numeric_dtype(cells):
      numeric.append(Quantity(column, unit_of(cells.to_numpy(np.float64))))
      continue
    filled = cells[cells != MISSING_LABEL]
    labels = tuple(sorted(filled.unique()))
    if _looks_like_names(column, len(labels), len(filled), column in categorical):
      left_out.append(f"{column!r} ({len(labels)} labels in {len(filled)} rows)")
    else:
      labelled.append((column, labels))
  _warn(left_out, [column for column, _ in labelled])
  unit = unit_of(dataset.targets)
  return Schema(
    dataset.name, Quantity(target, unit), tuple(numeric), tuple(labelled), missing
  )


def unit_of(values: np.ndarray) -> float:
  """Returns the power of ten nearest to the standard deviation of values `[n]`.

  NaN is passed over. Where all values are the same, other sites may have others, and
  their size is taken; without any, the unit is one.
  """
  seen = values[~np.isnan(values)]
  largest = np.abs(seen).max(initial=0.0)
  if not largest:
    return 1.0
  parts = seen / largest  # So that squares neither overflow nor vanish.
  spread = 1.0
  if parts.min() < parts.max():
    spread = max(float(parts.std()), _SMALLEST_SPREAD * abs(float(parts.mean())))
  return power_of_ten(round(math.log10(spread) + math.log10(largest)))


def _looks_like_names(column: str, num_labels: int, num_rows: int, asked: bool) -> bool:
  """Whether most rows have a label of their own, or there are very many labels.

  Raises:
    InputError: If somebody has asked for such labels.
  """
  own = 2 * num_labels > num_rows
  if own and asked:
    raise InputError(
      f"column {column!r} has {num_labels} labels in {num_rows} rows, as columns of "
      "names have: leave it out, or write its categories into the schema by hand."
    )
  return own or (num_labels > _MANY_CATEGORIES and not asked)


def _warn(left_out: Sequence[str], labelled: Sequence[str]) -> None:
  if left_out:
    warnings.warn(
      f"left out of the schema, because their labels look like names: "
      f"{', '.join(left_out)}; write a column in by hand if all may see its labels",
      UserWarning,
      stacklevel=3,
    )
  if labelled:
    warnings.warn(
      f"the labels of columns {listing(labelled)} were read from the table: look them "
      "over, add those of other sites, and take out what others must not see",
      UserWarning,
      stacklevel=3,
    )
