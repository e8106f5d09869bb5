"""Noise and prior scale that maximise the evidence of summed statistics, exactly."""

import math

import jax
import jax.numpy as jnp

from fedbnr_jax.blr.statistics import SufficientStats

_NUM_GRID = 256
_NUM_BISECTIONS = 60
# log(ρ · largest eigenvalue) runs from here, "no signal", to this much above the
# inverse of the rounding error: more cannot be told from "no noise".
_LOG_START = -18.0
_LOG_ABOVE = 4.0


def fit_evidence(stats: SufficientStats) -> tuple[jax.Array, jax.Array]:
  """Returns (σ, λ) that maximise the marginal likelihood of pooled statistics.

  One eigendecomposition S = QΛQᵀ leaves a function of ρ = λ²/σ² alone,
  N log g(ρ) + Σ log(1 + ρ sᵢ) with g(ρ) = N σ̂²(ρ), of O(M) a value. Its minimum is
  bracketed on a grid of log ρ (there may be several) and then found by bisection of
  the derivative. Where the maximum is at an end of the range (pure noise, or none),
  that end is returned. Meant for float64; in float32 it stays finite.

  Args:
    stats: Statistics with at least one row and a non-zero energy.

  Returns:
    noise_std [], prior_std [].
  """
  dtype = stats.gram.dtype
  tiny = jnp.finfo(dtype).tiny
  eps = float(jnp.finfo(dtype).eps)
  values, vectors = jnp.linalg.eigh(stats.gram)
  largest = jnp.maximum(values[-1], tiny)
  # Directions of no spread carry no moment either, but for rounding.
  kept = values > eps * values.shape[0] * largest
  values = jnp.where(kept, values, 1.0)
  projected = jnp.matmul(vectors.T, stats.moment, precision="highest")
  power = jnp.where(kept, jnp.square(projected), 0.0)
  explained = power / values
  # What no weights can explain. Rounding may make it negative where the fit is
  # perfect: an energy of eps is as much as the statistics can tell.
  unexplained = jnp.maximum(
    stats.energy - jnp.sum(explained), eps * jnp.maximum(stats.energy, tiny)
  )

  def rows_variance(log_rho: jax.Array) -> jax.Array:  # g(ρ) / N
    shrink = 1.0 / (1.0 + jnp.exp(log_rho) * values)
    return (unexplained + jnp.sum(explained * shrink)) / stats.count

  def objective(log_rho: jax.Array) -> jax.Array:
    growth = jnp.where(kept, jnp.log1p(jnp.exp(log_rho) * values), 0.0)
    return stats.count * jnp.log(rows_variance(log_rho)) + jnp.sum(growth)

  span = (_LOG_START, _LOG_ABOVE - math.log(eps))
  grid = jnp.linspace(*span, _NUM_GRID, dtype=dtype) - jnp.log(largest)
  best = jnp.argmin(jax.vmap(objective)(grid))
  low = grid[jnp.maximum(best - 1, 0)]
  high = grid[jnp.minimum(best + 1, _NUM_GRID - 1)]
  slope = jax.grad(objective)

  def bisect(
    _: int, bracket: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    low, high = bracket
    middle = 0.5 * (low + high)
    rising = slope(middle) > 0
    return jnp.where(rising, low, middle), jnp.where(rising, middle, high)

  low, high = jax.lax.fori_loop(0, _NUM_BISECTIONS, bisect, (low, high))
  log_rho = 0.5 * (low + high)
  noise_std = jnp.sqrt(rows_variance(log_rho))
  return noise_std, noise_std * jnp.exp(0.5 * log_rho)
