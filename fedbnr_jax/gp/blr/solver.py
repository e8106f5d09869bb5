"""Solves the ridge system of the likelihood in the precision that the dtypes allow.

The types decide between three routes: float64 throughout (`_solve_exactly`); float32
products with a small system in float64 (`_solve_mixed`); float32 alone
(`_solve_alone`).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax.scipy.linalg import solve_triangular

from fedbnr_jax.gp.blr.factor import guarded_cholesky
from fedbnr_jax.gp.blr.statistics import statistics_dtype


class Solution(struct.PyTreeNode):
  """The solution holds everything that the likelihood and its gradient need."""

  weights: jax.Array  # [M] posterior mean w̄.
  residual: jax.Array  # [N] y − Φw̄.
  quadratic: jax.Array  # [] σ² yᵀ(λ²ΦΦᵀ + σ²I)⁻¹y = ‖y − Φw̄‖² + ‖w̄‖²/ρ.
  log_det: jax.Array  # [] log|B|.
  inverse_trace: jax.Array  # [] tr B⁻¹ or tr C⁻¹, whichever system was factored.
  shrunk: jax.Array  # [N, M] Φ B⁻¹ = C⁻¹ Φ, in the features' dtype.


_product = partial(jnp.matmul, precision="highest")


def _uses_dual(features: jax.Array) -> bool:
  """Tells whether the [N, N] system C is smaller than the [M, M] system B."""
  num_rows, num_features = features.shape
  return num_rows < num_features


def _gram(features: jax.Array) -> jax.Array:
  """Returns the smaller of ΦΦᵀ [N, N] and ΦᵀΦ [M, M]."""
  if _uses_dual(features):
    return _product(features, features.T)
  return _product(features.T, features)


def solve(features: jax.Array, targets: jax.Array, rho: jax.Array) -> Solution:
  """Factors the smaller of B = I + ρΦᵀΦ and C = I + ρΦΦᵀ and solves for w̄.

  Args:
    features: [N, M] Φ, zero in padded rows.
    targets: [N] y, zero in padded rows.
    rho: [] ρ = λ²/σ².
  """
  dtype = statistics_dtype()
  if dtype == jnp.float32:
    return _solve_alone(*(a.astype(dtype) for a in (features, targets, rho)))
  if features.dtype == dtype:
    return _solve_exactly(features, targets, rho)
  return _solve_either(features, targets, rho)


# The largest rounding error of ρG, relative to the identity in I + ρG, at which
# float32 products are still used. Only a kernel that has collapsed to a constant comes
# near it: in the worst case found, its gradient is off by three times as much, 1 %.
# Gradients of other kernels are off by 1e-4 at most.
MAX_ROUNDING = 4e-3


@jax.custom_jvp
def _solve_either(features: jax.Array, targets: jax.Array, rho: jax.Array) -> Solution:
  """Solves for float32 features where float64 is enabled, by `_choose`.

  This wrapper only adds the rule for second derivatives.
  """
  return _choose(features, targets, rho)


@_solve_either.defjvp
def _solve_either_jvp(
  primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[Solution, Solution]:
  """Differentiates the float64 route, because the choice cannot be transposed.

  Only second derivatives come here, and no training takes any.
  """
  return jax.jvp(_solve_exactly, primals, tangents)


@jax.custom_batching.custom_vmap
def _choose(features: jax.Array, targets: jax.Array, rho: jax.Array) -> Solution:
  """Uses float32 products unless ρ times their rounding error nears the identity.

  That happens as soon as σ is small beside λ. The arguments may have leading axes,
  [..., N, M], [..., N] and [...]. One choice is made for all of them: under a plain
  `vmap`, a choice for each client would compute both routes for every client.
  """
  mixed, exact = _solve_mixed, _solve_exactly
  for _ in range(rho.ndim):
    mixed, exact = jax.vmap(mixed), jax.vmap(exact)
  trace = jnp.sum(features**2, axis=(-2, -1))  # Bounds the norm of G.
  rounding = jnp.finfo(features.dtype).eps * jnp.max(rho * trace)
  return jax.lax.cond(rounding < MAX_ROUNDING, mixed, exact, features, targets, rho)


@_choose.def_vmap
def _choose_batch(
  axis_size: int, in_batched: list[bool], *arguments: jax.Array
) -> tuple[Solution, Solution]:
  batch = [
    argument if batched else jnp.broadcast_to(argument, (axis_size, *argument.shape))
    for argument, batched in zip(arguments, in_batched, strict=True)
  ]
  solution = _choose(*batch)
  return solution, jax.tree.map(lambda _: True, solution)


def _solve_exactly(features: jax.Array, targets: jax.Array, rho: jax.Array) -> Solution:
  """Solves in float64 throughout; only `shrunk` returns to the features' dtype."""
  wide = (a.astype(jnp.float64) for a in (features, targets, rho))
  solution = _solve_mixed(*wide)
  return solution.replace(shrunk=solution.shrunk.astype(features.dtype))


def _solve_mixed(features: jax.Array, targets: jax.Array, rho: jax.Array) -> Solution:
  """Multiplies with the features in their own dtype and solves in float64."""
  dtype = features.dtype
  wide, wide_rho = partial(jnp.asarray, dtype=jnp.float64), rho.astype(jnp.float64)
  factor = _factored(jnp.linalg.cholesky, wide(_gram(features)), wide_rho)
  if _uses_dual(features):
    residual = factor.solve(wide(targets))  # C⁻¹y = y − Φw̄
    back = wide(_product(residual.astype(dtype), features))
    # As a function of the residual this is largest at the exact one, where it equals
    # the quadratic form: an error of the residual enters squared.
    quadratic = jnp.dot(2.0 * wide(targets) - residual, residual) - wide_rho * jnp.sum(
      back**2
    )
    weights = wide_rho * back
  else:
    weights = wide_rho * factor.solve(wide(_product(targets, features)))
    residual = wide(targets - _product(features, weights.astype(dtype)))
    # As a function of the weights this is smallest at the exact ones, where it equals
    # the quadratic form: an error of the weights enters squared.
    quadratic = jnp.sum(residual**2) + jnp.sum(weights**2) / wide_rho
  return factor.solution(features, weights, residual, quadratic)


def _solve_alone(features: jax.Array, targets: jax.Array, rho: jax.Array) -> Solution:
  """Solves in float32 alone, by a guarded factor and one step of refinement.

  As in `_solve_mixed`, an error of the solution enters the quadratic form squared.
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
  """The factor of I + ρG, inverted: (I + ρG)⁻¹ = half_inverseᵀ · half_inverse.

  Its size m is that of the smaller system, min(N, M).
  """

  half_inverse: jax.Array  # [m, m] inverse of the lower Cholesky factor.
  log_det: jax.Array  # [] log|I + ρG|.

  def solve(self, b: jax.Array) -> jax.Array:
    """Returns (I + ρG)⁻¹ b [m] for b [m]."""
    return _product(self.half_inverse.T, _product(self.half_inverse, b))

  def solution(
    self,
    features: jax.Array,
    weights: jax.Array,
    residual: jax.Array,
    quadratic: jax.Array,
  ) -> Solution:
    """Completes a solution from features [N, M], w̄ [M], y − Φw̄ [N] and a scalar."""
    inverse_trace = jnp.sum(self.half_inverse**2)
    half = self.half_inverse.astype(features.dtype)
    inverse = _product(half.T, half)
    dual = _uses_dual(features)
    shrunk = _product(inverse, features) if dual else _product(features, inverse)
    return Solution(weights, residual, quadratic, self.log_det, inverse_trace, shrunk)


def _factored(
  cholesky: Callable[[jax.Array], jax.Array], gram: jax.Array, rho: jax.Array
) -> _Factor:
  """Factors I + ρG for a Gram matrix G [m, m] and ρ []."""
  identity = jnp.eye(gram.shape[0], dtype=gram.dtype)
  lower = cholesky(identity + rho * gram)
  # The product of this inverse with the features is a GEMM, several times faster than
  # triangular solves with as many right-hand sides.
  half_inverse = solve_triangular(lower, identity, lower=True)
  return _Factor(half_inverse, 2.0 * jnp.sum(jnp.log(jnp.diagonal(lower))))
