"""Runs a grid of trainings, one pinned worker a core, into one table.

python -m launch.sweep --config=configs/paper_table.py --workdir=runs/paper_table

Every run has its own folder under `workdir/runs`, and what it printed in
`workdir/logs`; a second start skips what is finished and takes up what was stopped.
`results.csv` is rewritten after every run. --shard=2/3 runs the second third, for one
of three machines, into `results-2of3.csv`; `launch.tables` takes all their files.
"""

import collections
import contextlib
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import ml_collections
import pandas as pd
from absl import flags
from tqdm import tqdm

from fedbnr_jax.errors import InputError
from fedbnr_jax.records import RunFolder, as_json, usable
from launch import common
from launch import worker as worker_lib
from launch.grid import Run, expand
from launch.worker import Job, Worker, WorkerDiedError, WorkerStartError

try:
  import fcntl
except ImportError:  # Not on Windows.
  fcntl = None  # type: ignore[assignment]

_WORKERS = flags.DEFINE_string("workers", "auto", "Runs at a time; auto: one a core.")
_SHARD = flags.DEFINE_string("shard", "1/1", "i/n: every n-th run, from the i-th on.")

_MAX_DEATHS = 3  # Of workers over one run; then it has failed.


class Results:
  """One table of all runs, from what is on disk: summaries, and why others failed."""

  def __init__(
    self,
    path: pathlib.Path,
    logs: pathlib.Path,
    runs: dict[Run, ml_collections.ConfigDict],
    folders: dict[str, RunFolder],
  ) -> None:
    self._path, self._logs, self._runs, self._folders = path, logs, runs, folders
    self._done: dict[str, dict[str, Any]] = {}  # Summaries do not change.

  def note(self, run: Run, failure: str | None) -> None:
    """Keeps why a run failed, until it is done."""
    file = self._failure_file(run)
    with usable(self._path.parent):
      if failure is None:
        file.unlink(missing_ok=True)
      else:
        file.write_text(failure)

  def write(self) -> None:
    """Rewrites the table at one stroke."""
    with usable(self._path.parent):
      rows = [row for run in self._runs for row in self._rows(run)]
      if rows:
        part = self._path.with_suffix(".tmp")
        pd.DataFrame(rows).to_csv(part, index=False)
        os.replace(part, self._path)

  def _rows(self, run: Run) -> list[dict[str, Any]]:
    """None for a run that has not ended; several for one of a pooled method."""
    config = self._runs[run]
    known = {
      "dataset": config.data.name or pathlib.Path(config.data.path).stem,
      "method": config.method,
      "num_clients": config.num_clients,
      "seed": config.seed,
    }
    summary = self._done.get(run.name) or self._folders[run.name].summary()
    state = {"status": "done", "reason": ""}
    if summary:
      self._done[run.name] = summary
    elif self._failure_file(run).exists():
      state = {"status": "failed", "reason": self._failure_file(run).read_text()}
    else:
      return []
    fields = {f"config.{name}": v for name, v in run.fields if name not in known}
    row = known | (summary or {}) | fields | state
    counts = [{"num_clients": count} for count in run.counts if len(run.counts) > 1]
    return [row | count for count in counts or [{}]]

  def _failure_file(self, run: Run) -> pathlib.Path:
    return self._logs / f"{run.name}.failed"


@contextlib.contextmanager
def alone_with(path: pathlib.Path) -> Iterator[None]:
  """Keeps a second sweep from training the same runs at the same time."""
  with usable(path.parent):
    file = open(path.with_suffix(".lock"), "w")  # noqa: SIM115  Closed below.
  with file:
    if fcntl is not None:
      try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise InputError(
          f"another sweep is at work in {path.parent}: wait for it, or choose another "
          "workdir."
        ) from error
    yield


def parse_workers(text: str) -> int:
  """The number of workers that --workers asks for."""
  if text == "auto":
    return len(common.available_cores())
  if not text.isdecimal() or int(text) < 1:
    raise InputError(f"--workers is {text!r}: give 'auto' or a number from 1 on.")
  return int(text)


def parse_shard(text: str) -> tuple[int, int]:
  """(i, n) of --shard=i/n, i counted from 1."""
  first, slash, second = text.partition("/")
  if not (slash and first.isdecimal() and second.isdecimal()):
    raise InputError(f"--shard is {text!r}: give i/n, as 2/3.")
  index, count = int(first), int(second)
  if not 1 <= index <= count:
    raise InputError(f"--shard is {text!r}: i must be from 1 to n.")
  return index, count


class Schedule:
  """Which run is waiting, trained by which worker, done, or failed."""

  def __init__(self, waiting: Sequence[Run], workers: Sequence[Worker]) -> None:
    self.failures: dict[str, str] = {}  # Of a run's name: why.
    self.running: dict[Future[str | None], tuple[Run, Worker]] = {}
    self._waiting = collections.deque(waiting)
    self._workers = workers
    self._idle = collections.deque(workers)
    self._num_deaths: collections.Counter[Run] = collections.Counter()

  @property
  def num_left(self) -> int:
    return len(self._waiting) + len(self.running)

  def close(self) -> None:
    worker_lib.stop(self._workers)

  def start(self, job_of: Callable[[Run], Job]) -> None:
    """Gives every idle worker a run, as far as there are any."""
    while self._waiting and self._idle:
      run, worker = self._waiting.popleft(), self._idle.popleft()
      self.running[worker.submit(job_of(run))] = run, worker

  def settle(self, future: "Future[str | None]") -> tuple[Run, str | None]:
    """Takes notice of the end of a run, or of its worker: which, and why it failed."""
    run, worker = self.running.pop(future)
    try:
      failure = future.result()
    except WorkerStartError as error:
      tqdm.write(f"a worker is given up, for it cannot start ({error})")
      self._waiting.appendleft(run)
      if not self._idle and not self.running:
        raise InputError(f"no worker can start ({error}).") from error
      return run, None
    except WorkerDiedError as error:
      self._num_deaths[run] += 1
      if self._num_deaths[run] < _MAX_DEATHS:
        tqdm.write(f"{run.name}: its worker died ({error}) and is replaced")
        self._waiting.appendleft(run)
        failure = None
      else:
        failure = f"its worker died {_MAX_DEATHS} times (at last {error})"
    self._idle.append(worker)
    if failure is not None:
      self.failures[run.name] = failure
      tqdm.write(f"{run.name} failed: {failure}")
    return run, failure


class Progress:
  """One line: runs done, the time left, failures so far, and what runs now."""

  def __init__(self, num_runs: int, num_done: int) -> None:
    text = (
      "{percentage:3.0f}% {n_fmt}/{total_fmt} runs [{elapsed}<{remaining}{postfix}]"
    )
    # Runs end irregularly, so the mean over all tells more than the last few.
    self._bar = tqdm(total=num_runs, initial=num_done, bar_format=text, smoothing=0)
    # Between two changes the clock goes on, but only where lines can be rewritten.
    self.pause = 1.0 if sys.stderr.isatty() else None

  def show(self, schedule: Schedule) -> None:
    """Tells where things stand."""
    self._bar.n = (self._bar.total or 0) - schedule.num_left
    names = ", ".join(run.name for run, _ in schedule.running.values())
    now = f"; now {names}" if names else ""
    self._bar.set_postfix_str(f"{len(schedule.failures)} failed{now}")

  def close(self) -> None:
    self._bar.close()


def main() -> None:
  num_workers = parse_workers(_WORKERS.value)
  workdir = pathlib.Path(common.workdir()).absolute()
  sweep(common.config(), workdir, num_workers, parse_shard(_SHARD.value))


def sweep(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  num_workers: int,
  shard: tuple[int, int] = (1, 1),
) -> None:
  """Runs what is left of the grid, or of its shard, and keeps `results.csv` so."""
  index, count = shard
  # Neighbours in the grid take about as long, so that shards are of equal length.
  grid = expand(config)
  runs = dict(list(grid.items())[index - 1 :: count])
  if not runs:
    raise InputError(f"--shard={index}/{count} is empty: the grid has fewer runs.")
  folders = {run.name: RunFolder(workdir / "runs" / run.name) for run in grid}
  if len(folders) < len(grid):
    raise InputError("two points of the grid have the same name: see config.grid.")
  waiting = [
    run for run in runs if not common.is_finished(folders[run.name], runs[run])
  ]
  # Shards may share the folder, and nothing that two of them write.
  suffix = f"-{index}of{count}" if count > 1 else ""
  logs, path = workdir / "logs", workdir / f"results{suffix}.csv"
  with usable(workdir):
    for folder in (workdir / "runs", logs):
      folder.mkdir(parents=True, exist_ok=True)
  cores = common.available_cores()
  workers = [
    Worker(cores[number % len(cores)], logs / f"worker{suffix}-{number}.log")
    for number in range(min(num_workers, len(waiting)))
  ]

  def job(run: Run) -> Job:
    folder = folders[run.name].path
    log = logs / f"{run.name}.log"
    command = shlex.join(run.command(folder))
    return Job(as_json(runs[run]), str(folder), str(log), command)

  with alone_with(path):
    schedule = Schedule(waiting, workers)
    results = Results(path, logs, runs, folders)
    work_off(schedule, job, results, Progress(len(runs), len(runs) - len(waiting)))
  failures = schedule.failures
  print(f"{len(runs) - len(failures)} of {len(runs)} runs done; see {path}")
  if failures:
    raise InputError(
      f"{len(failures)} runs failed: {', '.join(failures)}; their logs are in {logs}."
    )


def work_off(
  schedule: Schedule, job: Callable[[Run], Job], results: Results, progress: Progress
) -> None:
  """Until every run is done or has failed; the table is true all the time."""
  try:
    results.write()
    while schedule.num_left:
      schedule.start(job)
      progress.show(schedule)
      for future in wait(schedule.running, progress.pause, FIRST_COMPLETED).done:
        results.note(*schedule.settle(future))
        results.write()
    progress.show(schedule)
  finally:
    schedule.close()
    progress.close()


if __name__ == "__main__":
  common.run(main)
