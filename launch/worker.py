"""A process that trains run after run: how it is spoken to, and what it does.

`launch.sweep` starts it as `python -m launch.worker`; it is no program for the shell.
A line of JSON on its stdin names a run, and a line on its stdout says what became of
it. When stdin ends, because the sweep is done or dead, so does the worker.
"""

import concurrent.futures
import contextlib
import faulthandler
import gc
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import jax
import ml_collections

from fedbnr_jax.errors import InputError
from fedbnr_jax.training import NonFiniteError
from launch import common

_ROOT = pathlib.Path(__file__).parent.parent
_MAX_STARTS = 3
# Compiled programs serve later runs of the same shapes, but must not pile up.
_RUNS_BETWEEN_CLEARINGS = 8
_GRACE = 5.0  # Seconds for a run that is stopped to close its checkpoint.


class Job(NamedTuple):
  """One run, as it is told to a worker."""

  config: dict[str, Any]  # The whole of it, as the sweep has checked it.
  workdir: str
  log: str  # File that takes what the run prints.
  command: str  # What would do the same from the shell, for the reader of the log.


class WorkerDiedError(Exception):
  """A worker ended in the midst of a run; the message says how."""


class WorkerStartError(Exception):
  """A worker could not be started; the message says why."""


# ------------------------------------------------------------------ the sweep's side


class Worker:
  """A worker process on a core, started when it is first needed, and again if it dies.

  Its stdin, once closed, tells the process to end; so does the death of this one.
  """

  def __init__(self, core: int, log: pathlib.Path) -> None:
    self._core = core
    self._log = log  # Takes what the process prints outside of runs.
    self._process: subprocess.Popen[str] | None = None
    self._stopped = False
    self._lock = threading.Lock()  # One thread trains, another may stop.
    self._thread = concurrent.futures.ThreadPoolExecutor(1)

  def submit(self, job: Job) -> "concurrent.futures.Future[str | None]":
    """Trains in the background; the result is why the run failed, None if it did not.

    The future may also raise WorkerDiedError, after which the next job gets another
    process, or WorkerStartError, if there is none to be had.
    """
    return self._thread.submit(self._train, job)

  def close(self) -> None:
    """Asks the process to end, even in the midst of a run; does not wait."""
    with self._lock:
      self._stopped = True
      _close(self._process)

  def end(self, deadline: float) -> None:
    """Waits for a process that was asked to end; kills it at the deadline."""
    _reap(self._process, deadline)
    self._thread.shutdown()
    if self._process and self._process.stdout:
      self._process.stdout.close()

  def _train(self, job: Job) -> str | None:
    if self._process is None or self._process.poll() is not None:
      self._start()
    self._tell(job)
    answer = self._answer()
    if answer is None:
      raise WorkerDiedError(self._fate())
    reason: str | None = answer["reason"]
    return reason

  def _start(self) -> None:
    """Starts a process and waits until it is ready."""
    for _ in range(_MAX_STARTS):
      with self._lock:
        if self._stopped:
          raise WorkerStartError("the sweep was stopped")
        self._process = self._popen()
      if self._answer() is not None:
        return
      fate = self._fate()
    lines = self._log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "no message")
    raise WorkerStartError(f"{fate}: {last.strip()}; see {self._log}")

  def _popen(self) -> subprocess.Popen[str]:
    # Ctrl-C reaches every process of the terminal. A worker leaves it to the sweep,
    # from its first moment on: it inherits what this thread does not let through.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
      with open(self._log, "w") as log:
        return subprocess.Popen(
          [sys.executable, "-m", "launch.worker"],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=log,
          text=True,
          env=os.environ | {"FEDBNR_CORE": str(self._core)},  # See launch/__init__.py.
          cwd=_ROOT,
        )
    except OSError as error:
      raise WorkerStartError(str(error)) from error
    finally:
      signal.pthread_sigmask(signal.SIG_SETMASK, mask)

  def _tell(self, job: Job) -> None:
    with self._lock:
      if self._process and self._process.stdin and not self._stopped:
        with contextlib.suppress(OSError):  # It is dead: then there is no answer.
          self._process.stdin.write(json.dumps(job._asdict()) + "\n")
          self._process.stdin.flush()

  def _answer(self) -> dict[str, Any] | None:
    """The next answer; None if the process died before it."""
    if self._process and self._process.stdout:
      for line in self._process.stdout:
        with contextlib.suppress(json.JSONDecodeError):  # What an import printed.
          answer = json.loads(line)
          if isinstance(answer, dict):
            return answer
    return None

  def _fate(self) -> str:
    """How the process ended, which has said its last word."""
    process = self._process
    assert process is not None
    assert process.stdout is not None
    _reap(process, time.monotonic() + _GRACE)
    _close(process)
    process.stdout.close()
    status = process.returncode
    if status >= 0:
      return f"exit status {status}"
    try:
      name = signal.Signals(-status).name
    except ValueError:
      name = f"signal {-status}"
    hint = ", perhaps for want of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def stop(workers: Sequence[Worker]) -> None:
  """Ends all processes, those in the midst of a run too."""
  deadline = time.monotonic() + 1.5 * _GRACE
  for worker in workers:
    worker.close()
  for worker in workers:
    worker.end(deadline)


def _close(process: subprocess.Popen[str] | None) -> None:
  if process and process.stdin:
    with contextlib.suppress(OSError):  # It may be dead, with a line still unread.
      process.stdin.close()


def _reap(process: subprocess.Popen[str] | None, deadline: float) -> None:
  """Waits for the end of a process, until a time of `time.monotonic` at most."""
  if process is None:
    return
  try:
    process.wait(max(0.0, deadline - time.monotonic()))
  except subprocess.TimeoutExpired:
    pass
  finally:  # Also on a second Ctrl-C.
    process.kill()
    process.wait()


# ----------------------------------------------------------------- the worker's side


def main() -> None:
  # The answers keep the pipe to themselves: whatever a library prints goes to a log.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
  faulthandler.enable()  # A crash of compiled code leaves a traceback in the log.
  jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
  signal.signal(signal.SIGTERM, common.interrupt)
  with contextlib.suppress(KeyboardInterrupt):
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    _say(answers, {"ready": True})
    for number, job in enumerate(iter(jobs.get, None), 1):
      reason = train(job)
      if number % _RUNS_BETWEEN_CLEARINGS == 0:
        jax.clear_caches()
      gc.collect()  # Programs and their data refer to one another in circles.
      _say(answers, {"reason": reason})
  # Nobody listens any more. Without the ceremony of Python's end, which Orbax may
  # disturb and be disturbed by: half a checkpoint is dropped at the next start.
  os._exit(0)


def train(job: Job) -> str | None:
  """Does what `launch.train` does; returns the line it would fail with, if it does."""
  # Here, because a sweep imports this module too and has no use for the flags.
  from launch import train as launch_train

  try:
    with _printing_to(job.log):
      print(f"$ {job.command}")
      try:
        launch_train.train(ml_collections.ConfigDict(job.config), job.workdir)
      except (InputError, NonFiniteError) as error:
        line = f"error: {' '.join(str(error).split())}"
        print(line, file=sys.stderr)
        return line
      except Exception:
        traceback.print_exc()
        raise
  except Exception as error:  # A bug: the next run may not meet it.
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}; see {job.log}"
  return None


def _listen(jobs: "queue.SimpleQueue[Job | None]") -> None:
  """Passes jobs on; ends the process when no more can come."""
  main_thread = threading.main_thread().ident
  with os.fdopen(os.dup(0)) as lines:
    for line in lines:
      jobs.put(Job(**json.loads(line)))
  jobs.put(None)
  if main_thread is not None:
    signal.pthread_kill(main_thread, signal.SIGTERM)  # It may be in a run.
  time.sleep(_GRACE)  # A run takes notice between rounds, which may be long.
  os._exit(1)


def _say(answers: IO[str], answer: dict[str, Any]) -> None:
  print(json.dumps(answer), file=answers, flush=True)


@contextlib.contextmanager
def _printing_to(path: str) -> Iterator[None]:
  """Sends all output to the end of a file, also that of libraries in C."""
  # Warnings that an earlier run gave are news again: catching forgets them.
  with open(path, "a") as log, warnings.catch_warnings():
    before = {stream: os.dup(stream.fileno()) for stream in (sys.stdout, sys.stderr)}
    for stream in before:
      os.dup2(log.fileno(), stream.fileno())
    try:
      yield
    finally:
      for stream, copy in before.items():
        stream.flush()
        os.dup2(copy, stream.fileno())
        os.close(copy)


if __name__ == "__main__":
  common.run(main)
