"""Fits the noise σ and the prior scale λ to pooled statistics by their evidence."""

import math

import jax
import jax.numpy as jnp

from fedbnr_jax.gp.blr.statistics import SufficientStats

_NUM_GRID = 256
_NUM_BISECTIONS = 60
# The search covers log(ρ · largest eigenvalue) from _LOG_START, where the signal is
# negligible, to _LOG_ABOVE − log(eps), where rounding hides the noise.
_LOG_START = -18.0
_LOG_ABOVE = 4.0


def fit_evidence(
  stats: SufficientStats, max_rho: jax.Array | float | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the (σ, λ) that maximise the marginal likelihood of pooled statistics.

  One eigendecomposition of the Gram matrix, with eigenvalues sᵢ, leaves a function of
  ρ = λ²/σ² alone to be minimised: N log g(ρ) + Σ log(1 + ρ sᵢ), where g(ρ) = N σ̂²(ρ).
  A value of it costs O(M). A grid of log ρ brackets its global minimum, because there
  may be several local ones, and bisection of the derivative then finds it. If the
  minimum lies at an end of the range (the targets are pure noise, or have none), the
  function returns that end. It is meant for float64; in float32 it stays finite.

  Args:
    stats: Statistics of M features, with at least one row and a non-zero energy.
    max_rho: [] upper bound of λ²/σ², for statistics that are not exact.

  Returns:
    noise_std [], prior_std [].

  Example:
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from fedbnr_jax import blr
    >>> rng = np.random.default_rng(0)
    >>> features = rng.normal(size=(500, 4))
    >>> targets = features @ np.array([1.0, -1.0, 1.0, -1.0])
    >>> targets += 0.1 * rng.normal(size=500)
    >>> stats = blr.sufficient_stats(jnp.asarray(features), jnp.asarray(targets))
    >>> noise_std, prior_std = blr.fit_evidence(stats)
    >>> round(float(noise_std), 1), round(float(prior_std), 1)
    (0.1, 1.0)
  """
  dtype = stats.gram.dtype
  eps = float(jnp.finfo(dtype).eps)
  values, explained, unexplained, kept = _spectrum(stats)
  largest = jnp.max(jnp.where(kept, values, jnp.finfo(dtype).tiny))

  def rows_variance(log_rho: jax.Array) -> jax.Array:  # σ̂²(ρ) = g(ρ) / N, []
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
  """Raises the evidence above that of the given (σ, λ) by a few steps of EM.

  Unlike the maximiser, the result stays near the given scales. Early in training this
  matters: under a kernel that explains nothing yet, the evidence is highest without
  any signal, and a model without signal never learns its kernel.

  Args:
    stats: Pooled statistics of M features.
    noise_std: [] σ to start from.
    prior_std: [] λ to start from.
    num_steps: Number of EM steps; no step lowers the evidence.

  Returns:
    noise_std [], prior_std [].
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
    weights = explained * spread * jnp.square(rho * shrink)  # [M] squares of w̄.
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
  """Splits the energy of the targets along the eigenvectors of the Gram matrix.

  Returns:
    values: [M] eigenvalues, set to 1 where they are zero up to rounding.
    explained: [M] energy of the targets that each eigenvector explains.
    unexplained: [] energy that no weights can explain.
    kept: [M] bool, false where the eigenvalue is zero up to rounding.
  """
  dtype = stats.gram.dtype
  tiny, eps = jnp.finfo(dtype).tiny, float(jnp.finfo(dtype).eps)
  values, vectors = jnp.linalg.eigh(stats.gram)
  largest = jnp.maximum(values[-1], tiny)
  # Where the eigenvalue is zero, so is the moment, but for rounding.
  kept = values > eps * values.shape[0] * largest
  values = jnp.where(kept, values, 1.0)
  projected = jnp.matmul(vectors.T, stats.moment, precision="highest")
  explained = jnp.where(kept, jnp.square(projected), 0.0) / values
  # Where the fit is perfect, rounding may make the difference negative. Statistics do
  # not resolve an energy below eps times their own, so this is its lower bound.
  unexplained = jnp.maximum(
    stats.energy - jnp.sum(explained), eps * jnp.maximum(stats.energy, tiny)
  )
  return values, explained, unexplained, kept
