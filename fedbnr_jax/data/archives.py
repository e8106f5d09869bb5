"""A file is found by name: in a folder, in zip archives in it, or fetched from afar."""

import http.client
import io
import os
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from fedbnr_jax.errors import InputError

_TIMEOUT_SECONDS = 60.0
_DEEPEST_NESTING = 3
# What a damaged, encrypted or oddly compressed archive makes the reader raise.
_ZIP_ERRORS = (
  zipfile.BadZipFile,
  zlib.error,
  EOFError,
  NotImplementedError,
  RuntimeError,
  OSError,
)


def find_file(folder: Path, names: Sequence[str]) -> tuple[str, bytes] | None:
  """Looks for a file under one of its names, in any letter case.

  Files that lie open are preferred over those in archives, so that a damaged archive
  does no harm beside an unpacked one.

  Args:
    folder: Where to look, folders within it included.
    names: The names that the file may have.

  Returns:
    Where the file was found (to show to the user) and its content, or None.

  Raises:
    InputError: If a file or an archive on the way cannot be read.
  """
  wanted = {name.lower() for name in names}
  paths = sorted(path for path in folder.rglob("*") if path.is_file())
  for path in paths:
    if path.name.lower() in wanted:
      return str(path), _read(path)
  for path in paths:
    if path.suffix.lower() == ".zip":
      for where, content in _members(str(path), _read(path), wanted):
        return where, content
  return None


def download(url: str, target: Path) -> None:
  """Fetches a zip archive; `target` is either complete afterwards or untouched.

  Args:
    url: Where the archive is.
    target: Where to put it; its folder is made if need be.

  Raises:
    InputError: If the archive cannot be fetched, read or stored, with the reason in
      a few words, for the caller to say what to do.
  """
  temporary: Path | None = None
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
      content = response.read()
    # A login page of a network arrives as cheerfully as the archive.
    if not zipfile.is_zipfile(io.BytesIO(content)):
      raise InputError("what arrived is not a complete zip archive")
    # Processes that fetch at the same time must not write into one another's file.
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    temporary = Path(name)
    with os.fdopen(handle, "wb") as file:
      file.write(content)
    os.replace(temporary, target)
  except (OSError, http.client.HTTPException) as error:
    if isinstance(error, urllib.error.HTTPError):
      error.close()  # It carries the connection.
    raise InputError(_first_line(error)) from error
  finally:
    if temporary is not None:
      temporary.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
  try:
    return path.read_bytes()
  except OSError as error:
    raise InputError(f"{path} cannot be read ({error.strerror})") from error


def _members(
  where: str, archive: bytes, wanted: set[str], depth: int = 0
) -> Iterator[tuple[str, bytes]]:
  """Yields the wanted members of an archive and of the archives within it."""
  try:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
      for member in opened.namelist():
        name = PurePosixPath(member).name.lower()
        if name in wanted:
          yield f"{where}/{member}", opened.read(member)
        elif name.endswith(".zip") and depth < _DEEPEST_NESTING:
          inner = opened.read(member)
          yield from _members(f"{where}/{member}", inner, wanted, depth + 1)
  except _ZIP_ERRORS as error:
    raise InputError(
      f"{where} is not a usable zip archive ({_first_line(error)}): delete it and get "
      "it again"
    ) from error


def _first_line(error: BaseException) -> str:
  lines = str(error).splitlines()
  return lines[0] if lines else type(error).__name__
