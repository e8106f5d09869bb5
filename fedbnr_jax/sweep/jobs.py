"""What a worker process does: it trains one run after another, each with its own log.

Everything here runs in the worker's process; see workers.py for who starts it.
"""

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import jax
import ml_collections
from tqdm import tqdm

from fedbnr_jax import precision, workflow
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import TEXT
from fedbnr_jax.run import cores
from fedbnr_jax.run.training import NonFiniteError

# Seconds for a run that is stopped to close its checkpoint.
GRACE = 5.0
# Compiled programs serve later runs of the same shapes, but must not pile up.
_RUNS_BETWEEN_CLEARINGS = 8

# Trains a config in a folder.
Train = Callable[[ml_collections.ConfigDict, str], None]


class Job(NamedTuple):
  """One run of a sweep."""

  config: dict[str, Any]  # The training's config, whole and valid.
  folder: str  # Where the run writes its files.
  log: str  # File that takes what the run prints.
  command: str  # What does the same from the shell, for the reader of the log.


_num_runs = itertools.count(1)
# Whatever fails once this is set does so because the run is stopped.
_stopped = threading.Event()


def prepare(log: str) -> None:
  """Readies a process that has just started for its first job.

  Args:
    log: File that takes what the process prints outside of runs.
  """
  os.environ.update(cores.one_thread_environment())
  _print_to(log)
  sys.stdout = open(1, "w", buffering=1, closefd=False, **TEXT)  # noqa: SIM115
  sys.stderr = open(2, "w", buffering=1, closefd=False, **TEXT)  # noqa: SIM115
  # tqdm's own lock is one between processes, which a kill would leave behind.
  tqdm.set_lock(threading.RLock())
  faulthandler.enable()  # A crash of compiled code leaves a traceback in the log.
  threading.Thread(target=_end_with_parent, daemon=True).start()


def train(config: ml_collections.ConfigDict, folder: str) -> None:
  """Trains a run and prints nothing."""
  with precision.float64():
    outcome = workflow.train(config, folder)
  if outcome.failure:
    raise outcome.failure


def perform(train: Train, job: Job) -> str | None:
  """Trains; returns the line that the run fails with, None if it does not fail."""
  before = signal.signal(signal.SIGTERM, _interrupt)
  try:
    return _failure(train, job)
  except KeyboardInterrupt:
    # Without the ceremony of Python's end: half a checkpoint is dropped at the next
    # start.
    os._exit(0)
  finally:
    signal.signal(signal.SIGTERM, before)
    if next(_num_runs) % _RUNS_BETWEEN_CLEARINGS == 0:
      jax.clear_caches()
    gc.collect()  # Programs and their data refer to one another in circles.


def _failure(train: Train, job: Job) -> str | None:
  with _printing_to(job.log):
    print(f"$ {job.command}", file=sys.stderr)
    try:
      train(ml_collections.ConfigDict(job.config), job.folder)
    except (InputError, NonFiniteError) as error:
      line = f"error: {' '.join(str(error).split())}"
      print(line, file=sys.stderr)
      return line
    except Exception as error:  # A bug: the next run may not meet it.
      if _stopped.is_set():
        raise KeyboardInterrupt from error
      traceback.print_exc()
      text = " ".join(str(error).split())[:200]
      return f"{type(error).__name__}: {text}; see {job.log}"
  return None


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
  """Stops a run: it takes notice between two rounds, and closes its checkpoint."""
  _stopped.set()
  raise KeyboardInterrupt


def _end_with_parent() -> None:
  """Ends this process when the one that started it is gone, even by SIGKILL.

  At once: until then the run is locked, and a sweep that is started again could not
  take it up. Half a checkpoint is dropped then.
  """
  parent = multiprocessing.parent_process()
  if parent is not None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _printing_to(path: str) -> Iterator[None]:
  """Sends all output to the end of a file, also that of libraries in C."""
  before = {output: os.dup(output) for output in (1, 2)}
  # Warnings that an earlier run gave are news again: catching forgets them.
  with warnings.catch_warnings():
    try:
      _print_to(path)
      yield
    finally:
      sys.stdout.flush()
      sys.stderr.flush()
      for output, copy in before.items():
        os.dup2(copy, output)
        os.close(copy)


def _print_to(path: str) -> None:
  """Has the process print to the end of a file from now on."""
  with open(path, "a") as log:
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
