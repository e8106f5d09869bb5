"""The lock of a folder: one writer, told apart from the others, freed by its death."""

import errno
import os
import subprocess
import sys

import pytest

from benchmarks import kills
from fedbnr_jax import lock, posterior, workflow
from fedbnr_jax.lock import NAME, alone_in
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run.records import RunFolder
from tests.runs import assert_refused, tiny

_HOLD = """
import sys
from fedbnr_jax.lock import alone_in
with alone_in(sys.argv[1], shared=len(sys.argv) > 2):
  print("held", flush=True)
  sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
  """Starts other processes that hold the lock of the folder `run` until they end."""
  started = []

  def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "run"), *arguments]
    process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    started.append(process)
    assert process.stdout.readline() == "held\n"
    return process

  yield start
  for process in started:
    process.kill()
    process.communicate()


def take(folder, **options) -> None:
  with alone_in(folder, **options):
    pass


def test_a_second_writer_is_refused_until_the_first_dies(tmp_path, holder):
  process = holder()
  assert_refused(lambda: take(tmp_path / "run"), "another", str(process.pid), "wait")
  process.kill()
  process.wait()
  take(tmp_path / "run")


def test_those_who_share_exclude_only_the_one_who_does_not(tmp_path, holder):
  holder("shared")
  take(tmp_path / "run", shared=True)
  assert_refused(lambda: take(tmp_path / "run"), "another program is writing")


def test_those_who_share_are_not_taken_for_who_was_before(tmp_path, holder):
  take(tmp_path / "run")  # Leaves its number.
  holder("shared")
  assert_refused(lambda: take(tmp_path / "run"), "another program is writing")


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
  def refuse(*arguments) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(lock.fcntl, "flock", refuse)
  assert_refused(lambda: take(tmp_path / "run"), "no space is left", "free some")


def test_a_lock_is_free_after_an_error(tmp_path):
  with pytest.raises(KeyError), alone_in(tmp_path):
    raise KeyError
  take(tmp_path)


def test_a_training_beside_another_is_refused_and_writes_nothing(tmp_path, holder):
  holder()
  config = tiny(kernel="gaussian")
  assert_refused(lambda: workflow.train(config, tmp_path / "run"), "another program")
  assert [path.name for path in (tmp_path / "run").iterdir()] == [NAME]


class Intruder:
  """Trains in the same folder while somebody else does, in every round."""

  def __init__(self, config, folder) -> None:
    self._train = lambda: workflow.train(config, folder)
    self.refused = 0

  def start(self, *arguments) -> None:
    pass

  def update(self, record) -> None:
    assert_refused(self._train, "another program", str(os.getpid()), "wait")
    self.refused += 1

  def calibrating(self, fold, num_folds) -> None:
    pass

  def close(self) -> None:
    pass


def test_a_training_ends_as_if_nobody_had_tried_beside_it(tmp_path):
  config = tiny(kernel="gaussian")
  intruder = Intruder(config, tmp_path / "run")
  workflow.train(config, tmp_path / "run", intruder)
  assert intruder.refused == 3
  workflow.train(config, tmp_path / "alone")
  assert kills.differences(tmp_path / "run", tmp_path / "alone") == []


def test_the_folders_of_seeds_are_locked_too(tmp_path):
  config = tiny(kernel="gaussian", num_seeds=2)
  RunFolder(tmp_path / "run").claim(config)
  with alone_in(tmp_path / "run" / "seed_1"):
    assert_refused(
      lambda: workflow.train(config, tmp_path / "run"), "another program", "seed_1"
    )


def test_what_another_program_finished_meanwhile_is_left_alone(tmp_path, monkeypatch):
  config = tiny(kernel="gaussian", num_rounds=1)
  build = experiment_lib.build_seeds

  def build_slowly(config):
    monkeypatch.setattr(experiment_lib, "build_seeds", build)
    workflow.train(config, tmp_path / "run")
    return build(config)

  monkeypatch.setattr(experiment_lib, "build_seeds", build_slowly)
  assert workflow.train(config, tmp_path / "run").was_finished


def test_rows_do_not_join_while_another_program_writes(tmp_path, holder):
  workflow.train(tiny(kernel="gaussian", num_rounds=1), tmp_path / "run")
  holder()
  assert_refused(lambda: posterior.change_rows(tmp_path / "run"), "another program")


def test_a_folder_that_holds_no_run_is_not_written_to(tmp_path):
  (tmp_path / "mine.txt").write_text("mine")
  assert_refused(lambda: workflow.train(tiny(), tmp_path), "not empty")
  assert_refused(lambda: posterior.change_rows(tmp_path), "config.json")
  assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
