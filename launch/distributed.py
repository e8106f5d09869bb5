"""Flags of one training by several processes, on several hosts or on this one.

On each host, with its own --process_id:
  python -m launch.train ... --coordinator=HOST:PORT --num_processes=2 --process_id=0
On this machine alone, one pinned single-threaded process a core:
  python -m launch.train ... --local_processes=auto
"""

import signal
import sys
from collections.abc import Sequence

from absl import flags

from fedbnr_jax.errors import InputError
from fedbnr_jax.run import cores, joining, local_processes
from launch import interruption

_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "HOST:PORT of process 0, where the processes meet."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 1, "Processes of the training.")
_PROCESS_ID = flags.DEFINE_integer("process_id", 0, "Number of this one, from 0.")
_WAIT = flags.DEFINE_integer("wait_seconds", 60, "How long to wait for the others.")
_LOCAL = flags.DEFINE_string(
  "local_processes", None, "Processes to start here, a core each; 'auto': one a core."
)


def join() -> None:
  """Connects this process with the others that the flags tell of."""
  local_processes.follow_parent()
  joining.join(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, _WAIT.value)


def num_local(default: str = "1") -> int:
  """Returns how many processes this one is to start in its stead; 1 for none."""
  text = _LOCAL.value or default
  if text != "auto" and (not text.isdecimal() or int(text) < 1):
    raise InputError(f"--local_processes must be 'auto' or at least 1, got {text!r}.")
  if _NUM_PROCESSES.value > 1:
    if _LOCAL.value and text != "1":
      raise InputError("--local_processes and --num_processes do not go together.")
    return 1
  return len(cores.available_cores()) if text == "auto" else int(text)


def run_locally(module: str, count: int) -> int:
  """Starts this command `count` times, a core each, and waits; returns the status.

  Raises:
    KeyboardInterrupt: If this process was interrupted, or the first of the others.
  """
  # Ended by a signal, as by `timeout` or a batch system, it ends its children too.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  command = [
    *(sys.executable, "-m", module),
    *_without("local_processes", sys.argv[1:]),
    f"--coordinator=127.0.0.1:{local_processes.free_port()}",
    *(f"--num_processes={count}", "--local_processes=1"),
  ]
  status = local_processes.run([[*command, f"--process_id={n}"] for n in range(count)])
  if status == interruption.STATUS:  # Of which the first leaves it to us to tell.
    raise KeyboardInterrupt
  return status


def _without(flag: str, arguments: Sequence[str]) -> list[str]:
  """Leaves a flag and its value, in one word or two, out of the arguments."""
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
