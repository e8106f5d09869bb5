"""Trains and evaluates one model.

python -m launch.train --config=configs/default.py --workdir=runs/demo

A second start on the same folder goes on where the first stopped. The folder has all
there is to know of the run in report.html; with --tensorboard also its records as
events, for `tensorboard --logdir=runs`. See launch/distributed.py for several
processes, on one machine or more.
"""

import os
import sys

import ml_collections
from absl import flags

from fedbnr_jax import workflow
from fedbnr_jax.events import EventWriter
from fedbnr_jax.progress import ProgressBar
from fedbnr_jax.report import run as report
from fedbnr_jax.run import processes
from fedbnr_jax.run.coverage import warn_of_coverage
from launch import common, distributed

flags.adopt_module_key_flags(distributed)
flags.declare_key_flag(common.CONFIG)
flags.declare_key_flag(common.WORKDIR)
_TENSORBOARD = flags.DEFINE_bool("tensorboard", False, "Write TensorBoard events too.")


def main() -> None:
  num_local = distributed.num_local()
  if num_local > 1:
    sys.exit(distributed.run_locally("launch.train", num_local))
  config, workdir = common.config(), common.workdir()
  distributed.join()
  train(config, workdir, _TENSORBOARD.value)


def train(
  config: ml_collections.ConfigDict, workdir: str, tensorboard: bool = False
) -> None:
  """Trains in `workdir` and prints the scores; called by every process."""
  # One process of several draws, and on a terminal only.
  progress: workflow.Progress = ProgressBar(
    disable=None if processes.is_first() else True
  )
  if tensorboard and processes.is_first():
    progress = workflow.Watchers(progress, EventWriter(workdir))
  outcome = workflow.train(config, workdir, progress)
  if not processes.is_first():
    return
  if outcome.was_finished:
    print(f"{workdir}: this run is finished; {_where(config, workdir)}.")
    return
  for trial in outcome.trials:
    error = "diverged" if trial.val_rmse is None else f"{trial.val_rmse:.4g}"
    taken = ", taken" if trial.name == outcome.taken else ""
    print(f"tried {trial.name}: validation RMSE {error} ({trial.seconds:.1f} s){taken}")
  for summary in outcome.summaries:
    print(report.summary_text(summary))
    warn_of_coverage(summary)
  if outcome.comparison:
    print(outcome.comparison)
  if outcome.failure:
    raise outcome.failure
  print(f"written to {workdir}: {_where(config, workdir)}")


def _where(config: ml_collections.ConfigDict, workdir: str) -> str:
  """Says which page to look at."""
  if config.num_seeds > 1:
    return "a folder a seed, with its page report.html"
  return f"to look at it, open {os.path.join(workdir, 'report.html')}"


if __name__ == "__main__":
  common.run(main)
