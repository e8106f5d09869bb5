"""Inducing features: a stationary kernel through inputs that are nobody's rows.

The features of x are L⁻¹k(Z, x), LLᵀ = k(Z, Z): the Nyström approximation at inducing
inputs Z. These are ω here: drawn from a seed and from what sums over all clients say
of the inputs, so that any site can draw them again, and none sees another's row.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from fedbnr_jax.gp.urk.base import FeatureMap, FeatureParams, Shared, check_positive
from fedbnr_jax.gp.urk.fourier import (
  initial_length_scale,
  length_scale_penalty,
  scaled,
)
from fedbnr_jax.names import require_choice

# Added to the diagonal of k(Z, Z), whose largest possible entry is one.
JITTER = {"float32": 1e-4, "float64": 1e-5}
# A squared distance below this counts as it, because √ has no derivative at zero.
_NEAR = 1e-12


class InputSummary(struct.PyTreeNode):
  """What sums over all clients say of the D inputs: marginals and correlations.

  An input is numeric, or the indicator of a category in one of several columns.
  """

  quantiles: chex.Array  # [Q, D] quantiles at the levels (q + ½)/Q; of numeric inputs.
  # [D, D] lower Cholesky factor of the correlation of the inputs' normal scores; an
  # indicator's row is one of the identity.
  factor: chex.Array
  column: chex.Array  # [D] int32, number of the categorical column; D where numeric.
  log_frequency: chex.Array  # [D] of the category that an indicator stands for.
  levels: chex.Array  # [2, D] an indicator's value off, and on.


def draw_inputs(
  key: chex.PRNGKey, num_samples: int, inputs: InputSummary, dtype: Any
) -> jax.Array:
  """Draws rows [S, D] that resemble the inputs, by a Gaussian copula.

  Normal draws with the correlation of the inputs' scores are pushed through each
  numeric input's own quantiles. A category is drawn by its frequency, so that exactly
  one indicator of its column is on.
  """
  num_quantiles, num_inputs = inputs.quantiles.shape
  normal = jax.random.normal(key, (num_samples, num_inputs), dtype)
  uniform = jax.scipy.stats.norm.cdf(normal @ inputs.factor.astype(dtype).T)
  # Levels are evenly spaced, so that their places need no search.
  place = jnp.clip(uniform * num_quantiles - 0.5, 0.0, num_quantiles - 1)
  below = jnp.minimum(place.astype(jnp.int32), num_quantiles - 2)
  quantiles = inputs.quantiles.astype(dtype)
  low, high = (jnp.take_along_axis(quantiles, below + step, axis=0) for step in (0, 1))
  numeric = low + (place - below.astype(dtype)) * (high - low)
  # The category with the largest log frequency + Gumbel noise is a fair draw.
  tiny = jnp.finfo(dtype).tiny
  gumbel = -jnp.log(jnp.maximum(-jnp.log(jnp.maximum(uniform, tiny)), tiny))
  score = (inputs.log_frequency.astype(dtype)[None, :] + gumbel).T  # [D, S]
  best = jax.ops.segment_max(score, inputs.column, num_inputs + 1)
  is_on = (score == best[inputs.column]).T
  off, on = inputs.levels.astype(dtype)
  indicator = jnp.where(is_on, on[None, :], off[None, :])
  is_numeric = (inputs.column == num_inputs)[None, :]
  return jnp.where(is_numeric, numeric, indicator)


def _matern12(r: jax.Array) -> jax.Array:
  return jnp.exp(-r)


def _matern32(r: jax.Array) -> jax.Array:
  r = 3.0**0.5 * r
  return (1.0 + r) * jnp.exp(-r)


def _matern52(r: jax.Array) -> jax.Array:
  r = 5.0**0.5 * r
  return (1.0 + r + r * r / 3.0) * jnp.exp(-r)


def _gaussian(r: jax.Array) -> jax.Array:
  return jnp.exp(-0.5 * r * r)


# Kernels as functions of the distance, by the name of their spectrum.
PROFILES = {
  "gaussian": _gaussian,
  "matern12": _matern12,
  "matern32": _matern32,
  "matern52": _matern52,
}


# A kernel that learns how rough it is: a weighted mean of these, with trained weights.
BLEND = "blend"
_BLENDED = ("matern12", "matern32", "gaussian")
_BLEND_SPREAD = 2.0  # Deviation of the logarithms of its weights under their prior.


def kernel_matrix(
  spectrum: str, a: jax.Array, b: jax.Array, log_weights: jax.Array | None = None
) -> jax.Array:
  """Computes k [N, P] between rows a [N, D] and b [P, D] with unit length-scale.

  Args:
    spectrum: One of `PROFILES`, or `BLEND`.
    a: [N, D].
    b: [P, D].
    log_weights: [3] of a blend, up to a constant.
  """
  squares = jnp.sum(a * a, axis=1)[:, None] + jnp.sum(b * b, axis=1)[None, :]
  distance = jnp.sqrt(jnp.maximum(squares - 2.0 * a @ b.T, _NEAR))
  if log_weights is None:
    return PROFILES[spectrum](distance)
  weights = jax.nn.softmax(log_weights)
  parts = [weights[p] * PROFILES[name](distance) for p, name in enumerate(_BLENDED)]
  return sum(parts[1:], start=parts[0])


def _blend_penalty(theta: Any) -> jax.Array:
  return 0.5 * jnp.sum((theta["log_weights"] / _BLEND_SPREAD) ** 2)


def inducing(
  num_samples: int,
  spectrum: str = "matern32",
  length_scale: float = 1.0,
  *,
  isotropic: bool = False,
  spread: float = 0.0,
) -> FeatureMap:
  """Features L⁻¹k(Z, x) of a stationary kernel at S drawn inducing inputs Z.

  Their inner products approach k(x, x') from below as S grows, and no row's features
  are longer than one. They are computed in float64 where JAX has it.

  Args:
    num_samples: S, the number of inducing inputs, and of features.
    spectrum: One of `PROFILES`, or `BLEND`.
    length_scale: Initial ℓ, trained in the logarithm; if each input has its own, in
      units of √D.
    isotropic: Whether all inputs share one ℓ [], or each has its own, ℓ [D].
    spread: Deviation of log ℓ under its prior, around the start; 0: no prior.
  """
  require_choice("spectrum", spectrum, (*PROFILES, BLEND))
  check_positive(num_samples=num_samples, length_scale=length_scale)

  def draw(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> jax.Array:
    if not isinstance(inputs, InputSummary):
      raise TypeError("inducing inputs are drawn from an InputSummary.")
    key_omega, _ = jax.random.split(key)
    return draw_inputs(key_omega, num_samples, inputs, x.dtype)

  def init(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> FeatureParams:
    theta = initial_length_scale(length_scale, x, isotropic=isotropic)
    if spectrum == BLEND:
      theta["log_weights"] = jnp.zeros(len(_BLENDED), x.dtype)
    return FeatureParams(draw(key, x, inputs), theta)

  def between(theta: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes k [N, P] between rows a [N, D] and b [P, D]."""
    weights = theta.get("log_weights")
    a, b = in_units(theta, a), in_units(theta, b)
    weights = None if weights is None else weights.astype(a.dtype)
    return kernel_matrix(spectrum, a, b, weights)

  def in_units(theta: Any, x: jax.Array) -> jax.Array:
    """Divides rows [N, D] by the length-scales, in float64 where there is one."""
    wide = jax.dtypes.canonicalize_dtype(jnp.float64)
    theta = jax.tree.map(lambda leaf: leaf.astype(wide), theta)
    return scaled(theta, x.astype(wide))

  def factor(theta: Any, omega: jax.Array) -> jax.Array:
    """Computes L [S, S]."""
    among = between(theta, omega, omega)
    jitter = JITTER[str(among.dtype)] * jnp.eye(num_samples, dtype=among.dtype)
    return jnp.linalg.cholesky(among + jitter)

  def whitening(params: FeatureParams) -> jax.Array:
    """Computes L⁻¹ [S, S]: a product with it is faster than solving for few inputs.

    The jitter bounds its condition, so that no more than three digits are lost.
    """
    lower = factor(params.theta, params.omega)
    identity = jnp.eye(num_samples, dtype=lower.dtype)
    return jax.scipy.linalg.solve_triangular(lower, identity, lower=True)

  def apply_whitened(
    params: FeatureParams, x: jax.Array, inverse: jax.Array
  ) -> jax.Array:
    chex.assert_rank(x, 2)
    across = between(params.theta, x, params.omega)  # [N, S]
    return jnp.matmul(across, inverse.T, precision="highest")

  def by_whitening(
    params: FeatureParams, inverse: jax.Array, products: jax.Array
  ) -> Any:
    # φ = L⁻¹u moves by -L⁻¹ dL φ, so that the gradient in L is -L⁻ᵀ Σ c φᵀ.
    _, pull = jax.vjp(lambda theta: factor(theta, params.omega), params.theta)
    slope = jnp.matmul(inverse.T, products.astype(inverse.dtype), precision="highest")
    return pull(-jnp.tril(slope))[0]

  def apply(params: FeatureParams, x: jax.Array) -> jax.Array:
    return apply_whitened(params, x, whitening(params))

  def missing(params: FeatureParams, x: jax.Array, inverse: jax.Array) -> jax.Array:
    return 1.0 - jnp.sum(apply_whitened(params, x, inverse) ** 2, axis=1)

  penalties = [length_scale_penalty(length_scale, spread)]
  penalties += [_blend_penalty] if spectrum == BLEND else []
  priors = [one for one in penalties if one is not None]

  def penalty(theta: Any) -> jax.Array:
    return jnp.sum(jnp.stack([prior(theta) for prior in priors]))

  return FeatureMap(
    init,
    apply,
    draw,
    norm_bound=lambda theta: jnp.ones(()),
    missing=missing,
    needs_inputs=True,
    penalty=penalty if priors else None,
    shared=Shared(whitening, apply_whitened, by_whitening),
  )
