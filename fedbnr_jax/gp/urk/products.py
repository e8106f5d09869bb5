"""Kernels of inner products: exponential, polynomial, linear."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp.urk.base import FeatureMap, FeatureParams, from_function


def exponential(num_samples: int) -> FeatureMap:
  """exp(ωᵀx) with normal ω: the non-stationary kernel exp(‖x + x'‖²/2)."""

  def sample_omega(key: chex.PRNGKey, x: jax.Array) -> jax.Array:
    return jax.random.normal(key, x.shape, x.dtype)

  def g(theta: Any, omega: jax.Array, x: jax.Array) -> jax.Array:
    del theta
    return jnp.exp(jnp.dot(omega, x))

  return from_function(g, sample_omega, num_samples)


def polynomial(num_samples: int, degree: int = 2, offset: float = 1.0) -> FeatureMap:
  """The polynomial kernel (xᵀx' + c)ⁿ by the paper's multinomial construction.

  With x̄ = [√(2c), √(2D) x] and ω ~ Multinomial(n, [1/2, 1/(2D), …]) the feature
  is Π x̄ᵢ^ωᵢ. We keep the n trials of the multinomial instead of their counts and
  multiply the entries of x̄ that they name: the same number, and right for
  negative inputs, whose logarithm the paper's formula would need.
  """
  if not (degree >= 1 and degree == int(degree)):
    raise InputError(f"degree must be a whole number of at least 1, got {degree}.")
  if not offset >= 0:
    raise InputError(f"offset must not be negative, got {offset}.")

  def sample_omega(key: chex.PRNGKey, x: jax.Array) -> jax.Array:
    (num_inputs,) = x.shape
    rest = jnp.full((num_inputs,), 0.5 / num_inputs, x.dtype)
    probability = jnp.concatenate([jnp.full((1,), 0.5, x.dtype), rest])
    return jax.random.categorical(key, jnp.log(probability), shape=(int(degree),))

  def g(theta: Any, omega: jax.Array, x: jax.Array) -> jax.Array:
    del theta
    constant = jnp.full((1,), (2.0 * offset) ** 0.5, x.dtype)
    extended = jnp.concatenate([constant, (2.0 * x.shape[0]) ** 0.5 * x])
    return jnp.prod(extended[omega])

  return from_function(g, sample_omega, num_samples)


def linear(largest_input: float | None = None) -> FeatureMap:
  """The linear kernel 1 + xᵀx'/D, whose features [1, x/√D] are exact, without draws.

  Args:
    largest_input: The largest absolute value of an input, where inputs are clipped,
      as normal scores are; it makes the norm of the features bounded.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax import urk
    >>> kernel, x = urk.linear(), jnp.array([[4.0, 8.0, 12.0, 16.0]])
    >>> kernel.apply(kernel.init(jax.random.key(0), x), x).tolist()
    [[1.0, 2.0, 4.0, 6.0, 8.0]]
  """

  def draw(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> Any:
    del key, x, inputs
    return ()

  def init(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> FeatureParams:
    del key, x, inputs
    return FeatureParams((), {})

  def apply(params: FeatureParams, x: jax.Array) -> jax.Array:
    del params
    num_rows, num_inputs = x.shape
    return jnp.concatenate(
      [jnp.ones((num_rows, 1), x.dtype), x * num_inputs**-0.5], axis=1
    )

  if largest_input is None:
    return FeatureMap(init, apply, draw)
  bound = 1.0 + largest_input**2
  return FeatureMap(init, apply, draw, norm_bound=lambda theta: jnp.asarray(bound))
