"""Orbax checkpoints of a run, with a digest so that damage is seen and stepped over."""

import hashlib
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedbnr_jax.errors import InputError

# Every round's checkpoint replaces the one three rounds before it: when the last
# is damaged there is still one to fall back to.
_NUM_KEPT = 3


class Saved(NamedTuple):
  """What a checkpoint holds."""

  round: int
  state: Any  # Server state after that round.
  best: Any  # Server state after the best round so far.


class Checkpoints:
  """The checkpoints in one folder; writing goes on while the next round runs.

  A checkpoint is one array of bytes, those of all arrays of both states, and a note of
  their types, shapes and digest. Bytes are read as they were written, wherever that is:
  with float64 disabled, JAX's own arrays would lose digits. One array is also quicker
  to write than sixty, and when its file is damaged fails once, not sixty times.
  """

  def __init__(self, directory: str | os.PathLike[str]) -> None:
    os.makedirs(directory, exist_ok=True)
    # Of several processes only one has checkpoints: it must not wait for the others.
    alone = ocp.options.MultiprocessingOptions(
      primary_host=jax.process_index(),
      active_processes={jax.process_index()},
      barrier_sync_key_prefix=f"process{jax.process_index()}",
    )
    options = ocp.CheckpointManagerOptions(
      max_to_keep=_NUM_KEPT, create=False, multiprocessing_options=alone
    )
    self._manager = ocp.CheckpointManager(os.path.abspath(directory), options=options)

  def save(self, saved: Saved) -> None:
    """Writes a checkpoint; arrays are copied before the call returns."""
    leaves = [np.array(leaf) for leaf in jax.tree.leaves((saved.state, saved.best))]
    note = {
      "digest": digest(leaves),
      "arrays": [[str(leaf.dtype), list(leaf.shape)] for leaf in leaves],
    }
    arguments = ocp.args.Composite(
      state=ocp.args.StandardSave({"bytes": _packed(leaves)}),
      meta=ocp.args.JsonSave(note),
    )
    self._manager.save(saved.round, args=arguments)

  def restore(self, like: Any, max_round: int | None = None) -> Saved | None:
    """Returns the newest sound checkpoint, or None; says so if it passes one over.

    Args:
      like: A server state of the same structure and shapes, in whose types the
        result is given.
      max_round: Pass over checkpoints of later rounds.

    Raises:
      InputError: If a sound one is of other shapes.
    """
    for step in sorted(self._manager.all_steps(), reverse=True):
      if max_round is not None and step > max_round:
        continue
      try:
        leaves = self._read(step)
      except Exception as error:  # Whatever a damaged file makes Orbax raise.
        reason = (
          str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        )
        warnings.warn(
          f"checkpoint of round {step} is damaged ({reason}); trying an older one.",
          stacklevel=2,
        )
      else:
        return Saved(step, *_shaped(leaves, like, self._manager.directory))
    return None

  def _read(self, step: int) -> list[np.ndarray]:
    arguments = ocp.args.Composite(meta=ocp.args.JsonRestore())
    note = self._manager.restore(step, args=arguments).meta
    wanted = [np.zeros(shape, dtype) for dtype, shape in note["arrays"]]
    arguments = ocp.args.Composite(
      state=ocp.args.StandardRestore({"bytes": _packed(wanted)})
    )
    packed = self._manager.restore(step, args=arguments).state["bytes"]
    leaves = _unpacked(np.asarray(packed), wanted)
    if digest(leaves) != note["digest"]:
      raise ValueError("its digest does not match its arrays")
    return leaves

  def is_empty(self) -> bool:
    """Whether there is none, sound or not."""
    return not self._manager.all_steps()

  def discard_after(self, round_number: int) -> None:
    """Removes the checkpoints of later rounds, which are about to be made anew."""
    for step in self._manager.all_steps():
      if step > round_number:
        self._manager.delete(step)

  def wait(self) -> None:
    """Blocks until all is on disk."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, and lets the writing threads go."""
    self.wait()
    self._manager.close()


def digest(tree: Any) -> str:
  """SHA-256 of the bytes, dtypes and shapes of all leaves, in order."""
  total = hashlib.sha256()
  for leaf in jax.tree.leaves(tree):
    array = np.asarray(leaf)
    total.update(f"{array.dtype}{array.shape}".encode())
    total.update(np.ascontiguousarray(array).tobytes())
  return total.hexdigest()


def _packed(leaves: Sequence[np.ndarray]) -> np.ndarray:
  """The bytes of all arrays, one after another."""
  return np.concatenate([np.frombuffer(leaf.tobytes(), np.uint8) for leaf in leaves])


def _unpacked(packed: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
  """The arrays that `_packed` was given, of the types and shapes of `like`."""
  ends = np.cumsum([leaf.nbytes for leaf in like])
  parts = np.split(packed, ends[:-1])
  return [
    np.frombuffer(part.tobytes(), leaf.dtype).reshape(leaf.shape)
    for part, leaf in zip(parts, like, strict=True)
  ]


def _shaped(leaves: Sequence[np.ndarray], like: Any, directory: Any) -> tuple[Any, Any]:
  """The leaves as (state, best), each of the structure and types of `like`."""
  wanted, structure = jax.tree.flatten((like, like))
  if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in wanted]:
    raise InputError(
      f"the checkpoints in {directory} are of a model of other shapes: they belong to "
      "other data or another config."
    )
  cast = [leaf.astype(w.dtype) for leaf, w in zip(leaves, wanted, strict=True)]
  state, best = jax.tree.unflatten(structure, cast)
  return state, best
