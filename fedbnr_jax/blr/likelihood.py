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
  inverse_trace: jax.Array  # [] tr B⁻¹ or tr C⁻¹, of the system that was factored.
  shrunk: jax.Array  # [N, M] Φ B⁻¹ = C⁻¹ Φ, in the features' type.


_product = partial(jnp.matmul, precision="highest")


def _uses_dual(features: jax.Array) -> bool:
  num_rows, num_features = features.shape
  return num_rows < num_features


def _gram(features: jax.Array) -> jax.Array:
  """The smaller of ΦΦᵀ and ΦᵀΦ."""
  if _uses_dual(features):
    return _product(features, features.T)
  return _product(features.T, features)


def _solve(features: jax.Array, targets: jax.Array, rho: jax.Array) -> _Solution:
  """Factors the smaller of B = I + ρΦᵀΦ and C = I + ρΦΦᵀ and solves for w̄."""
  dtype = statistics_dtype()
  if dtype == jnp.float32:
    return _solve_alone(*(a.astype(dtype) for a in (features, targets, rho)))
  if features.dtype == dtype:
    return _solve_exactly(features, targets, rho)
  return _solve_either(features, targets, rho)


# How much of the identity in I + ρG the rounding of float32 products may eat, as a
# bound that only a collapsed kernel reaches: its gradient is off by three times as
# much, 1 %, in the worst case found; that of others by 1e-4 at most.
_MAX_ROUNDING = 4e-3


@jax.custom_jvp
def _solve_either(features: jax.Array, targets: jax.Array, rho: jax.Array) -> _Solution:
  """Narrow features where float64 is enabled: mixed precision as far as it goes."""
  return _choose(features, targets, rho)


@_solve_either.defjvp
def _solve_either_jvp(
  primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[_Solution, _Solution]:
  """For second derivatives, which no training takes; a choice cannot be transposed."""
  return jax.jvp(_solve_exactly, primals, tangents)


@jax.custom_batching.custom_vmap
def _choose(features: jax.Array, targets: jax.Array, rho: jax.Array) -> _Solution:
  """Float32 products as long as ρ times their rounding stays far below the identity.

  Float32 loses that as soon as σ is small beside λ. Any leading axes, and one choice
  for all of them: a choice for each client would compute both.
  """
  mixed, exact = _solve_mixed, _solve_exactly
  for _ in range(rho.ndim):
    mixed, exact = jax.vmap(mixed), jax.vmap(exact)
  trace = jnp.sum(features**2, axis=(-2, -1))  # Bounds the norm of G.
  rounding = jnp.finfo(features.dtype).eps * jnp.max(rho * trace)
  return jax.lax.cond(rounding < _MAX_ROUNDING, mixed, exact, features, targets, rho)


@_choose.def_vmap
def _choose_batch(
  axis_size: int, in_batched: list[bool], *arguments: jax.Array
) -> tuple[_Solution, _Solution]:
  batch = [
    argument if batched else jnp.broadcast_to(argument, (axis_size, *argument.shape))
    for argument, batched in zip(arguments, in_batched, strict=True)
  ]
  solution = _choose(*batch)
  return solution, jax.tree.map(lambda _: True, solution)


def _solve_exactly(
  features: jax.Array, targets: jax.Array, rho: jax.Array
) -> _Solution:
  """All of it in float64."""
  wide = (a.astype(jnp.float64) for a in (features, targets, rho))
  solution = _solve_mixed(*wide)
  return solution.replace(shrunk=solution.shrunk.astype(features.dtype))


def _solve_mixed(features: jax.Array, targets: jax.Array, rho: jax.Array) -> _Solution:
  """Products with the features in their own type, the small system in float64."""
  dtype = features.dtype
  wide, wide_rho = partial(jnp.asarray, dtype=jnp.float64), rho.astype(jnp.float64)
  factor = _factored(jnp.linalg.cholesky, wide(_gram(features)), wide_rho)
  if _uses_dual(features):
    residual = factor.solve(wide(targets))  # C⁻¹y = y − Φw̄
    back = wide(_product(residual.astype(dtype), features))
    # Its maximum over all residuals is the quadratic form.
    quadratic = jnp.dot(2.0 * wide(targets) - residual, residual) - wide_rho * jnp.sum(
      back**2
    )
    weights = wide_rho * back
  else:
    weights = wide_rho * factor.solve(wide(_product(targets, features)))
    residual = wide(targets - _product(features, weights.astype(dtype)))
    # Its minimum over all weights is the quadratic form.
    quadratic = jnp.sum(residual**2) + jnp.sum(weights**2) / wide_rho
  return factor.solution(features, weights, residual, quadratic)


def _solve_alone(features: jax.Array, targets: jax.Array, rho: jax.Array) -> _Solution:
  """Float32 and nothing else: a factor that always exists, one step of refinement.

  The quadratic forms are such that the error of the solution enters squared.
  """
  dual = _uses_dual(features)
  factor = _factored(guarded_cholesky, _gram(features), rho)

  def refined(b: jax.Array) -> jax.Array:
    solution = factor.solve(b)
    if dual:
      product = _product(features, _product(features.T, solution))
    else:
      product = _product(features.T, _product(features, solution))
    return solution + factor.solve(b - solution - rho * product)

  if dual:
    residual = refined(targets)
    back = _product(features.T, residual)
    quadratic = jnp.dot(2.0 * targets - residual, residual) - rho * jnp.sum(back**2)
    weights = rho * back
  else:
    weights = refined(rho * _product(features.T, targets))
    residual = targets - _product(features, weights)
    quadratic = jnp.sum(residual**2) + jnp.sum(weights**2) / rho
  return factor.solution(features, weights, residual, quadratic)


class _Factor(struct.PyTreeNode):
  """(I + ρG)⁻¹ = half_inverseᵀ · half_inverse."""

  half_inverse: jax.Array  # [m, m]
  log_det: jax.Array  # []

  def solve(self, b: jax.Array) -> jax.Array:
    return _product(self.half_inverse.T, _product(self.half_inverse, b))

  def solution(
    self,
    features: jax.Array,
    weights: jax.Array,
    residual: jax.Array,
    quadratic: jax.Array,
  ) -> _Solution:
    inverse_trace = jnp.sum(self.half_inverse**2)
    half = self.half_inverse.astype(features.dtype)
    inverse = _product(half.T, half)
    dual = _uses_dual(features)
    shrunk = _product(inverse, features) if dual else _product(features, inverse)
    return _Solution(weights, residual, quadratic, self.log_det, inverse_trace, shrunk)


def _factored(
  cholesky: Callable[[jax.Array], jax.Array], gram: jax.Array, rho: jax.Array
) -> _Factor:
  identity = jnp.eye(gram.shape[0], dtype=gram.dtype)
  lower = cholesky(identity + rho * gram)
  # Its product with the features is a GEMM, several times faster than triangular
  # solves with as many right-hand sides.
  half_inverse = solve_triangular(lower, identity, lower=True)
  return _Factor(half_inverse, 2.0 * jnp.sum(jnp.log(jnp.diagonal(lower))))


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
  dtype, wide = features.dtype, solution.residual.dtype
  by_targets = solution.residual.astype(dtype) / noise_std**2
  outer = by_targets[:, None] * solution.weights.astype(dtype)[None, :]
  by_features = rho * solution.shrunk - outer
  # Differences of near equals: as wide as the solution is, whole numbers first.
  sigma, prior = noise_std.astype(wide), prior_std.astype(wide)
  size, trace = min(features.shape), solution.inverse_trace  # γ = size − trace
  misfit = jnp.sum((solution.residual / sigma) ** 2)
  length = jnp.sum((solution.weights / prior) ** 2)
  by_noise = (count.astype(wide) - size + trace - misfit) / sigma
  by_prior = (size - trace - length) / prior
  tangent = (
    jnp.sum(by_features * d_features)
    + jnp.dot(by_targets, d_targets)
    + by_noise.astype(dtype) * d_noise
    + by_prior.astype(dtype) * d_prior
  )
  return value, tangent
