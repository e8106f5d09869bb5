"""Knows what the training rows covered, and which other rows lie outside of it.

Random features are periodic: far from all training rows, a model's error bars look as
ordinary as near them. So what was trained on is kept with the preprocessing.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedbnr_jax.names import listing

# How far beyond its training range a number may lie, as a share of that range: fresh
# rows of the same kind do lie a little beyond.
_MARGIN = 0.1


def numeric_ranges(
  features: pd.DataFrame, numeric: Sequence[str]
) -> tuple[tuple[float, float], ...]:
  """Returns the lowest and the highest training value of each numeric column."""
  return tuple(
    (float(features[column].min()), float(features[column].max())) for column in numeric
  )


def outside_cells(
  features: pd.DataFrame,
  ranges: Sequence[tuple[str, tuple[float, float]]],
  categories: Sequence[tuple[str, Sequence[str]]],
) -> pd.DataFrame:
  """Marks the cells that lie outside what was trained on.

  Args:
    features: `[N, columns]` parsed features.
    ranges: Pairs (numeric column, its training range).
    categories: Pairs (categorical column, its training categories).

  Returns:
    `[N, columns]` truth values: a number beyond its range by more than a tenth of that
    range, or a category that no training row had.
  """
  cells: dict[str, np.ndarray] = {}
  for column, (low, high) in ranges:
    values, margin = features[column].to_numpy(np.float64), _MARGIN * (high - low)
    cells[column] = (values < low - margin) | (values > high + margin)
  for column, known in categories:
    cells[column] = ~features[column].astype(str).isin(known).to_numpy()
  return pd.DataFrame(cells, index=features.index)


def warn_of_outside(cells: pd.DataFrame) -> None:
  """Warns of rows to predict with marked cells: how many, in which columns."""
  if cells.any(axis=None):
    warnings.warn(
      f"{_counted(cells)}: do not rely on their predictions or error bars; they are "
      "marked in the column `outside`",
      UserWarning,
      stacklevel=3,
    )


def warn_of_joining(cells: pd.DataFrame, source: str) -> None:
  """Warns of rows with marked cells that join a model.

  Args:
    cells: `[N, columns]` truth values, from `outside_cells`.
    source: Names the table of these rows.
  """
  if cells.any(axis=None):
    warnings.warn(
      f"{source}: {_counted(cells)}: the kernel, which stays as it is when rows join, "
      "was not learnt there, and they may spoil predictions elsewhere; take them out "
      "again, or train with them",
      UserWarning,
      stacklevel=3,
    )


def _counted(cells: pd.DataFrame) -> str:
  """Says how many rows have marked cells, and in which columns."""
  rows = int(cells.any(axis=1).sum())
  columns = [str(column) for column in cells.columns[cells.any(axis=0)]]
  return (
    f"{rows} of {len(cells)} rows {'lies' if rows == 1 else 'lie'} outside what the "
    f"model was trained on (columns {listing(columns)})"
  )
