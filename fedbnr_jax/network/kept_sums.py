"""Sums that a coordinator has read, on its disk: who resumes asks for none twice.

Sites that mask would refuse to be asked twice when others have come or gone meanwhile.
"""

import os
import pathlib
import shutil
import types
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedbnr_jax import files
from fedbnr_jax.errors import InputError
from fedbnr_jax.network.question import Question

_VECTOR = "vector"
_PART = "part "  # Before a site's name.
_PHASE = "phase.json"


class Summed(NamedTuple):
  """What sites have answered together.

  Attributes:
    vector: [n] the sum of their vectors.
    members: The sites that are in it.
    parts: [n] of each site, by name, where later answers are checked by them.
  """

  vector: np.ndarray
  members: tuple[str, ...]
  parts: Mapping[str, np.ndarray] = types.MappingProxyType({})


class KeptSums:
  """A folder of sums by question: some stay, the others are of one round."""

  def __init__(self, folder: str | os.PathLike[str]) -> None:
    self._folder = pathlib.Path(folder)
    self._round = self._folder / "round"

  def begin(self, phase: str) -> None:
    """Begins a round, or takes it up; sums of the one before are removed."""
    path = self._round / _PHASE
    if path.exists() and files.read_object(path).get("phase") == phase:
      return
    if self._round.exists():
      shutil.rmtree(self._round)
    self._round.mkdir(parents=True)
    files.write_json(path, {"phase": phase})

  def read(self, question: Question, *, stays: bool) -> Summed | None:
    """Returns the sum that a question has had, or None.

    Raises:
      InputError: If its file is damaged.
    """
    path = self._path(question, stays)
    if not path.exists():
      return None
    try:
      arrays, note = files.read_arrays(path)
      parts = {name: arrays[_PART + name] for name in note["parts"]}
      return Summed(arrays[_VECTOR], tuple(note["members"]), parts)
    except Exception as error:  # Whatever a damaged file makes NumPy raise.
      raise InputError(f"{path} is damaged ({error}): start a new run.") from error

  def write(self, question: Question, summed: Summed, *, stays: bool) -> None:
    """Notes a sum before anything is made of it."""
    path = self._path(question, stays)
    path.parent.mkdir(parents=True, exist_ok=True)
    note = {"members": list(summed.members), "parts": list(summed.parts)}
    parts = {_PART + name: part for name, part in summed.parts.items()}
    files.write_arrays(path, {_VECTOR: summed.vector, **parts}, note)

  def _path(self, question: Question, stays: bool) -> pathlib.Path:
    folder = self._folder / "stays" if stays else self._round
    return folder / f"{question.digest()}.npz"
