"""A lock that keeps two sweeps from training the same runs at the same time."""

import contextlib
import pathlib
from collections.abc import Iterator

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors

try:
  import fcntl
except ImportError:  # Not on Windows.
  fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def alone_with(path: pathlib.Path) -> Iterator[None]:
  """Holds the lock of a sweep's table.

  Raises:
    InputError: If another process holds it.
  """
  with explain_os_errors(path.parent):
    file = open(path.with_suffix(".lock"), "w")  # noqa: SIM115  Closed below.
  with file:
    if fcntl is not None:
      try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise InputError(
          f"another sweep is at work in {path.parent}: wait for it, or choose another "
          "workdir."
        ) from error
    yield
