"""Runs a grid of trainings, one pinned worker a core, into one table.

python -m launch.sweep --config=configs/paper_table.py --workdir=runs/paper_table

Every run has its own folder under `workdir/runs`, and what it printed in
`workdir/logs`; a second start skips what is finished and takes up what was stopped.
`results.csv` is rewritten after every run. --shard=2/3 runs the second third, for one
of three machines, into `results-2of3.csv`; `launch.tables` takes all their files.
"""

import pathlib
import sys

import ml_collections
from absl import flags
from tqdm import tqdm

from fedbnr_jax.errors import InputError
from fedbnr_jax.run import cores
from fedbnr_jax.sweep.run_grid import run_grid
from fedbnr_jax.sweep.schedule import Standing
from launch import common

flags.declare_key_flag(common.CONFIG)
flags.declare_key_flag(common.WORKDIR)
_WORKERS = flags.DEFINE_string("workers", "auto", "Runs at a time; auto: one a core.")
_SHARD = flags.DEFINE_string("shard", "1/1", "i/n: every n-th run, from the i-th on.")

_ROOT = pathlib.Path(__file__).parent.parent


def main() -> None:
  num_workers = parse_workers(_WORKERS.value)
  workdir = pathlib.Path(common.workdir())
  sweep(common.config(), workdir, num_workers, parse_shard(_SHARD.value))


def sweep(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  num_workers: int,
  shard: tuple[int, int] = (1, 1),
) -> None:
  """Runs what is left of the grid, or of its shard, and tells what became of it."""
  with Bar() as bar:
    outcome = run_grid(
      config,
      workdir,
      num_workers,
      shard,
      _ROOT,
      train,
      on_message=tqdm.write,
      on_progress=bar.show,
    )
  failures = outcome.failures
  num_done = outcome.num_runs - len(failures)
  print(f"{num_done} of {outcome.num_runs} runs done; see {outcome.table}")
  if failures:
    raise InputError(
      f"{len(failures)} runs failed: {', '.join(failures)}; their logs are in "
      f"{outcome.logs}."
    )


def train(config: ml_collections.ConfigDict, folder: str) -> None:
  """Does in a worker what `launch.train` does."""
  # Here, because the sweep itself has no use for the flags that this defines.
  from launch import train as launch_train

  common.set_up_jax()
  launch_train.train(config, folder)


def parse_workers(text: str) -> int:
  """Returns the number of workers that --workers asks for."""
  if text == "auto":
    return len(cores.available_cores())
  if not text.isdecimal() or int(text) < 1:
    raise InputError(f"--workers is {text!r}: give 'auto' or a number from 1 on.")
  return int(text)


def parse_shard(text: str) -> tuple[int, int]:
  """Returns (i, n) of --shard=i/n, i counted from 1."""
  first, slash, second = text.partition("/")
  if not (slash and first.isdecimal() and second.isdecimal()):
    raise InputError(f"--shard is {text!r}: give i/n, as 2/3.")
  index, count = int(first), int(second)
  if not 1 <= index <= count:
    raise InputError(f"--shard is {text!r}: i must be from 1 to n.")
  return index, count


class Bar:
  """One line: runs done, the time left, failures so far, and what runs now."""

  def __init__(self) -> None:
    self._bar: tqdm | None = None
    self._shown: Standing | None = None

  def __enter__(self) -> "Bar":
    return self

  def __exit__(self, *exception: object) -> None:
    if self._bar is not None:
      self._bar.close()

  def show(self, progress: Standing) -> None:
    """Draws the line anew; where lines cannot be rewritten, only when it changes."""
    if progress == self._shown and not sys.stderr.isatty():
      return
    self._shown = progress
    num_done = progress.num_runs - progress.num_left
    if self._bar is None:
      text = (
        "{percentage:3.0f}% {n_fmt}/{total_fmt} runs [{elapsed}<{remaining}{postfix}]"
      )
      # Runs end irregularly, so the mean over all tells more than the last few.
      self._bar = tqdm(
        total=progress.num_runs, initial=num_done, bar_format=text, smoothing=0
      )
    self._bar.n = num_done
    now = f"; now {', '.join(progress.running)}" if progress.running else ""
    self._bar.set_postfix_str(f"{progress.num_failed} failed{now}")


if __name__ == "__main__":
  common.run(main)
