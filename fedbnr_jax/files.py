"""Files are written whole or not at all; what the system refuses is said in a line."""

import contextlib
import errno
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedbnr_jax.errors import InputError

CACHE_VARIABLE = "FEDBNR_CACHE_DIR"
PARTIAL = ".tmp"  # Ends the name of a file that is still being written.
_FULL = (errno.ENOSPC, errno.EDQUOT)  # Of the disk, or of one's share of it.
# Names of files may hold bytes that are no text; they are written as they are.
TEXT: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape"}
_NOTE = "note"  # Name of the array that holds the JSON text beside the others.


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Gives a path to write to; when the block ends well, that file becomes `path`.

  Whoever reads `path` meanwhile, or after a kill or a power cut, finds the old file or
  the new one, never a part of it. One process at a time may write a file.
  """
  path = pathlib.Path(path)
  part = path.with_name(path.name + PARTIAL)
  try:
    yield part
    with open(part, "rb+") as file:
      os.fsync(file.fileno())
    os.replace(part, path)
  except BaseException:
    part.unlink(missing_ok=True)
    raise


def write_json(path: str | os.PathLike[str], content: Any) -> None:
  """Writes what JSON can hold, indented."""
  with replacing(path) as part:
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: str | os.PathLike[str]) -> Any:
  """Reads a file that `write_json` wrote.

  Raises:
    InputError: If it is not JSON.
  """
  try:
    return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise InputError(f"{path} is not readable JSON ({error}): remove it.") from error


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads a file that must hold a JSON object.

  Raises:
    InputError: If it holds something else.
  """
  content = read_json(path)
  if not isinstance(content, dict):
    raise InputError(f"{path} does not hold a JSON object: restore it, or remove it.")
  return content


def write_arrays(
  path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], note: Any = None
) -> None:
  """Writes named arrays of numbers, and a note that JSON can hold, as one npz file."""
  text = np.frombuffer(json.dumps(note).encode(), np.uint8)
  content = {_NOTE: text} | {name: np.asarray(a) for name, a in arrays.items()}
  # NumPy would pickle an array of objects; before 2.2 `savez` cannot be told not to.
  assert not any(array.dtype.hasobject for array in content.values())
  with replacing(path) as part, open(part, "wb") as file:
    np.savez(file, **content)


def read_arrays(
  path: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, Any], Any]:
  """Reads the arrays and the note that `write_arrays` wrote; None if it has no note.

  Args:
    path: The file.
    wanted: Says by its name whether an array is read; of others no byte is.

  Raises:
    Exception: Whatever a damaged file makes NumPy, zipfile or json raise.
  """
  with _opened(path) as content:
    names = [name for name in content.files if name == _NOTE or wanted(name)]
    arrays = {name: content[name] for name in names}
  note = arrays.pop(_NOTE, None)
  return arrays, None if note is None else _decoded(note)


def read_note(path: str | os.PathLike[str]) -> Any:
  """Reads the note that `write_arrays` wrote, and none of the arrays.

  Raises:
    Exception: Whatever a damaged file makes NumPy, zipfile or json raise.
  """
  with _opened(path) as content:
    return _decoded(content[_NOTE])


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
  """Opens an npz file, of which an array is read when it is asked for."""
  # An open file, because NumPy leaves one that it opened itself to the garbage
  # collector when it turns out to be damaged.
  with open(path, "rb") as file, np.load(file, allow_pickle=False) as content:
    yield content


def _decoded(note: np.ndarray) -> Any:
  return json.loads(note.tobytes().decode())


@contextlib.contextmanager
def explain_os_errors(
  path: str | os.PathLike[str], role: str = "workdir"
) -> Iterator[None]:
  """Turns errors of the operating system, such as a full disk, into an InputError.

  Args:
    path: The folder that is read or written in the block.
    role: What the message calls it, such as "--output".
  """
  try:
    yield
  except BrokenPipeError:  # The reader of the output is gone; no file is at fault.
    raise
  except OSError as error:
    if is_full(error):
      raise InputError(
        f"no space is left for {role} {path} ({error.strerror}): free some and start "
        "the same command again. What was written before is kept."
      ) from error
    raise InputError(
      f"cannot use {role} {path} ({error.strerror or error}): choose another one, or "
      "change its permissions."
    ) from error


def is_full(error: BaseException | None) -> bool:
  """Whether the operating system says by an error that there is no space left."""
  return isinstance(error, OSError) and error.errno in _FULL


def cache_folder() -> pathlib.Path:
  """The folder that keeps downloads and compiled programs between runs."""
  home = os.environ.get(CACHE_VARIABLE) or "~/.cache/fedbnr_jax"
  return pathlib.Path(home).expanduser()
