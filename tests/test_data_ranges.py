"""What the training rows covered, and which rows lie outside of it."""

import numpy as np
import pandas as pd
import pytest

from fedbnr_jax.data import Preprocessor, ranges

TRAINED = pd.DataFrame({"size": [0.0, 4.0, 10.0], "kind": ["u", "v", "u"]})


@pytest.fixture
def fitted() -> Preprocessor:
  return Preprocessor.fit(TRAINED, np.arange(3.0), "y")


@pytest.mark.parametrize(
  "size, outside",
  [(0, False), (10, False), (-1, False), (11, False), (-1.01, True), (11.01, True)],
)
def test_a_number_is_outside_a_tenth_of_its_range_beyond(fitted, size, outside):
  cells = fitted.outside(pd.DataFrame({"size": [float(size)], "kind": ["u"]}))
  assert cells.to_dict("list") == {"size": [outside], "kind": [False]}


def test_a_category_that_no_training_row_had_is_outside(fitted):
  rows = pd.DataFrame({"size": [5.0, 5.0], "kind": ["v", "w"]}, index=["p", "q"])
  cells = fitted.outside(rows)
  assert cells["kind"].to_dict() == {"p": False, "q": True}


def test_rows_outside_are_counted_in_one_warning():
  cells = pd.DataFrame(
    {"a": [True, False, True], "b": [True, False, False], "c": False}
  )
  with pytest.warns(UserWarning, match=r"^2 of 3 rows lie .*\(columns 'a', 'b'\)"):
    ranges.warn_of_outside(cells)
  ranges.warn_of_outside(cells & False)  # Nothing is said where nothing is marked.


def test_rows_that_join_from_outside_are_counted_as_such():
  cells = pd.DataFrame({"a": [True, False], "b": False})
  with pytest.warns(UserWarning, match=r"^new\.csv: 1 of 2 .*'a'.* join") as caught:
    ranges.warn_of_joining(cells, "new.csv")
  # No prediction is made, and no column marked.
  assert "`outside`" not in str(caught[0].message)
  ranges.warn_of_joining(cells & False, "new.csv")


def test_a_record_of_an_older_version_marks_no_number(fitted):
  record = fitted.to_json()
  del record["numeric_ranges"]
  older = Preprocessor.from_json(record)
  assert older.numeric_ranges == ()
  cells = older.outside(pd.DataFrame({"size": [1e9], "kind": ["w"]}))
  assert cells.to_dict("list") == {"kind": [True]}
