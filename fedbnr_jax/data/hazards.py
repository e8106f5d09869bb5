"""Warns of tables that spoil a training although every cell of them is valid."""

import warnings

import numpy as np
import pandas as pd

from fedbnr_jax.data.preprocessing import Preprocessor
from fedbnr_jax.data.reader import place

# Below this share of a column's standard deviation, what most of its rows differ by is
# lost on the kernel. With one cell 300 deviations off among 160 training rows it was
# 0.04, and the error of all other rows became fivefold; at 100 deviations, 0.13, it had
# not changed.
_SQUEEZED = 0.05
# A mistake stands apart: it is this many times as far from the median as the next cell.
# A long tail, such as that of rainfall, has no such gap.
_GAP = 10.0
# A mistake may be made more than once, as by a code for a missing value, but not in
# more than this share of the rows.
_MOST = 0.05


def warn_of_hazards(
  features: pd.DataFrame,
  targets: np.ndarray,
  num_train: int,
  preprocessor: Preprocessor,
) -> None:
  """Warns of single cells that dwarf their column, and of more inputs than rows.

  Args:
    features: `[N, columns]` the raw features of a dataset; also of rows that are held
      out, whose scores such a cell would spoil.
    targets: `[N]` its raw targets.
    num_train: How many of the rows are trained on.
    preprocessor: Fitted to those.
  """
  columns = {c: features[c].to_numpy(np.float64) for c in preprocessor.numeric_columns}
  if preprocessor.input_scores:
    columns = {}  # Scores are of ranks, beside which no cell is far.
  columns[preprocessor.target_name] = np.asarray(targets, np.float64)
  for column, values in columns.items():
    is_target = column == preprocessor.target_name
    remedy = "" if is_target else ", or set data.inputs=scores"
    far = _far_cells(values)
    if len(far):
      row, count = int(far[0]), len(far)
      warnings.warn(
        f"{place(features, row)}, column {column!r}: {values[far[0]]:g} is so far from "
        f"the others (median {np.nanmedian(values):g}) that these look alike beside it"
        f"{f' (such cells: {count})' if count > 1 else ''}: correct it, drop the row, "
        f"take logarithms of the column{remedy}",
        UserWarning,
        stacklevel=3,
      )
  if preprocessor.num_inputs > num_train:
    warnings.warn(
      f"{preprocessor.num_inputs} inputs for {num_train} training rows: error bars "
      "may be far too narrow; predict from fewer columns (`features`), or give more "
      "rows",
      UserWarning,
      stacklevel=3,
    )


def _far_cells(values: np.ndarray) -> np.ndarray:
  """Returns the positions of cells that dwarf a column `[N]`, the farthest first."""
  present = np.flatnonzero(~np.isnan(values))
  if len(present) < len(values):
    return present[_far_cells(values[present])]
  distances = np.abs(values - np.median(values))
  order = np.argsort(-distances, kind="stable")
  ranked = distances[order]
  limit = _SQUEEZED * values.std()
  num_different = int(np.sum(ranked > 0))
  for count in range(1, max(1, int(_MOST * len(values))) + 1):
    # Where most others are all the same, the column indicates something rare, which is
    # no mistake and does no harm.
    if num_different < 2 * count:
      break
    if _GAP * ranked[count] <= ranked[count - 1]:
      return order[:count] if values[order[count:]].std() < limit else order[:0]
  return order[:0]
