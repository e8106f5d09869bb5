"""A core for each process: which cores there are, and how a child gets one of them.

One thread a core is several times the throughput of programs that share all cores.
"""

import contextlib
import os
from collections.abc import Iterator


def available_cores() -> list[int]:
  """Returns the cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):  # Linux.
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
  """Keeps this thread on one core, and for good the processes that it starts inside.

  A child inherits the cores of the thread that starts it, so NumPy and JAX find one
  core when they are imported, and start one thread. Only Linux has this.
  """
  if not hasattr(os, "sched_setaffinity"):
    yield
    return
  before = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {core})
  try:
    yield
  finally:
    os.sched_setaffinity(0, before)


def one_thread_environment() -> dict[str, str]:
  """Returns the environment variables that keep a process to one thread.

  XLA reads its flags when the first array is made; the linear algebra libraries read
  theirs when they are imported, and otherwise count the cores.
  """
  flags = os.environ.get("XLA_FLAGS", "")
  one_thread = "--xla_cpu_multi_thread_eigen=false"
  if one_thread not in flags:
    flags = f"{flags} {one_thread}".strip()
  return {
    "XLA_FLAGS": flags,
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
  }
