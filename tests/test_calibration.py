"""A run calibrates its intervals by rows that it has not seen, and keeps the counts."""

import dataclasses
import json
import shutil

import ml_collections
import numpy as np
import pandas as pd
import pytest

import fedbnr_jax as fb
from fedbnr_jax import calibration, model, posterior, prediction, workflow
from fedbnr_jax.data import load_table
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated import federation as federation_lib
from fedbnr_jax.gp import conformal
from fedbnr_jax.precision import enable_x64
from fedbnr_jax.report import run as report
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from launch import posterior as launch_posterior
from launch import predict as launch_predict
from tests.runs import assert_refused, quick_compiler, sites, tiny, train_sites

SHARE = {"data__calibration": 0.4}
FOLDS = {"data__calibration_folds": 4}


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
  with quick_compiler():
    yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A folder with the run of two sites, 40 % of whose rows were set aside."""
  folder = tmp_path_factory.mktemp("calibrated")
  train_sites(folder, **SHARE)
  return folder


@pytest.fixture
def run(trained, tmp_path):
  return shutil.copytree(trained / "run", tmp_path / "run")


def built(**fields):
  """An experiment on the table of two sites."""
  dataset = load_table(sites(80), target="y", client="site")
  config = tiny(kernel="gaussian", num_rounds=2, data__client="site", **fields)
  return experiment_lib.build(config, dataset)


def joining() -> pd.DataFrame:
  """Rows of the same sites that are new, and within what was trained on."""
  return sites(60, seed=3).query("abs(a) < 1 and abs(b) < 1")


def counted(experiment, state, rows) -> np.ndarray:
  """Counts of scores, computed apart from the code under test."""
  x = experiment.preprocessor.transform(experiment.dataset.features.iloc[rows])
  mean, variance = prediction.predict(experiment.config, state, x.astype(np.float32))
  y = experiment.preprocessor.standardise(experiment.dataset.targets[rows])
  return conformal.count(np.abs(y - mean) / np.sqrt(variance))


def test_rows_are_set_aside_from_every_site_and_serve_nothing_else():
  plain, experiment = built(), built(**SHARE)
  aside, split = experiment.calibration_rows, experiment.split
  assert len(aside) == pytest.approx(0.4 * len(plain.split.train), abs=1)
  assert not set(aside) & {*split.train, *split.validation, *split.test}
  assert {*aside, *split.train} == set(plain.split.train)
  np.testing.assert_array_equal(plain.split.test, split.test)
  for name in ("north", "south"):
    of_site = experiment.dataset.clients == name
    before = of_site[plain.split.train].sum()
    assert of_site[aside].sum() == pytest.approx(0.4 * before, abs=1)
  # Not even to standardise the others.
  targets = experiment.dataset.targets[split.train]
  assert experiment.preprocessor.target_mean == pytest.approx(targets.mean())
  np.testing.assert_array_equal(aside, built(**SHARE).calibration_rows)
  other = built(seed=1, **SHARE)
  assert set(aside) != set(other.calibration_rows)


def test_few_rows_are_not_set_aside_where_there_are_folds():
  small = built(data__calibration=0.4, data__calibration_folds=5)
  assert len(small.calibration_rows) == 0
  assert small.num_folds == 5
  assert built(**SHARE).num_folds == 0
  dataset = load_table(sites(1250), target="y", client="site")
  fields = {"data__calibration": 0.1, "data__calibration_folds": 5}
  large = experiment_lib.build(tiny(kernel="gaussian", **fields), dataset)
  assert len(large.calibration_rows) == 100
  assert large.num_folds == 0


def test_not_more_rows_are_set_aside_than_bring_something(monkeypatch):
  monkeypatch.setattr(experiment_lib, "MOST_CALIBRATION_ROWS", 8)
  assert len(built(**SHARE).calibration_rows) == pytest.approx(8, abs=1)


def test_a_loaded_model_has_the_counts_of_the_rows_that_were_set_aside(trained):
  loaded = model.load(trained / "run")
  dataset = load_table(str(trained / "table.csv"), target="y", client="site")
  experiment = experiment_lib.build(loaded.config, dataset)
  wanted = counted(experiment, loaded.state, experiment.calibration_rows)
  found = loaded.calibration
  np.testing.assert_array_equal(found.counts, wanted)
  assert (found.by, found.num_rows) == ("rows", len(experiment.calibration_rows))
  new = loaded.predict(sites(50, seed=1), warn=False)
  reach = found.threshold(0.95)
  np.testing.assert_array_equal(
    new["upper95_conformal"], new["mean"] + reach * new["std"]
  )
  np.testing.assert_array_equal(
    new["lower95_conformal"], new["mean"] - reach * new["std"]
  )
  assert list(new.columns[-1:]) == ["outside"]


def test_summary_tells_what_share_of_the_test_rows_is_covered(trained):
  loaded = model.load(trained / "run")
  dataset = load_table(str(trained / "table.csv"), target="y", client="site")
  experiment = experiment_lib.build(loaded.config, dataset)
  table = sites(80).iloc[experiment.split.test]
  new = loaded.predict(table, warn=False)
  inside = table["y"].between(new["lower95_conformal"], new["upper95_conformal"])
  assert loaded.summary["test_coverage95_conformal"] == pytest.approx(inside.mean())
  assert loaded.summary["calibration_rows"] == loaded.calibration.num_rows
  assert loaded.summary["calibrated_by"] == "rows"
  assert "conformal one covers" in report.summary_text(loaded.summary)


def _with_rounds(experiment, num_rounds):
  config = ml_collections.ConfigDict(experiment.config.to_dict())
  config.num_rounds = num_rounds
  return dataclasses.replace(experiment, config=config)


def test_each_row_is_scored_by_a_training_without_its_fold():
  experiment = built(**FOLDS)
  program = workflow.program_for(experiment)
  result = training.train(experiment, program)
  compiled = program.step._cache_size()
  told = []
  found = calibration.of_training(
    experiment, program, result, lambda *fold: told.append(fold)
  )
  assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
  assert program.step._cache_size() == compiled  # No fold was compiled for.
  total, seen = 0, []
  for number in range(4):
    pairs = list(zip(experiment.client_rows, experiment.folds(), strict=True))
    kept = [rows[fold != number] for rows, fold in pairs]
    left = np.concatenate([rows[fold == number] for rows, fold in pairs])
    x = experiment.preprocessor.transform(experiment.dataset.features)
    y = experiment.preprocessor.standardise(experiment.dataset.targets)
    alone = federation_lib.build(x, y, kept, on_host=True)
    num_rows = experiment.federation.clients.y.shape[1]
    alone = federation_lib.with_rows(alone, num_rows)
    smaller = dataclasses.replace(experiment, federation=alone)
    smaller = _with_rounds(smaller, result.best_round)
    state = training.train(smaller, program).state
    total = total + counted(experiment, state, left)
    seen += [*left]
  assert sorted(seen) == sorted(experiment.split.train)
  assert (found.by, found.num_rows) == ("folds", len(seen))
  # Sums in another order may move a score across the edge of a bin.
  assert np.abs(np.cumsum(found.counts) - np.cumsum(total)).max() <= 1


@pytest.mark.parametrize("fields", [SHARE, FOLDS])
def test_a_model_in_memory_is_calibrated_as_one_in_a_folder(tmp_path, fields):
  options = {"num_rounds": 2, "num_samples": 4, "kernel": "gaussian"} | fields
  options |= {"target": "y", "client": "site", "progress": False}
  fitted = fb.fit(sites(80), method="fedbnr", num_local_steps=2, **options)
  fitted.save(tmp_path / "saved")
  folder = tmp_path / "trained"
  other = fb.fit(
    sites(80), method="fedbnr", num_local_steps=2, folder=folder, **options
  )
  for one in (fb.load(tmp_path / "saved"), other):
    np.testing.assert_array_equal(one.calibration.counts, fitted.calibration.counts)
    assert one.calibration.by == fitted.calibration.by


def test_there_is_no_calibration_unless_asked_for(tmp_path):
  train_sites(tmp_path)
  loaded = model.load(tmp_path / "run")
  assert loaded.calibration is None
  assert not (tmp_path / "run" / "calibration.json").exists()
  columns = loaded.predict(sites(5), levels=0.5, warn=False).columns
  assert list(columns) == ["mean", "std", "lower50", "upper50", "outside"]


def test_a_model_for_each_client_has_none():
  experiment = built(method="local+local", **SHARE, **FOLDS)
  assert len(experiment.calibration_rows) == experiment.num_folds == 0


def test_a_training_without_a_fold_that_diverges_is_told(monkeypatch):
  experiment = built(**FOLDS)

  def diverge(*_):
    raise training.NonFiniteError("round 1: the loss is not finite")

  monkeypatch.setattr(training, "train", diverge)
  trained = training.Result(None, [{"val_rmse": 1.0}])
  with pytest.warns(
    UserWarning, match=r"no conformal .* of 4 folds, round 1: the loss"
  ):
    assert calibration.of_training(experiment, None, trained) is None


# ------------------------------------------------------------------------- its file


def test_calibration_of_another_run_is_named(run):
  path = run / "calibration.json"
  content = json.loads(path.read_text())
  content["seal"]["history"] = content["seal"]["files"]["config.json"] = "0" * 64
  path.write_text(json.dumps(content))
  assert_refused(lambda: model.load(run), "calibration.json", "another run")


@pytest.mark.parametrize(
  "change", [{"counts": {"7": 1}}, {"counts": {"900": 1}, "rows": 1}, {"seal": 3}]
)
def test_damaged_calibration_is_named(run, change):
  path = run / "calibration.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  assert_refused(lambda: model.load(run), "calibration.json", "damaged", "restore it")


# ------------------------------------------------------------------ from the shell


def predicted(run, tmp_path, levels) -> pd.DataFrame:
  sites(9, seed=2).drop(columns="y").to_csv(tmp_path / "new.csv", index=False)
  output = tmp_path / "out.csv"
  launch_predict.predict(
    str(run), str(tmp_path / "new.csv"), str(output), levels=levels
  )
  return pd.read_csv(output)


@pytest.mark.filterwarnings("ignore:.*outside")
def test_predict_writes_levels_or_says_which_are_possible(run, tmp_path):
  table = predicted(run, tmp_path, None)
  assert {"lower95_conformal", "upper95_conformal"} <= set(table)
  table = predicted(run, tmp_path, [0.5, 0.9])
  names = [f"{side}{level}" for level in (50, 90) for side in ("lower", "upper")]
  assert {*names, *(f"{name}_conformal" for name in names)} <= set(table)
  assert "lower95" not in table
  (tmp_path / "out.csv").unlink()
  num_rows = model.load(run).calibration.num_rows
  call = lambda level: lambda: predicted(run, tmp_path, [level])  # noqa: E731
  assert_refused(call(0.99), "99 %", "it takes 99 rows", f"calibrated with {num_rows}")
  assert_refused(call(1.5), "between 0 and 1", "1.5")
  assert not (tmp_path / "out.csv").exists()


# --------------------------------------------------------------- rows join or leave


def test_rows_that_were_set_aside_cannot_join_and_are_passed_over(trained, run):
  experiment = built(**SHARE)
  aside = sites(80).iloc[np.sort(experiment.calibration_rows)]
  with pytest.raises(InputError, match="held out"):
    posterior.change_rows(run, add=[("aside", aside)])
  south = sites(80).query("site == 'south'")
  changed = posterior.change_rows(run, remove=[("south", south)])
  held_out = {*experiment.split.test, *experiment.split.validation}
  held_out |= set(experiment.calibration_rows)
  assert changed.passed_over == [
    ("south", len(held_out & set(south.index)), len(south))
  ]


def test_a_changed_model_is_calibrated_again_by_the_rows_that_stay(trained, run):
  before = model.load(run).calibration
  changed = posterior.change_rows(run, add=[("new", joining())])
  loaded, experiment = model.load(run), built(data__inputs="scores", **SHARE)
  rows = experiment.calibration_rows
  np.testing.assert_array_equal(
    loaded.calibration.counts, counted(experiment, loaded.state, rows)
  )
  assert not np.array_equal(loaded.calibration.counts, before.counts)
  assert not changed.calibration.outdated
  south = sites(80).query("site == 'south'")
  for erase in (False, True):
    posterior.change_rows(run, remove=[] if erase else [("s", south)], erase=erase)
    loaded = model.load(run)
    stay = rows[experiment.dataset.clients[rows] == "north"]
    assert loaded.calibration.num_rows == len(stay)
    np.testing.assert_array_equal(
      loaded.calibration.counts, counted(experiment, loaded.state, stay)
    )


def test_a_change_without_the_rows_at_hand_outdates_the_calibration(
  trained, tmp_path, capsys
):
  folder = shutil.copytree(trained, tmp_path / "copy")
  workdir, table = folder / "run", folder / "table.csv"
  config = json.loads((workdir / "config.json").read_text())
  hidden = trained / "hidden.csv"
  shutil.move(config["data"]["path"], hidden)
  try:
    joining().to_csv(table, index=False)
    launch_posterior.update(str(workdir), [str(table)], [])
    assert "no longer calibrated" in capsys.readouterr().out
  finally:
    shutil.move(hidden, config["data"]["path"])
  loaded, new = model.load(workdir), sites(5)
  with pytest.warns(UserWarning, match="joined or left the model since it was cal"):
    assert "lower95_conformal" not in loaded.predict(new)
  assert_refused(lambda: loaded.predict(new, levels=0.9), "joined or left", "Train")


def test_erasing_leaves_no_counts_of_folds(tmp_path):
  train_sites(tmp_path, **FOLDS)
  run, south = tmp_path / "run", sites(80).query("site == 'south'")
  told = posterior.change_rows(run, remove=[("south", south)])
  assert told.calibration.outdated
  assert any("calibration.json" in line for line in told.traces.erasable)
  posterior.change_rows(run, erase=True)
  assert not (run / "calibration.json").exists()
  assert model.load(run).calibration is None


def test_counts_survive_a_computer_without_64_bit_types(trained):
  with enable_x64(False):
    assert model.load(trained / "run").calibration.num_rows > 19
