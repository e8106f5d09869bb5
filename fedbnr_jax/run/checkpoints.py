"""Checkpoints of a run: one npz file a round, with a digest that shows damage."""

import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbnr_jax import files
from fedbnr_jax.errors import InputError
from fedbnr_jax.run.seal import Seal, digest

# Every round's checkpoint replaces the one three rounds before it: when the last
# is damaged there is still one to fall back to.
_NUM_KEPT = 3
_SUFFIX = ".npz"
# The draws and the parameters of the kernel at the best round, by their paths.
_KERNEL = ("best.server.omega", "best.server.params.theta")


class Saved(NamedTuple):
  """What a checkpoint holds."""

  round: int
  state: Any  # State after that round.
  best: Any  # State after the best round so far.


class Content(NamedTuple):
  """A checkpoint as it stands in its file."""

  round: int
  arrays: dict[str, np.ndarray]  # By their paths, such as `best.server.omega`.
  seal: Seal | None  # None if it was written by a version that had none.


def write(path: str | os.PathLike[str], content: Content) -> None:
  """Writes a checkpoint's file, with a note that vouches for it.

  Whoever changes arrays of a checkpoint that is there `read`s it and writes it anew.
  """
  note = {"round": content.round, "digest": digest(content.arrays)}
  seal = content.seal._asdict() if content.seal else {}
  files.write_arrays(path, content.arrays, note | seal)


def read(path: str | os.PathLike[str]) -> Content:
  """Reads a checkpoint's file.

  Raises:
    Exception: Whatever a damaged file makes NumPy, zipfile or json raise.
  """
  arrays, note = files.read_arrays(path)
  if digest(arrays) != note["digest"]:
    raise ValueError("its digest does not match its arrays")
  return Content(note["round"], arrays, _seal(note))


def read_kernel(path: str | os.PathLike[str]) -> Content:
  """Reads of a checkpoint's arrays its best kernel alone, for others may be large.

  Raises:
    Exception: Whatever a damaged file makes NumPy, zipfile or json raise.
  """
  arrays, note = files.read_arrays(
    path, lambda name: any(_is_below(root, name) for root in _KERNEL)
  )
  return Content(note["round"], arrays, _seal(note))


def kernel_digest(content: Content) -> str:
  """The digest of ω and θ at the best round, as of those in its state."""
  below = [
    [array for name, array in content.arrays.items() if _is_below(root, name)]
    for root in _KERNEL
  ]
  return digest(below)


def _is_below(root: str, name: str) -> bool:
  """Whether an array is in the subtree at a path, by its own path."""
  return f"{name}.".startswith(f"{root}.")


def _seal(note: dict[str, Any]) -> Seal | None:
  return Seal(note["files"], note["history"]) if "history" in note else None


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

  def save(self, saved: Saved, seal: Seal | None = None) -> None:
    """Writes a checkpoint to the disk and removes the oldest one.

    Args:
      saved: What it holds.
      seal: Tells which files it belongs with.
    """
    leaves = _named(saved.state, saved.best)
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    write(self._path(saved.round), Content(saved.round, arrays, seal))
    for number in self._rounds()[:-_NUM_KEPT]:
      self._path(number).unlink()

  def restore(
    self,
    like: Any,
    max_round: int | None = None,
    check: Callable[[int, Seal | None], None] = lambda number, seal: None,
  ) -> Saved | None:
    """Returns the newest sound checkpoint, or None; warns if it passes one over.

    Args:
      like: A state of the same structure and shapes; its types are given to the
        result, whose arrays are NumPy's.
      max_round: Checkpoints of later rounds are passed over.
      check: Is called with the round and the seal of a sound one, and raises an
        InputError where it does not belong.

    Raises:
      InputError: If a sound one does not belong, or is of other shapes.
    """
    found = self._newest(read, max_round)
    if found is None:
      return None
    check(found.round, found.seal)
    path = self._path(found.round)
    return Saved(found.round, *_shaped(found.arrays, like, path))

  def newest_kernel(self) -> Content | None:
    """Returns the newest checkpoint whose note and kernel can be read, and no more.

    So it takes milliseconds, however many rows and features there are; damage to other
    arrays does not show.
    """
    return self._newest(read_kernel)

  def kernel_digest(self, number: int) -> str:
    """The digest of the best kernel in the checkpoint of a round that is sound.

    It is of the types in the file, whatever types JAX has where it is read.
    """
    return kernel_digest(read_kernel(self._path(number)))

  def is_empty(self) -> bool:
    """Whether there is none, sound or not."""
    return not self._rounds()

  def discard_after(self, round_number: int) -> None:
    """Removes checkpoints of later rounds, which are about to be made anew."""
    for number in self._rounds():
      if number > round_number:
        self._path(number).unlink()

  def replace_all(self, state: Any, seal_of: Callable[[int], Seal]) -> None:
    """Puts a state in the place of the newest checkpoint, and removes all others.

    Args:
      state: Becomes both the last and the best state.
      seal_of: Makes the seal of the checkpoint of a round.
    """
    *older, newest = self._rounds()
    self.save(Saved(newest, state, state), seal_of(newest))
    for number in older:
      self._path(number).unlink(missing_ok=True)

  def _newest(
    self, reader: Callable[[pathlib.Path], Content], max_round: int | None = None
  ) -> Content | None:
    """The newest checkpoint that can be read; warns of each that it passes over."""
    for number in reversed(self._rounds()):
      if max_round is not None and number > max_round:
        continue
      try:
        found = reader(self._path(number))
        if found.round != number:
          raise ValueError(f"it is of round {found.round}")
        return found
      except Exception as error:  # Whatever a damaged file makes NumPy raise.
        lines = str(error).splitlines() or [type(error).__name__]
        warnings.warn(
          f"checkpoint of round {number} is damaged ({lines[0][:200]}); trying an "
          "older one.",
          stacklevel=3,
        )
    return None

  def _path(self, number: int) -> pathlib.Path:
    return self._directory / f"{number}{_SUFFIX}"

  def _rounds(self) -> list[int]:
    """Rounds of which there is a file, in order."""
    names = [path.stem for path in self._directory.glob(f"*{_SUFFIX}")]
    return sorted(int(name) for name in names if name.isdecimal())


def _named(state: Any, best: Any) -> dict[str, Any]:
  """All leaves of two states by their paths, such as `best.params.theta`."""
  leaves = jax.tree_util.tree_leaves_with_path({"state": state, "best": best})
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf
    for path, leaf in leaves
  }


def _shaped(
  arrays: dict[str, np.ndarray], like: Any, path: pathlib.Path
) -> tuple[Any, Any]:
  """Puts named arrays together as (state, best), each with the structure of `like`."""
  wanted = _named(like, like)
  for name in sorted(wanted.keys() | arrays.keys()):
    there, needed = (
      str(list(tree[name].shape)) if name in tree else "not there"
      for tree in (arrays, wanted)
    )
    if there != needed:
      raise InputError(
        f"{path} is of a model of other shapes ({name} is {there}, and should be "
        f"{needed}): it belongs to other data or another config. Restore it, or remove "
        "it, so that an older one is used."
      )
  cast = [arrays[name].astype(leaf.dtype) for name, leaf in wanted.items()]
  structure = jax.tree.structure({"state": like, "best": like})
  states = jax.tree.unflatten(structure, cast)
  return states["state"], states["best"]
