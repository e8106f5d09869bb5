"""Optimisers: Adam that keeps its digits in float32, L-BFGS that goes downhill."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

_B1, _B2, _EPS = 0.9, 0.999, 1e-8  # As everyone has them.
# Of the angle between a step and the change of the gradient that L-BFGS remembers.
_LEAST_COSINE = 0.1


def adam(learning_rate: float | jax.Array) -> optax.GradientTransformation:
  """optax.adam, with 1 − bᵗ as −expm1(t log b); moments of the parameters' types.

  Computed as it is written, 1 − bᵗ with b near one cancels: the first steps lose three
  digits, more than the rest of a float32 program does. Nothing is promoted, so trees of
  several types and strict promotion will do.
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


def lbfgs(memory_size: int = 10) -> optax.GradientTransformation:
  """L-BFGS for steps that no line search has chosen.

  A step that only lowers the value may meet negative curvature, after which Optax's
  direction can point uphill. Here a gradient difference that is nearly orthogonal to
  its step, or opposed to it, is tilted towards the step before it is remembered, so
  that every direction goes downhill. All parameters are one vector here: memory of ten
  steps for each of many small arrays would take XLA seconds to compile.
  """
  inner = optax.scale_by_lbfgs(memory_size=memory_size)

  def update(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    step = optax.tree.sub(params, state.params)
    change = optax.tree.sub(gradient, state.updates)
    length = optax.tree.norm(step, squared=True)
    wanted = _LEAST_COSINE * jnp.sqrt(length) * optax.tree.norm(change)
    lack = jnp.maximum(wanted - optax.tree.vdot(step, change), 0.0)
    tilt = jnp.where(length > 0, lack / jnp.where(length > 0, length, 1.0), 0.0)
    before = jax.tree.map(
      lambda g, s: g - tilt.astype(s.dtype) * s, state.updates, step
    )
    direction, state = inner.update(gradient, state._replace(updates=before), params)
    return jax.tree.map(jnp.negative, direction), state

  return optax.flatten(optax.GradientTransformation(inner.init, update))
