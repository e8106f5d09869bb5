"""Symmetric and lower triangular matrices as one triangle: how they are sent.

The rows of the lower triangle follow one another, diagonal included, in the order of
`numpy.tril_indices`: M(M + 1)/2 numbers for a matrix [M, M].
"""

import math

import jax
import numpy as np


def pack(matrix: jax.Array) -> jax.Array:
  """Takes the lower triangle [M(M + 1)/2] of a matrix [M, M]."""
  rows, columns = np.tril_indices(matrix.shape[-1])
  return matrix[rows, columns]


def unpack(triangle: jax.Array) -> jax.Array:
  """Rebuilds the symmetric matrix [M, M] whose lower triangle is [M(M + 1)/2].

  Example:
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax import blr
    >>> blr.unpack(blr.pack(jnp.array([[1.0, 2.0], [2.0, 3.0]]))).tolist()
    [[1.0, 2.0], [2.0, 3.0]]
  """
  size = side(triangle.shape[-1])
  rows, columns = np.indices((size, size))
  low, high = np.minimum(rows, columns), np.maximum(rows, columns)
  return triangle[high * (high + 1) // 2 + low]


def side(length: int) -> int:
  """Finds M, given the length M(M + 1)/2 of a triangle."""
  return (math.isqrt(8 * length + 1) - 1) // 2
