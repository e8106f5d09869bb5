"""This process joins the others that train with it, on this host or on several."""

import contextlib
import inspect
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
from jax.experimental import multihost_utils

from fedbnr_jax.errors import InputError
from fedbnr_jax.run import local_processes, meeting

# At the end the others wait for the first process, which still has figures to draw.
_SHUTDOWN_SECONDS = 3600
# Seconds for the first sum of processes that are connected: it is compiled.
_FIRST_SUM_SECONDS = 60.0


def join(
  coordinator: str | None,
  num_processes: int,
  process_id: int,
  wait_seconds: float = 60.0,
) -> None:
  """Connects this process with the others, if there are any; before any array is made.

  Args:
    coordinator: HOST:PORT of process 0.
    num_processes: How many there are; with 1 nothing is done.
    process_id: Number of this process, from 0.
    wait_seconds: How long to wait for the others.

  Raises:
    InputError: If an argument makes no sense, or a process does not come in time.
  """
  if num_processes < 1:
    raise InputError(f"num_processes must be at least 1, got {num_processes}.")
  if not 0 <= process_id < num_processes:
    raise InputError(
      f"process_id must be from 0 to {num_processes - 1} "
      f"(num_processes={num_processes}), got {process_id}."
    )
  if wait_seconds < 1:
    raise InputError(f"wait_seconds must be at least 1, got {wait_seconds}.")
  if num_processes == 1:
    if coordinator:
      raise InputError("coordinator is of use with num_processes above 1 only.")
    return
  host, port = _address(coordinator or "")
  place = meeting.Place(host, port, wait_seconds, local_processes.shared_word())
  meeting.meet(place, process_id, num_processes)

  def connect() -> None:
    jax.distributed.initialize(
      f"{host}:{port}",
      num_processes,
      process_id,
      # JAX ends the process with a stack trace then, so we are to give up before it.
      initialization_timeout=math.ceil(2 * wait_seconds),
      # The address at which they have met, rather than all that the machine has.
      coordinator_bind_address=f"{host}:{port}",
      **_patience_at_the_end(),
    )

  try:
    with _quiet_stdout():
      _within(wait_seconds, connect)
      _within(
        max(wait_seconds, _FIRST_SUM_SECONDS),
        lambda: multihost_utils.sync_global_devices("joined"),
      )
  except TimeoutError as error:
    raise InputError(
      f"process {process_id} of {num_processes}: all came to {place}, but then one did "
      "not connect in time: end what is left of earlier starts, and start all anew."
    ) from error


def _patience_at_the_end() -> dict[str, Any]:
  """Returns the argument of `initialize` for it, which JAX 0.7 does not have yet.

  There JAX's own limit holds for how long the first process may draw figures.
  """
  known = inspect.signature(jax.distributed.initialize).parameters
  name = "shutdown_timeout_seconds"
  return {name: _SHUTDOWN_SECONDS} if name in known else {}


def _within(seconds: float, work: Callable[[], None]) -> None:
  """Does the work in a thread, for JAX cannot be interrupted while it waits.

  Raises:
    TimeoutError: If it takes longer. The thread goes on; the caller has to end.
  """
  done: Future[None] = Future()

  def run() -> None:
    try:
      work()
      done.set_result(None)
    except BaseException as error:
      done.set_exception(error)

  threading.Thread(target=run, daemon=True).start()
  done.result(seconds)


def _address(text: str) -> tuple[str, int]:
  host, _, port = text.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 65536:
    raise InputError(
      "coordinator must be HOST:PORT of process 0 where there is more than one "
      f"process, got {text!r}."
    )
  return host, int(port)


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
  """Keeps what the runtime prints when it first connects out of the user's output."""
  sys.stdout.flush()
  kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 1)
  try:
    yield
  finally:
    os.dup2(kept, 1)
    os.close(kept)
    os.close(nowhere)
