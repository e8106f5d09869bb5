"""The ledger as a file: posterior.npz, checked before it replaces the one before it.

Gram matrices are triangles in it. Each table takes M(M + 5)/2 + 3 numbers and a tag a
row: 64 MB where there are M = 4,000 features.
"""

import pathlib
import shutil
from typing import Any

import numpy as np

from fedbnr_jax import files
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp.blr import SufficientStats
from fedbnr_jax.ledger import Ledger, Part, is_finite, make_part
from fedbnr_jax.run.seal import digest

_VERSION = 2
_SUMS = ("gram", "moment", "energy", "count")


def previous(path: pathlib.Path) -> pathlib.Path:
  """Where the ledger before the last change is kept."""
  return path.with_name(f"{path.stem}.before{path.suffix}")


def replace(path: pathlib.Path, ledger: Ledger) -> None:
  """Writes a ledger and keeps the one before it beside it.

  Raises:
    InputError: If a number of it is not finite; then nothing is written.
  """
  _require_finite(ledger, f"what would be written to {path}")
  with files.replacing(previous(path)) as part:
    shutil.copyfile(path, part)
  write(path, ledger)


def write(path: pathlib.Path, ledger: Ledger) -> None:
  """Writes a ledger whole or not at all, and keeps nothing of one before it."""
  _require_finite(ledger, f"what would be written to {path}")
  arrays = {"held_out": ledger.held_out, "departed": ledger.departed}
  arrays |= _arrays("training", ledger.training)
  for index, part in enumerate(ledger.joined):
    arrays |= _arrays(f"joined.{index}", part)
  note = {
    "version": _VERSION,
    "digest": digest(arrays),
    "kernel": ledger.kernel,
    "noise_offset": ledger.noise_offset,
    "joined": [part.table for part in ledger.joined],
    "owners": ledger.owners,
    "changes": ledger.changes,
    "erased": ledger.erased,
    "scale": ledger.scale,
  }
  files.write_arrays(path, arrays, note)


def read(path: pathlib.Path) -> Ledger:
  """The ledger in a file.

  Raises:
    InputError: If there is none, or it is damaged, or of a version that is not known.
  """
  if not path.exists():
    raise InputError(
      f"{path} does not exist: it is written when a training is finished, if all "
      "clients are in its posterior."
    )
  try:
    arrays, note = files.read_arrays(path)
    if "held_out" not in arrays:
      raise _of_another_version(path)
    _require_version(path, note)
    # Files that were written before there was a digest are taken as they are.
    if "digest" in note and note["digest"] != digest(arrays):
      raise ValueError("its digest does not match its arrays")
    ledger = _first_version(arrays, note) if "tags" in arrays else _ledger(arrays, note)
  except InputError:
    raise
  except Exception as error:  # Whatever a damaged file makes NumPy raise.
    raise _damaged(path, error) from error
  _require_finite(ledger, str(path), _remedy(path))
  return ledger


def kernel(path: pathlib.Path) -> str:
  """The digest of the kernel that the ledger in a file is of; reads none of its sums.

  Raises:
    InputError: If its note is damaged, or of a version that is not known.
  """
  try:
    note = files.read_note(path)
    _require_version(path, note)
    return str(note["kernel"])
  except InputError:
    raise
  except Exception as error:  # Whatever a damaged file makes NumPy raise.
    raise _damaged(path, error) from error


def changes(path: pathlib.Path) -> tuple[dict[str, Any], ...]:
  """What has changed since training, by the ledger in a file; () if there is none."""
  return read(path).changes if path.exists() else ()


def _require_version(path: pathlib.Path, note: Any) -> None:
  """Raises InputError if a ledger's note is not of a version that is known."""
  if note is None or note.get("version", 1) > _VERSION:
    raise _of_another_version(path)


def _of_another_version(path: pathlib.Path) -> InputError:
  return InputError(
    f"{path} was made by another version: train again, in another workdir."
  )


def _damaged(path: pathlib.Path, error: Exception) -> InputError:
  return InputError(f"{path} is damaged ({error}): {_remedy(path)}.")


def _remedy(path: pathlib.Path) -> str:
  if previous(path).exists():
    return f"{previous(path).name} beside it is the ledger before its last change"
  return "restore it, or remove it and train again"


def _arrays(name: str, part: Part) -> dict[str, np.ndarray]:
  """The arrays of one table's rows, by the names that they have in the file."""
  arrays = {field: getattr(part.sums, field) for field in _SUMS}
  arrays |= {"tags": part.tags, "rounding": part.rounding}
  return {f"{name}.{field}": array for field, array in arrays.items()}


def _part(name: str, table: str, arrays: dict[str, Any]) -> Part:
  sums = SufficientStats(**{field: arrays[f"{name}.{field}"] for field in _SUMS})
  return Part(table, sums, arrays[f"{name}.tags"], arrays[f"{name}.rounding"])


def _ledger(arrays: dict[str, Any], note: dict[str, Any]) -> Ledger:
  return Ledger(
    training=_part("training", "", arrays),
    kernel=note["kernel"],
    noise_offset=note["noise_offset"],
    held_out=arrays["held_out"],
    departed=arrays["departed"],
    joined=tuple(
      _part(f"joined.{index}", table, arrays)
      for index, table in enumerate(note["joined"])
    ),
    owners=note["owners"],
    changes=tuple(note["changes"]),
    erased=note["erased"],
    scale=note.get("scale", 1.0),  # Files of an older version have none.
  )


def _first_version(arrays: dict[str, Any], note: dict[str, Any]) -> Ledger:
  """Reads a file in which all rows that are in were one sum."""
  stats = SufficientStats(**{field: arrays[field] for field in _SUMS})
  return Ledger(
    training=make_part("", stats, arrays["tags"]),
    kernel=note["kernel"],
    noise_offset=note["noise_offset"],
    held_out=arrays["held_out"],
    departed=arrays["held_out"][:0],
    changes=tuple(note["changes"]),
  )


def _require_finite(ledger: Ledger, what: str, remedy: str = "") -> None:
  """Raises InputError if a sum is not finite."""
  if not all(map(is_finite, (ledger.training, *ledger.joined))):
    end = f": {remedy}." if remedy else ". Nothing is changed."
    raise InputError(f"{what} holds numbers that are not finite{end}")
