"""Trees of arrays as one vector of numbers, which is what sites add up."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedbnr_jax.errors import InputError


def to_vector(tree: Any) -> np.ndarray:
  """Puts all numbers of a tree into one vector [n] of float64."""
  leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
  return np.concatenate([np.zeros(0), *leaves])


def from_vector(vector: np.ndarray, like: Any) -> Any:
  """Makes a tree of a vector [n]; whole numbers, which were added exactly, stay whole.

  Args:
    vector: What `to_vector` has made of such a tree, or a sum of them.
    like: A tree with the shapes and types wanted.

  Raises:
    InputError: If the vector has another length.
  """
  leaves, structure = jax.tree.flatten(like)
  sizes = [int(np.prod(leaf.shape)) for leaf in leaves]
  if vector.shape != (sum(sizes),):
    raise InputError(
      f"a sum of sites has {vector.size} numbers instead of {sum(sizes)}: do all sites "
      "have the same version of fedbnr-jax?"
    )
  parts = np.split(vector, np.cumsum(sizes)[:-1]) if sizes else []
  made = []
  for part, leaf in zip(parts, leaves, strict=True):
    whole = np.issubdtype(leaf.dtype, np.integer)
    array = np.rint(part) if whole else part
    made.append(array.astype(leaf.dtype).reshape(leaf.shape))
  return jax.tree.unflatten(structure, made)


def to_arrays(tree: Any) -> tuple[np.ndarray, ...]:
  """Lists the arrays of a tree, on the host."""
  return tuple(np.asarray(leaf) for leaf in jax.device_get(jax.tree.leaves(tree)))


def from_arrays(arrays: Sequence[np.ndarray], like: Any) -> Any:
  """Makes a tree of arrays that came in a message.

  Args:
    arrays: In the order of the tree's leaves.
    like: A tree with the shapes and types that they must have.

  Raises:
    InputError: If they have others.
  """
  leaves, structure = jax.tree.flatten(like)
  got = [(array.shape, array.dtype) for array in arrays]
  if got != [(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves]:
    raise InputError(
      "a message holds other arrays than this question has: does the coordinator have "
      "the same version of fedbnr-jax?"
    )
  return jax.tree.unflatten(structure, list(arrays))
