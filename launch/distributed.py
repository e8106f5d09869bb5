"""One training by several processes: on hosts that find each other, or on this one.

On each host, with its own --process_id:
  python -m launch.train ... --coordinator=HOST:PORT --num_processes=2 --process_id=0
On this machine alone, one pinned single-threaded process a core:
  python -m launch.train ... --local_processes=auto
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO

import jax
from absl import flags
from jax.experimental import multihost_utils

from fedbnr_jax.errors import InputError
from launch import common, rendezvous

_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "HOST:PORT of process 0, where the processes meet."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 1, "Processes of the training.")
_PROCESS_ID = flags.DEFINE_integer("process_id", 0, "Number of this one, from 0.")
_WAIT = flags.DEFINE_integer("wait_seconds", 60, "How long to wait for the others.")
_LOCAL = flags.DEFINE_string(
  "local_processes", None, "Processes to start here, a core each; 'auto': one a core."
)
# How long the others may take to end once one has failed.
_GRACE = 15.0
_WATCH = "FEDBNR_WATCH_PARENT"


def join() -> None:
  """Meets the other processes, if there are to be any; before any array is made.

  Raises:
    InputError: If the flags make no sense, or somebody does not come in time.
  """
  number, count = _PROCESS_ID.value, _NUM_PROCESSES.value
  if count < 1:
    raise InputError(f"--num_processes must be at least 1, got {count}.")
  if not 0 <= number < count:
    raise InputError(
      f"--process_id must be from 0 to {count - 1} (--num_processes={count}), "
      f"got {number}."
    )
  if _WAIT.value < 1:
    raise InputError(f"--wait_seconds must be at least 1, got {_WAIT.value}.")
  if count == 1:
    if _COORDINATOR.value:
      raise InputError("--coordinator is of use with --num_processes above 1 only.")
    return
  _watch_parent()
  host, port = _address()
  rendezvous.meet(host, port, number, count, _WAIT.value)
  # At the end the others wait for the first, which still has figures to draw.
  jax.distributed.initialize(
    f"{host}:{port}", count, number, shutdown_timeout_seconds=3600
  )
  with _quiet_stdout():
    multihost_utils.sync_global_devices("met")


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


def _address() -> tuple[str, int]:
  text = _COORDINATOR.value or ""
  host, _, port = text.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 65536:
    raise InputError(
      "--coordinator must be HOST:PORT of process 0 where there is more than one "
      f"process, got {text!r}."
    )
  return host, int(port)


def num_local(default: str = "1") -> int:
  """How many processes this one is to start in its stead; 1 for none."""
  text = _LOCAL.value or default
  if text != "auto" and (not text.isdecimal() or int(text) < 1):
    raise InputError(f"--local_processes must be 'auto' or at least 1, got {text!r}.")
  if _NUM_PROCESSES.value > 1:
    if _LOCAL.value and text != "1":
      raise InputError("--local_processes and --num_processes do not go together.")
    return 1
  return len(common.available_cores()) if text == "auto" else int(text)


def run_locally(module: str, count: int) -> int:
  """Starts this command `count` times, a core each, and waits; returns the status."""
  arguments = _without("local_processes", sys.argv[1:])
  meeting = [f"--coordinator=127.0.0.1:{_free_port()}", f"--num_processes={count}"]
  meeting.append("--local_processes=1")
  cores = common.available_cores()
  # Ended by a signal, as by `timeout` or a batch system, it ends its children too.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  children: list[subprocess.Popen[bytes]] = []
  with tempfile.TemporaryFile() as noise:
    try:
      for number in range(count):
        # The first speaks for all; the others only if they fail.
        quiet = {"stdout": noise, "stderr": noise} if number else {}
        children.append(
          subprocess.Popen(
            [
              *(sys.executable, "-m", module, *arguments, *meeting),
              f"--process_id={number}",
            ],
            env=os.environ
            | {"FEDBNR_CORE": str(cores[number % len(cores)]), _WATCH: "1"},
            stdin=subprocess.PIPE,  # Never written to: it closes when we are gone.
            **quiet,  # type: ignore[call-overload]
          )
        )
      return _wait(children, noise)
    finally:
      for child in children:
        child.kill()
        child.wait()
        if child.stdin:
          child.stdin.close()


def _watch_parent() -> None:
  """Ends this process when the one that started it, by `run_locally`, is gone."""
  if _WATCH not in os.environ:
    return

  def watch() -> None:
    os.read(0, 1)
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()


def _without(flag: str, arguments: Sequence[str]) -> list[str]:
  """The arguments but for a flag and its value, in one word or two."""
  kept: list[str] = []
  skip = False
  for argument in arguments:
    name, equals, _ = argument.lstrip("-").partition("=")
    if skip:
      skip = False
    elif argument.startswith("-") and name == flag:
      skip = not equals
    else:
      kept.append(argument)
  return kept


def _wait(
  children: Sequence["subprocess.Popen[bytes]"], noise: IO[bytes] | None = None
) -> int:
  """Until all have ended; when one fails the others, who wait for it, are ended.

  Args:
    children: The first speaks for itself.
    noise: File with what the others have said.
  """
  first: tuple[int, int] | None = None  # To fail, and with what status.
  deadline = math.inf
  while any(child.poll() is None for child in children):
    if first is None:
      first = _failure(children)
      deadline = time.monotonic() + _GRACE if first else math.inf
    if time.monotonic() > deadline:
      break
    time.sleep(0.05)
  number, status = first or _failure(children) or (0, 0)
  own = children[0].poll()
  if own is not None and own > 0:
    return own  # The first has said why itself.
  if number > 0 or status < 0:
    told = _last_line(noise)
    common.fail(
      f"process {number} of {len(children)} ended with status {status}{told}: the same "
      "command takes the run up again."
    )
  return status


def _last_line(noise: IO[bytes] | None) -> str:
  """The last thing that was said, in brackets."""
  if noise is None:
    return ""
  noise.seek(0)
  lines = noise.read().decode(errors="replace").strip().splitlines()
  return f" ({lines[-1].strip()[:300]})" if lines else ""


def _failure(
  children: Sequence["subprocess.Popen[bytes]"],
) -> tuple[int, int] | None:
  """The number and status of a process that has failed."""
  for number, child in enumerate(children):
    status = child.poll()
    if status:
      return number, status
  return None


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return int(probe.getsockname()[1])
