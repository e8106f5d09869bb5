"""`FederatedGPRegressor` by scikit-learn's own checks, and in scikit-learn's tools.

The checks fit 44 times, to arrays of 14 shapes: a kernel without a network, one
precision and XLA's quick compiler make each shape a matter of seconds.
"""

import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fedbnr_jax as fb
from fedbnr_jax.run.coverage import CoverageWarning
from tests.runs import assert_refused, quick_compiler

SMALL = {
  "method": "fedbnr",
  "num_clients": 2,
  "num_rounds": 2,
  "num_local_steps": 2,
  "kernel": "gaussian",
  "num_samples": 16,
  "options": {"dtype": "float64"},
}


def small(**parameters) -> fb.FederatedGPRegressor:
  return fb.FederatedGPRegressor(**SMALL | parameters)


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
  with quick_compiler():
    yield


def arrays(num_rows: int = 200):
  """Of a shape that the checks have too, so that a program is shared."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(num_rows, 10))
  return x, 7 + 2 * x[:, 0] + 0.1 * rng.normal(size=num_rows)


def owned() -> fb.FederatedGPRegressor:
  """Pools the rows of all clients: one shape, whatever the labels are."""
  return small(method="central", num_rounds=1)


OWNERS = np.where(np.arange(200) % 3, "north", "south")


@pytest.fixture(scope="module")
def fitted() -> fb.FederatedGPRegressor:
  return small().fit(*arrays())


# An error also of what conftest.py lets pass: a fit inside of scikit-learn is silent.
@pytest.mark.filterwarnings("error::fedbnr_jax.run.coverage.CoverageWarning")
@parametrize_with_checks([small()])
def test_scikit_learns_own_checks(estimator, check):
  check(estimator)


# ------------------------------------------------------------------- what it predicts


def test_it_is_the_model_of_fit(fitted):
  x, y = arrays()
  fields = {name: value for name, value in SMALL.items() if name != "options"}
  model = fb.fit(x, y, progress=False, **fields, **SMALL["options"])
  wanted = model.predict(x, warn=False)
  with (
    pytest.warns(UserWarning, match="^2 of 200 rows lie outside"),
    pytest.warns(CoverageWarning, match="^20 test rows are too few"),
  ):
    mean, std = fitted.predict(x, return_std=True)
  np.testing.assert_array_equal(mean, wanted["mean"])
  np.testing.assert_array_equal(std, wanted["std"])
  np.testing.assert_array_equal(fitted.predict(x), mean)
  assert fitted.score(x, y) > 0.5
  assert fitted.model_.summary["train_rows"] == 160


def test_labels_of_clients_are_taken():
  x, y = arrays()
  fitted = owned().fit(x, y, clients=OWNERS)
  assert fitted.model_.summary["num_clients"] == 2
  assert (
    owned().fit(x, y, clients=np.arange(200) % 5).model_.summary["num_clients"] == 5
  )
  with pytest.raises(ValueError, match="inconsistent numbers of samples"):
    owned().fit(x, y, clients=OWNERS[:9])


def test_a_misspelt_option_is_one_line():
  assert_refused(
    lambda: small(options={"stop": 1}).fit(*arrays()), "'stop'", "'stop_on'"
  )
  assert_refused(lambda: small(method="fedbrn").fit(*arrays()), "did you mean 'fedbnr'")


def test_seeds_are_integers_or_drawn():
  x, y = arrays()
  seeds = [
    small(num_rounds=1, random_state=state).fit(x, y).model_.config.seed
    for state in (3, np.random.RandomState(0), np.random.RandomState(0), None)
  ]
  assert seeds[0] == 3
  assert seeds[1] == seeds[2] != 0
  assert 0 <= seeds[3] < 2**31


def test_a_pickle_predicts_and_has_no_rows_in_it(fitted):
  x, y = arrays()
  content = pickle.dumps(fitted)
  copy = pickle.loads(content)
  np.testing.assert_array_equal(copy.predict(x), fitted.predict(x))
  assert y.tobytes()[:64] not in content
  assert copy.model_.source is None


# -------------------------------------------------------------- in scikit-learn's tools


def test_in_a_pipeline():
  x, y = arrays()
  pipeline = make_pipeline(StandardScaler(), owned())
  pipeline.fit(x, y, federatedgpregressor__clients=OWNERS)
  assert pipeline.score(x, y) > 0.5
  inner = x[np.abs(x).max(axis=1) < 2]
  assert len(pipeline.predict(inner, return_std=True)) == 2
  assert pipeline[-1].model_.summary["num_clients"] == 2
  frame = pd.DataFrame(x, columns=[f"column {i}" for i in range(10)])
  named = small().fit(frame, y)
  assert list(named.feature_names_in_) == list(frame.columns)


def test_clone_has_the_parameters_and_nothing_learnt(fitted):
  copy = clone(fitted.set_params(num_rounds=2))
  assert copy.get_params() == fitted.get_params()
  assert not hasattr(copy, "model_")


def test_cross_validation_and_its_clients():
  x, y = arrays()
  scores = cross_val_score(owned(), x, y, cv=2, params={"clients": OWNERS})
  assert scores.shape == (2,)
  assert np.isfinite(scores).all()
  with sklearn.config_context(enable_metadata_routing=True):
    routed = owned().set_fit_request(clients=True)
    again = cross_val_score(routed, x, y, cv=2, params={"clients": OWNERS})
  np.testing.assert_allclose(again, scores)


def test_grid_search_chooses():
  x, y = arrays()
  search = GridSearchCV(small(), {"num_rounds": [1, 2]}, cv=2)
  search.fit(x, y)
  assert search.best_params_["num_rounds"] in (1, 2)
  assert search.predict(x).shape == (200,)


# -------------------------------------------------------------------- without the extra


def test_without_scikit_learn_the_rest_works_and_a_line_says_what_to_do():
  code = (
    "import sys; sys.modules['sklearn'] = None\n"
    "import fedbnr_jax as fb; fb.fit\n"
    "try: fb.FederatedGPRegressor\n"
    "except ImportError as error: print(error)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert "pip install 'fedbnr-jax[sklearn]'" in done.stdout
  assert done.stdout.count("\n") == 1


def test_scores_are_those_of_fit():
  x, y = arrays()
  x = np.exp(3 * x)
  fields = {name: value for name, value in SMALL.items() if name != "options"}
  wanted = fb.fit(x, y, inputs="scores", progress=False, **fields, **SMALL["options"])
  fitted = small(inputs="scores").fit(x, y)
  assert fitted.model_.preprocessor == wanted.preprocessor
  assert len(wanted.preprocessor.input_scores) == 10
  np.testing.assert_array_equal(
    fitted.predict(x), wanted.predict(x, warn=False)["mean"]
  )


def test_missing_cells_are_taken_if_wanted():
  x, y = arrays()
  x[::9, 3] = np.nan
  with pytest.raises(ValueError, match="NaN"):
    small().fit(x, y)
  fitted = small(missing="impute").fit(x, y)
  assert fitted.model_.preprocessor.input_names[-1] == "x3 is missing"
  assert np.isfinite(fitted.predict(x)).all()
  assert not small().__sklearn_tags__().input_tags.allow_nan
  assert fitted.__sklearn_tags__().input_tags.allow_nan
