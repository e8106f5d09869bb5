"""One program at a time writes a folder; the system frees the lock of one that dies."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors

try:
  import fcntl
except ImportError:  # Not on Windows, where nothing is locked.
  fcntl = None  # type: ignore[assignment]

NAME = ".lock"


@contextlib.contextmanager
def alone_in(
  folder: str | os.PathLike[str], name: str = NAME, *, shared: bool = False
) -> Iterator[None]:
  """Holds the lock of a folder, which is made if need be, for a `with` block.

  Args:
    folder: Whoever writes files of this folder holds its lock while doing so.
    name: The file that is locked. It stays, and holds its last holder's number.
    shared: Whether others may hold the lock too, if they also ask to share it.

  Raises:
    InputError: If another program holds it.
  """
  path = pathlib.Path(folder) / name
  with explain_os_errors(folder):
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab", buffering=0)  # noqa: SIM115  Closed below.
  with file:
    with explain_os_errors(folder):
      if fcntl is not None:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
          fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
          raise InputError(
            f"another program{_holder(path)} is writing in {path.parent}: wait until "
            "it ends, or choose another workdir."
          ) from error
      file.truncate(0)  # Those who share are not named, and neither is who was before.
      if not shared:
        file.write(str(os.getpid()).encode())
    yield


def _holder(path: pathlib.Path) -> str:
  """Names the process that holds a lock, if its file says which."""
  number = path.read_text(encoding="utf-8", errors="replace")
  return f" (process {number})" if number.isdecimal() else ""
