"""`fit`, `predict`, `save` and `load`: five lines for a frame or for arrays."""

import dataclasses
import pathlib
import pickle
import subprocess
import sys

import jax
import numpy as np
import pandas as pd
import pytest

import fedbnr_jax as fb
from fedbnr_jax import files, model, prediction, workflow
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run.records import RunFolder
from launch import posterior as launch_posterior
from launch import predict as launch_predict
from launch import train as launch_train
from tests.runs import (
  SUMMARY,
  StopError,
  assert_refused,
  assert_same_bits,
  quick_compiler,
  timeless,
)

SMALL = {"num_rounds": 2, "num_local_steps": 2, "num_samples": 4, "kernel": "gaussian"}
SMALL |= {"method": "fedbnr-ev"}
INTERVALS = ["lower95", "upper95", "lower95_conformal", "upper95_conformal"]
COLUMNS = ["mean", "std", *INTERVALS, "outside"]


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
  with quick_compiler():
    yield


def houses(num_rows: int = 60) -> pd.DataFrame:
  """A table with a categorical column, owners, and an index of its own."""
  rng = np.random.default_rng(1)
  area = rng.uniform(30, 200, num_rows)
  heating = np.array(["gas", "oil"])[rng.integers(2, size=num_rows)]
  price = 2000 * area + 1e4 * (heating == "gas") + rng.normal(scale=1e3, size=num_rows)
  return pd.DataFrame(
    {
      "area": area,
      "heating": heating,
      "site": np.array(["north", "south", "west"])[np.arange(num_rows) % 3],
      "price": price,
    },
    index=[f"house {row}" for row in range(num_rows)],
  )


def fit_houses(**options) -> fb.Model:
  fields = {"target": "price", "client": "site", "progress": False} | SMALL | options
  return fb.fit(houses(), **fields)


def arrays(num_rows: int = 60):
  rng = np.random.default_rng(2)
  x = rng.normal(size=(num_rows, 3))
  return x, x[:, 0] + 0.1 * rng.normal(size=num_rows), np.arange(num_rows) % 3


@pytest.fixture(scope="module")
def fitted() -> fb.Model:
  return fit_houses()


@pytest.fixture(scope="module")
def from_arrays() -> fb.Model:
  x, y, clients = arrays()
  return fb.fit(x, y, clients=clients, progress=False, **SMALL)


@pytest.fixture
def saved(fitted, tmp_path) -> pathlib.Path:
  fitted.save(tmp_path / "mine")
  return tmp_path / "mine"


# ------------------------------------------------------------------------------- fit


def test_a_frame_gives_a_model_with_history_and_summary(fitted):
  predicted = fitted.predict(houses().drop(columns=["price", "site"]))
  assert list(predicted.columns) == COLUMNS
  assert list(predicted.index) == list(houses().index)
  assert predicted["mean"].corr(houses()["price"]) > 0.5
  assert list(fitted.history["round"]) == [1, 2]
  assert set(fitted.summary) >= SUMMARY
  rows = [fitted.summary[f"{part}_rows"] for part in ("train", "validation", "test")]
  assert rows == [48, 6, 6]
  assert fitted.client_names == ("north", "south", "west")
  best = fitted.history.iloc[fitted.summary["best_round"] - 1]
  assert best["test_rmse"] == fitted.summary["test_rmse"]
  assert "fedbnr-ev of 'price', 3 clients, 2 rounds" in repr(fitted)


def test_arrays_are_a_frame_with_numbered_columns(from_arrays):
  x, y, clients = arrays()
  frame = pd.DataFrame(x, columns=["x0", "x1", "x2"]).assign(y=y, client=clients)
  same = fb.fit(frame, target="y", client="client", progress=False, **SMALL)
  assert_same_bits(same.state, from_arrays.state)
  np.testing.assert_array_equal(from_arrays.predict(x), same.predict(frame))
  assert from_arrays.client_names == ("0", "1", "2")
  given = {"y": frame["y"].rename("cost"), "clients": clients}
  named = fb.fit(frame[["x0", "x1", "x2"]], progress=False, **given, **SMALL)
  assert named.preprocessor.target_name == "cost"
  assert_same_bits(named.state, from_arrays.state)


def test_it_is_the_training_of_the_command_line(fitted, tmp_path):
  houses().to_csv(tmp_path / "table.csv", index=False)
  config = fitted.config.copy_and_resolve_references()
  config.data.path = str(tmp_path / "table.csv")
  launch_train.train(config, str(tmp_path / "run"))
  launched = fb.load(tmp_path / "run")
  assert_same_bits(launched.state, fitted.state)
  assert timeless(launched.records) == timeless(fitted.records)


def test_fields_of_the_config_are_keywords():
  fields = {"data.raw_target": True, "stop_on": "nll", "patience": np.int64(3)}
  config = fit_houses(num_rounds=1, **fields).config
  assert (config.data.raw_target, config.stop_on, config.patience) == (True, "nll", 3)
  assert (config.num_rounds, config.method) == (1, "fedbnr-ev")
  assert not fit_houses(num_rounds=1, data__raw_target=False).config.data.raw_target


def test_the_callers_settings_are_left_alone(x64_off, monkeypatch, fitted):
  model_without = fit_houses()
  assert not jax.config.jax_enable_x64
  assert jax.numpy.ones(1).dtype == np.float32
  # With float64 all the same, and in arrays that need no setting to be kept.
  assert_same_bits(model_without.state, fitted.state)
  leaves = jax.tree.leaves(model_without.state)
  assert all(isinstance(leaf, np.ndarray) for leaf in leaves)
  assert model_without.state.server.stats.gram.dtype == np.float64


def test_a_training_in_float32_says_so_once(x64_off, monkeypatch, tmp_path):
  def stop(*_) -> None:
    raise StopError

  monkeypatch.setattr(experiment_lib, "build", stop)
  for folder in (None, tmp_path / "run"):
    with pytest.raises(StopError):  # Without a warning: `fit` has switched float64 on.
      fit_houses(folder=folder)
  monkeypatch.setenv("JAX_ENABLE_X64", "0")  # As on a device that has none.
  for folder in (None, tmp_path / "run"):
    with (
      pytest.warns(UserWarning, match="JAX_ENABLE_X64.*float32") as caught,
      pytest.raises(StopError),
    ):
      fit_houses(folder=folder)
    assert len(caught) == 1


def test_hazards_of_a_table_are_warned_of():
  """The file tells no line here, but the row is counted as in other messages."""
  rows = houses()
  rows.iloc[5, 0] = 1e9
  fields = {"target": "price", "client": "site", "progress": False} | SMALL
  fields |= {"inputs": "standard"}
  with pytest.warns(UserWarning, match=r"^row 6, column 'area': 1e\+09 is so far"):
    fb.fit(rows, **fields)


def test_fits_of_one_shape_share_their_programs():
  """Both are of this test: between tests, compiled programs may be forgotten."""

  def fit_power(power: int) -> fb.Model:
    rows = houses().assign(price=lambda frame: frame["area"] ** power)
    fields = {"target": "price", "client": "site", "progress": False}
    return fb.fit(rows, **fields, **SMALL | {"num_rounds": 1})

  first = fit_power(1)
  (program,) = workflow._slot(prediction.method_key(first.config))
  before = workflow._slot.cache_info().misses, program.step._cache_size()
  fit_power(2)
  assert (workflow._slot.cache_info().misses, program.step._cache_size()) == before


def test_progress_is_shown_if_wanted(capsys):
  fit_houses(progress=True, data__calibration_folds=2)
  shown = capsys.readouterr().err
  assert "2/2" in shown
  assert "calibrates the intervals, training 2 of 2" in shown
  assert "val rmse" in shown
  fit_houses()
  assert capsys.readouterr() == ("", "")


# --------------------------------------------------------------------------- predict


def test_one_trace_for_all_tables_of_a_size(from_arrays, monkeypatch):
  traces = []
  build = prediction.algorithm

  def counted(config):
    algorithm = build(config)

    def predict(state, x):
      traces.append(x.shape)
      return algorithm.predict(state, x)

    return dataclasses.replace(algorithm, predict=predict)

  monkeypatch.setattr(prediction, "algorithm", counted)
  prediction._jitted.cache_clear()
  x = arrays()[0]
  for _ in range(3):
    from_arrays.predict(x[:20])
  assert traces == [(32, 3)]
  from_arrays.predict(x[:32])  # 17 to 32 rows: the same program.
  pickle.loads(pickle.dumps(from_arrays)).predict(x[:25])
  assert traces == [(32, 3)]
  from_arrays.predict(x)
  assert traces == [(32, 3), (64, 3)]
  prediction._jitted.cache_clear()


def test_rows_are_predicted_alike_in_tables_of_any_length(from_arrays):
  x = arrays()[0]
  whole = from_arrays.predict(x)
  for stop in (1, 7, 16, 33):
    part = from_arrays.predict(x[:stop])
    pd.testing.assert_frame_equal(part, whole.iloc[:stop], rtol=1e-5)


def test_a_client_is_named_where_each_has_a_model():
  trained = fit_houses(method="local+local", num_rounds=1)
  north = trained.predict(houses(), client="north")
  south = trained.predict(houses(), client="south")
  assert not np.allclose(north["mean"], south["mean"])
  assert_refused(lambda: trained.predict(houses()), "client=", "'north'")


# --------------------------------------------------------------------- save and load


def test_a_saved_model_is_the_folder_of_a_run(fitted, saved, tmp_path):
  launched = fit_houses(folder=tmp_path / "launched")
  names = {str(path.relative_to(saved)) for path in saved.rglob("*")}
  wanted = {
    str(path.relative_to(tmp_path / "launched"))
    for path in (tmp_path / "launched").rglob("*")
  }
  # Of the rounds' checkpoints a training keeps three, a model has the last.
  assert wanted - names == {"checkpoint/1.npz"}
  assert names <= wanted
  for name in ("config.json", "data.json", "preprocessing.json", "clients.json"):
    written = (tmp_path / "launched" / name).read_text()
    assert (saved / name).read_text() == written
  one, _ = files.read_arrays(saved / "checkpoint" / "2.npz")
  other, _ = files.read_arrays(tmp_path / "launched" / "checkpoint" / "2.npz")
  assert_same_bits(one, other)
  assert_same_bits(launched.state, fitted.state)
  for name, array in files.read_arrays(saved / "posterior.npz")[0].items():
    ledger = files.read_arrays(tmp_path / "launched" / "posterior.npz")[0]
    np.testing.assert_array_equal(array, ledger[name])


def test_a_loaded_model_is_the_saved_one(fitted, saved, tmp_path):
  loaded = fb.load(saved)
  np.testing.assert_array_equal(loaded.predict(houses()), fitted.predict(houses()))
  pd.testing.assert_frame_equal(loaded.history, fitted.history)
  assert loaded.summary == fitted.summary
  assert repr(loaded) == repr(fitted)
  fitted.save(saved)  # Again is no offence, nor is it of the loaded one.
  loaded.save(saved)
  loaded.save(tmp_path / "copy")
  again = fb.load(tmp_path / "copy")
  assert_same_bits(again.state, fitted.state)
  assert (tmp_path / "copy" / "figures" / "learning_curve.png").exists()
  again.save(saved)


def test_the_programs_work_on_a_saved_model(fitted, saved, tmp_path, capsys):
  rows = houses().reset_index(drop=True)
  rows.to_csv(tmp_path / "rows.csv", index=False)
  launch_predict.predict(
    str(saved), str(tmp_path / "rows.csv"), str(tmp_path / "out.csv")
  )
  written = pd.read_csv(tmp_path / "out.csv")
  predicted = fitted.predict(rows)
  pd.testing.assert_frame_equal(written[COLUMNS], predicted, rtol=1e-6)
  rows[rows["site"] == "north"].to_csv(tmp_path / "north.csv", index=False)
  launch_posterior.update(str(saved), [], [str(tmp_path / "north.csv")])
  said = capsys.readouterr().out
  assert "held out" in said
  assert "rows in the posterior" in said
  assert "no longer calibrated" in said
  changed = fb.load(saved)
  with pytest.warns(UserWarning, match="no conformal interval .* joined or left"):
    assert not np.allclose(changed.predict(rows)["mean"], predicted["mean"])
  # What left would be back if the model that was fitted were saved over it.
  assert_refused(lambda: fitted.save(saved), "joined or left")
  fitted.save(tmp_path / "first")
  assert_refused(lambda: fb.load(tmp_path / "first").save(saved), "joined or left")
  changed.save(saved)
  changed.save(tmp_path / "other")
  assert_same_bits(fb.load(tmp_path / "other").state, changed.state)


def test_an_array_model_is_an_array_model_when_it_is_loaded(from_arrays, tmp_path):
  from_arrays.save(tmp_path / "mine")
  x = arrays()[0]
  loaded = fb.load(tmp_path / "mine")
  np.testing.assert_array_equal(loaded.predict(x), from_arrays.predict(x))


def test_a_fit_in_a_folder_is_taken_up_and_then_loaded(fitted, tmp_path, monkeypatch):
  def stop(bar, record) -> None:
    raise StopError

  with monkeypatch.context() as patched:
    patched.setattr(fb.fitting.ProgressBar, "update", stop)
    with pytest.raises(StopError):
      fit_houses(folder=tmp_path / "mine")
  assert len(RunFolder(tmp_path / "mine").metrics()) == 1
  assert fb.load(tmp_path / "mine").summary == {}
  resumed = fit_houses(folder=tmp_path / "mine")
  assert_same_bits(resumed.state, fitted.state)
  times = {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").rglob("*")}
  assert_same_bits(fit_houses(folder=tmp_path / "mine").state, fitted.state)
  assert times == {
    path: path.stat().st_mtime_ns for path in (tmp_path / "mine").rglob("*")
  }
  for options in ({"seed": 1}, {"target": "area"}):
    assert_refused(
      lambda options=options: fit_houses(folder=tmp_path / "mine", **options),
      "another config",
    )
  rows = houses().assign(price=lambda frame: 2 * frame["price"])
  assert_refused(
    lambda: fb.fit(
      rows, target="price", client="site", folder=tmp_path / "mine", **SMALL
    ),
    "are not those",
  )


def test_a_model_can_be_pickled(fitted, tmp_path):
  copy = pickle.loads(pickle.dumps(fitted))
  np.testing.assert_array_equal(copy.predict(houses()), fitted.predict(houses()))
  copy.save(tmp_path / "mine")
  assert_same_bits(fb.load(tmp_path / "mine").state, fitted.state)


# ------------------------------------------------------------------------- bad input


def column(name: str, values) -> pd.DataFrame:
  return houses().assign(**{name: values})


def with_gap() -> pd.DataFrame:
  frame = houses()
  frame.loc["house 3", "area"] = np.nan
  return frame


def with_a_lonely_client() -> pd.DataFrame:
  """One of whose rows, with some seed, is in no training set."""
  return column("site", ["lonely", *("north", "south") * 29, "south"])


def twice() -> pd.DataFrame:
  frame = houses()
  return pd.concat([frame, frame[["area"]]], axis=1)


@pytest.mark.parametrize(
  "frame, options, parts",
  [
    (houses(), {"target": None}, ["no target", "'area'"]),
    (houses(), {"target": "prise"}, ["'prise'", "did you mean 'price'"]),
    (houses(), {"client": "sight"}, ["'sight'", "did you mean 'site'"]),
    (houses(), {"features": ["aera"]}, ["'aera'", "did you mean 'area'"]),
    (houses(), {"categorical": ["heatin"]}, ["'heatin'", "did you mean 'heating'"]),
    (houses(), {"num_round": 3}, ["'num_round'", "did you mean 'num_rounds'"]),
    (houses(), {"fedloc__roh": 3.0}, ["'fedloc__roh'", "did you mean 'fedloc__rho'"]),
    (houses(), {"data__path": "t.csv"}, ["'data__path'"]),
    (houses(), {"num_rounds": "ten"}, ["'num_rounds'", "'ten'"]),
    (houses(), {"num_rounds": 0}, ["num_rounds", "at least 1"]),
    (houses(), {"method": "fedbrn"}, ["'fedbrn'", "did you mean 'fedbnr'"]),
    (houses(), {"kernel": "gausian"}, ["'gausian'", "did you mean 'gaussian'"]),
    (houses(), {"clients": np.zeros(60)}, ["client="]),
    (houses().iloc[:0], {}, ["no rows"]),
    (houses().iloc[:4], {}, ["4 rows are too few"]),
    (with_gap(), {}, ["row 4", "'area'"]),
    (column("price", np.inf), {}, ["'price'"]),
    (column("price", 7.0), {}, ["constant"]),
    (twice(), {}, ["'area' occurs twice"]),
    (houses().rename(columns={"area": 5}), {}, ["5 is not a string"]),
    (with_a_lonely_client(), {"seed": 5}, ["lonely", "no training rows"]),
    (
      houses(),
      {"client": None, "num_clients": 60},
      ["num_clients", "48 training rows"],
    ),
  ],
)
def test_bad_frames_and_fields_are_one_line(frame, options, parts):
  fields = {"target": "price", "client": "site", "progress": False} | SMALL | options
  assert_refused(lambda: fb.fit(frame, **fields), *parts)


@pytest.mark.parametrize(
  "change, parts",
  [
    ({"y": arrays()[1][:50]}, ["x has 60 rows", "y has 50"]),
    ({"clients": arrays()[2][:50]}, ["x has 60 rows", "clients has 50"]),
    ({"y": arrays()[0]}, ["y has shape (60, 3)"]),
    ({"y": None}, ["no targets", "fit(x, y)"]),
    ({"y": np.full(60, np.nan)}, ["'y'", "row 1"]),
    ({"y": ["high"] * 60}, ["'y'", "'high'"]),
    ({"x": arrays()[1]}, ["x has shape (60,)", "reshape"]),
    ({"x": np.full((60, 3), "a")}, ["not an array of numbers"]),
    ({"x": [[1.0, 2.0], [3.0]]}, ["not an array of numbers"]),
    ({"x": arrays()[0] + 1j}, ["not an array of numbers"]),
    ({"x": np.full((60, 3), np.nan)}, ["'x0'", "row 1"]),
    ({"x": np.zeros((0, 3)), "y": [], "clients": []}, ["no rows"]),
    ({"x": "table.csv", "y": None, "clients": None}, ["'table.csv'", "read it"]),
    ({"clients": [np.nan] * 60}, ["'client'", "row 1"]),
    ({"target": "y"}, ["target=", "y is given"]),
    ({"x": houses().rename(columns={"area": "y"})}, ["'y'", "rename"]),
  ],
)
def test_bad_arrays_are_one_line(change, parts):
  x, y, clients = arrays()
  given = {"x": x, "y": y, "clients": clients} | change
  if given["y"] is None:
    given["clients"] = None
  data = given.pop("x")
  assert_refused(lambda: fb.fit(data, progress=False, **given, **SMALL), *parts)


def test_bad_rows_to_predict_are_one_line(fitted, from_arrays):
  assert_refused(lambda: fitted.predict(houses().drop(columns="area")), "'area'")
  assert_refused(lambda: fitted.predict(houses().iloc[:0]), "no rows")
  assert_refused(lambda: fitted.predict(with_gap()), "row 4", "'area'")
  assert_refused(lambda: fitted.predict(twice()), "'area' occurs twice")
  assert_refused(lambda: fitted.predict(arrays()[0]), "named columns", "'area'")
  assert_refused(
    lambda: from_arrays.predict(arrays()[0][:, :2]), "2 columns", "trained on 3"
  )
  assert_refused(lambda: from_arrays.predict(arrays()[1]), "shape (60,)")


def test_bad_folders_are_one_line(fitted, from_arrays, saved, tmp_path):
  assert_refused(lambda: fb.load(tmp_path), "holds no run")
  assert_refused(lambda: fb.load(tmp_path / "absent"), "holds no run")
  before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
  assert_refused(lambda: from_arrays.save(saved), "another config")
  other = fb.load(saved)
  from_arrays.save(tmp_path / "arrays")
  assert_refused(lambda: other.save(tmp_path / "arrays"), "another config")
  assert before == {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
  rows = houses().assign(price=lambda frame: 2 * frame["price"])
  fields = {"target": "price", "client": "site", "progress": False}
  doubled = fb.fit(rows, **fields, **SMALL)
  assert_refused(lambda: doubled.save(saved), "are not those")
  doubled.save(tmp_path / "doubled")
  assert_refused(lambda: other.save(tmp_path / "doubled"), "other rows")
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "thesis.tex").write_text("precious")
  for one in (fitted, other):
    assert_refused(lambda one=one: one.save(tmp_path / "full"), "not empty")
  bare = dataclasses.replace(fitted, source=None)
  assert_refused(lambda: bare.save(tmp_path / "new"), "cannot be saved")
  assert not (tmp_path / "new").exists()


# --------------------------------------------------------------------------- exports


def test_every_public_name_is_there():
  assert {"fit", "load", "Model", "FederatedGPRegressor", "InputError"} <= set(
    fb.__all__
  )
  for name in fb.__all__:
    assert name in dir(fb)
    assert getattr(fb, name) is not None
  assert fb.load is model.load
  with pytest.raises(AttributeError, match="no attribute 'fitt'"):
    _ = fb.fitt


def test_import_takes_nothing_heavy_along():
  heavy = ["jax", "pandas", "matplotlib", "sklearn", "orbax", "flax"]
  code = f"import sys, fedbnr_jax; print(set({heavy}) & set(sys.modules))"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert done.stdout == "set()\n"
