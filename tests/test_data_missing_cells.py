"""Missing cells: refused by default; imputed alike in training and prediction."""

import json

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest

import fedbnr_jax as fb
from fedbnr_jax import model
from fedbnr_jax.data import Preprocessor, load_table, missing_cells
from fedbnr_jax.data.hazards import warn_of_hazards
from fedbnr_jax.data.tables import parse_features
from fedbnr_jax.posterior import change_rows
from fedbnr_jax.run import experiment as experiment_lib
from tests.runs import assert_refused, tiny

SMALL = {"num_rounds": 1, "num_local_steps": 2, "num_samples": 4, "kernel": "gaussian"}
SMALL |= {"method": "fedbnr-ev"}
NAN = np.nan


# ----------------------------------------------------------------------- parsing

CELLS = "a,b,site,y\n1,u,north,1.5\n2,v,south,2.5\n3,u,north,0.5\n"
HINT = "or train with data.missing=impute"


@pytest.mark.parametrize(
  "old, new, column, kept",
  [
    ("3,u", ",u", "a", [1.0, 2.0, NAN]),
    ("3,u", "NA,u", "a", [1.0, 2.0, NAN]),
    ("3,u", " n/a ,u", "a", [1.0, 2.0, NAN]),
    ("3,u", "NaN,u", "a", [1.0, 2.0, NAN]),
    ("3,u", "null,u", "a", [1.0, 2.0, NAN]),
    ("2,v", "2,", "b", ["u", "", "u"]),
  ],
)
def test_missing_cells_of_a_file(tmp_path, old, new, column, kept):
  path = tmp_path / "t.csv"
  path.write_text(CELLS.replace(old, new, 1))
  names = {"target": "y", "client": "site"}
  assert_refused(lambda: load_table(path, **names), f"column {column!r}", HINT)
  got = load_table(path, **names, missing="impute").features[column]
  np.testing.assert_array_equal(got, kept)


@pytest.mark.parametrize(
  "values, kept",
  [
    (pd.Series([1, None], dtype="Int64"), [1.0, NAN]),
    (pd.Series([True, None], dtype="boolean"), [1.0, NAN]),
    (pd.Series([1.5, NAN]), [1.5, NAN]),
    (pd.Series([1, None], dtype=object), [1.0, NAN]),
    (pd.Series(["1e999", ""]), None),
    (pd.Series([np.inf, 1.0]), None),
    (pd.Series(["x", "1"]), None),
    (pd.Series(["u", None], dtype="string"), ["u", ""]),
    (pd.Series(["u", None], dtype="category"), ["u", ""]),
    # Without a number beside it, it may be a label.
    (pd.Series(["NA", "GB"]), ["NA", "GB"]),
  ],
)
def test_missing_cells_of_a_frame(values, kept):
  frame = pd.DataFrame({"a": values, "y": [0.0, 1.0]})
  load = lambda: load_table(frame, target="y", missing="impute")  # noqa: E731
  if kept is None:
    assert_refused(load, "row 1, column 'a'")
  else:
    np.testing.assert_array_equal(load().features["a"], kept)


@pytest.mark.parametrize("column", ["site", "y"])
def test_owners_and_targets_are_never_missing(column):
  frame = pd.DataFrame({"a": [1.0, 2.0], "site": ["n", "s"], "y": [0.0, 1.0]})
  frame[column] = frame[column].astype(object)
  frame.loc[1, column] = None
  for missing in ("error", "impute"):
    with pytest.raises(fb.InputError, match=f"row 2, column '{column}'") as caught:
      load_table(frame, target="y", client="site", missing=missing)
    assert "impute" not in str(caught.value)


def test_a_column_may_be_missing_altogether_in_rows_to_predict():
  raw = pd.DataFrame({"a": ["", "NA"], "b": ["", "u"]})
  parsed = parse_features(raw, ["a"], ["b"], missing="impute")
  assert np.isnan(parsed["a"]).all()
  assert parsed["b"].tolist() == ["", "u"]
  assert_refused(lambda: parse_features(raw, ["a"], ["b"]), "row 1", HINT)


# ----------------------------------------------------------------------- medians

RNG = np.random.default_rng(0)
COLUMNS = {
  "even": RNG.normal(size=1000),
  "odd": RNG.normal(size=1001),
  "long tail": np.exp(4 * RNG.normal(size=1001)),
  "integers": RNG.integers(0, 4, 1000).astype(float),
  "two halves": np.repeat([0.0, 1.0], 50),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_medians_of_sums_are_near_the_exact_ones(name):
  values = COLUMNS[name]
  mean, std, expected = values.mean(), values.std(), np.median(values)
  holes = np.insert(values, [0, 5, 9], np.nan)
  pooled = missing_cells.median([holes], mean, std)
  # Within a rank or two of the middle.
  share = np.mean(values < pooled - 1e-9), np.mean(values <= pooled + 1e-9)
  assert share[0] - 2e-3 <= 0.5 <= share[1] + 2e-3
  if len(np.unique(values)) < 10:
    assert pooled == pytest.approx(expected, abs=1e-12)
  for parts in (np.array_split(holes, 7), np.split(np.sort(holes), [1, 1, 400])):
    dealt = missing_cells.median(parts, mean, std)
    assert dealt == pytest.approx(pooled, rel=1e-12, abs=1e-14)


# -------------------------------------------------------------- the preprocessor


def holed() -> pd.DataFrame:
  return pd.DataFrame(
    {
      "a": [1.0, NAN, 3.0, 8.0, NAN, 2.0],
      "whole": [1.0, 2.0, 3.0, 4.0, 5.0, 7.0],
      "one": [5.0, NAN, 5.0, 5.0, 5.0, 5.0],
      "kind": pd.Series(["u", "", "v", "u", "u", "v"], dtype=object),
    }
  )


TARGETS = np.arange(6.0)


def fitted(**options) -> Preprocessor:
  return Preprocessor.fit(holed(), TARGETS, "y", missing="impute", **options)


def test_inputs_by_hand():
  made = fitted()
  assert made.input_names == (
    *("a", "whole", "a is missing", "one is missing"),
    *("kind=", "kind=u", "kind=v"),
  )
  observed = np.array([1.0, 3.0, 8.0, 2.0])
  raw = made.transform(holed()) * made.input_std + made.input_mean
  np.testing.assert_allclose(raw[:, 0], [1.0, 2.5, 3.0, 8.0, 2.5, 2.0])
  np.testing.assert_allclose(raw[:, 2], [0, 1, 0, 0, 1, 0], atol=1e-12)
  np.testing.assert_allclose(raw[:, 3], [0, 1, 0, 0, 0, 0], atol=1e-12)
  np.testing.assert_allclose(raw[:, 4], [0, 1, 0, 0, 0, 0], atol=1e-12)
  assert made.input_mean[0] == pytest.approx(observed.mean())
  assert made.input_std[0] == pytest.approx(observed.std())
  assert not made.outside(holed()).to_numpy().any()


def test_scores_are_of_the_cells_that_are_there():
  made = fitted(inputs="scores")
  got = made.transform(holed())
  there = Preprocessor.fit(
    holed().dropna()[["a", "whole"]], TARGETS[:4], "y", inputs="scores"
  ).transform(holed().dropna()[["a", "whole"]])
  np.testing.assert_allclose(got[~np.isnan(holed()["a"]), 0], there[:, 0], atol=1e-12)
  assert got[1, 0] == pytest.approx(0.0, abs=1e-12)  # The median.
  assert np.abs(got).max() <= made.largest_input


@pytest.mark.parametrize("inputs", ["standard", "scores"])
def test_a_record_restores_every_bit_and_older_ones_impute_nothing(inputs):
  made = fitted(inputs=inputs)
  record = json.loads(json.dumps(made.to_json()))
  assert Preprocessor.from_json(record) == made
  for change, part in [
    ({"medians": [1.0], "marked": ["a", "one"]}, "of their medians"),
    ({"medians": [1.0, 2.0], "marked": ["a"]}, "numbers of inputs"),
    ({"medians": [1.0, 2.0]}, "lacks the field 'marked'"),
    ({"medians": "12", "marked": ["a", "one"]}, "malformed"),
  ]:
    changed = record | {"imputation": change}
    assert_refused(lambda changed=changed: Preprocessor.from_json(changed), part)
  whole = Preprocessor.fit(holed()[["whole"]], TARGETS, "y")
  older = whole.to_json()
  del older["imputation"], older["input_scores"]
  assert Preprocessor.from_json(older) == whole


def test_cells_that_lacked_nowhere_in_training_are_counted_and_outside():
  features = holed().iloc[[0, 2, 3, 5]].reset_index(drop=True)[["a", "whole", "kind"]]
  made = Preprocessor.fit(features, TARGETS[:4], "y", missing="impute")
  assert made.input_names == ("a", "whole", "kind=u", "kind=v")
  asked = features.copy()
  asked.loc[[0, 2], "a"] = NAN
  asked.loc[2, "kind"] = ""
  with pytest.warns(UserWarning, match=r"lacked none in training: 'a' \(2\), 'kind'"):
    got = made.transform(asked)
  raw = got * made.input_std + made.input_mean
  np.testing.assert_allclose(raw[0, 0], 2.5)
  np.testing.assert_allclose(raw[2, 2:], [0, 0], atol=1e-12)
  assert made.outside(asked).any(axis=1).tolist() == [True, False, True, False]


def test_without_the_option_holes_are_refused():
  with pytest.raises(fb.InputError, match=r"column 'a' is missing .* row 2"):
    Preprocessor.fit(holed(), TARGETS, "y")


@hypothesis.given(
  hnp.arrays(np.float64, (12, 2), elements=st.floats(-1e6, 1e6), unique=True),
  hnp.arrays(bool, (12, 2)),
  st.sampled_from(["standard", "scores"]),
)
def test_inputs_are_finite_whatever_is_missing(values, gone, inputs):
  frame = pd.DataFrame(np.where(gone, np.nan, values), columns=["p", "q"])
  frame["r"] = np.arange(12.0)
  with pytest.MonkeyPatch.context() as patch:
    # Of constant columns, of two values, of columns that lacked nothing.
    patch.setattr("warnings.warn", lambda *_, **__: None)
    made = Preprocessor.fit(frame, np.arange(12.0), "y", inputs, "impute")
    everything = made.transform(frame.assign(p=np.nan, q=np.nan, r=np.nan))
  for got in (made.transform(frame), everything):
    assert got.shape == (12, made.num_inputs)
    assert np.isfinite(got).all()


def test_hazards_are_looked_for_among_the_cells_that_are_there():
  rng = np.random.default_rng(0)
  values = rng.normal(size=200)
  values[::7] = np.nan
  values[30] = 1e6
  features, targets = pd.DataFrame({"a": values}), rng.normal(size=200)
  made = Preprocessor.fit(features, targets, "y", missing="impute")
  with pytest.warns(UserWarning, match=r"^row 31, column 'a': 1e\+06 is so far"):
    warn_of_hazards(features, targets, 200, made)


# -------------------------------------------------------------------- whole runs


def rooms(num_rows: int = 80, seed: int = 0) -> pd.DataFrame:
  """Rows of two sites with holes, which mean something."""
  rng = np.random.default_rng(seed)
  frame = pd.DataFrame(
    {
      "area": rng.uniform(10, 90, num_rows),
      "age": rng.uniform(0, 50, num_rows),
      "kind": rng.choice(["u", "v"], num_rows).astype(object),
      "site": rng.choice(["north", "south"], num_rows),
    }
  )
  frame["y"] = 3 * frame["area"] - frame["age"]
  frame.loc[rng.uniform(size=num_rows) < 0.2, "age"] = np.nan
  frame.loc[rng.uniform(size=num_rows) < 0.2, "kind"] = None
  return frame


FIT = {"target": "y", "client": "site", "progress": False} | SMALL


@pytest.fixture(scope="module")
def trained() -> fb.Model:
  return fb.fit(rooms(), missing="impute", inputs="scores", **FIT)


@pytest.mark.filterwarnings("ignore:.*rows? lies? outside")
def test_a_model_imputes_alike_when_it_is_loaded(trained, tmp_path):
  trained.save(tmp_path / "run")
  loaded = model.load(tmp_path / "run")
  fresh = rooms(20, 1)
  pd.testing.assert_frame_equal(loaded.predict(fresh), trained.predict(fresh))
  fresh.loc[3, "area"] = np.nan
  with pytest.warns(UserWarning, match=r"lacked none in training: 'area' \(1\);"):
    predicted = loaded.predict(fresh)
  assert np.isfinite(predicted[["mean", "std"]]).all(axis=None)
  assert predicted.loc[3, "outside"]
  rows = [("fresh", rooms(20, 1))]
  assert change_rows(tmp_path / "run", add=rows).num_rows == 84
  assert change_rows(tmp_path / "run", remove=rows).num_rows == 64
  assert_refused(
    lambda: change_rows(tmp_path / "run", add=[("no y", fresh.assign(y=np.nan))]),
    "column 'y'",
  )


def test_files_have_the_same_holes_as_frames(trained, tmp_path):
  rooms().to_csv(tmp_path / "t.csv", index=False)
  config = trained.config.copy_and_resolve_references()
  config.data.path = str(tmp_path / "t.csv")
  built = experiment_lib.build(config)
  assert built.preprocessor == trained.preprocessor
  config.data.missing = "error"
  assert_refused(lambda: experiment_lib.build(config), "t.csv", "'age'", HINT)


def test_inducing_inputs_are_drawn_for_what_says_where_cells_are_missing():
  config = tiny(method="fedbnr-ard", data__missing="impute", data__source="table")
  dataset = load_table(rooms(), target="y", client="site", missing="impute")
  built = experiment_lib.build(config, dataset)
  assert built.preprocessor.input_names[:3] == ("area", "age", "age is missing")
  summary = built.federation.inputs
  assert summary.column.tolist() == [6, 6, 6, 0, 0, 0]
  said = built.federation.clients.x[..., 2][built.federation.clients.mask]
  ends = summary.quantiles[[0, -1], 2]
  np.testing.assert_allclose(ends, [said.min(), said.max()], rtol=1e-6)


def test_bounds_and_unknown_values_are_refused():
  assert_refused(
    lambda: fb.fit(rooms(), missing="imput", **FIT),
    "config.data.missing is 'imput'",
    "did you mean 'impute'",
  )
  bounds = {"area": [0, 90], "age": [0, 50], "kind": ["u", "v"], "y": [0, 500]}
  assert_refused(
    lambda: fb.fit(rooms(), missing="impute", bounds=bounds, **FIT),
    "config.data.missing",
    "config.data.bounds",
  )
  assert_refused(lambda: fb.fit(rooms(), **FIT), "'age'", HINT)
