"""What a model says of its columns: which of them matter, and their length-scales."""

import jax
import numpy as np
import pandas as pd
import pytest

import fedbnr_jax as fb
from fedbnr_jax import relevance
from fedbnr_jax.data import Preprocessor
from fedbnr_jax.gp.urk.inducing_inputs import draw_inputs
from fedbnr_jax.run import input_summary
from tests.runs import assert_refused, quick_compiler

KINDS = np.array(["red", "green", "blue"])
SLOPES = {"a": 3.0, "b": 1.0, "idle": 0.0}


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
  with quick_compiler():
    yield


def table(num_rows: int = 400) -> pd.DataFrame:
  """A linear law of two numbers and a category, with a column that does nothing."""
  rng = np.random.default_rng(2)
  frame = pd.DataFrame({name: rng.normal(size=num_rows) for name in SLOPES})
  frame["kind"] = KINDS[rng.integers(3, size=num_rows)]
  law = sum(slope * frame[name] for name, slope in SLOPES.items())
  law += 2.0 * (frame["kind"] == "red")
  frame["y"] = 100.0 + law + 0.1 * rng.normal(size=num_rows)
  return frame


def fit(**fields) -> fb.Model:
  given = {"inputs": "standard", "num_clients": 2, "progress": False, **fields}
  given |= {"data__calibration": 0, "data__calibration_folds": 0}
  return fb.fit(table(), target="y", **given)


RIDGE = {"method": "fedridge", "ridge__num_samples": 50, "ridge__kernel": "linear"}
SPARSE = {
  "method": "fedbnr-ard",
  "num_rounds": 2,
  "sparse__kernel": "blend+additive+linear",
  "sparse__start_samples": 20,
  "sparse__num_samples": 40,
  "sparse__posterior_samples": 60,
}


@pytest.fixture(scope="module")
def sparse() -> fb.Model:
  return fit(**SPARSE)


def test_of_a_linear_model_it_is_the_deviation_of_each_columns_term():
  frame = table()
  found = fit(**RIDGE).relevance()
  expected = {name: slope * frame[name].std() for name, slope in SLOPES.items()}
  expected["kind"] = 2.0 * (frame["kind"] == "red").std()
  assert list(found.index) == ["a", "b", "kind", "idle"]
  for name, value in expected.items():
    # The law is learnt to a hundredth or so, and hundreds of draws give a few per cent.
    assert found[name] == pytest.approx(value, rel=0.08, abs=0.03)


def test_an_idle_column_is_last_and_small_also_of_inducing_features(sparse, tmp_path):
  found = sparse.relevance()
  assert list(found.index) == ["a", "b", "kind", "idle"]
  assert found["idle"] < 0.05 * found["a"]
  sparse.save(tmp_path / "run")
  pd.testing.assert_series_equal(fb.load(tmp_path / "run").relevance(), found)


def test_a_deep_kernel_has_relevances_but_no_length_scales():
  deep = fit(
    method="fedbnr-ev", num_rounds=8, num_local_steps=20, num_samples=10, hidden_size=20
  )
  found = deep.relevance()
  assert found.index[0] == "a"
  assert found["idle"] < 0.2 * found["a"]
  assert_refused(deep.length_scales, "fedbnr-ev", "deep", "relevance")


def test_a_model_for_each_client_has_relevances_for_each():
  each = fit(
    method="local+local", num_rounds=2, num_local_steps=2, num_samples=4, hidden_size=4
  )
  names = each.client_names
  one, two = (each.relevance(client=name) for name in names)
  assert not one.sort_index().equals(two.sort_index())
  assert_refused(each.relevance, "client")


def test_length_scales_are_those_of_the_state_by_input(sparse):
  found = sparse.length_scales()
  assert tuple(found.index) == sparse.preprocessor.input_names
  assert list(found.columns) == ["blend", "blend (laplacian)", "additive"]
  theta = sparse.state.server.params.theta["parts"]
  np.testing.assert_allclose(np.log(found["blend"]), theta[0]["log_length_scale"])
  np.testing.assert_allclose(np.log(found["additive"]), theta[1]["log_length_scale"])


def test_the_only_part_of_a_kernel_has_its_name():
  found = fit(method="fedbnr", kernel="gaussian", num_rounds=1, num_samples=4)
  assert list(found.length_scales().columns) == ["gaussian"]


def test_a_column_with_missing_cells_is_one_column():
  frame = table()
  frame.loc[::5, "b"] = np.nan
  model = fb.fit(
    frame, target="y", num_clients=2, missing="impute", progress=False, **RIDGE
  )
  assert "b is missing" in model.preprocessor.input_names
  assert set(model.relevance().index) == {*SLOPES, "kind"}


@pytest.mark.parametrize("inputs", ["standard", "scores"])
def test_what_the_preprocessor_alone_says_of_inputs(inputs: str):
  frame = table(2000).drop(columns="y")
  fitted = Preprocessor.fit(frame, frame["a"].to_numpy(), "y", inputs)
  summary = input_summary.of_preprocessor(fitted)
  drawn = np.asarray(draw_inputs(jax.random.key(0), 4000, summary, np.float64))
  seen = fitted.transform(frame)
  assert drawn.shape[1] == seen.shape[1]
  np.testing.assert_allclose(drawn.mean(axis=0), seen.mean(axis=0), atol=0.08)
  np.testing.assert_allclose(drawn.std(axis=0), seen.std(axis=0), atol=0.08)
  is_kind = [name.startswith("kind=") for name in fitted.input_names]
  assert {tuple(row) for row in np.round(drawn[:, is_kind], 9)} == {
    tuple(row) for row in np.round(seen[:, is_kind], 9)
  }


def test_a_drawn_number_is_missing_as_often_as_in_training():
  frame = table(500).drop(columns=["y", "kind"])
  frame.loc[::4, "b"] = np.nan
  fitted = Preprocessor.fit(frame, np.arange(500.0), "y", missing="impute")
  summary = input_summary.of_preprocessor(fitted)
  drawn = np.asarray(draw_inputs(jax.random.key(0), 4000, summary, np.float64))
  place = fitted.input_names.index("b is missing")
  assert np.mean(drawn[:, place] > 0.5) == pytest.approx(0.25, abs=0.03)
  assert relevance._places(fitted)["b"] == [1, place]
