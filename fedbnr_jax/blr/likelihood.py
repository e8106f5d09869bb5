"""Marginal likelihood of features and targets, with its gradient in closed form."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.scipy.linalg import solve_triangular

from fedbnr_jax.blr.statistics import masked


def negative_log_marginal_likelihood(
  features: jax.Array,
  targets: jax.Array,
  noise_std: jax.Array | float,
  prior_std: jax.Array | float,
  mask: jax.Array | None = None,
) -> jax.Array:
  """−log p(y | Φ, σ, λ), constants included, of the rows that `mask` admits.

  The smaller of the two systems is factored, [M, M] or [N, N], by shape at trace
  time. Derivatives are in closed form; they do not pass through the factor.

  Args:
    features: [N, M].
    targets: [N].
    noise_std: [] σ, positive.
    prior_std: [] λ, positive.
    mask: [N] bool, false for padding.

  Returns:
    [] in nats, a sum over rows.
  """
  dtype = features.dtype
  features, targets, count = masked(features, targets.astype(dtype), mask)
  noise_std, prior_std = jnp.asarray(noise_std, dtype), jnp.asarray(prior_std, dtype)
  chex.assert_rank([noise_std, prior_std], 0)
  return _nll(features, targets, noise_std, prior_std, count)


class _Solution(struct.PyTreeNode):
  """Everything that value and gradient of the likelihood need."""

  weights: jax.Array  # [M] posterior mean w̄.
  residual: jax.Array  # [N] y − Φw̄.
  log_det: jax.Array  # [] log|B|.
  half_inverse: jax.Array  # [m, m] L⁻¹, m = min(N, M).


def _uses_dual(features: jax.Array) -> bool:
  num_rows, num_features = features.shape
  return num_rows < num_features


def _solve(features: jax.Array, targets: jax.Array, rho: jax.Array) -> _Solution:
  """Factors the smaller of I + ρΦᵀΦ and I + ρΦΦᵀ and solves for w̄."""
  product = partial(jnp.matmul, precision="highest")
  dual = _uses_dual(features)
  gram = product(features, features.T) if dual else product(features.T, features)
  identity = jnp.eye(gram.shape[0], dtype=gram.dtype)
  cholesky = jnp.linalg.cholesky(identity + rho * gram)
  # Its product with the features is a GEMM, several times faster than
  # triangular solves with as many right-hand sides.
  half_inverse = solve_triangular(cholesky, identity, lower=True)

  def apply_inverse(vector: jax.Array) -> jax.Array:
    return product(half_inverse.T, product(half_inverse, vector))

  def weights_for(response: jax.Array) -> jax.Array:  # ρ B⁻¹ Φᵀ response
    if dual:
      return rho * product(features.T, apply_inverse(response))
    return rho * apply_inverse(product(features.T, response))

  weights = weights_for(targets)
  # One step of iterative refinement: in float32 it takes the error of the
  # quadratic form from 1e-4 to 1e-6 when σ is small beside λ.
  residual = targets - product(features, weights)
  gap = rho * product(features.T, residual) - weights  # = B (w̄ − weights)
  if dual:  # B⁻¹ = I − ρ Φᵀ C⁻¹ Φ
    gap = gap - rho * product(features.T, apply_inverse(product(features, gap)))
  else:
    gap = apply_inverse(gap)
  weights = weights + gap
  residual = targets - product(features, weights)
  log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(cholesky)))
  return _Solution(weights, residual, log_det, half_inverse)


def _nll_value(
  solution: _Solution, noise_std: jax.Array, prior_std: jax.Array, count: jax.Array
) -> jax.Array:
  quadratic = (
    jnp.sum(solution.residual**2) / noise_std**2
    + jnp.sum(solution.weights**2) / prior_std**2
  )
  log_noise = count * (
    jnp.log(2.0 * jnp.pi).astype(count.dtype) + 2.0 * jnp.log(noise_std)
  )
  return 0.5 * (log_noise + solution.log_det + quadratic)


@jax.custom_jvp
def _nll(
  features: jax.Array,
  targets: jax.Array,
  noise_std: jax.Array,
  prior_std: jax.Array,
  count: jax.Array,
) -> jax.Array:
  solution = _solve(features, targets, (prior_std / noise_std) ** 2)
  return _nll_value(solution, noise_std, prior_std, count)


@_nll.defjvp
def _nll_jvp(
  primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
  """The gradient in closed form, as a linear map of the tangents.

  w̄ minimises the quadratic form, so it counts as constant; what is left is
  ∂/∂Φ = ρ Φ B⁻¹ − r w̄ᵀ/σ² and, with the effective number of weights
  γ = tr(I − B⁻¹), the derivatives in log σ and log λ.
  """
  features, targets, noise_std, prior_std, count = primals
  d_features, d_targets, d_noise, d_prior, _ = tangents
  product = partial(jnp.matmul, precision="highest")
  rho = (prior_std / noise_std) ** 2
  solution = _solve(features, targets, rho)
  half = solution.half_inverse
  inverse = product(half.T, half)
  shrunk = (  # Φ B⁻¹ = C⁻¹ Φ
    product(inverse, features) if _uses_dual(features) else product(features, inverse)
  )
  weights, residual = solution.weights, solution.residual
  variance = noise_std**2
  by_features = rho * shrunk - residual[:, None] * weights[None, :] / variance
  effective = half.shape[0] - jnp.sum(half**2)
  by_noise = (count - effective - jnp.sum(residual**2) / variance) / noise_std
  by_prior = (effective - jnp.sum(weights**2) / prior_std**2) / prior_std
  value = _nll_value(solution, noise_std, prior_std, count)
  tangent = (
    jnp.sum(by_features * d_features)
    + jnp.sum(residual / variance * d_targets)
    + by_noise * d_noise
    + by_prior * d_prior
  )
  return value, tangent
