"""A program that is killed as it writes leaves what was there, and can begin again.

Kills of trainings and sweeps are in test_training.py and test_sweep.py; many more, at
random instants, in benchmarks/kills.py.
"""

import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from benchmarks import kills, tools
from fedbnr_jax import ledger_file, posterior, workflow
from fedbnr_jax.report import figures
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run.records import RunFolder
from tests.runs import tiny

# Adds rows, and dies when the new ledger is to replace the old one.
ADD = """
import os, signal, sys
import pandas as pd
from tests import conftest
from fedbnr_jax import posterior

def die(event, arguments):
  if event == "os.rename" and str(arguments[1]).endswith("posterior.npz"):
    os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die)
posterior.change_rows(sys.argv[1], add=[("new.csv", pd.read_csv(sys.argv[2]))])
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A folder with a run and a table of rows that can join it."""
  home = tmp_path_factory.mktemp("trained")
  config = tiny(kernel="gaussian", num_rounds=1)
  workflow.train(config, home / "run")
  dataset = experiment_lib.load_dataset(config)
  # Rows that the training did not have.
  rows = dataset.features.assign(**{dataset.target_name: dataset.targets + 0.25})
  rows.head(5).to_csv(home / "new.csv", index=False)
  return home, rows.head(5)


def test_rows_join_once_though_the_program_was_killed(trained, tmp_path):
  home, rows = trained
  for name in ("killed", "straight"):
    shutil.copytree(home / "run", tmp_path / name)
  command = [sys.executable, "-c", ADD, tmp_path / "killed", home / "new.csv"]
  done = subprocess.run(command, cwd=tools.ROOT, capture_output=True, check=False)
  assert done.returncode == -signal.SIGKILL, done.stderr.decode()
  assert (tmp_path / "killed" / "posterior.npz.tmp").exists()
  assert ledger_file.changes(RunFolder(tmp_path / "killed").posterior) == ()
  for name in ("killed", "straight"):
    posterior.change_rows(tmp_path / name, add=[("new.csv", rows)])
  assert kills.differences(tmp_path / "killed", tmp_path / "straight") == []


def test_a_figure_that_a_killed_program_left_half_drawn_is_replaced(tmp_path):
  class Figure:
    def savefig(self, path, **options) -> None:
      left.append(sorted(entry.name for entry in tmp_path.iterdir()))
      pathlib.Path(path).write_bytes(b"drawn")

  left: list[list[str]] = []
  for name in ("first.png", "second.png"):
    figures.save(Figure(), tmp_path / name)
  (tmp_path / "second.png.tmp").write_bytes(b"half")
  figures.save(Figure(), tmp_path / "second.png")
  assert left[-1] == ["first.png", "second.png", "second.png.tmp"]
  assert sorted(path.name for path in tmp_path.iterdir()) == ["first.png", "second.png"]


def test_folders_are_compared_but_for_seconds(trained, tmp_path):
  home, _ = trained
  shutil.copytree(home / "run", tmp_path / "run")
  folder = RunFolder(tmp_path / "run")
  (record,) = folder.metrics()
  folder.keep_metrics([record | {"seconds": 99.0}])
  folder.write_summary(folder.summary() | {"seconds": 99.0})
  assert kills.differences(home / "run", folder.path) == []
  folder.keep_metrics([record | {"val_rmse": 99.0}])
  folder.posterior.write_bytes(b"")
  (folder.checkpoints / "2.npz.tmp").write_bytes(b"")
  folder.finished.unlink()
  assert kills.differences(home / "run", folder.path) == [
    *("checkpoint/2.npz.tmp", "metrics.csv", "posterior.npz", "summary.json")
  ]
