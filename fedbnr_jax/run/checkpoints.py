"""Checkpoints of a run: one npz file a round, with a digest that shows damage."""

import hashlib
import os
import pathlib
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbnr_jax import files
from fedbnr_jax.errors import InputError

# Every round's checkpoint replaces the one three rounds before it: when the last
# is damaged there is still one to fall back to.
_NUM_KEPT = 3
_SUFFIX = ".npz"


class Saved(NamedTuple):
  """What a checkpoint holds."""

  round: int
  state: Any  # State after that round.
  best: Any  # State after the best round so far.


class Checkpoints:
  """The checkpoints in one folder: `1.npz`, `2.npz`, ..., named by their rounds.

  A file holds every array of both states under its path in the tree, such as
  `state.params.log_noise_std`, in its own type, whether or not JAX has 64-bit types
  enabled where it is written or read.
  """

  def __init__(self, directory: str | os.PathLike[str]) -> None:
    """Makes the folder if need be.

    Raises:
      InputError: If it holds checkpoints of a version that wrote them by Orbax.
    """
    self._directory = pathlib.Path(directory)
    self._directory.mkdir(parents=True, exist_ok=True)
    if any(path.is_dir() for path in self._directory.iterdir()):
      raise InputError(
        f"{self._directory} was written by an earlier version, whose checkpoints are "
        "folders: train again in another folder, or use that version."
      )

  def save(self, saved: Saved) -> None:
    """Writes a checkpoint to the disk and removes the oldest one."""
    leaves = _named(saved.state, saved.best)
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    note = {"round": saved.round, "digest": digest(arrays)}
    files.write_arrays(self._path(saved.round), arrays, note)
    for number in self._rounds()[:-_NUM_KEPT]:
      self._path(number).unlink()

  def restore(self, like: Any, max_round: int | None = None) -> Saved | None:
    """Returns the newest sound checkpoint, or None; warns if it passes one over.

    Args:
      like: A state of the same structure and shapes; its types are given to the
        result, whose arrays are NumPy's.
      max_round: Checkpoints of later rounds are passed over.

    Raises:
      InputError: If a sound one is of other shapes.
    """
    for number in reversed(self._rounds()):
      if max_round is not None and number > max_round:
        continue
      try:
        arrays = self._read(number)
      except Exception as error:  # Whatever a damaged file makes NumPy raise.
        lines = str(error).splitlines() or [type(error).__name__]
        warnings.warn(
          f"checkpoint of round {number} is damaged ({lines[0][:200]}); trying an "
          "older one.",
          stacklevel=2,
        )
      else:
        return Saved(number, *_shaped(arrays, like, self._directory))
    return None

  def is_empty(self) -> bool:
    """Whether there is none, sound or not."""
    return not self._rounds()

  def discard_after(self, round_number: int) -> None:
    """Removes checkpoints of later rounds, which are about to be made anew."""
    for number in self._rounds():
      if number > round_number:
        self._path(number).unlink()

  def replace_all(self, state: Any) -> None:
    """Puts a state in the place of the newest checkpoint, and removes all others."""
    *older, newest = self._rounds()
    self.save(Saved(newest, state, state))
    for number in older:
      self._path(number).unlink(missing_ok=True)

  def _path(self, number: int) -> pathlib.Path:
    return self._directory / f"{number}{_SUFFIX}"

  def _rounds(self) -> list[int]:
    """Rounds of which there is a file, in order."""
    names = [path.stem for path in self._directory.glob(f"*{_SUFFIX}")]
    return sorted(int(name) for name in names if name.isdecimal())

  def _read(self, number: int) -> dict[str, np.ndarray]:
    arrays, note = files.read_arrays(self._path(number))
    if digest(arrays) != note["digest"] or number != note["round"]:
      raise ValueError("its digest does not match its arrays")
    return arrays


def digest(tree: Any) -> str:
  """SHA-256 of the bytes, dtypes and shapes of all leaves, in order."""
  total = hashlib.sha256()
  for leaf in jax.tree.leaves(tree):
    array = np.asarray(leaf)
    total.update(f"{array.dtype}{array.shape}".encode())
    total.update(np.ascontiguousarray(array).data)
  return total.hexdigest()


def _named(state: Any, best: Any) -> dict[str, Any]:
  """All leaves of two states by their paths, such as `best.params.theta`."""
  leaves = jax.tree_util.tree_leaves_with_path({"state": state, "best": best})
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf
    for path, leaf in leaves
  }


def _shaped(
  arrays: dict[str, np.ndarray], like: Any, directory: pathlib.Path
) -> tuple[Any, Any]:
  """Puts named arrays together as (state, best), each with the structure of `like`."""
  wanted = _named(like, like)
  shapes = {name: array.shape for name, array in arrays.items()}
  if shapes != {name: leaf.shape for name, leaf in wanted.items()}:
    raise InputError(
      f"the checkpoints in {directory} are of a model of other shapes: they belong to "
      "other data or another config."
    )
  cast = [arrays[name].astype(leaf.dtype) for name, leaf in wanted.items()]
  structure = jax.tree.structure({"state": like, "best": like})
  states = jax.tree.unflatten(structure, cast)
  return states["state"], states["best"]
