"""Orbax checkpoints of a run, with a digest so that damage is seen and stepped over."""

import hashlib
import os
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

# Every round's checkpoint replaces the one three rounds before it: when the last
# is damaged there is still one to fall back to.
_NUM_KEPT = 3


class Saved(NamedTuple):
  """What a checkpoint holds."""

  round: int
  state: Any  # Server state after that round.
  best: Any  # Server state after the best round so far.


class Checkpoints:
  """The checkpoints in one folder; writing goes on while the next round runs."""

  def __init__(self, directory: str | os.PathLike[str]) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=_NUM_KEPT)
    self._manager = ocp.CheckpointManager(os.path.abspath(directory), options=options)

  def save(self, saved: Saved) -> None:
    """Writes a checkpoint; arrays are copied before the call returns."""
    tree = jax.tree.map(np.array, {"state": saved.state, "best": saved.best})
    arguments = ocp.args.Composite(
      state=ocp.args.StandardSave(tree),
      meta=ocp.args.JsonSave({"digest": digest(tree)}),
    )
    self._manager.save(saved.round, args=arguments)

  def restore(self, like: Any, max_round: int | None = None) -> Saved | None:
    """Returns the newest sound checkpoint, or None; says so if it passes one over.

    Args:
      like: A server state of the same structure, shapes and dtypes.
      max_round: Pass over checkpoints of later rounds.
    """
    for step in sorted(self._manager.all_steps(), reverse=True):
      if max_round is not None and step > max_round:
        continue
      try:
        return self._read(step, like)
      except Exception as error:  # Whatever a damaged file makes Orbax raise.
        reason = (
          str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        )
        warnings.warn(
          f"checkpoint of round {step} is damaged ({reason}); trying the one before.",
          stacklevel=2,
        )
    return None

  def discard_after(self, round_number: int) -> None:
    """Removes the checkpoints of later rounds, which are about to be made anew."""
    for step in self._manager.all_steps():
      if step > round_number:
        self._manager.delete(step)

  def _read(self, step: int, like: Any) -> Saved:
    abstract = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    arguments = ocp.args.Composite(
      state=ocp.args.StandardRestore({"state": abstract, "best": abstract}),
      meta=ocp.args.JsonRestore(),
    )
    read = self._manager.restore(step, args=arguments)
    if digest(read.state) != read.meta["digest"]:
      raise ValueError("its digest does not match its arrays")
    return Saved(step, read.state["state"], read.state["best"])

  def wait(self) -> None:
    """Blocks until all is on disk."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, and lets the writing threads go."""
    self._manager.wait_until_finished()
    self._manager.close()


def digest(tree: Any) -> str:
  """SHA-256 of the bytes, dtypes and shapes of all leaves, in order."""
  total = hashlib.sha256()
  for leaf in jax.tree.leaves(tree):
    array = np.asarray(leaf)
    total.update(f"{array.dtype}{array.shape}".encode())
    total.update(np.ascontiguousarray(array).tobytes())
  return total.hexdigest()
