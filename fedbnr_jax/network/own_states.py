"""What a site keeps for itself in a training, on its disk, as it was after each step.

A coordinator that resumes may ask for a step again; the site then does it from what it
had before that step, and so comes to the same.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbnr_jax import files
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors


class Place(NamedTuple):
  """Where in a training something is asked.

  Attributes:
    round: Counted from 1; 0 where a method does not ask.
    step: Which exchange of the round, counted from 0.
  """

  round: int = 0
  step: int = 0


class OwnStates:
  """The own states of one training."""

  def __init__(self, folder: str | os.PathLike[str], start: Callable[[], Any]) -> None:
    """Takes them up.

    Args:
      folder: Of the site's own, for this training alone.
      start: Makes what is there before the first round; always the same.
    """
    self._folder = pathlib.Path(folder)
    self._start = jax.device_get(start())

  def before(self, place: Place) -> Any:
    """Returns what there was before a step; what came later is forgotten."""
    for later in self._places():
      # Of a round that is over, its last step is all that is needed.
      over = later.round == place.round - 1 and later != self._last(later.round)
      if later >= place or (over and place.step == 0):
        self._path(later).unlink()
    return self._read(max(self._places(), default=None))

  def keep(self, place: Place, own: Any) -> None:
    """Notes what there is after a step, before the answer leaves."""
    leaves = jax.tree.leaves(jax.device_get(own))
    arrays = {f"{number:04d}": np.asarray(leaf) for number, leaf in enumerate(leaves)}
    with explain_os_errors(self._folder, "the folder of a site"):
      self._folder.mkdir(parents=True, exist_ok=True)
      files.write_arrays(self._path(place), arrays)

  def after(self, number: int) -> Any:
    """Returns what there was after a round, or after the last one before it."""
    known = [place for place in self._places() if place.round <= number]
    return self._read(max(known, default=None))

  def _last(self, number: int) -> Place:
    return max(place for place in self._places() if place.round == number)

  def _places(self) -> list[Place]:
    stems = [path.stem.split("_") for path in self._folder.glob("*_*.npz")]
    return [Place(int(number), int(step)) for number, step in stems]

  def _path(self, place: Place) -> pathlib.Path:
    return self._folder / f"{place.round}_{place.step}.npz"

  def _read(self, place: Place | None) -> Any:
    if place is None:
      return self._start
    path = self._path(place)
    try:
      arrays, _ = files.read_arrays(path)
      leaves = [arrays[name] for name in sorted(arrays)]
      shapes = [leaf.shape for leaf in leaves]
      if shapes != [leaf.shape for leaf in jax.tree.leaves(self._start)]:
        raise ValueError("its arrays are of other shapes")
    except Exception as error:  # Whatever a damaged file makes NumPy raise.
      raise InputError(f"{path} is damaged ({error}): start a new run.") from error
    return jax.tree.unflatten(jax.tree.structure(self._start), leaves)
