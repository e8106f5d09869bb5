"""A trained model predicts tables in the target's unit, saved or not."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pandas as pd
import pytest

from fedbnr_jax import model, precision, prediction, workflow
from fedbnr_jax.data import load_table, read_table
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import metrics
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from fedbnr_jax.run.program import make_program
from fedbnr_jax.run.records import RunFolder
from fedbnr_jax.tags import OwnedRows
from launch import posterior
from tests.runs import assert_refused, claimed, seal_anew, table, tiny

NUMBERS = ["mean", "std", "lower95", "upper95"]
COLUMNS = [*NUMBERS, "outside"]


def frame(num_rows: int = 60) -> pd.DataFrame:
  rng = np.random.default_rng(3)
  a, b = rng.normal(size=num_rows), rng.uniform(10, 20, num_rows)
  kind = np.array(["red", "green", "blue"])[rng.integers(3, size=num_rows)]
  price = 1000.0 + 200.0 * a + 50.0 * (kind == "red") + rng.normal(size=num_rows)
  return pd.DataFrame({"a": a, "b": b, "kind": kind, "price": price})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Experiment, model in memory, and the folder with the same model."""
  dataset = load_table(frame(), target="price")
  experiment = experiment_lib.build(tiny(), dataset)
  program = make_program(experiment.algorithm, transform=jax.jit)
  folder = claimed(tmp_path_factory.mktemp("model") / "run", experiment)
  result = training.train(experiment, program, folder)
  return experiment, model.from_result(experiment, result), folder.path


def test_prediction_is_the_algorithms_in_the_targets_unit(trained):
  experiment, fitted, _ = trained
  rows = frame().iloc[7:19]
  predicted = fitted.predict(rows)
  scaler = experiment.preprocessor
  x = scaler.transform(experiment.dataset.features.iloc[7:19])
  mean, variance = experiment.algorithm.predict(
    fitted.state, jnp.asarray(x, jnp.float32)
  )
  assert list(predicted.columns) == COLUMNS
  np.testing.assert_allclose(
    predicted["mean"], np.asarray(mean) * scaler.target_std + scaler.target_mean
  )
  np.testing.assert_allclose(
    predicted["std"], np.sqrt(np.asarray(variance)) * scaler.target_std
  )
  assert predicted["mean"].between(0, 2000).all()
  assert predicted.index.equals(rows.index)


def test_interval_is_central_and_95_percent(trained):
  predicted = trained[1].predict(frame())
  half = 1.96 * predicted["std"]
  np.testing.assert_allclose(predicted["upper95"] - predicted["mean"], half, rtol=1e-4)
  np.testing.assert_allclose(predicted["mean"] - predicted["lower95"], half, rtol=1e-4)
  assert (predicted["std"] > 0).all()


def test_order_of_columns_further_columns_and_index_do_not_matter(trained):
  rows = frame()
  other = rows[["price", "kind", "b", "a"]].assign(note="x", a_2=1.0)
  other.index = [f"row {i}" for i in range(len(rows))]
  one, two = trained[1].predict(rows), trained[1].predict(other)
  np.testing.assert_array_equal(one, two)
  assert list(two.index) == list(other.index)


def test_rows_are_predicted_one_by_one(trained):
  rows = frame().iloc[:12]
  together = trained[1].predict(rows)
  backwards = trained[1].predict(rows.iloc[::-1])
  pd.testing.assert_frame_equal(backwards.iloc[::-1], together, rtol=1e-6)


def test_numbers_given_as_text_are_the_same_numbers(trained):
  rows = frame()
  texts = rows.assign(a=rows["a"].map(repr), b=rows["b"].map(repr))
  np.testing.assert_array_equal(trained[1].predict(texts), trained[1].predict(rows))


@pytest.mark.parametrize("chunk", [1, 7, 60])
def test_chunks_do_not_show(trained, monkeypatch, chunk: int):
  whole = trained[1].predict(frame())
  monkeypatch.setattr(prediction, "_CHUNK", chunk)
  parts = trained[1].predict(frame())
  pd.testing.assert_frame_equal(parts, whole, rtol=1e-6)


def test_saved_model_predicts_the_same_bits(trained):
  _, fitted, path = trained
  loaded = model.load(path)
  assert loaded.preprocessor == fitted.preprocessor
  assert loaded.config.to_dict() == fitted.config.to_dict()
  np.testing.assert_array_equal(loaded.predict(frame()), fitted.predict(frame()))


@pytest.mark.parametrize("num_devices", [0, 64])
def test_trained_on_more_devices_than_there_are_here(trained, tmp_path, num_devices):
  _, fitted, path = trained
  shutil.copytree(path, tmp_path / "run")
  recorded = tmp_path / "run" / "config.json"
  config = json.loads(recorded.read_text()) | {"mesh": num_devices}
  recorded.write_text(json.dumps(config))
  seal_anew(RunFolder(tmp_path / "run"))
  loaded = model.load(tmp_path / "run")
  assert loaded.config.mesh == num_devices
  np.testing.assert_array_equal(loaded.predict(frame()), fitted.predict(frame()))


def test_float64_is_arranged_inside_or_left_to_the_environment(
  trained, x64_off, monkeypatch
):
  _, fitted, path = trained
  loaded = model.load(path)
  assert loaded.state.server.stats.gram.dtype == np.float64
  np.testing.assert_array_equal(loaded.predict(frame()), fitted.predict(frame()))
  monkeypatch.setenv("JAX_ENABLE_X64", "0")  # As on a device that has none.
  narrow = model.load(path)
  assert narrow.state.server.stats.gram.dtype == np.float32
  precision._tell_once.cache_clear()
  with pytest.warns(UserWarning, match="JAX_ENABLE_X64.*predict.*float32") as caught:
    predicted = [narrow.predict(frame()) for _ in range(3)]
  assert len(caught) == 1
  monkeypatch.delenv("JAX_ENABLE_X64")
  np.testing.assert_allclose(
    predicted[0][NUMBERS], loaded.predict(frame())[NUMBERS], rtol=1e-3
  )


@pytest.mark.parametrize("missing", ["a", "kind"])
def test_missing_column_is_named(trained, missing: str):
  with pytest.raises(InputError, match=f"'{missing}'"):
    trained[1].predict(frame().drop(columns=missing))


@pytest.mark.parametrize("cell", [np.nan, np.inf, "many"])
def test_unusable_cell_is_named_by_row_and_column(trained, cell: object):
  rows = frame().astype({"b": object})
  rows.loc[4, "b"] = cell
  with pytest.raises(InputError, match="row 5, column 'b'"):
    trained[1].predict(rows)


def test_no_rows_are_refused(trained):
  with pytest.raises(InputError, match="no rows"):
    trained[1].predict(frame().iloc[:0])


def test_unseen_category_warns_and_is_predicted(trained):
  rows = frame().iloc[:3].assign(kind=["red", "violet", "blue"])
  with (
    pytest.warns(UserWarning, match="^1 of 3 rows lies outside .*'kind'"),
    pytest.warns(UserWarning, match="'kind'.*'violet'"),
  ):
    predicted = trained[1].predict(rows)
  assert np.isfinite(predicted[NUMBERS]).all(axis=None)
  assert predicted["outside"].tolist() == [False, True, False]
  seen = trained[1].predict(frame().iloc[:3].assign(kind=["red", "red", "blue"]))
  pd.testing.assert_frame_equal(predicted.iloc[[0, 2]], seen.iloc[[0, 2]], rtol=1e-6)


# ------------------------------------------------------- far from what was trained on


def test_a_prediction_that_is_not_finite_is_refused_with_its_row(trained, tmp_path):
  rows = frame()
  rows.loc[4, "b"] = 1e39  # Too large for float32.
  assert_refused(lambda: trained[1].predict(rows), "row 5", "not finite", "'b'")
  assert_refused(lambda: trained[1].rows(rows), "row 5", "'b'")  # None joins either.
  rows.to_csv(tmp_path / "new.csv", index=False)
  table = read_table(tmp_path / "new.csv")
  assert_refused(lambda: trained[1].predict(table), "new.csv: row 5 (line 6)", "'b'")


def test_a_variance_that_overflows_is_refused_too(trained, monkeypatch):
  fine = np.zeros(60)
  spoilt = np.where(np.arange(60) == 6, np.inf, 1.0)
  monkeypatch.setattr(prediction, "predict", lambda *_: (fine, spoilt))
  assert_refused(lambda: trained[1].predict(frame()), "row 7", "not finite")


@pytest.mark.parametrize("deviations", [10.0, 100.0, 1e4])
def test_rows_far_outside_are_marked_and_counted(trained, deviations: float):
  rows = frame()
  rows.loc[[3, 8], "a"] += deviations
  with pytest.warns(UserWarning, match="^2 of 60 rows lie outside .*'a'.*`outside`"):
    predicted = trained[1].predict(rows)
  assert np.flatnonzero(predicted["outside"]).tolist() == [3, 8]
  assert predicted["outside"].dtype == bool
  quiet = trained[1].predict(rows, warn=False)
  pd.testing.assert_frame_equal(quiet, predicted)


def test_ranges_are_of_the_training_rows_and_kept(trained):
  experiment, fitted, path = trained
  a = experiment.dataset.features["a"].to_numpy()[experiment.split.train]
  assert fitted.preprocessor.numeric_ranges[0] == (a.min(), a.max())
  assert model.load(path).preprocessor == fitted.preprocessor


def test_a_folder_of_an_older_version_predicts_and_marks_no_number(trained, tmp_path):
  _, fitted, path = trained
  shutil.copytree(path, tmp_path / "run")
  file = tmp_path / "run" / "preprocessing.json"
  record = json.loads(file.read_text())
  del record["numeric_ranges"]
  file.write_text(json.dumps(record))
  rows = frame().assign(a=1e4)
  seal_anew(RunFolder(tmp_path / "run"))
  older = model.load(tmp_path / "run").predict(rows)
  assert not older["outside"].any()
  wanted = fitted.predict(rows, warn=False)
  pd.testing.assert_frame_equal(older[NUMBERS], wanted[NUMBERS])


def test_folder_without_run_is_refused(tmp_path):
  with pytest.raises(InputError, match="holds no run"):
    model.load(tmp_path)
  with pytest.raises(InputError, match="holds no run"):
    model.load(tmp_path / "absent")
  assert not (tmp_path / "absent").exists()


def test_run_without_a_round_is_refused(trained, tmp_path):
  folder = RunFolder(tmp_path / "run")
  folder.claim(tiny())
  with pytest.raises(InputError, match="no trained model"):
    model.load(folder.path)
  folder.write_preprocessing(trained[0].preprocessor)
  with pytest.raises(InputError, match="no checkpoint"):
    model.load(folder.path)


# ------------------------------------------------------------- a model for each client


def test_a_model_for_each_client_is_asked_by_name(tmp_path):
  experiment = experiment_lib.build(tiny(method="avg+local", num_rounds=2), table())
  folder = RunFolder(tmp_path)
  workflow.train_one(experiment, folder)
  loaded = model.load(tmp_path)
  assert loaded.client_names == ("client 1", "client 2")
  predict = jax.jit(experiment.algorithm.predict)
  means, variances = predict(loaded.state, experiment.test.x)
  rows = experiment.dataset.features.iloc[experiment.split.test]
  for name, mean in zip(loaded.client_names, means, strict=True):
    wanted = experiment.preprocessor.unstandardise_mean(np.asarray(mean))
    got = loaded.predict(rows, client=name, warn=False)["mean"]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
  # Scores are means over clients.
  scores = [
    metrics.evaluate(mean, variance, experiment.test.y)["rmse"]
    for mean, variance in zip(means, variances, strict=True)
  ]
  told = folder.summary()["test_rmse"]
  np.testing.assert_allclose(np.mean(scores) * experiment.error_scale, told, rtol=1e-6)
  assert not folder.posterior.exists()
  assert_refused(lambda: loaded.predict(rows), "avg+local", "'client 1'")
  assert_refused(lambda: loaded.predict(rows, client="client 3"), "did you mean")
  some = OwnedRows(np.ones((2, 2)), np.ones(2))
  assert_refused(lambda: loaded.statistics(some), "no last layer")


def test_one_model_for_all_is_nobodys(trained):
  _, fitted, _ = trained
  assert_refused(
    lambda: fitted.predict(frame(), client="client 1"), "one model for all"
  )


def test_error_bars_are_of_the_target_however_the_run_was_scored(trained):
  experiment, fitted, _ = trained
  rows = frame().iloc[:5]
  config = ml_collections.ConfigDict(experiment.config.to_dict())
  config.with_noise = False
  bare = dataclasses.replace(fitted, config=config)
  pd.testing.assert_frame_equal(bare.predict(rows), fitted.predict(rows))


def test_fused_experts_are_one_model(tmp_path):
  config = tiny(method="fedloc", num_rounds=1)
  # More than a client has rows, so that the shape of a process depends on these.
  config.fedloc.num_iterations, config.fedloc.num_inducing = 2, 30
  experiment = experiment_lib.build(config, table())
  workflow.train_one(experiment, RunFolder(tmp_path))
  loaded = model.load(tmp_path)
  rows = experiment.dataset.features.iloc[:5]
  assert len(loaded.predict(rows)) == 5
  assert (tmp_path / "figures" / "reliability.png").exists()
  assert_refused(lambda: loaded.predict(rows, client="client 1"), "one model for all")
  assert_refused(lambda: posterior.update(str(tmp_path), [], []), "no last layer")
