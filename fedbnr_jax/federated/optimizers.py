"""Adam whose bias corrections keep their digits in float32.

Computed as it is written, 1 − bᵗ with b near one cancels: the first steps
lose three digits, more than the rest of a float32 program does.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

_B1, _B2, _EPS = 0.9, 0.999, 1e-8  # As everyone has them.


def adam(learning_rate: float | jax.Array) -> optax.GradientTransformation:
  """optax.adam, with 1 − bᵗ as −expm1(t log b); moments of the parameters' types.

  Nothing is promoted, so trees of several types and strict promotion will do.
  """
  return optax.chain(
    optax.GradientTransformation(_init, _update), optax.scale(-learning_rate)
  )


def _init(params: Any) -> optax.ScaleByAdamState:
  zeros = jax.tree.map(jnp.zeros_like, params)
  return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), mu=zeros, nu=zeros)


def _update(
  gradient: Any, state: optax.ScaleByAdamState, params: Any = None
) -> tuple[Any, optax.ScaleByAdamState]:
  del params
  count = optax.safe_increment(state.count)
  mean = jax.tree.map(lambda m, g: _B1 * m + (1.0 - _B1) * g, state.mu, gradient)
  square = jax.tree.map(lambda v, g: _B2 * v + (1.0 - _B2) * g**2, state.nu, gradient)

  def step(mean: jax.Array, square: jax.Array) -> jax.Array:
    mean = mean / _correction(_B1, count, mean.dtype)
    square = square / _correction(_B2, count, square.dtype)
    return mean / (jnp.sqrt(square) + _EPS)

  return jax.tree.map(step, mean, square), optax.ScaleByAdamState(count, mean, square)


def _correction(decay: float, count: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """1 − decayᵗ."""
  return -jnp.expm1(count.astype(dtype) * math.log(decay))
