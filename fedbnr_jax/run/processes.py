"""The processes of one training agree: the first decides, and all follow.

With one process there is nobody to agree with, and `work` is just done. Every function
must be called by every process, in the same order.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedbnr_jax.errors import InputError

_T = TypeVar("_T")
_MAX_REFUSAL = 2000  # Bytes that are passed on.


def is_first() -> bool:
  """Says whether this process writes files and talks to the user."""
  return jax.process_index() == 0


def from_first(content: Any) -> Any:
  """Gives every process the content of the first, as JSON carries it."""
  if jax.process_count() == 1:
    return content
  data = np.frombuffer(json.dumps(content).encode(), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.asarray(data.size)))
  data = data if is_first() else np.zeros(size, np.uint8)
  received = np.asarray(multihost_utils.broadcast_one_to_all(data))
  return json.loads(received.astype(np.uint8).tobytes().decode())


def arrays_from_first(tree: Any) -> Any:
  """Gives every process the arrays of the first; all have the same shapes and types."""
  if jax.process_count() == 1:
    return tree
  return jax.tree.map(
    # As bytes: a sum over processes, which this is inside, may not keep the bits.
    lambda leaf: _from_bytes(
      np.asarray(multihost_utils.broadcast_one_to_all(_bytes(leaf))), np.asarray(leaf)
    ),
    tree,
  )


def first_does(work: Callable[[], _T]) -> _T | None:
  """Runs `work` in the first process; if it raises an InputError, all processes do.

  Returns:
    The result of `work` in the first process; None in the others.
  """
  result, refusal = None, None
  if is_first():
    try:
      result = work()
    except InputError as error:
      refusal = str(error)
    except OSError as error:  # Such as a full disk: the others must not wait.
      if jax.process_count() == 1:
        raise
      refusal = str(error)
  refusal = from_first(refusal)
  if refusal is not None:
    raise InputError(refusal)
  return result


def all_do(work: Callable[[], _T]) -> _T:
  """Runs `work` in every process; if one raises an InputError, all processes do."""
  if jax.process_count() == 1:
    return work()
  result, refusal = None, ""
  try:
    result = work()
  except InputError as error:
    refusal = str(error)
  mine = np.zeros(_MAX_REFUSAL, np.uint8)
  text = np.frombuffer(refusal.encode()[:_MAX_REFUSAL], np.uint8)
  mine[: text.size] = text
  everyone = np.asarray(multihost_utils.process_allgather(mine)).astype(np.uint8)
  for number, row in enumerate(everyone):
    message = row.tobytes().rstrip(b"\0").decode(errors="ignore")
    if message:
      raise InputError(f"process {number}: {message}" if number else message)
  return result  # type: ignore[return-value]


def require_same(what: str, content: Any) -> None:
  """Raises InputError in every process unless all have the same content."""
  if jax.process_count() == 1:
    return
  digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
  mine = np.frombuffer(digest, np.uint8)
  everyone = np.asarray(multihost_utils.process_allgather(mine))
  other = np.flatnonzero(np.any(everyone != everyone[0], axis=1))
  if other.size:
    raise InputError(
      f"process {other[0]} has another {what} than process 0: start all processes with "
      "the same options and the same data."
    )


def _bytes(leaf: Any) -> np.ndarray:
  return np.frombuffer(np.asarray(leaf).tobytes(), np.uint8)


def _from_bytes(data: np.ndarray, like: np.ndarray) -> np.ndarray:
  flat = np.frombuffer(data.astype(np.uint8).tobytes(), like.dtype)
  return flat.reshape(like.shape)
