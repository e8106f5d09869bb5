"""A checkpoint's seal: digests of the files that it belongs with, which show strangers.

Config, data, preprocessing, clients and history of a run stand beside its checkpoints,
in files that anybody can edit or exchange. So every checkpoint notes what they were
when it was written, and they are compared whenever it is taken up or loaded. This finds
mistakes; whoever wants to deceive can compute a digest too.
"""

import functools
import hashlib
import json
import pathlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbnr_jax import files
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing
from fedbnr_jax.run.records import Record, RunFolder

_NO_ROWS = ""  # The digest of an empty history.


class Seal(NamedTuple):
  """What was in a run's folder when a checkpoint was written."""

  files: Mapping[str, str]  # The digest of each JSON file, by the file's name.
  history: str  # The digest of the rows of metrics.csv up to the checkpoint's round.


def of_folder(folder: RunFolder, number: int) -> Seal:
  """The seal that a checkpoint of round `number` has, by the files as they are now."""
  return Seal(of_files(folder), of_history(folder.metrics()[:number]))


def of_files(folder: RunFolder) -> dict[str, str]:
  """Digests of a folder's JSON files, by name; formatting does not count."""
  there = [path for path in folder.sealed if path.exists()]
  return {path.name: _digest(files.read_json(path)) for path in there}


def of_history(records: Iterable[Record]) -> str:
  """The digest of all rows, in order."""
  return functools.reduce(extended, records, _NO_ROWS)


def extended(history: str, record: Record) -> str:
  """The digest of a history with one more row; how long it took does not count."""
  row = {name: v for name, v in record.items() if not name.endswith("seconds")}
  return _digest([history, row])


def of_changes(changes: Iterable[Mapping[str, Any]]) -> str:
  """The digest of the changes by which rows joined or left a model."""
  return _digest(list(changes))


def require(folder: RunFolder, number: int, seal: Seal | None) -> None:
  """Raises InputError unless a checkpoint belongs with the files of its folder.

  Args:
    folder: Its files are read now, thus after the checkpoint: whoever trains writes a
      row first.
    number: The checkpoint's round.
    seal: None for a checkpoint of a version before there were seals; it is let pass,
      with a warning.
  """
  checkpoint = folder.checkpoints / f"{number}.npz"
  if seal is None:
    _warn_of_earlier_version(checkpoint)
    return
  remedy = "remove it, so that an older one is used"
  require_same_run(folder, checkpoint, number, seal, remedy)


def require_same_run(
  folder: RunFolder, path: pathlib.Path, number: int, seal: Seal, otherwise: str
) -> None:
  """Raises InputError unless a file belongs with the others of its folder.

  Args:
    folder: The run's.
    path: The file.
    number: How many rounds there were when it was written.
    seal: The one that it was written with.
    otherwise: What to do instead of restoring it.
  """
  strangers = _strangers(folder, seal.files)
  records = folder.metrics()[:number]
  if len(records) < number or of_history(records) != seal.history:
    strangers.append(folder.history.name)
  _refuse(folder, strangers, path, otherwise)


def write_arrays(
  folder: RunFolder, name: str, arrays: Mapping[str, np.ndarray]
) -> None:
  """Writes a model that has no history, sealed with the folder's JSON files."""
  note = {"digest": digest(dict(arrays)), "files": of_files(folder)}
  files.write_arrays(folder.path / name, arrays, note)


def read_arrays(folder: RunFolder, name: str) -> dict[str, Any]:
  """Reads what `write_arrays` wrote.

  Raises:
    InputError: If it is damaged, or does not belong with the folder's JSON files.
  """
  path = folder.path / name
  try:
    arrays, note = files.read_arrays(path)
    noted = note["files"] if note else None
    if note and note["digest"] != digest(arrays):
      raise ValueError("its digest does not match its arrays")
  except Exception as error:  # Whatever a damaged file makes NumPy raise.
    raise InputError(f"{path} is damaged ({error}): restore it.") from error
  if noted is None:
    _warn_of_earlier_version(path)
  else:
    _refuse(folder, _strangers(folder, noted), path, "restore the whole release")
  return arrays


def digest(tree: Any) -> str:
  """SHA-256 of the bytes, dtypes and shapes of all leaves, in order."""
  total = hashlib.sha256()
  for leaf in jax.tree.leaves(tree):
    array = np.asarray(leaf)
    total.update(f"{array.dtype}{array.shape}".encode())
    total.update(np.ascontiguousarray(array).data)
  return total.hexdigest()


def _warn_of_earlier_version(path: pathlib.Path) -> None:
  warnings.warn(
    f"{path} was written by an earlier version, which did not note the files that it "
    "belongs with: whether they are its own cannot be checked.",
    stacklevel=3,
  )


def _strangers(folder: RunFolder, files: Mapping[str, str]) -> list[str]:
  now = of_files(folder)
  return [name for name, digest in files.items() if now.get(name) != digest]


def _refuse(
  folder: RunFolder, strangers: list[str], model: pathlib.Path, otherwise: str
) -> None:
  """Raises InputError if a file is a stranger; where several are, it is the model."""
  if len(strangers) == 1:
    raise InputError(
      f"{folder.path / strangers[0]} is not what it was when {model.name} was written "
      "with it: restore it, or train again in another folder."
    )
  if strangers:
    raise InputError(
      f"{model} is of another run than {listing(strangers)} in {folder.path}: restore "
      f"it, or {otherwise}."
    )


def _digest(content: Any) -> str:
  """SHA-256 of what JSON can hold, whatever the order of names."""
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
