"""Sums of kernels: features side by side, each part with an amplitude of its own."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp.urk.base import (
  FeatureMap,
  FeatureParams,
  Shared,
  apply_shared,
  shared_part,
)


def add(*parts: FeatureMap) -> FeatureMap:
  """Adds kernels: Σ a_p² k_p(x, x'), with trained amplitudes a that start at one.

  θ is {"parts": one θ a part, "log_amplitude": [P]}, and ω one ω a part.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax import urk
    >>> kernel, x = urk.add(urk.random_fourier(10), urk.linear()), jnp.zeros((5, 3))
    >>> params = kernel.init(jax.random.key(0), x)
    >>> kernel.apply(params, x).shape, params.theta["log_amplitude"].tolist()
    ((5, 24), [0.0, 0.0])
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

  def split(params: FeatureParams) -> list[FeatureParams]:
    pairs = zip(params.omega, params.theta["parts"], strict=True)
    return [FeatureParams(omega, theta) for omega, theta in pairs]

  def compute(params: FeatureParams) -> Any:
    own = zip(parts, split(params), strict=True)
    return tuple(shared_part(part, one) for part, one in own)

  def apply(params: FeatureParams, x: jax.Array) -> jax.Array:
    return apply_with(params, x, compute(params))

  def apply_with(params: FeatureParams, x: jax.Array, shared: Any) -> jax.Array:
    amplitudes = jnp.exp(params.theta["log_amplitude"])
    blocks = [
      apply_shared(part, own, x, common)
      for part, own, common in zip(parts, split(params), shared, strict=True)
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

  def missing(params: FeatureParams, x: jax.Array, shared: Any) -> jax.Array:
    squares, own = jnp.exp(2.0 * params.theta["log_amplitude"]), split(params)
    lost = [parts[p].missing(own[p], x, shared[p]) for p in lossy]  # type: ignore[misc]
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

  sharing = [p for p, part in enumerate(parts) if part.shared is not None]

  def gradient(params: FeatureParams, shared: Any, products: jax.Array) -> Any:
    own = split(params)
    # Parts that share something draw inputs [S, D]: they know what a row is like.
    row = jnp.zeros_like(own[sharing[0]].omega[:1])
    ends = np.cumsum(
      [
        jax.eval_shape(part.apply, one, row).shape[1]
        for part, one in zip(parts, own, strict=True)
      ]
    )
    slopes = jax.tree.map(jnp.zeros_like, params.theta)
    by_part = list(slopes["parts"])
    for p in sharing:
      start = ends[p - 1] if p else 0
      # Amplitudes scale c and φ of a part inversely: H of its block is its own.
      block = products[start : ends[p], start : ends[p]]
      by_part[p] = parts[p].shared.gradient(own[p], shared[p], block)  # type: ignore[union-attr]
    return slopes | {"parts": tuple(by_part)}

  bounded = all(part.norm_bound is not None for part in parts)
  return FeatureMap(
    init,
    apply,
    draw,
    norm_bound=norm_bound if bounded else None,
    missing=missing if lossy else None,
    needs_inputs=any(part.needs_inputs for part in parts),
    penalty=penalty if held else None,
    shared=Shared(compute, apply_with, gradient) if sharing else None,
  )
