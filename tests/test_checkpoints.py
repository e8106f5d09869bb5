"""Damage is seen, said and stepped over, and the run still ends as it would have."""

import errno
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

from fedbnr_jax import files, model, workflow
from fedbnr_jax.errors import InputError
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from fedbnr_jax.run.checkpoints import Checkpoints, Saved, digest
from fedbnr_jax.run.program import make_program
from fedbnr_jax.run.records import RunFolder
from tests.runs import (
  StopError,
  assert_refused,
  assert_same_bits,
  claimed,
  stop_after,
  table,
  timeless,
  tiny,
)


def tree(number: int) -> dict:
  rng = np.random.default_rng(number)
  return {
    "weights": rng.normal(size=(30, 40)).astype(np.float32),
    "gram": rng.normal(size=(50, 50)),
    "count": np.array(number, np.int32),
  }


def saved_folder(path: pathlib.Path, num_rounds: int) -> Checkpoints:
  checkpoints = Checkpoints(path)
  for number in range(1, num_rounds + 1):
    checkpoints.save(Saved(number, tree(number), tree(100 + number)))
  return checkpoints


def truncate(file: pathlib.Path) -> None:
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: pathlib.Path) -> None:
  content = bytearray(file.read_bytes())
  middle = len(content) // 2
  content[middle : middle + 8] = bytes(255 - b for b in content[middle : middle + 8])
  file.write_bytes(bytes(content))


def empty(file: pathlib.Path) -> None:
  file.write_bytes(b"")


def forge(file: pathlib.Path) -> None:
  """Sound arrays, but not the ones that the digest is of."""
  arrays, note = files.read_arrays(file)
  files.write_arrays(file, arrays, note | {"digest": "0" + note["digest"][1:] + "0"})


def exchange(file: pathlib.Path) -> None:
  """A sound checkpoint under another round's name."""
  older = file.with_name(f"{int(file.stem) - 1}.npz")
  file.write_bytes(older.read_bytes())


def drop(file: pathlib.Path) -> None:
  """Without one of its arrays."""
  arrays, note = files.read_arrays(file)
  arrays.popitem()
  files.write_arrays(file, arrays, note)


DAMAGES = [truncate, flip, empty, forge, exchange, drop]


# ---------------------------------------------------------------------- on their own


def test_restores_the_newest_bit_for_bit(tmp_path):
  checkpoints = saved_folder(tmp_path, 2)
  found = checkpoints.restore(tree(0))
  assert_same_bits(tuple(found), (2, tree(2), tree(102)))


def test_three_are_kept(tmp_path):
  saved_folder(tmp_path, 5)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["3.npz", "4.npz", "5.npz"]


def test_nothing_saved_is_none(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  assert checkpoints.restore(tree(0)) is None


def test_later_rounds_can_be_passed_over_and_discarded(tmp_path):
  checkpoints = saved_folder(tmp_path, 3)
  assert checkpoints.restore(tree(0), max_round=2).round == 2
  checkpoints.discard_after(1)
  assert checkpoints.restore(tree(0)).round == 1
  checkpoints.save(Saved(2, tree(7), tree(8)))  # Made anew.
  assert_same_bits(checkpoints.restore(tree(0)).state, tree(7))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_falls_back(tmp_path, damage):
  saved_folder(tmp_path, 3)
  damage(tmp_path / "3.npz")
  checkpoints = Checkpoints(tmp_path)
  with pytest.warns(UserWarning, match="round 3 is damaged") as caught:
    found = checkpoints.restore(tree(0))
  assert "\n" not in str(caught[0].message)
  assert_same_bits(tuple(found), (2, tree(2), tree(102)))


def test_other_shape_is_not_restored(tmp_path):
  saved_folder(tmp_path, 1)
  checkpoints = Checkpoints(tmp_path)
  like = tree(0) | {"weights": np.zeros((3, 4), np.float32)}
  assert_refused(
    lambda: checkpoints.restore(like),
    *("1.npz", "other shapes", "best.weights is [30, 40], and should be [3, 4]"),
  )
  like = {name: leaf for name, leaf in tree(0).items() if name != "gram"}
  assert_refused(lambda: checkpoints.restore(like), "best.gram", "be not there")


def test_float64_is_kept_where_jax_has_none(tmp_path, x64_off):
  like = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree(0)
  )
  found = saved_folder(tmp_path, 1).restore(like)
  assert_same_bits(found.state, tree(1))
  narrow = tree(0) | {"gram": np.zeros((50, 50), np.float32)}
  gram = Checkpoints(tmp_path).restore(narrow).state["gram"]
  np.testing.assert_array_equal(gram, tree(1)["gram"].astype(np.float32))


def test_arrays_stand_in_the_file_by_their_names(tmp_path):
  saved_folder(tmp_path, 1)
  with np.load(tmp_path / "1.npz") as content:
    np.testing.assert_array_equal(content["state.gram"], tree(1)["gram"])
    np.testing.assert_array_equal(content["best.weights"], tree(101)["weights"])


def test_folder_of_the_version_with_orbax_is_refused_in_a_line(stopped, copy):
  experiment, program, _, _ = stopped
  shutil.rmtree(copy.checkpoints)
  (copy.checkpoints / "3" / "state").mkdir(parents=True)
  for use in (
    lambda: training.train(experiment, program, copy),
    lambda: model.load(copy.path),
  ):
    assert_refused(use, "earlier version", "train again")
  assert (copy.checkpoints / "3" / "state").is_dir()


def test_digest_sees_values_shapes_and_types():
  one = np.arange(6, dtype=np.float32)
  others = [one.reshape(2, 3), one.view(np.int32), one + np.float32(1e-6), -one]
  assert len({digest({"a": array}) for array in [one, *others]}) == 5
  assert digest({"a": one}) == digest({"a": jax.numpy.asarray(one)})


# ------------------------------------------------------------------- within a training


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """A run of five rounds stopped after three, and how it ends undisturbed."""
  experiment = experiment_lib.build(tiny(num_rounds=5), table())
  program = make_program(experiment.algorithm, transform=jax.jit)
  folder = claimed(tmp_path_factory.mktemp("stopped") / "run", experiment)
  with pytest.raises(StopError):
    training.train(experiment, program, folder, stop_after(3))
  return experiment, program, folder.path, training.train(experiment, program)


@pytest.fixture
def copy(stopped, tmp_path) -> RunFolder:
  shutil.copytree(stopped[2], tmp_path / "run")
  return RunFolder(tmp_path / "run")


def assert_ends_as_undisturbed(stopped, folder: RunFolder, result) -> None:
  straight = stopped[3]
  assert timeless(result.history) == timeless(straight.history)
  assert timeless(folder.metrics()) == timeless(straight.history)
  assert_same_bits(result.state, straight.state)
  assert int(model.load(folder.path).state.server.num_rounds) == straight.best_round


@pytest.mark.parametrize("damage", DAMAGES)
def test_training_goes_on_from_the_one_before(stopped, copy, damage):
  experiment, program, _, _ = stopped
  damage(copy.checkpoints / "3.npz")
  redone = []
  with pytest.warns(UserWarning, match="round 3 is damaged"):
    result = training.train(experiment, program, copy, redone.append)
  assert [record["round"] for record in redone] == [3, 4, 5]
  assert_ends_as_undisturbed(stopped, copy, result)


@pytest.fixture
def refused_and_kept(stopped, copy):
  """Checks that training refuses to start, and that no file has changed."""
  experiment, program, _, _ = stopped

  def contents() -> dict[pathlib.Path, bytes]:
    found = [path for path in copy.path.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in found}

  def check() -> None:
    before = contents()
    with pytest.raises(InputError, match=r"no checkpoint .* is sound"):
      training.train(experiment, program, copy)
    assert contents() == before

  return check


def test_nothing_is_discarded_if_all_are_damaged(copy, refused_and_kept):
  for number in (1, 2, 3):
    truncate(copy.checkpoints / f"{number}.npz")
  with pytest.warns(UserWarning, match="is damaged") as caught:
    refused_and_kept()
  assert len(caught) == 3


def test_nothing_is_discarded_if_the_metrics_are_gone(copy, refused_and_kept):
  (copy.path / "metrics.csv").unlink()
  refused_and_kept()


def test_cut_row_is_made_anew_with_its_checkpoint(stopped, copy):
  experiment, program, _, _ = stopped
  metrics = copy.path / "metrics.csv"
  metrics.write_text(metrics.read_text()[:-10])
  redone = []
  result = training.train(experiment, program, copy, redone.append)
  assert [record["round"] for record in redone] == [3, 4, 5]
  assert_ends_as_undisturbed(stopped, copy, result)


def test_row_without_checkpoint_is_made_anew(stopped, copy):
  experiment, program, _, _ = stopped
  (copy.checkpoints / "3.npz").unlink()
  redone = []
  result = training.train(experiment, program, copy, redone.append)
  assert [record["round"] for record in redone] == [3, 4, 5]
  assert_ends_as_undisturbed(stopped, copy, result)


def test_unfinished_checkpoint_of_a_killed_run_is_no_hindrance(stopped, copy):
  experiment, program, _, _ = stopped
  (copy.checkpoints / "4.npz.tmp").write_bytes(b"half")
  result = training.train(experiment, program, copy)
  assert_ends_as_undisturbed(stopped, copy, result)


def test_a_full_disk_is_one_line_and_nothing_is_lost(stopped, copy, monkeypatch):
  experiment, program, _, _ = stopped
  before = {path: path.read_bytes() for path in copy.checkpoints.iterdir()}

  def fill_up(file, **arrays) -> None:
    file.write(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patch:
    patch.setattr(files.np, "savez", fill_up)
    assert_refused(
      lambda: workflow.train(experiment.config, copy.path, dataset=table()),
      *("no space is left", str(copy.path), "the same command", "is kept"),
    )
  assert {path: path.read_bytes() for path in copy.checkpoints.iterdir()} == before
  assert len(copy.metrics()) == 4  # The row of the round that has no checkpoint.
  result = training.train(experiment, program, copy)
  assert_ends_as_undisturbed(stopped, copy, result)


def test_loading_falls_back_too(stopped, copy):
  truncate(copy.checkpoints / "3.npz")
  with pytest.warns(UserWarning, match="round 3 is damaged"):
    loaded = model.load(copy.path)
  assert int(loaded.state.server.num_rounds) == training.best_round(copy.metrics()[:2])


def test_loading_with_all_damaged_is_an_input_error(copy):
  for number in (1, 2, 3):
    empty(copy.checkpoints / f"{number}.npz")
  with (
    pytest.warns(UserWarning, match="is damaged"),
    pytest.raises(InputError, match="no sound checkpoint"),
  ):
    model.load(copy.path)


def test_loading_changes_no_file(copy):
  before = {path: path.stat().st_mtime_ns for path in copy.path.rglob("*")}
  model.load(copy.path)
  assert {path: path.stat().st_mtime_ns for path in copy.path.rglob("*")} == before
