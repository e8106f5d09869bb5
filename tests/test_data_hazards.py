"""Tables that spoil a training although every cell of them is valid."""

import warnings

import numpy as np
import pandas as pd
import pytest

from fedbnr_jax.data import Preprocessor, load_table
from fedbnr_jax.data.hazards import warn_of_hazards

NUM_ROWS = 200
TRAIN = np.random.default_rng(1).permutation(NUM_ROWS)[:160]


def warned(values: np.ndarray, **columns) -> list[str]:
  """Returns what is said of a table with this column `a`."""
  return said_of(pd.DataFrame({"a": values, **columns}))


def said_of(features: pd.DataFrame, targets: np.ndarray | None = None) -> list[str]:
  targets = np.arange(float(NUM_ROWS)) if targets is None else targets
  fitted = Preprocessor.fit(features.iloc[TRAIN], targets[TRAIN], "y")
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    warn_of_hazards(features, targets, len(TRAIN), fitted)
  return [str(one.message) for one in caught]


def normal() -> np.ndarray:
  return np.random.default_rng(0).normal(size=NUM_ROWS)


@pytest.mark.parametrize("cell", [300.0, -1e6])
def test_a_cell_that_dwarfs_its_column_is_named(cell):
  values, row = normal(), TRAIN[7]
  values[row] = cell
  (said,) = warned(values)
  assert said.startswith(f"row {row + 1}, column 'a': {cell:g} is so far from")


def test_beside_scores_no_cell_of_a_feature_is_far():
  values = normal()
  values[TRAIN[7]] = 1e6
  features, targets = pd.DataFrame({"a": values}), np.arange(float(NUM_ROWS))
  fitted = Preprocessor.fit(features.iloc[TRAIN], targets[TRAIN], "y", inputs="scores")
  warn_of_hazards(features, targets, len(TRAIN), fitted)  # Warnings are errors here.
  with pytest.warns(UserWarning, match="column 'y'.* take logarithms of the column$"):
    warn_of_hazards(features, values, len(TRAIN), fitted)
  (said,) = warned(values)
  assert said.endswith("or set data.inputs=scores")


def test_held_out_rows_and_targets_are_looked_at_too():
  held_out = next(row for row in range(NUM_ROWS) if row not in TRAIN)
  values = normal()
  values[held_out] = 1e6
  (said,) = warned(values)
  assert said.startswith(f"row {held_out + 1}, column 'a': 1e+06")
  (said,) = said_of(pd.DataFrame({"a": normal()}), values)
  assert said.startswith(f"row {held_out + 1}, column 'y': 1e+06")


def test_a_code_for_missing_values_is_one_warning():
  values = normal()
  values[TRAIN[[3, 50, 90]]] = -99999.0
  (said,) = warned(values)
  assert f"row {TRAIN[3] + 1}, column 'a': -99999" in said
  assert "(such cells: 3)" in said


@pytest.mark.parametrize(
  "values",
  [
    normal(),
    np.exp(2 * normal()),  # A long tail.
    np.where(np.arange(NUM_ROWS) == TRAIN[0], 1.0, 0.0),  # An indicator.
    np.where(np.arange(NUM_ROWS) % 20 < 1, np.exp(3 * normal()), 0.0),  # Rainfall.
    np.where(np.arange(NUM_ROWS) == TRAIN[0], 30.0, normal()),
  ],
)
def test_columns_without_harm_are_passed_over(values):
  assert warned(values) == []


def test_more_inputs_than_training_rows_are_warned_of():
  labels = [f"k{row}" for row in range(NUM_ROWS)]
  assert warned(normal(), label=labels[:100] * 2) == []
  (said,) = warned(normal(), label=labels)
  assert said.startswith("161 inputs for 160 training rows")


def test_the_row_is_that_of_the_file(tmp_path):
  values, row = normal(), TRAIN[7]
  values[row] = 1e6
  frame = pd.DataFrame({"a": values, "y": normal()})
  frame.to_csv(tmp_path / "t.csv", index=False)
  (said,) = said_of(load_table(tmp_path / "t.csv", target="y").features)
  assert f"t.csv: row {row + 1} (line {row + 2}), column 'a'" in said
