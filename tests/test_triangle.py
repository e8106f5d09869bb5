"""Symmetric matrices as triangles: there and back, for any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbnr_jax.gp.blr import triangle


def _symmetric(size, seed, dtype=np.float64):
  matrix = np.random.default_rng(seed).normal(size=(size, size)).astype(dtype)
  return np.tril(matrix) + np.tril(matrix, -1).T


@given(
  st.integers(1, 40), st.integers(0, 10**6), st.sampled_from([np.float32, np.float64])
)
def test_unpacking_what_was_packed_changes_no_bit(size, seed, dtype):
  matrix = _symmetric(size, seed, dtype)
  packed = triangle.pack(matrix)
  assert packed.shape == (size * (size + 1) // 2,)
  assert packed.dtype == dtype
  np.testing.assert_array_equal(triangle.unpack(packed), matrix)
  np.testing.assert_array_equal(triangle.pack(triangle.unpack(packed)), packed)


@given(st.integers(1, 12), st.integers(0, 10**6))
def test_triangles_are_summed_as_matrices_are(size, seed):
  one, other = _symmetric(size, seed), _symmetric(size, seed + 1)
  total = triangle.unpack(triangle.pack(one) + triangle.pack(other))
  np.testing.assert_array_equal(total, one + other)


def test_rows_of_the_lower_triangle_follow_one_another():
  matrix = np.array([[1, 2, 4], [2, 3, 5], [4, 5, 6]])
  np.testing.assert_array_equal(triangle.pack(matrix), [1, 2, 3, 4, 5, 6])
  # What is above the diagonal is not looked at.
  matrix[0, 2] = -1
  np.testing.assert_array_equal(triangle.pack(matrix), [1, 2, 3, 4, 5, 6])


@given(st.integers(0, 10**8))
def test_side_is_the_size_of_every_triangle(size):
  """In integers: a square root in floats would be wrong for large ones."""
  assert triangle.side(size * (size + 1) // 2) == size


@pytest.mark.parametrize("size", [1, 2, 3, 50, 400])
def test_no_size_is_refused_in_a_traced_function(size):
  shape = jax.ShapeDtypeStruct((size, size), np.float64)
  there_and_back = jax.eval_shape(lambda m: triangle.unpack(triangle.pack(m)), shape)
  assert there_and_back.shape == (size, size)


def test_gradients_pass_there_and_back():
  """The gradient of the sum is one for each entry that is read."""

  @jax.jit
  def gradient(matrix):
    return jax.grad(lambda m: jnp.sum(triangle.unpack(triangle.pack(m))))(matrix)

  got = gradient(jnp.ones((3, 3)))
  np.testing.assert_array_equal(got, [[1, 0, 0], [2, 1, 0], [2, 2, 1]])
