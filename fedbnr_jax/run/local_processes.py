"""Several commands run side by side on this machine, a core each, and end together."""

import math
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO

from fedbnr_jax.errors import InputError
from fedbnr_jax.run import cores

# Seconds that the others may take to end once one has failed.
_GRACE = 15.0
_WATCH = "FEDBNR_WATCH_PARENT"


def run(commands: Sequence[Sequence[str]]) -> int:
  """Runs all commands at once and waits for them.

  The first command has this process's output; what the others print is dropped, but
  for the last line of one that fails. If this process is ended, so are they.

  Returns:
    The exit status of the first command, which has told its user why it failed.

  Raises:
    InputError: If another command failed, or the first was killed.
  """
  available = cores.available_cores()
  children: list[subprocess.Popen[bytes]] = []
  with tempfile.TemporaryFile() as output:
    try:
      for number, command in enumerate(commands):
        quiet = {"stdout": output, "stderr": output} if number else {}
        with cores.pinned(available[number % len(available)]):
          children.append(
            subprocess.Popen(
              command,
              env=os.environ | cores.one_thread_environment() | {_WATCH: "1"},
              stdin=subprocess.PIPE,  # Never written to: it closes when we are gone.
              **quiet,  # type: ignore[call-overload]
            )
          )
      return wait(children, output)
    finally:
      for child in children:
        child.kill()
        child.wait()
        if child.stdin:
          child.stdin.close()


def end_with_parent() -> None:
  """Ends this process when the one that started it by `run` is gone."""
  if _WATCH not in os.environ:
    return

  def watch() -> None:
    os.read(0, 1)
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()


def free_port() -> int:
  """Returns a port of this machine at which nobody listens."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return int(probe.getsockname()[1])


def wait(
  children: Sequence["subprocess.Popen[bytes]"],
  output: IO[bytes] | None = None,
  grace: float = _GRACE,
) -> int:
  """Waits until all have ended, or for the grace after one, for whom they wait, failed.

  Args:
    children: The first tells its user itself why it fails.
    output: File with what the others have printed.
    grace: Seconds.

  Returns:
    The exit status of the first.

  Raises:
    InputError: If another failed, or the first was killed.
  """
  failed: tuple[int, int] | None = None  # Number and status of the first to fail.
  deadline = math.inf
  while any(child.poll() is None for child in children):
    if failed is None:
      failed = _failure(children)
      deadline = time.monotonic() + grace if failed else math.inf
    if time.monotonic() > deadline:
      break
    time.sleep(0.05)
  number, status = failed or _failure(children) or (0, 0)
  own = children[0].poll()
  if own is not None and own > 0:
    return own
  if number > 0 or status < 0:
    raise InputError(
      f"process {number} of {len(children)} ended with status {status}"
      f"{_last_line(output)}: the same command takes the run up again."
    )
  return status


def _failure(
  children: Sequence["subprocess.Popen[bytes]"],
) -> tuple[int, int] | None:
  """Returns the number and status of a process that has failed."""
  for number, child in enumerate(children):
    status = child.poll()
    if status:
      return number, status
  return None


def _last_line(output: IO[bytes] | None) -> str:
  """Returns the last line that was printed, in brackets."""
  if output is None:
    return ""
  output.seek(0)
  lines = output.read().decode(errors="replace").strip().splitlines()
  return f" ({lines[-1].strip()[:300]})" if lines else ""
