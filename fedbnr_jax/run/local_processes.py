"""Several commands run side by side on this machine, a core each, and end together."""

import math
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO

from fedbnr_jax.errors import InputError
from fedbnr_jax.run import cores

# Seconds that the others may take to end once one has failed, or that one may rest.
_GRACE = 15.0
_PAUSE = 0.05
_WORD = "FEDBNR_SHARED_WORD"  # Children have it, and share it with nobody else.
_LOG = "FEDBNR_RUNTIME_LOG"  # The descriptor for what compiled code prints.
# Matches the line in which compiled code says why it ends its process.
_FATAL = re.compile(r"^F\d{4} [^\]]*\] (?:.*absl::Status: )?(.*)", re.MULTILINE)


def run(commands: Sequence[Sequence[str]]) -> int:
  """Runs all commands at once and waits for them.

  The first command has this process's output; what the others print is dropped, but
  for a line of one that fails. If this process is ended, so are they.

  Returns:
    The exit status of the first command, which has told its user why it failed.

  Raises:
    InputError: If another command failed, or the first was killed.
  """
  available = cores.available_cores()
  environment = os.environ | cores.one_thread_environment()
  environment[_WORD] = secrets.token_hex(16)
  children: list[subprocess.Popen[bytes]] = []
  with tempfile.TemporaryFile() as output:
    environment[_LOG] = str(output.fileno())
    try:
      for number, command in enumerate(commands):
        quiet = {"stdout": output, "stderr": output} if number else {}
        with cores.pinned(available[number % len(available)]):
          children.append(
            subprocess.Popen(
              command,
              env=environment,
              pass_fds=[output.fileno()],
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


def follow_parent() -> None:
  """Ends this process when the one that started it by `run` is gone.

  What compiled code prints, which may be a long stack trace, it leaves to that one too.
  """
  if _WORD not in os.environ:
    return

  def watch() -> None:
    os.read(0, 1)
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()
  if sys.stderr:  # None where it is closed.
    sys.stderr.flush()
    sys.stderr = open(os.dup(2), "w", buffering=1)  # noqa: SIM115
    os.dup2(int(os.environ[_LOG]), 2)


def shared_word() -> str:
  """Returns what processes know that one `run` has started; "" for all others."""
  return os.environ.get(_WORD, "")


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
    InputError: If another failed, the first was killed, or one was stopped for longer
      than the grace, as by SIGSTOP.
  """
  failed: tuple[int, int] | None = None  # Number and status of the first to fail.
  deadline = math.inf
  rest = 0.0  # Counted in pauses: time in which this process was stopped too is none.
  while any(child.poll() is None for child in children):
    if failed is None:
      failed = _failure(children)
      deadline = time.monotonic() + grace if failed else math.inf
    if time.monotonic() > deadline:
      break
    stopped = [n for n, child in enumerate(children) if is_stopped(child.pid)]
    rest = rest + _PAUSE if stopped else 0.0
    if rest > grace and failed is None:
      raise InputError(
        f"process {stopped[0]} of {len(children)} was stopped by a signal, and the "
        "others wait for it: the same command takes the run up again."
      )
    time.sleep(_PAUSE)
  number, status = failed or _failure(children) or (0, 0)
  own = children[0].poll()
  if own is not None and own > 0:
    return own
  if number > 0 or status < 0:
    raise InputError(
      f"process {number} of {len(children)} ended with status {status}"
      f"{_reason(output)}: the same command takes the run up again."
    )
  return status


def is_stopped(pid: int) -> bool:
  """Says whether a child of this process is stopped, as by SIGSTOP, and may go on."""
  if not hasattr(os, "waitid"):  # macOS.
    return False
  try:
    stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
  except ChildProcessError:  # It has ended.
    return False
  return stopped is not None


def _failure(
  children: Sequence["subprocess.Popen[bytes]"],
) -> tuple[int, int] | None:
  """Returns the number and status of a process that has failed."""
  for number, child in enumerate(children):
    status = child.poll()
    if status:
      return number, status
  return None


def _reason(output: IO[bytes] | None) -> str:
  """Returns what compiled code ended for, or the last line printed, in brackets."""
  if output is None:
    return ""
  output.seek(0)
  text = output.read().decode(errors="replace").strip()
  fatal = _FATAL.findall(text)
  lines = fatal[:1] or text.splitlines()[-1:]
  return f" ({lines[0].strip()[:300]})" if lines else ""
