"""A preprocessor from sums over sites is the one that the pooled rows give."""

import dataclasses
import warnings

import hypothesis
import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st

from fedbnr_jax.data import Preprocessor, column_sums, tables
from fedbnr_jax.data.column_sums import Columns
from tests.runs import assert_refused

_NUMERIC, _KINDS = ("a", "long", "binary", "same"), ("x", "y", "z", "never")


def _frame(num_rows=200, seed=0):
  """Columns of all kinds; two of them never vary, and one category is nobody's."""
  rng = np.random.default_rng(seed)
  return pd.DataFrame(
    {
      "a": 1e3 + rng.normal(size=num_rows),
      "long": np.exp(3.0 * rng.normal(size=num_rows)),
      "binary": rng.integers(2, size=num_rows).astype(float),
      "same": np.full(num_rows, 0.1),
      "kind": rng.choice(list(_KINDS[:3]), size=num_rows),
      "one": np.full(num_rows, "only"),
    }
  ), 50.0 * rng.normal(size=num_rows) - 7.0


def _columns(missing="error"):
  categories = (("kind", _KINDS), ("one", ("only", "other")))
  return Columns("y", _NUMERIC, categories, missing)


def _ask(sites):
  """Adds up what sites answer."""

  def ask(question, arguments):
    first, *others = [site.answer(question, arguments) for site in sites]
    assert all(one.keys() == first.keys() for one in others)
    return {name: sum([o[name] for o in others], first[name]) for name in first}

  return ask


def _fitted(frame, targets, owners, inputs="standard", missing="error"):
  columns = _columns(missing)
  sites = [
    column_sums.Site(columns, frame[owners == name], targets[owners == name])
    for name in np.unique(owners)
  ]
  return column_sums.fit(_ask(sites), columns, inputs)


def _pooled(frame, targets, inputs, missing):
  with warnings.catch_warnings(action="ignore"):  # Of what does not vary.
    parsed = tables.parse_features(frame, _NUMERIC, ("kind", "one"), missing)
    return Preprocessor.fit(parsed, targets, "y", inputs, missing)


@pytest.mark.filterwarnings("ignore:columns with two values")
@pytest.mark.parametrize("inputs", ["standard", "scores"])
@pytest.mark.parametrize("missing", ["error", "impute"])
def test_it_is_the_pooled_one_whoever_holds_which_rows(inputs, missing):
  frame, targets = _frame()
  if missing == "impute":
    frame.loc[::7, "a"] = np.nan
  pooled = _pooled(frame, targets, inputs, missing)
  owners = np.random.default_rng(1).integers(4, size=len(frame))
  for by in (owners, np.argsort(np.argsort(frame["long"])) // 67, 0 * owners):
    got = _fitted(frame, targets, np.asarray(by), inputs, missing)
    assert got.numeric_columns == pooled.numeric_columns == ("a", "long", "binary")
    assert got.categories == pooled.categories == (("kind", ("x", "y", "z")),)
    for name in ("input_mean", "input_std", "target_mean", "target_std"):
      np.testing.assert_allclose(
        getattr(got, name), getattr(pooled, name), rtol=1e-12, err_msg=name
      )
    assert dataclasses.replace(got, imputation=None).num_inputs == pooled.num_inputs
    with warnings.catch_warnings(action="ignore"):
      np.testing.assert_allclose(
        got.transform(frame), pooled.transform(frame), atol=1e-9
      )


def test_ranges_are_those_of_the_rows_up_to_a_bin():
  frame, targets = _frame()
  got = _fitted(frame, targets, np.arange(len(frame)) % 3)
  for name, (low, high) in zip(got.numeric_columns, got.numeric_ranges, strict=True):
    width = frame[name].max() - frame[name].min()
    assert frame[name].min() <= low <= frame[name].min() + 0.01 * width
    assert frame[name].max() - 0.01 * width <= high <= frame[name].max()


@hypothesis.given(st.integers(0, 1000), st.integers(1, 6))
def test_sites_do_not_matter(seed, num_sites):
  frame, targets = _frame(60, seed)
  owners = np.random.default_rng(seed).integers(num_sites, size=60)
  got, whole = (_fitted(frame, targets, by) for by in (owners, 0 * owners))
  np.testing.assert_allclose(got.input_std, whole.input_std, rtol=1e-12)


def test_what_cannot_be_learnt_from_is_refused():
  frame, targets = _frame()
  owners = np.arange(len(frame)) % 2
  assert_refused(lambda: _fitted(frame, 0 * targets + 0.1, owners), "'y' is constant")
  flat = frame.assign(a=1.0, long=2.0, binary=0.0, kind="x")
  assert_refused(lambda: _fitted(flat, targets, owners), "no feature varies")
  huge = frame.assign(a=np.where(owners, 1e300, -1e300))
  assert_refused(lambda: _fitted(huge, targets, owners), "'a'", "rescale")
  site = column_sums.Site(_columns(), frame, targets)
  assert_refused(lambda: site.answer("rows", {}), "no question 'rows'")
