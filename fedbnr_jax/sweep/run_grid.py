"""A whole sweep: what is left of a grid is trained, and the table kept up to date.

Every run has its own folder under `workdir/runs`, and what it printed in
`workdir/logs`; a second start skips what is finished and takes up what was stopped.
"""

import contextlib
import multiprocessing
import pathlib
import shlex
from collections.abc import Callable
from typing import NamedTuple

import ml_collections

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.lock import NAME, alone_in
from fedbnr_jax.run import cores
from fedbnr_jax.run.records import RunFolder, as_json
from fedbnr_jax.sweep import jobs
from fedbnr_jax.sweep.grid import Run, expand
from fedbnr_jax.sweep.jobs import Job, Train
from fedbnr_jax.sweep.schedule import Schedule, Standing
from fedbnr_jax.sweep.table import RunTable
from fedbnr_jax.sweep.workers import Worker
from fedbnr_jax.workflow import is_finished

_PAUSE = 1.0  # Seconds between two calls of `on_progress` while nothing ends.


class Outcome(NamedTuple):
  """What became of a sweep."""

  num_runs: int
  failures: dict[str, str]  # Reason, by the run's name.
  table: pathlib.Path
  logs: pathlib.Path  # Folder.


def run_grid(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  num_workers: int | None = None,
  shard: tuple[int, int] = (1, 1),
  root: pathlib.Path | None = None,
  train: Train = jobs.train,
  on_message: Callable[[str], None] = lambda line: None,
  on_progress: Callable[[Standing], None] = lambda progress: None,
) -> Outcome:
  """Trains what is left of a grid; `results.csv` in `workdir` is true all the time.

  Workers are spawned: a script must call this under `if __name__ == "__main__":`.

  Args:
    config: What `grid.config` returns.
    workdir: Folder of the sweep.
    num_workers: Runs at a time; None for one a core.
    shard: (i, n) takes every n-th run, from the i-th on, for one of n machines; the
      table is `results-{i}of{n}.csv` then.
    root: Folder that `config.base` starts from; None for the current one.
    train: Trains one config in one folder, and may print into the run's log; a
      function at the top level of a module, which the workers import.
    on_message: Is called with a line about each failure and each worker's death.
    on_progress: Is called at every change, and about once a second.

  Raises:
    InputError: If the grid is refused, or the folder, or no worker can start.
  """
  _refuse_inside_a_starting_worker()
  index, count = shard
  grid = expand(config, root)
  # Neighbours in the grid take about as long, so that shards are of equal length.
  runs = dict(list(grid.items())[index - 1 :: count])
  if not runs:
    raise InputError(f"shard {index}/{count} is empty: the grid has fewer runs.")
  workdir = workdir.absolute()
  folders = {run.name: RunFolder(workdir / "runs" / run.name) for run in grid}
  if len(folders) < len(grid):
    raise InputError("two points of the grid have the same name: see config.grid.")
  waiting = [run for run in runs if not is_finished(folders[run.name], runs[run])]
  # Shards may share the folder, and nothing that two of them write.
  suffix = f"-{index}of{count}" if count > 1 else ""
  logs, path = workdir / "logs", workdir / f"results{suffix}.csv"
  with explain_os_errors(workdir):
    for folder in (workdir / "runs", logs):
      folder.mkdir(parents=True, exist_ok=True)
  available = cores.available_cores()
  workers = [
    Worker(available[n % len(available)], logs / f"worker{suffix}-{n}.log", train)
    for n in range(min(num_workers or len(available), len(waiting)))
  ]

  def job(run: Run) -> Job:
    folder = folders[run.name].path
    command = shlex.join(run.command(folder))
    return Job(as_json(runs[run]), str(folder), f"{logs / run.name}.log", command)

  schedule = Schedule(waiting, workers, job, on_message)
  with contextlib.ExitStack() as locks:
    # A whole sweep has the folder to itself; shards share it, each with its part.
    locks.enter_context(alone_in(workdir, shared=count > 1))
    if count > 1:
      locks.enter_context(alone_in(workdir, f"{NAME}{suffix}"))
    table = RunTable(path, logs, runs, folders)
    _work_off(schedule, table, lambda: on_progress(schedule.progress(len(runs))))
    _write_page(path, workdir / f"report{suffix}.html")
  return Outcome(len(runs), schedule.failures, path, logs)


def _write_page(results: pathlib.Path, path: pathlib.Path) -> None:
  """Writes the page of the sweep's results beside them."""
  # Here, because Matplotlib takes long to import, and workers import this module.
  from fedbnr_jax.report import results_page, tables

  with explain_os_errors(path):
    results_page.write(tables.read_results(results), results.parent.name, path)


def _refuse_inside_a_starting_worker() -> None:
  """Raises InputError where a worker, as it starts, runs the script that started it."""
  if getattr(multiprocessing.current_process(), "_inheriting", False):
    raise InputError(
      "the workers import this script: call run_grid under 'if __name__ == "
      '"__main__":\'.'
    )


def _work_off(
  schedule: Schedule, table: RunTable, on_progress: Callable[[], None]
) -> None:
  """Returns when every run is done or has failed; the workers have ended then."""
  try:
    table.write()
    while schedule.num_left:
      schedule.start()
      on_progress()
      for run, failure in schedule.ended(_PAUSE):
        table.record(run, failure)
        table.write()
    on_progress()
  finally:
    schedule.stop()
