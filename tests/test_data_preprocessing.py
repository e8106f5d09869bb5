"""Preprocessing: training statistics alone, encoding, and an exact JSON round trip."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedbnr_jax.data import Preprocessor
from fedbnr_jax.errors import InputError

FEATURES = pd.DataFrame(
  {
    "size": [1.0, 2.0, 3.0, 6.0],
    "season": pd.Series(["Winter", "Autumn", "Winter", "Winter"], dtype=object),
  }
)
TARGETS = np.array([10.0, 20.0, 30.0, 60.0])


@pytest.fixture
def fitted() -> Preprocessor:
  return Preprocessor.fit(FEATURES, TARGETS, "y")


def test_names_and_kinds(fitted):
  assert fitted.num_inputs == 3
  assert fitted.input_names == ("size", "season=Autumn", "season=Winter")
  assert fitted.numeric_columns == ("size",)
  assert fitted.categorical_columns == ("season",)
  assert fitted.numeric_ranges == ((1.0, 6.0),)


def test_transform_by_hand(fitted):
  one = pd.DataFrame({"season": ["Autumn"], "more": ["x"], "size": [3.0]})
  std = np.std([1, 2, 3, 6])
  hot = np.sqrt(1 / 4 * 3 / 4)
  expected = [[0.0, (1 - 1 / 4) / hot, (0 - 3 / 4) / hot]]
  np.testing.assert_allclose(fitted.transform(one), expected, atol=1e-12)
  assert fitted.input_std[0] == pytest.approx(std)


def test_target_goes_there_and_back(fitted):
  z = fitted.standardise(TARGETS)
  assert z.mean() == pytest.approx(0)
  assert z.std() == pytest.approx(1)
  np.testing.assert_allclose(fitted.unstandardise_mean(z), TARGETS)


@given(
  hnp.arrays(np.float64, (12, 3), elements=st.floats(-1e6, 1e6), unique=True),
  st.lists(st.sampled_from("abc"), min_size=10, max_size=10),
)
def test_training_inputs_have_mean_zero_and_deviation_one(values, letters):
  frame = pd.DataFrame(values, columns=["p", "q", "r"])
  # A spread well above rounding, so that the property holds to a tight tolerance.
  frame = frame + np.linspace(0, 10, 12)[:, None]
  frame["c"] = pd.Series([*letters, "a", "b"], dtype=object)
  inputs = Preprocessor.fit(frame, np.arange(12.0), "y").transform(frame)
  np.testing.assert_allclose(inputs.mean(axis=0), 0, atol=1e-6)
  np.testing.assert_allclose(inputs.std(axis=0), 1, atol=1e-6)


@given(
  hnp.arrays(np.float64, (5, 2), elements=st.floats(-1e100, 1e100), unique=True),
  st.lists(st.text(max_size=4), min_size=2, max_size=5, unique=True),
)
def test_json_round_trip_is_exact(values, words):
  frame = pd.DataFrame({"p": values[:, 0]})
  # Values too close to square in float64 are refused, which another test sees to.
  frame["p"] = frame["p"] + np.arange(5)
  frame["c"] = pd.Series([*words, *words[:1] * (5 - len(words))], dtype=object)
  targets = np.arange(5.0) + values[:, 1]
  assume(min(np.ptp(frame["p"]), np.ptp(targets)) > 0)
  fitted = Preprocessor.fit(frame, targets, "y")
  assert Preprocessor.from_json(json.loads(json.dumps(fitted.to_json()))) == fitted


def test_constant_features_are_dropped_with_a_warning():
  frame = FEATURES.assign(flat=5.0, same="s")
  with pytest.warns(UserWarning, match="constant .*'flat', 'same'"):
    fitted = Preprocessor.fit(frame, TARGETS, "y")
  assert fitted.num_inputs == 3
  assert fitted.transform(FEATURES).shape == (4, 3)  # Neither is asked for again.


def test_all_constant():
  with pytest.raises(InputError, match=r"no feature varies over the 4 .*'flat'"):
    Preprocessor.fit(pd.DataFrame({"flat": [5.0] * 4}), TARGETS, "y")


def test_constant_training_target():
  with pytest.raises(InputError, match=r"^column 'y' is constant \(value 2.0\)"):
    Preprocessor.fit(FEATURES, np.full(4, 2.0), "y")


@pytest.mark.parametrize("values", [[-1e308, 1e308, 0, 0], [5e-324, 0, 0, 0]])
def test_statistics_beyond_float64(values):
  frame = pd.DataFrame({"p": np.array(values, dtype=float)})
  with pytest.raises(InputError, match="column 'p' runs from"):
    Preprocessor.fit(frame, TARGETS, "y")


def test_missing_columns_are_all_named(fitted):
  with pytest.raises(InputError, match="columns 'size', 'season' are missing"):
    fitted.transform(pd.DataFrame({"other": [1.0]}))


def test_unseen_category_sets_no_indicator(fitted):
  frame = pd.DataFrame({"size": [3.0], "season": ["Spring"]})
  with pytest.warns(UserWarning, match="column 'season' .*'Spring'"):
    inputs = fitted.transform(frame)
  raw = inputs * fitted.input_std + fitted.input_mean
  np.testing.assert_allclose(raw, [[3.0, 0.0, 0.0]], atol=1e-12)


def test_text_and_holes_in_a_numeric_column(fitted):
  with pytest.raises(InputError, match="column 'size' is to be numeric"):
    fitted.transform(FEATURES.assign(size="x"))
  with pytest.raises(InputError, match=r"column 'size' is missing .* row 2"):
    fitted.transform(FEATURES.assign(size=[1.0, np.nan, 3.0, 4.0]))


@pytest.mark.parametrize(
  "change, expected",
  [
    ({"input_std": None}, "malformed"),
    ({"input_mean": [1.0]}, "numbers of inputs"),
    ({"target_std": 0.0}, "not positive"),
    ({"target_mean": float("nan")}, "not finite"),
    ({"target_mean": "3"}, "not a list of numbers"),
    ({"numeric_columns": "size"}, "not a list of strings"),
    ({"categories": [["season"]]}, "malformed"),
    (
      {"numeric_ranges": [[1.0, 6.0], [0.0, 1.0]]},
      "columns and of their ranges differ",
    ),
    ({"numeric_ranges": [[1.0]]}, "malformed"),
  ],
)
def test_malformed_record(fitted, change, expected):
  with pytest.raises(InputError, match=expected) as caught:
    Preprocessor.from_json(fitted.to_json() | change)
  assert "\n" not in str(caught.value)


def test_incomplete_record(fitted):
  record = fitted.to_json()
  del record["target_name"]
  with pytest.raises(InputError, match="lacks the field 'target_name'"):
    Preprocessor.from_json(record)
  with pytest.raises(InputError, match="malformed"):
    Preprocessor.from_json([])
