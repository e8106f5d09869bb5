"""Finds a file by name in a folder and its zip archives, and downloads archives."""

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
# No table has 1 MB; a small archive can hold gigabytes of zeros.
_MAX_BYTES = 64_000_000
# zipfile raises these for a damaged, encrypted or oddly compressed archive.
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

  Unpacked files are preferred over those in archives, so that a damaged archive does
  no harm beside an unpacked file.

  Args:
    folder: The folder to search, with all folders in it.
    names: The names that the file may have.

  Returns:
    The place where the file was found, for messages, and its content; or None.

  Raises:
    InputError: If a file or an archive on the way cannot be read, or is too large.
  """
  wanted = {name.lower() for name in names}
  paths = sorted(path for path in folder.rglob("*") if path.is_file())
  for path in paths:
    if path.name.lower() in wanted:
      return str(path), _read(path)
  for path in paths:
    if path.suffix.lower() == ".zip":
      for where, content in _members(str(path), _read(path), wanted, _Budget()):
        return where, content
  return None


def check_unpacked_size(where: str, archive: bytes) -> None:
  """Raises InputError if a zip archive, such as a workbook, is large when unpacked.

  Raises:
    zipfile.BadZipFile: If it is no zip archive.
  """
  budget = _Budget()
  with zipfile.ZipFile(io.BytesIO(archive)) as opened:
    for member in opened.infolist():
      budget.spend(where, member.file_size)


def download(url: str, target: Path) -> None:
  """Downloads a zip archive; `target` is either complete afterwards or untouched.

  Args:
    url: The address of the archive.
    target: The file to write; its folder is created if there is none.

  Raises:
    InputError: If the archive cannot be downloaded, read or stored. The message is
      the reason in a few words; the caller adds what to do.
  """
  temporary: Path | None = None
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
      content = response.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
      raise InputError(f"what arrives has more than {_MAX_BYTES // 10**6} MB")
    # A network may answer with its login page instead of the archive.
    if not zipfile.is_zipfile(io.BytesIO(content)):
      raise InputError("what arrived is not a complete zip archive")
    # Processes that download at the same time must not write into the same file.
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    temporary = Path(name)
    with os.fdopen(handle, "wb") as file:
      file.write(content)
    os.replace(temporary, target)
  except (OSError, http.client.HTTPException) as error:
    if isinstance(error, urllib.error.HTTPError):
      error.close()  # The error holds the open connection.
    raise InputError(_first_line(error)) from error
  finally:
    if temporary is not None:
      temporary.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
  """Reads a file, or raises an InputError with the reason."""
  try:
    _Budget().spend(str(path), path.stat().st_size)
    return path.read_bytes()
  except OSError as error:
    raise InputError(f"{path} cannot be read ({error.strerror})") from error


class _Budget:
  """Counts the bytes that are still allowed to be read."""

  def __init__(self) -> None:
    self._left = _MAX_BYTES

  def spend(self, where: str, size: int) -> None:
    """Raises InputError if that many bytes are too many."""
    self._left -= size
    if self._left < 0:
      raise InputError(
        f"{where} holds more than {_MAX_BYTES // 10**6} MB, which no table does: "
        "delete it and get it again"
      )


def _members(
  where: str, archive: bytes, wanted: set[str], budget: _Budget, depth: int = 0
) -> Iterator[tuple[str, bytes]]:
  """Yields place and content of the wanted files of an archive, nested ones too."""
  try:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
      for member in opened.infolist():
        name = PurePosixPath(member.filename).name.lower()
        place = f"{where}/{member.filename}"
        is_archive = name.endswith(".zip") and depth < _DEEPEST_NESTING
        if name not in wanted and not is_archive:
          continue
        budget.spend(place, member.file_size)  # zipfile unpacks no more than that.
        content = opened.read(member)
        if name in wanted:
          yield place, content
        else:
          yield from _members(place, content, wanted, budget, depth + 1)
  except _ZIP_ERRORS as error:
    raise InputError(
      f"{where} is not a usable zip archive ({_first_line(error)}): delete it and get "
      "it again"
    ) from error


def _first_line(error: BaseException) -> str:
  """Returns the first line of an error's message, or its type if it has none."""
  lines = str(error).splitlines()
  return lines[0] if lines else type(error).__name__
