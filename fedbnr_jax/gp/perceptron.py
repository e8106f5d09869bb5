"""Computes a ReLU layer and a linear one in a single step, with a gradient by hand.

A wide extractor spends nearly all its time here. Three things that automatic
differentiation does not do make this about twice as fast on a CPU. Products with a
small inner size are multiply-adds, which XLA fuses with what follows. The gradient of
the bias comes out of the product that the gradient of the kernel needs anyway. Hidden
units that do not fit into the cache are computed in blocks of rows, once in the forward
pass and again in the backward pass, and are never stored.
"""

import chex
import jax
import jax.numpy as jnp

_NARROW = 6  # Largest inner size at which multiply-adds beat a matrix product.
_MAX_UNITS = 1_500_000  # Largest number N·s of hidden units computed at once.
_BLOCK_UNITS = 500_000  # Hidden units of a block, if there are more: 2 MB of float32.


@jax.custom_vjp
def hidden_then_linear(
  x: jax.Array, kernel: jax.Array, bias: jax.Array, output: jax.Array
) -> jax.Array:
  """Returns max(x·kernel + bias, 0)·outputᵀ [N, latent].

  Reverse-mode derivatives of any order are defined; forward mode is not.

  Args:
    x: [N, D] rows.
    kernel: [D, s] weights of the hidden layer.
    bias: [s] bias of the hidden layer.
    output: [latent, s] weights of the linear layer.
  """
  chex.assert_rank([x, kernel, bias, output], [2, 2, 1, 2])
  blocks = _row_blocks(x, bias.shape[0])
  if blocks is None:
    return _linear(_hidden(x, kernel, bias), output)
  latent = jax.lax.map(
    lambda rows: _linear(_hidden(rows, kernel, bias), output), blocks
  )
  return latent.reshape(-1, output.shape[0])[: x.shape[0]]


_Arrays = tuple[jax.Array, ...]


def _forward(
  x: jax.Array, kernel: jax.Array, bias: jax.Array, output: jax.Array
) -> tuple[jax.Array, _Arrays]:
  """Returns the value, and the arrays that `_backward` needs.

  The hidden units [N, s] are among them only if all rows were computed at once.
  """
  if _row_blocks(x, bias.shape[0]) is not None:
    latent = hidden_then_linear(x, kernel, bias, output)
    return latent, (x, kernel, bias, output)
  hidden = _hidden(x, kernel, bias)
  return _linear(hidden, output), (x, kernel, bias, output, hidden)


def _backward(residuals: _Arrays, by_latent: jax.Array) -> _Arrays:
  """Returns the cotangents of x, kernel, bias and output, given one [N, latent]."""
  x, kernel, bias, output, *hidden = residuals
  if hidden:
    by_x, by_weights = _gradient(x, kernel, output, hidden[0], by_latent)
    return by_x, *by_weights
  blocks = _row_blocks(x, bias.shape[0])
  assert blocks is not None
  padding = blocks.shape[0] * blocks.shape[1] - x.shape[0]
  # Padded rows have no gradient, so they add nothing to any sum.
  by_latent = jnp.pad(by_latent, ((0, padding), (0, 0)))
  by_latent = by_latent.reshape(*blocks.shape[:2], -1)

  def add_block(total: _Arrays, block: _Arrays) -> tuple[_Arrays, jax.Array]:
    rows, by_rows = block
    hidden = _hidden(rows, kernel, bias)
    by_x, by_weights = _gradient(rows, kernel, output, hidden, by_rows)
    return tuple(a + b for a, b in zip(total, by_weights, strict=True)), by_x

  zero = tuple(jnp.zeros_like(weights) for weights in (kernel, bias, output))
  total, by_x = jax.lax.scan(add_block, zero, (blocks, by_latent))
  return by_x.reshape(-1, x.shape[1])[: x.shape[0]], *total


hidden_then_linear.defvjp(_forward, _backward)


def _gradient(
  x: jax.Array,
  kernel: jax.Array,
  output: jax.Array,
  hidden: jax.Array,
  by_latent: jax.Array,
) -> tuple[jax.Array, _Arrays]:
  """Returns the cotangent of x [N, D], and those of kernel, bias and output."""
  by_hidden = _product(by_latent, output)
  by_hidden = jnp.where(hidden > 0, by_hidden, jnp.zeros_like(by_hidden))
  # One product serves kernel and bias; a sum over rows would be a second pass.
  extended = jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)
  by_both = jnp.matmul(extended.T, by_hidden)
  by_output = jnp.matmul(by_latent.T, hidden)
  # XLA removes this product where x is data and its gradient is not used.
  by_x = jnp.matmul(by_hidden, kernel.T)
  return by_x, (by_both[:-1], by_both[-1], by_output)


def _hidden(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
  """Returns the hidden units [N, s] of rows x [N, D]."""
  return jnp.maximum(_product(x, kernel) + bias[None, :], 0)


def _linear(hidden: jax.Array, output: jax.Array) -> jax.Array:
  """Maps hidden units [N, s] to [N, latent]."""
  return jnp.matmul(hidden, output.T)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns [N, n] · [n, s], computed as a sum of outer products where n is small."""
  if a.shape[1] > _NARROW:
    return jnp.matmul(a, b)
  terms = (a[:, i, None] * b[None, i, :] for i in range(1, a.shape[1]))
  return sum(terms, start=a[:, 0, None] * b[None, 0, :])


def _row_blocks(x: jax.Array, width: int) -> jax.Array | None:
  """Returns the rows [N, D] as blocks [B, n, D] padded with zeros; None if few.

  Blocks pay off where the cache of a core is small beside the hidden units. This was
  measured on CPUs; on other devices the rows stay whole.
  """
  num_rows = x.shape[0]
  if num_rows * width <= _MAX_UNITS or jax.default_backend() != "cpu":
    return None
  num_blocks = -(-num_rows * width // _BLOCK_UNITS)
  size = -(-num_rows // num_blocks)
  num_blocks = -(-num_rows // size)
  padded = jnp.pad(x, ((0, num_blocks * size - num_rows), (0, 0)))
  return padded.reshape(num_blocks, size, -1)
