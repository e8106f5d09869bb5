"""Datasets: what is refused, and how a random split cuts the rows."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbnr_jax.data import Dataset, Split, random_split
from fedbnr_jax.errors import InputError


def make(**changes) -> Dataset:
  """Builds a small valid dataset with some fields changed."""
  fields = {
    "name": "toy",
    "features": pd.DataFrame({"a": [0.0, 1.0, 2.0], "b": ["u", "v", "u"]}),
    "targets": np.array([1.0, 2.0, 4.0]),
    "target_name": "y",
  }
  return Dataset(**(fields | changes))


def assert_refused(**changes) -> str:
  """Returns the message with which a dataset is refused, checked to be one line."""
  with pytest.raises(InputError) as caught:
    make(**changes)
  message = str(caught.value)
  assert "\n" not in message
  assert "'toy'" in message
  return message


def test_valid_dataset_counts_rows():
  assert make(clients=np.array(["p", "q", "p"])).num_rows == 3


def test_constant_target():
  message = assert_refused(targets=np.full(3, 3.0))
  assert "column 'y' is constant (value 3.0): nothing to predict" in message


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_target_not_finite(bad):
  assert "'y' is not finite in row 2" in assert_refused(
    targets=np.array([1.0, bad, 2.0])
  )


@pytest.mark.parametrize("targets", [np.ones((3, 1)), np.ones(0)])
def test_target_shape(targets):
  assert f"shape {targets.shape}" in assert_refused(targets=targets)


def test_lengths_differ():
  assert "3 rows of features but 2 targets" in assert_refused(
    targets=np.array([1.0, 2.0])
  )
  assert "client labels have shape (2,)" in assert_refused(clients=np.array(["p", "q"]))


def test_features_unusable():
  assert "no feature column" in assert_refused(features=pd.DataFrame(index=range(3)))
  twice = pd.DataFrame([[0.0, 1.0]] * 3, columns=["a", "a"])
  assert "'a' occurs twice" in assert_refused(features=twice)
  hole = pd.DataFrame({"a": [0.0, np.inf, 1.0]})
  assert "column 'a' is missing or not finite in row 2" in assert_refused(features=hole)
  gone = pd.DataFrame({"b": pd.Series(["u", "v", None], dtype=object)})
  assert "column 'b' is missing or not finite in row 3" in assert_refused(features=gone)


@pytest.mark.parametrize(
  "parts, expected",
  [
    (([0], [1], []), "no rows in 'validation'"),
    (([0], [1], [3]), "outside 0 to 2"),
    (([0], [1], [1]), "names a row twice"),
  ],
)
def test_split_unusable(parts, expected):
  split = Split(*(np.array(part, dtype=int) for part in parts))
  assert expected in assert_refused(split=split)


@given(num_rows=st.integers(6, 2000), seed=st.integers(0, 2**32 - 1))
def test_random_split_is_a_partition(num_rows, seed):
  split = random_split(np.random.default_rng(seed), num_rows)
  assert len(split.train) == int(0.8 * num_rows)
  assert len(split.test) == (num_rows - len(split.train)) // 2
  assert sorted(np.concatenate(split)) == list(range(num_rows))


def test_random_split_depends_on_the_generator_alone():
  first, same, other = (random_split(np.random.default_rng(s), 50) for s in (1, 1, 2))
  assert all(map(np.array_equal, first, same))
  assert not np.array_equal(first.train, other.train)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_random_split_of_too_few_rows(num_rows):
  with pytest.raises(InputError, match=f"^{num_rows} rows are too few"):
    random_split(np.random.default_rng(0), num_rows)
