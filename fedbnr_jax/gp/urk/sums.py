"""Sums of kernels: features side by side, each part with an amplitude of its own."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp.urk.base import FeatureMap, FeatureParams


def add(*parts: FeatureMap) -> FeatureMap:
  """Adds kernels: Σ a_p² k_p(x, x'), with trained amplitudes a that start at one.

  θ is {"parts": one θ a part, "log_amplitude": [P]}, and ω one ω a part.
  """
  if not parts:
    raise InputError("a sum of kernels needs at least one part.")

  def draw(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> Any:
    keys = jax.random.split(key, len(parts))
    return tuple(
      part.draw(key, x, inputs if part.needs_inputs else ())
      for part, key in zip(parts, keys, strict=True)
    )

  def init(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> FeatureParams:
    keys = jax.random.split(key, len(parts))
    starts = [
      part.init(key, x, inputs if part.needs_inputs else ())
      for part, key in zip(parts, keys, strict=True)
    ]
    theta = {
      "parts": tuple(start.theta for start in starts),
      "log_amplitude": jnp.zeros(len(parts), x.dtype),
    }
    return FeatureParams(tuple(start.omega for start in starts), theta)

  def apply(params: FeatureParams, x: jax.Array) -> jax.Array:
    amplitudes = jnp.exp(params.theta["log_amplitude"])
    blocks = [
      part.apply(FeatureParams(omega, theta), x)
      for part, omega, theta in zip(
        parts, params.omega, params.theta["parts"], strict=True
      )
    ]
    # The widest of the parts' types; which need not be promoted implicitly.
    dtype = max((block.dtype for block in blocks), key=lambda dtype: dtype.itemsize)
    scaled = [
      amplitudes[p].astype(dtype) * block.astype(dtype)
      for p, block in enumerate(blocks)
    ]
    return jnp.concatenate(scaled, axis=1)

  def norm_bound(theta: Any) -> jax.Array:
    bounds = [
      part.norm_bound(own)
      for part, own in zip(parts, theta["parts"], strict=True)
      if part.norm_bound is not None
    ]
    return jnp.dot(jnp.exp(2.0 * theta["log_amplitude"]), jnp.stack(bounds))

  lossy = [p for p, part in enumerate(parts) if part.missing is not None]

  def missing(params: FeatureParams, x: jax.Array) -> jax.Array:
    squares = jnp.exp(2.0 * params.theta["log_amplitude"])
    lost = [
      parts[p].missing(FeatureParams(params.omega[p], params.theta["parts"][p]), x)  # type: ignore[misc]
      for p in lossy
    ]
    return jnp.sum(
      jnp.stack(
        [squares[p].astype(o.dtype) * o for p, o in zip(lossy, lost, strict=True)]
      ),
      axis=0,
    )

  held = [p for p, part in enumerate(parts) if part.penalty is not None]

  def penalty(theta: Any) -> jax.Array:
    own = theta["parts"]
    return jnp.sum(jnp.stack([parts[p].penalty(own[p]) for p in held]))  # type: ignore[misc]

  bounded = all(part.norm_bound is not None for part in parts)
  return FeatureMap(
    init,
    apply,
    draw,
    norm_bound=norm_bound if bounded else None,
    missing=missing if lossy else None,
    needs_inputs=any(part.needs_inputs for part in parts),
    penalty=penalty if held else None,
  )
