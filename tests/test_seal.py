"""A stranger among the files of a run is named in a line, and nothing is changed."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from fedbnr_jax import files, ledger_file, model, workflow
from fedbnr_jax.precision import enable_x64
from fedbnr_jax.release import folder as release
from fedbnr_jax.run import checkpoints, seal, summary
from fedbnr_jax.run.records import RunFolder
from launch import predict as launch_predict
from tests.runs import assert_refused, table, timeless, tiny

CONFIG = {"kernel": "gaussian", "num_rounds": 4, "patience": 4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> pathlib.Path:
  """A folder with two runs, `a` and `b`, and `a` as it was after three rounds."""
  home = tmp_path_factory.mktemp("trained")
  workflow.train(tiny(**CONFIG), home / "a")
  workflow.train(tiny(**CONFIG, seed=1), home / "b")
  shutil.copytree(home / "a", home / "stopped")
  (home / "stopped" / "summary.json").unlink()
  (home / "stopped" / "checkpoint" / "4.npz").unlink()
  return home


@pytest.fixture
def copy(trained, tmp_path):
  """Copies one of the runs."""

  def make(name: str = "a") -> RunFolder:
    shutil.copytree(trained / name, tmp_path / "run")
    return RunFolder(tmp_path / "run")

  return make


def go_on(folder: RunFolder) -> None:
  workflow.train(tiny(**CONFIG), folder.path)


def read(folder: RunFolder) -> None:
  model.load(folder.path)


# Who looks at the files of which run: one that was stopped, or a finished one.
LOOKS = [("a", read), ("a", go_on), ("stopped", go_on)]


def contents(folder: RunFolder) -> dict[pathlib.Path, bytes]:
  found = [path for path in folder.path.rglob("*") if path.name != ".lock"]
  return {path: path.read_bytes() for path in found if path.is_file()}


def edit(name: str, **changes):
  """Changes fields of a JSON file."""

  def change(folder: RunFolder) -> None:
    path = folder.path / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

  return change


def change_cell(column: str, text: str):
  """Changes a cell in the second row of the history."""

  def change(folder: RunFolder) -> None:
    path = folder.path / "metrics.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()]
    rows[2][rows[0].index(column)] = text
    path.write_text("".join(",".join(row) + "\n" for row in rows))

  return change


STRANGERS = {
  "a forged row": (change_cell("val_rmse", "0.5"), ["metrics.csv is not"]),
  "a row of NaN": (change_cell("test_nll", "nan"), ["metrics.csv is not"]),
  "preprocessing": (edit("preprocessing.json", target_std=9.0), ["preprocessing.json"]),
  "clients": (edit("clients.json", names=["x", "y"]), ["clients.json is not"]),
}


@pytest.mark.parametrize("case", STRANGERS)
@pytest.mark.parametrize("name, use", LOOKS)
def test_a_changed_file_is_named_and_nothing_is_lost(copy, case: str, name: str, use):
  folder, (change, parts) = copy(name), STRANGERS[case]
  change(folder)
  before = contents(folder)
  assert_refused(lambda: use(folder), *parts, "restore it")
  assert contents(folder) == before


@pytest.mark.parametrize("name, use", LOOKS)
def test_a_checkpoint_of_another_run_is_named(trained, copy, name: str, use):
  folder, newest = copy(name), "4.npz" if name == "a" else "3.npz"
  for path in folder.checkpoints.iterdir():
    shutil.copy(trained / "b" / "checkpoint" / path.name, path)
  before = contents(folder)
  parts = [newest, "another run", "'config.json'", "'metrics.csv'", "remove it"]
  assert_refused(lambda: use(folder), *parts)
  assert contents(folder) == before


@pytest.mark.parametrize("use", [read, go_on])
@pytest.mark.parametrize(
  "change, parts",
  [
    (edit("data.json", features=["z"]), ["data.json is not what it was"]),
    (edit("summary.json", test_rmse=0.1), ["summary.json", "test_rmse is 0.1"]),
    (edit("summary.json", seed=3), ["summary.json", "seed is 3"]),
  ],
)
def test_a_finished_run_goes_with_all_files(copy, use, change, parts):
  folder = copy()
  change(folder)
  assert_refused(lambda: use(folder), *parts, "restore it")


def test_a_loaded_model_goes_with_its_config(copy):
  folder = copy()
  edit("config.json", num_samples=5)(folder)
  assert_refused(lambda: read(folder), "config.json is not what it was", "restore it")


@pytest.mark.parametrize("use", [read, go_on])
def test_rows_after_the_end_are_not_the_trainings(copy, use):
  folder = copy()
  folder.append_metrics(folder.metrics()[-1] | {"round": 5})
  assert_refused(lambda: use(folder), "metrics.csv has 5 rows", "wrote 4")


@pytest.mark.parametrize("use", [read, go_on])
def test_a_row_that_is_missing_shows(copy, use):
  folder = copy()
  folder.keep_metrics(folder.metrics()[:3])
  assert_refused(lambda: use(folder), "metrics.csv is not what it was")


def test_checkpoints_of_a_finished_run_are_sound_or_all_gone(copy):
  folder = copy()
  (folder.checkpoints / "4.npz").write_bytes(b"")
  with pytest.warns(UserWarning, match="round 4 is damaged"):
    go_on(folder)  # Round 3 vouches for the files as well.
  for path in folder.checkpoints.iterdir():
    path.write_bytes(b"")
  with pytest.warns(UserWarning, match="is damaged"):
    assert_refused(lambda: go_on(folder), "no checkpoint", "is sound", "restore one")
  shutil.rmtree(folder.checkpoints)  # Whoever keeps the scores alone may do so.
  assert workflow.train(tiny(**CONFIG), folder.path).was_finished
  assert not folder.checkpoints.exists()


def joined(folder: RunFolder) -> None:
  """Makes the folder's ledger one that a row has joined."""
  ledger = ledger_file.read(folder.posterior)
  change = {"action": "add", "table": "some.csv", "rows": 1}
  ledger_file.write(folder.posterior, ledger._replace(changes=(change,)))


@pytest.mark.parametrize("name, use", LOOKS)
@pytest.mark.parametrize("has_changed", [False, True])
def test_a_ledger_of_another_run_is_named(trained, copy, name, use, has_changed):
  folder = copy(name)
  shutil.copyfile(trained / "b" / "posterior.npz", folder.posterior)
  if has_changed:
    joined(folder)
  if name == "stopped" and not has_changed:
    use(folder)  # A training that is not finished writes its own in its place.
    model.load(folder.path)
    return
  before = folder.posterior.read_bytes()
  assert_refused(
    lambda: use(folder), f"{folder.posterior} is of another kernel", "or remove"
  )
  assert folder.posterior.read_bytes() == before
  folder.posterior.unlink()  # As the line says.
  folder.finished.unlink(missing_ok=True)
  go_on(folder)
  own = ledger_file.read(trained / "a" / "posterior.npz")
  assert ledger_file.read(folder.posterior).kernel == own.kernel


@pytest.mark.parametrize("use", [read, go_on])
def test_a_ledger_of_other_rows_under_the_same_kernel_goes_with_it(copy, use):
  folder = copy()
  joined(folder)
  use(folder)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_a_ledger_of_a_float64_kernel_is_its_own_in_float32_too(tmp_path, monkeypatch):
  folder, config = RunFolder(tmp_path / "run"), tiny(**CONFIG, dtype="float64")
  with enable_x64(True):
    workflow.train(config, folder.path)
  monkeypatch.setenv("JAX_ENABLE_X64", "0")  # As on a device that has no such types.
  with enable_x64(False):
    assert workflow.train(config, folder.path).was_finished
    read(folder)


@pytest.mark.parametrize("use", [read, go_on])
def test_a_damaged_ledger_is_named(copy, use):
  folder = copy()
  folder.posterior.write_bytes(folder.posterior.read_bytes()[:-100])
  assert_refused(lambda: use(folder), f"{folder.posterior} is damaged", "restore it")


def test_a_method_without_a_ledger_is_told_of_one(trained, tmp_path):
  config = tiny(method="fedavg", num_rounds=2)
  folder = RunFolder(tmp_path / "run")
  workflow.train(config, folder.path)
  assert not folder.posterior.exists()
  assert workflow.train(config, folder.path).was_finished
  read(folder)
  shutil.copyfile(trained / "a" / "posterior.npz", folder.posterior)
  for use in (lambda: workflow.train(config, folder.path), lambda: read(folder)):
    assert_refused(use, f"{folder.posterior} is of another kernel")


def test_folders_of_seeds_are_looked_at_too(trained, tmp_path):
  config, whole = tiny(**CONFIG, num_seeds=2), RunFolder(tmp_path / "run")
  whole.claim(config)
  whole.write_summary({"test_rmse": 1.0})
  for name, own in zip("ab", workflow.seed_folders(whole, config), strict=True):
    shutil.copytree(trained / name, own.path)
  assert workflow.is_finished(whole, config)
  edit("summary.json", test_rmse=0.1)(RunFolder(whole.path / "seed_1"))
  assert_refused(lambda: workflow.is_finished(whole, config), "seed_1/summary.json")
  shutil.rmtree(whole.path / "seed_1")
  shutil.copytree(trained / "a", whole.path / "seed_1")  # Another seed's folder.
  assert_refused(lambda: workflow.is_finished(whole, config), "config.seed differs")


def test_seconds_formatting_and_the_order_of_columns_are_free(copy):
  folder = copy()
  change_cell("seconds", "99.0")(folder)
  records = [dict(reversed(record.items())) for record in folder.metrics()]
  folder.keep_metrics(records)
  edit("config.json")(folder)
  assert model.load(folder.path).records[1]["seconds"] == 99.0


def test_a_history_of_rows_is_that_of_one_after_another():
  rows = [{"round": 1, "a": 0.1, "seconds": 3.0}, {"round": 2, "a": 0.2}]
  one = seal.extended(seal.of_history([]), rows[0])
  assert seal.extended(one, rows[1]) == seal.of_history(rows)
  assert one == seal.of_history([{"a": 0.1, "round": 1, "seconds": 4.0}])
  assert len({one, seal.of_history(rows), seal.of_history(rows[::-1])}) == 3


def test_a_checkpoint_that_is_written_anew_still_belongs(copy):
  folder = copy()
  for path in folder.checkpoints.iterdir():
    content = checkpoints.read(path)
    grams = {name for name in content.arrays if name.endswith("stats.gram")}
    zeros = {name: np.zeros_like(content.arrays[name]) for name in grams}
    checkpoints.write(path, content._replace(arrays=content.arrays | zeros))
  assert not model.load(folder.path).state.server.stats.gram.any()
  newest = checkpoints.read(folder.checkpoints / "4.npz")
  assert newest.seal == seal.of_folder(folder, 4)


def without_seals(folder: RunFolder) -> None:
  """Makes the folder one of the version before."""
  for path in folder.checkpoints.iterdir():
    checkpoints.write(path, checkpoints.read(path)._replace(seal=None))


def test_a_folder_of_the_version_before_is_read_with_a_warning(trained, copy):
  folder = copy("stopped")
  without_seals(folder)
  with pytest.warns(UserWarning, match=r"3\.npz was written by an earlier version"):
    model.load(folder.path)
  with pytest.warns(UserWarning, match="cannot be checked"):
    go_on(folder)
  assert timeless(folder.metrics()) == timeless(RunFolder(trained / "a").metrics())
  model.load(folder.path)  # What it wrote now has a seal.


def test_a_model_other_than_the_one_of_the_summary_is_not_loaded(copy):
  folder = copy()
  best = folder.summary()["best_round"]
  assert best < 4
  (folder.checkpoints / "4.npz").write_bytes(b"")
  with pytest.warns(UserWarning, match="round 4 is damaged"):
    assert model.load(folder.path).summary["best_round"] == best
  records = folder.metrics()
  records[3]["val_rmse"] = 1e-9  # As if round 4 had been the best.
  folder.keep_metrics(records)
  folder.write_summary(folder.summary() | summary.scores(records))
  with pytest.warns(UserWarning, match="round 4 is damaged"):
    assert_refused(
      lambda: model.load(folder.path), "best round", "is 4", "of round 3", "remove"
    )


def test_rows_that_left_stay_out_when_a_summary_is_made_anew(copy):
  folder = copy()
  ledger = ledger_file.read(folder.posterior)
  change = {"action": "remove", "table": "some.csv", "rows": 1}
  ledger_file.write(folder.posterior, ledger._replace(changes=(change,)))
  before = folder.posterior.read_bytes()
  folder.finished.unlink()
  go_on(folder)
  assert folder.summary() is not None
  assert folder.posterior.read_bytes() == before


# ------------------------------------------------------------------------- released


NOTE = {
  **{"epsilon": 1.0, "delta": 1e-5, "protects": "a row", "sampler": "dice"},
  **{"noise_in_words": "none", "spent_in_total": {"releases": 1, "epsilon": 1.0}},
}


@pytest.fixture
def released(copy) -> RunFolder:
  """A run with a release, whose statistics are the exact ones."""
  folder = copy()
  loaded = model.load(folder.path)
  server = loaded.state.server
  release.write(folder, loaded, server.stats, server.posterior, NOTE)
  return folder


def test_a_release_belongs_with_its_files(released, trained, tmp_path):
  table().features.assign(x0=0.5).to_csv(tmp_path / "new.csv", index=False)

  def use() -> None:
    launch_predict.predict(
      str(released.path), str(tmp_path / "new.csv"), str(tmp_path / "o.csv"), True
    )

  inner = RunFolder(released.released)
  before = contents(inner)
  release.load(released.path)
  edit("config.json", num_samples=5)(inner)
  assert_refused(use, "released/config.json is not what it was", "model.npz")
  edit("config.json", num_samples=4)(inner)
  edit("preprocessing.json", target_std=9.0)(inner)
  assert_refused(use, "released is of another run", "restore it")
  shutil.copytree(inner.path, tmp_path / "alone")
  alone = tmp_path / "alone"
  assert_refused(lambda: release.load(alone), "preprocessing.json is not")
  for path, content in before.items():
    path.write_bytes(content)
  arrays, note = files.read_arrays(inner.path / "model.npz")
  files.write_arrays(
    inner.path / "model.npz", arrays | {"moment": arrays["moment"][1:]}, note
  )
  assert_refused(use, "model.npz is damaged", "digest")
  files.write_arrays(inner.path / "model.npz", arrays)
  with pytest.warns(UserWarning, match="earlier version"):
    release.load(released.path)
