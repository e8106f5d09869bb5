"""Fills in missing cells by medians of the training rows, and says where it is a guess.

Medians come from sums over clients (`marginals`). A column that lacks cells in training
rows also has an input that says so, from which the model learns what a missing cell
means; of a column that lacks none there is nothing to learn.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedbnr_jax.data import encoding, marginals


class Imputation(NamedTuple):
  """What stands in for missing cells."""

  medians: tuple[float, ...]  # Of each numeric column, over the training rows.
  # Columns of numbers that lack cells in training rows, which an input says.
  marked: tuple[str, ...]

  def filled(self, raw: np.ndarray) -> np.ndarray:
    """Returns inputs `[N, D]`, numeric columns first, with medians in place of NaN."""
    numeric = raw[:, : len(self.medians)]
    numeric = np.where(np.isnan(numeric), np.array(self.medians), numeric)
    return np.concatenate([numeric, raw[:, len(self.medians) :]], axis=1)


def median(parts: Sequence[np.ndarray], mean: float, std: float) -> float:
  """Returns the median of a column, given in parts `[n_c]` by client, NaN aside.

  Args:
    parts: In the raw unit.
    mean: Mean of the column over all clients.
    std: Standard deviation of the column over all clients.
  """
  observed = [(values[~np.isnan(values)] - mean) / std for values in parts]
  return marginals.fit(observed).median() * std + mean


def fresh(
  features: pd.DataFrame,
  numeric: Sequence[str],
  categories: Sequence[encoding.Categories],
) -> pd.DataFrame:
  """Marks missing cells of columns that lacked none in training.

  Args:
    features: `[N, columns]` parsed features.
    numeric: Columns of numbers that lacked no cell in training rows.
    categories: Pairs (categorical column, its training categories).

  Returns:
    `[N, columns]` truth values.
  """
  cells = {column: features[column].isna().to_numpy() for column in numeric}
  for column, known in categories:
    if encoding.MISSING_LABEL not in known:
      cells[column] = (features[column] == encoding.MISSING_LABEL).to_numpy()
  return pd.DataFrame(cells, index=features.index)


def warn_of_fresh(cells: pd.DataFrame) -> None:
  """Warns of marked cells, if there are any, and counts them by column."""
  counts = {column: int(cells[column].sum()) for column in cells}
  found = [f"{column!r} ({count})" for column, count in counts.items() if count]
  if found:
    warnings.warn(
      f"cells are missing in columns that lacked none in training: {', '.join(found)}; "
      "a number counts as the training median, a category as none, and what it means "
      "that they are missing the model has not learnt",
      UserWarning,
      stacklevel=3,
    )
