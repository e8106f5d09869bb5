"""Damage is seen, said and stepped over, and the run still ends as it would have."""

import pathlib
import shutil

import jax
import numpy as np
import pytest

from fedbnr_jax import experiment as experiment_lib
from fedbnr_jax import model, training
from fedbnr_jax.checkpoints import Checkpoints, Saved, digest
from fedbnr_jax.errors import InputError
from fedbnr_jax.records import RunFolder
from tests.runs import (
  StopError,
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
  checkpoints.wait()
  return checkpoints


def files(path: pathlib.Path) -> list[pathlib.Path]:
  """Smallest first."""
  found = [file for file in path.rglob("*") if file.is_file()]
  return sorted(found, key=lambda file: (file.stat().st_size, str(file)))


def truncate(step: pathlib.Path) -> None:
  largest = files(step)[-1]
  largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def flip(step: pathlib.Path) -> None:
  largest = files(step)[-1]
  content = bytearray(largest.read_bytes())
  middle = len(content) // 2
  content[middle : middle + 8] = bytes(255 - b for b in content[middle : middle + 8])
  largest.write_bytes(bytes(content))


def delete(step: pathlib.Path) -> None:
  (step / "state" / "manifest.ocdbt").unlink()


def empty(step: pathlib.Path) -> None:
  shutil.rmtree(step)
  step.mkdir()


def forge(step: pathlib.Path) -> None:
  """Sound arrays, but not the ones that the digest is of."""
  meta = step / "meta" / "metadata"
  text = meta.read_text()
  assert "digest" in text
  meta.write_text(text.replace('"digest": "', '"digest": "0'))


DAMAGES = [truncate, flip, delete, empty, forge]


# ---------------------------------------------------------------------- on their own


def test_restores_the_newest_bit_for_bit(tmp_path):
  checkpoints = saved_folder(tmp_path, 2)
  found = checkpoints.restore(tree(0))
  checkpoints.close()
  assert_same_bits(tuple(found), (2, tree(2), tree(102)))


def test_three_are_kept(tmp_path):
  saved_folder(tmp_path, 5).close()
  assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4", "5"]


def test_nothing_saved_is_none(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  assert checkpoints.restore(tree(0)) is None
  checkpoints.close()


def test_later_rounds_can_be_passed_over_and_discarded(tmp_path):
  checkpoints = saved_folder(tmp_path, 3)
  assert checkpoints.restore(tree(0), max_round=2).round == 2
  checkpoints.discard_after(1)
  assert checkpoints.restore(tree(0)).round == 1
  checkpoints.save(Saved(2, tree(7), tree(8)))  # Made anew.
  checkpoints.wait()
  assert_same_bits(checkpoints.restore(tree(0)).state, tree(7))
  checkpoints.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_falls_back(tmp_path, damage):
  saved_folder(tmp_path, 3).close()
  damage(tmp_path / "3")
  checkpoints = Checkpoints(tmp_path)
  with pytest.warns(UserWarning, match="round 3 is damaged") as caught:
    found = checkpoints.restore(tree(0))
  checkpoints.close()
  assert "\n" not in str(caught[0].message)
  assert_same_bits(tuple(found), (2, tree(2), tree(102)))


def test_other_shape_is_not_restored(tmp_path):
  saved_folder(tmp_path, 1).close()
  checkpoints = Checkpoints(tmp_path)
  like = tree(0) | {"weights": np.zeros((3, 4), np.float32)}
  with pytest.raises(InputError, match="other shapes"):
    checkpoints.restore(like)
  checkpoints.close()


def test_saved_arrays_may_be_overwritten_at_once(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  state = tree(1)
  checkpoints.save(Saved(1, state, state))
  state["gram"][:] = 0.0
  checkpoints.wait()
  assert_same_bits(checkpoints.restore(tree(0)).state, tree(1))
  checkpoints.close()


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
  program = training.jit(training.make_program(experiment))
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
  assert int(model.load(folder.path).state.num_rounds) == straight.best_round


@pytest.mark.parametrize("damage", DAMAGES)
def test_training_goes_on_from_the_one_before(stopped, copy, damage):
  experiment, program, _, _ = stopped
  damage(copy.checkpoints / "3")
  redone = []
  with pytest.warns(UserWarning, match="round 3 is damaged"):
    result = training.train(experiment, program, copy, redone.append)
  assert [record["round"] for record in redone] == [3, 4, 5]
  assert_ends_as_undisturbed(stopped, copy, result)


@pytest.fixture
def refused_and_kept(stopped, copy):
  """Checks that training refuses to start, and that no file has changed."""
  experiment, program, _, _ = stopped

  def check() -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.path.rglob("*")}
    with pytest.raises(InputError, match=r"no checkpoint .* is sound"):
      training.train(experiment, program, copy)
    assert {path: path.stat().st_mtime_ns for path in copy.path.rglob("*")} == before

  return check


def test_nothing_is_discarded_if_all_are_damaged(copy, refused_and_kept):
  for number in (1, 2, 3):
    truncate(copy.checkpoints / str(number))
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
  shutil.rmtree(copy.checkpoints / "3")
  redone = []
  result = training.train(experiment, program, copy, redone.append)
  assert [record["round"] for record in redone] == [3, 4, 5]
  assert_ends_as_undisturbed(stopped, copy, result)


def test_unfinished_checkpoint_of_a_killed_run_is_no_hindrance(stopped, copy):
  experiment, program, _, _ = stopped
  half = copy.checkpoints / "4.orbax-checkpoint-tmp-0"
  half.mkdir()
  (half / "junk").write_bytes(b"half")
  result = training.train(experiment, program, copy)
  assert_ends_as_undisturbed(stopped, copy, result)


def test_loading_falls_back_too(stopped, copy):
  truncate(copy.checkpoints / "3")
  with pytest.warns(UserWarning, match="round 3 is damaged"):
    loaded = model.load(copy.path)
  assert int(loaded.state.num_rounds) == training.best_round(copy.metrics()[:2])


def test_loading_with_all_damaged_is_an_input_error(copy):
  for number in (1, 2, 3):
    delete(copy.checkpoints / str(number))
  with (
    pytest.warns(UserWarning, match="is damaged"),
    pytest.raises(InputError, match="no sound checkpoint"),
  ):
    model.load(copy.path)


def test_loading_changes_no_file(copy):
  before = {path: path.stat().st_mtime_ns for path in copy.path.rglob("*")}
  model.load(copy.path)
  assert {path: path.stat().st_mtime_ns for path in copy.path.rglob("*")} == before
