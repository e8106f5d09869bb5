"""Processes on a core each that train run after run, and are replaced when they die.

A worker is a pool of one process from the standard library, started by "spawn", so
that the process imports JAX on its own core.
"""

import contextlib
import multiprocessing
import os
import pathlib
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from fedbnr_jax.files import TEXT
from fedbnr_jax.run import cores
from fedbnr_jax.run.local_processes import is_stopped
from fedbnr_jax.sweep import jobs
from fedbnr_jax.sweep.jobs import Job, Train


class WorkerDiedError(Exception):
  """A worker ended in the midst of a run; the message says how."""


class WorkerStartError(Exception):
  """A worker could not be started; the message says why."""


class Worker:
  """A process on a core, started when it is first needed, and again when it has died.

  It ends with this process, however that ends.
  """

  def __init__(self, core: int, log: pathlib.Path, train: Train) -> None:
    """Starts nothing yet.

    Args:
      core: The one core that the process uses.
      log: File that takes what the process prints outside of runs.
      train: Function at the top level of a module, which the process imports.
    """
    self._core = core
    self._log = log
    self._train = train
    self._pool: ProcessPoolExecutor | None = None
    self._process: BaseProcess | None = None
    self._ready: Future[int] | None = None

  def submit(self, job: Job) -> "Future[str | None]":
    """Starts a job in the worker's process; `result` takes the future once it is done.

    A process that died after its last job is replaced first.
    """
    # The system is asked: the pool's own thread may not have noticed yet.
    if self._process is not None and connection.wait([self._process.sentinel], 0):
      self._bury()
    try:
      return self._pool_with_process().submit(jobs.perform, self._train, job)
    except BrokenProcessPool as error:
      future: Future[str | None] = Future()
      future.set_exception(error)
      return future

  def result(self, future: "Future[str | None]") -> str | None:
    """Returns why the run of a job failed, None if it did not.

    Raises:
      WorkerDiedError: If the process died in the midst of it; the next job gets
        another one.
      WorkerStartError: If the process died before it could do anything.
    """
    try:
      return future.result()
    except BrokenProcessPool as error:
      started = self._ready is not None and self._ready.exception() is None
      fate = self._bury()
      if started:
        raise WorkerDiedError(fate) from error
      raise WorkerStartError(f"{fate}: {self._last_line()}; see {self._log}") from error

  def stopped(self) -> int | None:
    """Returns the process's number if a signal, such as SIGSTOP, has stopped it."""
    pid = self._process.pid if self._process is not None else None
    return pid if pid is not None and is_stopped(pid) else None

  def terminate(self) -> None:
    """Asks the process to end, even in the midst of a run; does not wait."""
    if self._process is not None:
      self._process.terminate()

  def end(self, deadline: float) -> None:
    """Waits for a process that was asked to end; kills it at the deadline.

    Args:
      deadline: A time of `time.monotonic`.
    """
    if self._process is None:
      return
    try:
      self._process.join(max(0.0, deadline - time.monotonic()))
    finally:  # Also on a second Ctrl-C.
      self._process.kill()
      self._bury()

  def _pool_with_process(self) -> ProcessPoolExecutor:
    """Returns the pool, whose process is running or starting."""
    if self._pool is None:
      before = set(multiprocessing.active_children())
      with _inherited_by_children(self._core, self._log):
        pool = ProcessPoolExecutor(
          max_workers=1,
          mp_context=multiprocessing.get_context("spawn"),
          initializer=jobs.prepare,
          initargs=(str(self._log),),
        )
        # The first job starts the process, at once, and tells when it is ready.
        self._ready = pool.submit(os.getpid)
      (self._process,) = set(multiprocessing.active_children()) - before
      self._pool = pool
    return self._pool

  def _bury(self) -> str:
    """Forgets a process that is dead; returns how it ended."""
    assert self._pool is not None
    assert self._process is not None
    self._pool.shutdown()  # Waits for the pool's own threads, which reap the process.
    self._process.join()
    status = self._process.exitcode
    self._pool = self._process = None
    if status is None or status >= 0:
      return f"exit status {status}"
    try:
      name = signal.Signals(-status).name
    except ValueError:
      name = f"signal {-status}"
    hint = ", perhaps for want of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"

  def _last_line(self) -> str:
    lines = self._log.read_text(**TEXT).split("\n")
    return next(
      (line.strip() for line in reversed(lines) if line.strip()), "no message"
    )


def stop(workers: Sequence[Worker]) -> None:
  """Ends all processes, those in the midst of a run too."""
  deadline = time.monotonic() + 1.5 * jobs.GRACE
  for worker in workers:
    worker.terminate()
  for worker in workers:
    worker.end(deadline)


@contextlib.contextmanager
def _inherited_by_children(core: int, log: pathlib.Path) -> Iterator[None]:
  """Sets what a process that is started inside has from its first moment on.

  It is on its core when it imports JAX. What it prints while it starts is in its log.
  Ctrl-C, which reaches every process of a terminal, it leaves to this one.
  """
  with cores.pinned(core), open(log, "w") as file, contextlib.ExitStack() as stack:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
    for output in (1, 2):
      with contextlib.suppress(OSError):  # Closed: so it will be in the child.
        copy = os.dup(output)
        stack.callback(os.close, copy)
        os.dup2(file.fileno(), output)
        stack.callback(os.dup2, copy, output)
    yield
