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


def fit_evidence(
  stats: SufficientStats, max_rho: jax.Array | float | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns (σ, λ) that maximise the marginal likelihood of pooled statistics.

  One eigendecomposition S = QΛQᵀ leaves a function of ρ = λ²/σ² alone,
  N log g(ρ) + Σ log(1 + ρ sᵢ) with g(ρ) = N σ̂²(ρ), of O(M) a value. Its minimum is
  bracketed on a grid of log ρ (there may be several) and then found by bisection of
  the derivative. Where the maximum is at an end of the range (pure noise, or none),
  that end is returned. Meant for float64; in float32 it stays finite.

  Args:
    stats: Statistics with at least one row and a non-zero energy.
    max_rho: The most that λ²/σ² may be, for statistics that are not exact.

  Returns:
    noise_std [], prior_std [].
  """
  dtype = stats.gram.dtype
  eps = float(jnp.finfo(dtype).eps)
  values, explained, unexplained, kept = _spectrum(stats)
  largest = jnp.max(jnp.where(kept, values, jnp.finfo(dtype).tiny))

  def rows_variance(log_rho: jax.Array) -> jax.Array:  # g(ρ) / N
    shrink = 1.0 / (1.0 + jnp.exp(log_rho) * values)
    return (unexplained + jnp.sum(explained * shrink)) / stats.count

  def objective(log_rho: jax.Array) -> jax.Array:
    growth = jnp.where(kept, jnp.log1p(jnp.exp(log_rho) * values), 0.0)
    return stats.count * jnp.log(rows_variance(log_rho)) + jnp.sum(growth)

  span = (_LOG_START, _LOG_ABOVE - math.log(eps))
  grid = jnp.linspace(*span, _NUM_GRID, dtype=dtype) - jnp.log(largest)
  if max_rho is not None:
    grid = jnp.minimum(grid, jnp.log(jnp.asarray(max_rho, dtype)))
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


def improve_evidence(
  stats: SufficientStats,
  noise_std: jax.Array,
  prior_std: jax.Array,
  num_steps: int = 10,
) -> tuple[jax.Array, jax.Array]:
  """(σ, λ) of a higher evidence than the given ones, by steps of EM.

  Unlike the maximiser they stay near where they were: under a kernel that explains
  nothing yet, the evidence is highest without any signal, and then no kernel is learnt.

  Args:
    stats: Pooled statistics.
    noise_std: [] σ to start from.
    prior_std: [] λ to start from.
    num_steps: Of EM; none makes the evidence fall.
  """
  values, explained, unexplained, kept = _spectrum(stats)
  (num_features,) = stats.moment.shape
  spread = jnp.where(kept, values, 0.0)

  def step(
    _: int, variances: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    noise, prior = variances
    rho = prior / noise
    shrink = 1.0 / (1.0 + rho * spread)
    weights = explained * spread * jnp.square(rho * shrink)  # w̄ squared.
    squares = unexplained + jnp.sum(explained * jnp.square(shrink))
    noise = (squares + prior * jnp.sum(spread * shrink)) / stats.count
    prior = (jnp.sum(weights) + prior * jnp.sum(shrink)) / num_features
    return noise, prior

  start = (jnp.square(noise_std), jnp.square(prior_std))
  noise, prior = jax.lax.fori_loop(0, num_steps, step, start)
  return jnp.sqrt(noise), jnp.sqrt(prior)


def _spectrum(
  stats: SufficientStats,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """The Gram's eigenvalues [M], the energy that each direction and none explains.

  Returns:
    Eigenvalues [M], 1 where there are none; explained energy [M]; unexplained energy
    []; and [M] bool, which directions have any spread.
  """
  dtype = stats.gram.dtype
  tiny, eps = jnp.finfo(dtype).tiny, float(jnp.finfo(dtype).eps)
  values, vectors = jnp.linalg.eigh(stats.gram)
  largest = jnp.maximum(values[-1], tiny)
  # Directions of no spread carry no moment either, but for rounding.
  kept = values > eps * values.shape[0] * largest
  values = jnp.where(kept, values, 1.0)
  projected = jnp.matmul(vectors.T, stats.moment, precision="highest")
  explained = jnp.where(kept, jnp.square(projected), 0.0) / values
  # What no weights can explain. Rounding may make it negative where the fit is
  # perfect: an energy of eps is as much as the statistics can tell.
  unexplained = jnp.maximum(
    stats.energy - jnp.sum(explained), eps * jnp.maximum(stats.energy, tiny)
  )
  return values, explained, unexplained, kept
