"""Computes the marginal likelihood of features and targets, with a closed gradient."""

import chex
import jax
import jax.numpy as jnp

from fedbnr_jax.gp.blr.solver import Solution, solve
from fedbnr_jax.gp.blr.statistics import masked


def negative_log_marginal_likelihood(
  features: jax.Array,
  targets: jax.Array,
  noise_std: jax.Array | float,
  prior_std: jax.Array | float,
  mask: jax.Array | None = None,
) -> jax.Array:
  """Returns −log p(y | Φ, σ, λ), constants included, of the rows where `mask` is true.

  The smaller of two systems is factored, [M, M] or [N, N], chosen by shape at trace
  time. Derivatives are in closed form; they do not pass through the factor.

  Args:
    features: [N, M] Φ.
    targets: [N] y.
    noise_std: [] σ, positive.
    prior_std: [] λ, positive.
    mask: [N] bool, false for padding.

  Returns:
    [] in nats, a sum over rows, in the features' dtype.

  Example:
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax import blr
    >>> features, targets = jnp.ones((1, 1)), jnp.zeros(1)
    >>> nll = blr.negative_log_marginal_likelihood(features, targets, 1.0, 1.0)
    >>> round(float(nll), 3)  # Of 0 under N(0, 1² + 1²).
    1.266
  """
  dtype = features.dtype
  features, targets, count = masked(features, targets.astype(dtype), mask)
  noise_std, prior_std = jnp.asarray(noise_std, dtype), jnp.asarray(prior_std, dtype)
  chex.assert_rank([noise_std, prior_std], 0)
  return _nll(features, targets, noise_std, prior_std, count)


def _nll_value(solution: Solution, noise_std: jax.Array, count: jax.Array) -> jax.Array:
  """Returns the negative log likelihood [], in the dtype of σ."""
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
  """Returns the likelihood [] of rows whose padding is zero; `count` [] is a float."""
  solution = solve(features, targets, (prior_std / noise_std) ** 2)
  return _nll_value(solution, noise_std, count)


@_nll.defjvp
def _nll_jvp(
  primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
  """Applies the gradient, which has a closed form, to the tangents.

  The weights w̄ minimise the quadratic form, so their own derivative drops out. What
  remains, with r = y − Φw̄ and γ = tr(I − B⁻¹), the number of weights that the data
  determine, is ∂Φ = ρ Φ B⁻¹ − r w̄ᵀ/σ², ∂y = r/σ², ∂log σ = N − γ − ‖r‖²/σ² and
  ∂log λ = γ − ‖w̄‖²/λ².
  """
  features, targets, noise_std, prior_std, count = primals
  d_features, d_targets, d_noise, d_prior, _ = tangents
  rho = (prior_std / noise_std) ** 2
  solution = solve(features, targets, rho)
  value = _nll_value(solution, noise_std, count)
  dtype, wide = features.dtype, solution.residual.dtype
  by_targets = solution.residual.astype(dtype) / noise_std**2
  outer = by_targets[:, None] * solution.weights.astype(dtype)[None, :]
  by_features = rho * solution.shrunk - outer
  # These are differences of nearly equal numbers. They are taken in the solution's
  # dtype, and whole numbers are subtracted first, because that is exact.
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
