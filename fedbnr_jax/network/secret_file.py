"""A file of JSON for its owner alone, which is as it was written, or refused."""

import json
import os
import pathlib
from typing import Any

from fedbnr_jax.files import explain_os_errors, replacing
from fedbnr_jax.network.framing import digest

_VERSION = 1
_PURPOSE = "fedbnr-jax site memory 1"
_ROLE = "the folder of a site's memory"


def write(path: pathlib.Path, content: Any) -> str:
  """Writes a file so that it outlives a power cut from the moment of return.

  Returns:
    The digest of its content.
  """
  text = json.dumps(content)
  seal = digest(_PURPOSE, text)
  header = json.dumps({"version": _VERSION, "digest": seal})
  with explain_os_errors(path.parent, _ROLE):
    with replacing(path) as part:
      part.unlink(missing_ok=True)  # Of a process that was killed.
      private = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
      with open(private, "w", encoding="utf-8") as file:
        file.write(f"{header}\n{text}\n")
    _sync_folder(path.parent)
  return seal


def read(path: pathlib.Path) -> tuple[Any, str]:
  """Reads what `write` wrote, and its digest.

  Raises:
    OSError: If it cannot be read.
    Exception: Whatever a damaged file makes json and others raise.
  """
  first, content, end = path.read_bytes().decode("utf-8").split("\n")
  header = json.loads(first)
  if header["version"] != _VERSION:
    raise ValueError(f"version {header['version']} is not known")
  seal = digest(_PURPOSE, content)
  if header["digest"] != seal or end:
    raise ValueError("its digest does not match")
  return json.loads(content), seal


def _sync_folder(folder: pathlib.Path) -> None:
  """Makes a new name in a folder last; the file's content already does."""
  if os.name != "posix":  # Elsewhere a folder cannot be opened.
    return
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
