"""Marginal likelihood of features and targets, with its gradient in closed form."""

from collections.abc import Callable
from functools import partial

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.scipy.linalg import solve_triangular

from fedbnr_jax.blr.factor import guarded_cholesky
from fedbnr_jax.blr.statistics import masked, statistics_dtype


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
  quadratic: jax.Array  # [] σ² yᵀ(λ²ΦΦᵀ + σ²I)⁻¹y = ‖y − Φw̄‖² + ‖w̄‖²/ρ.
  log_det: jax.Array  # [] log|B|.
  half_inverse: jax.Array  # [m, m] L⁻¹, m = min(N, M).


_product = partial(jnp.matmul, precision="highest")


def _uses_dual(features: jax.Array) -> bool:
  num_rows, num_features = features.shape
  return num_rows < num_features


def _solve(features: jax.Array, targets: jax.Array, rho: jax.Array) -> _Solution:
  """Factors the smaller of B = I + ρΦᵀΦ and C = I + ρΦΦᵀ and solves for w̄.

  Float64 where it is enabled: ρ times the Gram's rounding errors must stay below the
  identity, and float32 loses that as soon as σ is small beside λ. There it makes do
  with one step of iterative refinement, and with quadratic forms in which the error
  of the solution enters squared.
  """
  dtype = statistics_dtype()
  features, targets, rho = (a.astype(dtype) for a in (features, targets, rho))
  dual = _uses_dual(features)
  gram = _product(features, features.T) if dual else _product(features.T, features)
  identity = jnp.eye(gram.shape[0], dtype=dtype)
  # In float64 no ρ that training can reach makes the plain factor fail.
  factor = jnp.linalg.cholesky if dtype == jnp.float64 else guarded_cholesky
  lower = factor(identity + rho * gram)
  # Its product with the features is a GEMM, several times faster than
  # triangular solves with as many right-hand sides.
  half_inverse = solve_triangular(lower, identity, lower=True)
  log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(lower)))

  def refined(system: Callable[[jax.Array], jax.Array], b: jax.Array) -> jax.Array:
    def solve(vector: jax.Array) -> jax.Array:
      return _product(half_inverse.T, _product(half_inverse, vector))

    solution = solve(b)
    if dtype == jnp.float64:
      return solution
    return solution + solve(b - system(solution))

  if dual:

    def times_c(vector: jax.Array) -> jax.Array:
      return vector + rho * _product(features, _product(features.T, vector))

    residual = refined(times_c, targets)  # C⁻¹y = y − Φw̄
    back = _product(features.T, residual)
    # Its maximum over all residuals is the quadratic form.
    quadratic = jnp.dot(2.0 * targets - residual, residual) - rho * jnp.sum(back**2)
    return _Solution(rho * back, residual, quadratic, log_det, half_inverse)

  def times_b(vector: jax.Array) -> jax.Array:
    return vector + rho * _product(features.T, _product(features, vector))

  weights = refined(times_b, rho * _product(features.T, targets))
  residual = targets - _product(features, weights)
  # Its minimum over all weights is the quadratic form.
  quadratic = jnp.sum(residual**2) + jnp.sum(weights**2) / rho
  return _Solution(weights, residual, quadratic, log_det, half_inverse)


def _nll_value(
  solution: _Solution, noise_std: jax.Array, count: jax.Array
) -> jax.Array:
  dtype = solution.quadratic.dtype
  variance = noise_std.astype(dtype) ** 2
  log_noise = count.astype(dtype) * jnp.log(2.0 * jnp.pi * variance)
  value = 0.5 * (log_noise + solution.log_det + solution.quadratic / variance)
  return value.astype(noise_std.dtype)


@jax.custom_jvp
def _nll(
  features: jax.Array,
  targets: jax.Array,
  noise_std: jax.Array,
  prior_std: jax.Array,
  count: jax.Array,
) -> jax.Array:
  solution = _solve(features, targets, (prior_std / noise_std) ** 2)
  return _nll_value(solution, noise_std, count)


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
  rho = (prior_std / noise_std) ** 2
  solution = _solve(features, targets, rho)
  value = _nll_value(solution, noise_std, count)
  half = solution.half_inverse
  effective = (half.shape[0] - jnp.sum(half**2)).astype(noise_std.dtype)
  # From here on precision is not at stake: the network's own will do.
  half = half.astype(features.dtype)
  inverse = _product(half.T, half)
  weights = solution.weights.astype(features.dtype)
  residual = solution.residual.astype(features.dtype)
  shrunk = (  # Φ B⁻¹ = C⁻¹ Φ
    _product(inverse, features) if _uses_dual(features) else _product(features, inverse)
  )
  by_targets = residual / noise_std**2
  by_features = rho * shrunk - by_targets[:, None] * weights[None, :]
  by_noise = (count - effective - jnp.dot(residual, by_targets)) / noise_std
  by_prior = (effective - jnp.sum(weights**2) / prior_std**2) / prior_std
  tangent = (
    jnp.sum(by_features * d_features)
    + jnp.dot(by_targets, d_targets)
    + by_noise * d_noise
    + by_prior * d_prior
  )
  return value, tangent
