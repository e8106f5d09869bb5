"""Inducing features: a stationary kernel through inputs that are nobody's rows.

The features of x are L⁻¹k(Z, x), LLᵀ = k(Z, Z): the Nyström approximation at inducing
inputs Z. These are ω here: drawn from a seed and from what sums over all clients say
of the inputs, so that any site can draw them again, and none sees another's row.
"""

from collections.abc import Callable
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
# The Laplacian exp(−‖δ‖₁), a product of kernels of one input each: rows are alike if no
# input has a threshold between them, as two rows in one leaf of a tree.
LAPLACIAN = "laplacian"

# A kernel that learns how rough it is: a weighted mean of these, with trained weights.
BLEND = "blend"
_BLENDED = ("matern12", "matern32", "gaussian")  # And the Laplacian, after them.
_BLEND_SPREAD = 2.0  # Deviation of the logarithms of its weights under their prior.
INDUCED = (*PROFILES, LAPLACIAN, BLEND)  # All that have inducing features.


def _euclidean(a: jax.Array, b: jax.Array) -> jax.Array:
  """Computes distances [N, P] between rows a [N, D] and b [P, D]."""
  squares = jnp.sum(a * a, axis=1)[:, None] + jnp.sum(b * b, axis=1)[None, :]
  return jnp.sqrt(jnp.maximum(squares - 2.0 * a @ b.T, _NEAR))


def _taxicab(a: jax.Array, b: jax.Array) -> jax.Array:
  """Computes sums [N, P] of absolute differences of rows a [N, D] and b [P, D]."""

  # Input by input, so that no array is larger than the sum; also in the gradient,
  # which computes differences anew.
  @jax.checkpoint
  def add_input(total: jax.Array, columns: Any) -> tuple[jax.Array, None]:
    return total + jnp.abs(columns[0][:, None] - columns[1][None, :]), None

  zero = jnp.zeros((a.shape[0], b.shape[0]), a.dtype)
  return jax.lax.scan(add_input, zero, (a.T, b.T))[0]


def kernel_matrix(spectrum: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Computes k [N, P] between rows a [N, D] and b [P, D] with unit length-scale.

  Args:
    spectrum: One of `PROFILES`, or `LAPLACIAN`.
    a: [N, D].
    b: [P, D].
  """
  if spectrum == LAPLACIAN:
    return jnp.exp(-_taxicab(a, b))
  return PROFILES[spectrum](_euclidean(a, b))


def _blend_matrix(theta: Any, a: jax.Array, b: jax.Array) -> jax.Array:
  """Computes the blend [N, P] of kernels between rows a [N, D] and b [P, D]."""
  weights = jax.nn.softmax(theta["log_weights"])
  distance = _euclidean(scaled(theta, a), scaled(theta, b))
  own = {"log_length_scale": theta["log_laplacian_scale"]}
  total = weights[-1] * kernel_matrix(LAPLACIAN, scaled(own, a), scaled(own, b))
  for number, name in enumerate(_BLENDED):
    total += weights[number] * PROFILES[name](distance)
  return total


def _initial_theta(
  spectrum: str, length_scale: float, x: jax.Array, *, isotropic: bool
) -> Any:
  """Makes θ: log ℓ, and of a blend also the Laplacian's, and log weights [4]."""
  # Sums of absolute differences grow as D, where Euclidean distances grow as √D.
  far = length_scale if isotropic else length_scale * x.shape[1] ** 0.5
  by_sum = initial_length_scale(far, x, isotropic=isotropic)
  if spectrum == LAPLACIAN:
    return by_sum
  theta = initial_length_scale(length_scale, x, isotropic=isotropic)
  if spectrum == BLEND:
    theta["log_laplacian_scale"] = by_sum["log_length_scale"]
    theta["log_weights"] = jnp.zeros(len(_BLENDED) + 1, x.dtype)
  return theta


def _prior(
  spectrum: str, length_scale: float, spread: float
) -> Callable[[Any], jax.Array] | None:
  """Makes the penalty of θ: of length-scales around their start, and of weights."""
  by_length = length_scale_penalty(length_scale, spread)
  by_sum = length_scale_penalty(length_scale, spread, power=1.0)
  if spectrum == LAPLACIAN:
    return by_sum
  if spectrum != BLEND:
    return by_length

  def penalty(theta: Any) -> jax.Array:
    total = 0.5 * jnp.sum((theta["log_weights"] / _BLEND_SPREAD) ** 2)
    if by_length is None or by_sum is None:
      return total
    own = {"log_length_scale": theta["log_laplacian_scale"]}
    return total + by_length(theta) + by_sum(own)

  return penalty


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
    spectrum: One of `INDUCED`.
    length_scale: Initial ℓ, trained in the logarithm; if each input has its own, in
      units of √D, or, of the Laplacian, of D.
    isotropic: Whether all inputs share one ℓ [], or each has its own, ℓ [D].
    spread: Deviation of log ℓ under its prior, around the start; 0: no prior.
  """
  require_choice("spectrum", spectrum, INDUCED)
  check_positive(num_samples=num_samples, length_scale=length_scale)

  def draw(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> jax.Array:
    if not isinstance(inputs, InputSummary):
      raise TypeError("inducing inputs are drawn from an InputSummary.")
    key_omega, _ = jax.random.split(key)
    return draw_inputs(key_omega, num_samples, inputs, x.dtype)

  def init(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> FeatureParams:
    theta = _initial_theta(spectrum, length_scale, x, isotropic=isotropic)
    return FeatureParams(draw(key, x, inputs), theta)

  def between(theta: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes k [N, P] between rows a [N, D] and b [P, D], in float64 if possible."""
    wide = jax.dtypes.canonicalize_dtype(jnp.float64)
    theta, a, b = jax.tree.map(lambda leaf: leaf.astype(wide), (theta, a, b))
    if spectrum == BLEND:
      return _blend_matrix(theta, a, b)
    return kernel_matrix(spectrum, scaled(theta, a), scaled(theta, b))

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

  return FeatureMap(
    init,
    apply,
    draw,
    norm_bound=lambda theta: jnp.ones(()),
    missing=missing,
    needs_inputs=True,
    penalty=_prior(spectrum, length_scale, spread),
    shared=Shared(whitening, apply_whitened, by_whitening),
  )
