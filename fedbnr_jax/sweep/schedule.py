"""The order of a sweep: which run waits, which worker trains which, what failed."""

import collections
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

from fedbnr_jax.errors import InputError
from fedbnr_jax.sweep import workers as workers_lib
from fedbnr_jax.sweep.grid import Run
from fedbnr_jax.sweep.jobs import Job
from fedbnr_jax.sweep.workers import Worker, WorkerDiedError, WorkerStartError

_MAX_DEATHS = 3  # Workers that may die over one run before it has failed.
_MAX_STARTS = 3  # Times that a worker may fail to start before it is given up.


class Standing(NamedTuple):
  """Where a sweep stands."""

  num_runs: int
  num_left: int  # Waiting or running.
  num_failed: int
  running: tuple[str, ...]  # Names of runs.


class Schedule:
  """The runs that are left of a sweep, and the workers that train them."""

  def __init__(
    self,
    waiting: Sequence[Run],
    workers: Sequence[Worker],
    job_of: Callable[[Run], Job],
    on_message: Callable[[str], None],
  ) -> None:
    """Starts nothing yet.

    Args:
      waiting: Runs, in the order in which they are trained.
      workers: Of which each trains one run at a time.
      job_of: Gives what a worker needs to know of a run.
      on_message: Is called with a line for the user about each death and failure.
    """
    self.failures: dict[str, str] = {}  # Reason, by the run's name.
    self._waiting = collections.deque(waiting)
    self._running: dict[Future[str | None], tuple[Run, Worker]] = {}
    self._workers = workers
    self._idle = collections.deque(workers)
    self._num_deaths: collections.Counter[Run] = collections.Counter()
    self._num_failed_starts: collections.Counter[Worker] = collections.Counter()
    self._num_rests: collections.Counter[Worker] = collections.Counter()
    self._job_of = job_of
    self._on_message = on_message

  @property
  def num_left(self) -> int:
    return len(self._waiting) + len(self._running)

  def progress(self, num_runs: int) -> Standing:
    names = tuple(run.name for run, _ in self._running.values())
    return Standing(num_runs, self.num_left, len(self.failures), names)

  def start(self) -> None:
    """Gives every idle worker a run, as far as there are any."""
    while self._waiting and self._idle:
      run, worker = self._waiting.popleft(), self._idle.popleft()
      try:
        self._running[worker.submit(self._job_of(run))] = run, worker
      except OSError as error:  # No memory, or too many processes.
        self._give_back(run, worker, WorkerStartError(str(error)))

  def ended(self, seconds: float) -> list[tuple[Run, str | None]]:
    """Waits for ends of runs, for so long at most.

    Returns:
      The runs that were done, and those that failed with the reason. A run whose
      worker died, and that is to be tried again, is not among them.
    """
    futures = wait(self._running, seconds, FIRST_COMPLETED).done
    outcomes = [self._outcome(future) for future in futures]
    self._tell_of_rests()
    return [outcome for outcome in outcomes if outcome is not None]

  def stop(self) -> None:
    """Ends all workers, those in the midst of a run too."""
    workers_lib.stop(self._workers)

  def _tell_of_rests(self) -> None:
    """Tells, once, of each worker that was stopped and still is at the second look."""
    for run, worker in self._running.values():
      pid = worker.stopped()
      self._num_rests[worker] = self._num_rests[worker] + 1 if pid else 0
      if self._num_rests[worker] == 2:
        self._on_message(
          f"{run.name}: a signal has stopped its worker: 'kill -CONT {pid}' lets it go "
          f"on, 'kill -KILL {pid}' has it replaced"
        )

  def _outcome(self, future: "Future[str | None]") -> tuple[Run, str | None] | None:
    run, worker = self._running.pop(future)
    try:
      failure = worker.result(future)
    except WorkerStartError as error:
      self._give_back(run, worker, error)
      return None
    except WorkerDiedError as error:
      self._num_deaths[run] += 1
      if self._num_deaths[run] < _MAX_DEATHS:
        self._on_message(f"{run.name}: its worker died ({error}) and is replaced")
        self._waiting.appendleft(run)
        self._idle.append(worker)
        return None
      failure = f"its worker died {_MAX_DEATHS} times (at last {error})"
    self._idle.append(worker)
    if failure is not None:
      self.failures[run.name] = failure
      self._on_message(f"{run.name} failed: {failure}")
    return run, failure

  def _give_back(self, run: Run, worker: Worker, error: WorkerStartError) -> None:
    """Has a run wait again whose worker could not start."""
    self._waiting.appendleft(run)
    self._num_failed_starts[worker] += 1
    if self._num_failed_starts[worker] < _MAX_STARTS:
      self._idle.append(worker)
      return
    self._on_message(f"a worker is given up, for it cannot start ({error})")
    if not self._idle and not self._running:
      raise InputError(f"no worker can start ({error}).") from error
