"""Normal scores: near those of exact ranks, from sums alone, the same at prediction."""

import json
import shutil
import warnings

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from scipy import special, stats

import fedbnr_jax as fb
from fedbnr_jax import ledger_file, model, workflow
from fedbnr_jax.data import Preprocessor, scores
from fedbnr_jax.posterior import change_rows
from fedbnr_jax.release.trained import load_run
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import experiment as experiment_lib
from tests.runs import assert_refused, table, tiny

RNG = np.random.default_rng(0)
SIZE = 2000
COLUMNS = {
  "lognormal": np.exp(RNG.normal(size=SIZE)),
  "very long": np.exp(4 * RNG.normal(size=SIZE)),
  "Pareto": RNG.pareto(0.5, SIZE),
  "one cell": np.append(0.02 * RNG.normal(size=SIZE - 1), 50.0),
  "ties": np.round(RNG.normal(size=SIZE), 1),
  "integers": RNG.integers(0, 7, SIZE).astype(float),
  "mostly zero": np.where(RNG.uniform(size=SIZE) < 0.7, 0.0, RNG.pareto(1.0, SIZE)),
}


def exact(values: np.ndarray) -> np.ndarray:
  levels = (stats.rankdata(values, method="average") - 0.5) / len(values)
  return np.clip(special.ndtri(levels), -3.0, 3.0)


def standard(values: np.ndarray) -> np.ndarray:
  return ((values - values.mean()) / values.std())[:, None]


@pytest.mark.parametrize("name", COLUMNS)
def test_scores_are_near_those_of_exact_ranks(name):
  values = COLUMNS[name]
  (fitted,) = scores.fit([standard(values)], ["a"])
  difference = np.abs(fitted(standard(values)[:, 0]) - exact(values))
  assert difference.max() < 0.01
  if len(np.unique(values)) < 10:  # Ties share the middle of their ranks.
    assert difference.max() < 1e-12
  assert len(fitted.values) <= 1200


@pytest.mark.parametrize("name", ["Pareto", "ties", "mostly zero"])
@pytest.mark.parametrize("sizes", [[1000], [1, 2, 3], [5, 0, 1500]])
def test_sums_over_any_partition_give_the_same(name, sizes):
  values = standard(COLUMNS[name])
  (pooled,) = scores.fit([values], ["a"])
  for rows in (values, np.sort(values, axis=0)):
    (dealt,) = scores.fit(np.split(rows, np.cumsum(sizes)), ["a"])
    assert dealt.scores == pooled.scores  # To the bit: they are of counts.
    np.testing.assert_allclose(dealt.values, pooled.values, rtol=1e-12, atol=1e-15)


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@hypothesis.given(
  hnp.arrays(np.float64, st.integers(4, 40), elements=st.floats(-1e100, 1e100)),
  hnp.arrays(np.float64, 20, elements=FINITE),
)
@hypothesis.example(np.array([0.0, 1e-3, 1e-2, 2e-2]), np.array([-1.7e308, 1.7e308]))
def test_scores_rise_and_are_bounded_for_anything_finite(values, unseen):
  hypothesis.assume(len(np.unique(values)) > 3 and np.ptp(values) > 1e-100)
  frame, targets = pd.DataFrame({"a": values}), np.arange(float(len(values)))
  with warnings.catch_warnings(action="ignore"):  # Two bins may be all there are.
    fitted = Preprocessor.fit(frame, targets, "y", inputs="scores")
  asked = np.sort(np.concatenate([values, unseen]))
  got = fitted.transform(pd.DataFrame({"a": asked}))[:, 0]
  assert np.all(np.isfinite(got))
  assert np.all(np.diff(got) >= -1e-12)
  assert np.all(np.abs(got) <= fitted.largest_input + 1e-12)


# ---------------------------------------------------------------- the preprocessor


def frame(num_rows: int = 80, seed: int = 0) -> pd.DataFrame:
  """Rows of two sites: a long tail, a category, a column with two values."""
  rng = np.random.default_rng(seed)
  made = pd.DataFrame(
    {
      "tail": np.exp(3 * rng.normal(size=num_rows)),
      "kind": rng.choice(["u", "v", "w"], num_rows),
      "switch": rng.integers(2, size=num_rows).astype(float),
      "site": rng.choice(["north", "south"], num_rows),
    }
  )
  made["y"] = 100 + 30 * np.log(made["tail"]) + 5 * made["switch"]
  return made


TWO_VALUES = "ignore:columns with two values"


def test_categories_and_columns_with_two_values_are_as_before():
  features, targets = frame().drop(columns=["site", "y"]), frame()["y"].to_numpy()
  with pytest.warns(UserWarning, match="two values.*: 'switch'$") as caught:
    fitted = Preprocessor.fit(features, targets, "y", inputs="scores")
  assert len(caught) == 1
  before = Preprocessor.fit(features, targets, "y")
  np.testing.assert_allclose(
    fitted.transform(features)[:, 1:], before.transform(features)[:, 1:], atol=1e-12
  )
  np.testing.assert_allclose(
    fitted.transform(features)[:, 0], exact(features["tail"].to_numpy()), atol=0.01
  )


@pytest.mark.filterwarnings(TWO_VALUES)
def test_a_record_restores_every_bit_and_older_ones_have_no_scores():
  features, targets = frame().drop(columns=["site", "y"]), frame()["y"].to_numpy()
  fitted = Preprocessor.fit(features, targets, "y", inputs="scores")
  record = json.loads(json.dumps(fitted.to_json()))
  assert Preprocessor.from_json(record) == fitted
  del record["input_scores"]
  older = Preprocessor.from_json(record)
  assert older == Preprocessor.fit(features, targets, "y")
  for change, part in [
    ([], None),
    ([{"values": [0.0], "scores": [0.0]}], "numbers of numeric columns"),
    ([{"values": [0.0, 1.0], "scores": [0.0]}] * 2, "numbers of values"),
    ([{"values": [0.0, 1.0], "scores": [0.0, -1.0]}] * 2, "do not rise"),
    ([{"values": [0.0]}] * 2, "lacks the field 'scores'"),
    ([[0.0]] * 2, "malformed"),
  ]:
    changed = record | {"input_scores": change}
    if part is None:
      assert Preprocessor.from_json(changed) == older
    else:
      assert_refused(lambda changed=changed: Preprocessor.from_json(changed), part)


@pytest.mark.filterwarnings(TWO_VALUES)
def test_the_largest_input_is_known_where_inputs_are_bounded():
  features, targets = frame().drop(columns=["site", "y"]), frame()["y"].to_numpy()
  assert Preprocessor.fit(features, targets, "y").largest_input is None
  kinds = features[["kind"]]
  rare = kinds.assign(kind=["z", *kinds["kind"][1:]])
  for columns in (features, features[["tail"]], kinds, rare):
    fitted = Preprocessor.fit(columns, targets, "y", inputs="scores")
    strange = pd.concat([columns, columns.iloc[:1].replace({"kind": {"u": "?"}})])
    with warnings.catch_warnings(action="ignore"):
      if "tail" in columns:
        strange.iloc[0, 0] = 1e300
      inputs = fitted.transform(strange)
    assert np.abs(inputs).max() <= fitted.largest_input
  assert fitted.largest_input == pytest.approx(np.sqrt(79))
  bounds = fb.data.read_bounds({"tail": [0, 1], "kind": ["u", "v", "w"], "y": [0, 1]})
  declared = Preprocessor.from_bounds(features[["tail", "kind"]], "y", bounds)
  assert declared.largest_input == pytest.approx(np.sqrt(3))


# ---------------------------------------------------------------------- whole runs


def test_the_kernel_sees_scores_and_clients_hold_the_same_rows():
  rows = table()
  rows.features["a"] = np.exp(5 * rows.features["a"])
  fields = {"method": "fedbnr-ard", "data__source": "table"}
  with warnings.catch_warnings(action="ignore"):  # Of the long tail.
    plain = experiment_lib.build(tiny(data__inputs="standard", **fields), rows)
  built = experiment_lib.build(tiny(**fields), rows)  # Of tables, scores are taken.
  for one, other in zip(built.client_rows, plain.client_rows, strict=True):
    np.testing.assert_array_equal(one, other)
  train = rows.features["a"].to_numpy()[built.client_rows[0]]
  everyone = rows.features["a"].to_numpy()[built.split.train]
  own = np.asarray(built.federation.clients.x[0])[: len(train), 0]
  levels = np.searchsorted(np.sort(everyone), train) + 0.5
  np.testing.assert_allclose(own, special.ndtri(levels / len(everyone)), atol=0.01)
  assert np.abs(built.federation.inputs.quantiles).max() <= 3.0
  assert np.abs(plain.federation.inputs.quantiles).max() > 3.0


BOUNDS = '{"a": [0, 1]}'


@pytest.mark.parametrize(
  ("fields", "reading"),
  [
    ({}, "standard"),
    ({"method": "fedbnr-ard"}, "scores"),
    ({"data__source": "table"}, "scores"),
    ({"data__source": "table", "data__bounds": BOUNDS}, "standard"),
    ({"data__source": "table", "data__inputs": "standard"}, "standard"),
    ({"data__inputs": "scores"}, "scores"),
  ],
)
def test_what_is_left_open_depends_on_data_and_method(fields, reading):
  """The paper's data are as in the paper, for its methods."""
  assert config_lib.inputs_of(tiny(**fields)) == reading


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A folder with a run of scores and a linear part, and its table."""
  folder = tmp_path_factory.mktemp("scores")
  frame().to_csv(folder / "table.csv", index=False)
  config = tiny(
    kernel="gaussian+linear",
    num_rounds=1,
    data__source="table",
    data__path=str(folder / "table.csv"),
    data__target="y",
    data__client="site",
    data__inputs="scores",
  )
  with pytest.warns(UserWarning, match="two values") as caught:
    workflow.train(config, folder / "run")
  assert sum("two values" in str(one.message) for one in caught) == 1
  return folder


@pytest.mark.filterwarnings("ignore:.*lie.? outside")
def test_a_loaded_model_has_the_scores_of_its_training(run):
  trained = model.load(run / "run")
  assert trained.preprocessor.input_scores
  rows = frame(20, 1)
  far = rows.assign(tail=1e200)
  farther = rows.assign(tail=1e300)
  one, other = trained.predict(far), trained.predict(farther)
  np.testing.assert_array_equal(one["mean"], other["mean"])
  assert one["outside"].all()


def test_rows_join_and_leave_under_scores(run, tmp_path):
  copy = shutil.copytree(run / "run", tmp_path / "run")
  new = [("new", frame(20, 1))]
  before = ledger_file.read(copy / "posterior.npz").stats
  change_rows(copy, add=new)
  joined = ledger_file.read(copy / "posterior.npz").stats
  assert float(joined.count) == float(before.count) + 20
  change_rows(copy, remove=new)
  after = ledger_file.read(copy / "posterior.npz").stats
  np.testing.assert_array_equal(after.gram, before.gram)


def test_a_linear_part_has_a_bounded_norm(run):
  opened = load_run(run / "run")
  x, _ = opened.training_rows()
  norms = np.sum(np.asarray(opened.features(x.astype(np.float32))) ** 2, axis=1)
  assert norms.max() <= opened.squared_norm
  reach = opened.model.preprocessor.largest_input
  assert reach == 3.0
  squares = np.exp(2 * opened.model.state.server.params.theta["log_amplitude"])
  bound = squares @ np.array([4 / 3, 1 + reach**2])
  assert opened.squared_norm == pytest.approx(float(bound), rel=1e-5)


def test_bounds_and_unknown_values_are_refused():
  fields = {"target": "y", "client": "site", "progress": False}
  assert_refused(
    lambda: fb.fit(frame(), inputs="score", **fields),
    "config.data.inputs is 'score'",
    "did you mean 'scores'",
  )
  bounds = {"tail": [0, 1e6], "kind": ["u", "v", "w"], "switch": [0, 1], "y": [0, 500]}
  assert_refused(
    lambda: fb.fit(frame(), inputs="scores", bounds=bounds, **fields),
    "config.data.inputs",
    "config.data.bounds",
  )
