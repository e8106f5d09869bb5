"""Computes the posterior of the weights from pooled statistics, and predicts by it.

`covariance` and `partial_mean` compute the same posterior the way the paper prints its
phase 2, in two messages a client.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.scipy.linalg import cho_solve, solve_triangular

from fedbnr_jax.gp.blr.factor import guarded_cholesky
from fedbnr_jax.gp.blr.statistics import SufficientStats


class Posterior(struct.PyTreeNode):
  """The posterior of the weights is Gaussian: w | y ~ N(mean, λ² B⁻¹)."""

  mean: jax.Array  # [M] w̄.
  cholesky: jax.Array  # [M, M] lower factor of B = I + ρ ΦᵀΦ.
  noise_std: jax.Array  # [] σ.
  prior_std: jax.Array  # [] λ.
  # If the noise varies, its variance is σ² exp(φᵀu + c), see blr/noise.py; if it is
  # constant, both are None.
  noise_weights: jax.Array | None = None  # [M] u.
  noise_offset: jax.Array | None = None  # [] c.


class MeanAndNoise(struct.PyTreeNode):
  """The part of a posterior that residuals and the noise need, without the factor."""

  mean: jax.Array  # [M]
  noise_std: jax.Array  # [] σ
  noise_weights: jax.Array | None = None  # [M] u
  noise_offset: jax.Array | None = None  # [] c


def mean_and_noise(fitted: Posterior) -> MeanAndNoise:
  """Leaves the factor and the prior out."""
  return MeanAndNoise(
    fitted.mean, fitted.noise_std, fitted.noise_weights, fitted.noise_offset
  )


def posterior(
  stats: SufficientStats, noise_std: jax.Array | float, prior_std: jax.Array | float
) -> Posterior:
  """Conditions the prior w ~ N(0, λ²I) on pooled statistics of M features.

  Args:
    stats: Pooled statistics.
    noise_std: [] σ, positive.
    prior_std: [] λ, positive.

  Example:
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax import blr
    >>> features, targets = jnp.array([[1.0], [2.0]]), jnp.array([2.0, 4.0])
    >>> stats = blr.sufficient_stats(features, targets)
    >>> fitted = blr.posterior(stats, noise_std=0.1, prior_std=1.0)
    >>> [round(float(weight), 3) for weight in fitted.mean]
    [1.996]
  """
  (num_features,) = stats.moment.shape
  chex.assert_shape(stats.gram, (num_features, num_features))
  dtype = stats.gram.dtype
  noise_std, prior_std = _scales(noise_std, prior_std, dtype)
  rho = (prior_std / noise_std) ** 2
  system = jnp.eye(num_features, dtype=dtype) + rho * stats.gram
  lower = guarded_cholesky(system)
  mean = cho_solve((lower, True), rho * stats.moment)
  product = partial(jnp.matmul, precision="highest")
  gap = rho * (stats.moment - product(stats.gram, mean)) - mean
  mean = mean + cho_solve((lower, True), gap)  # One step of refinement.
  return Posterior(mean, lower, noise_std, prior_std)


def predict(
  fitted: Posterior, features: jax.Array, *, with_noise: bool = True
) -> tuple[jax.Array, jax.Array]:
  """Predicts mean [N] and variance [N] of y at features [N, M].

  Args:
    fitted: The posterior.
    features: [N, M], cast to the posterior's dtype.
    with_noise: Whether the variance includes that of the noise. False gives the
      variance of the function alone.

  Example:
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax import blr
    >>> features, targets = jnp.array([[1.0], [2.0]]), jnp.array([2.0, 4.0])
    >>> stats = blr.sufficient_stats(features, targets)
    >>> fitted = blr.posterior(stats, noise_std=0.1, prior_std=1.0)
    >>> mean, variance = blr.predict(fitted, jnp.array([[3.0], [0.0]]))
    >>> [round(float(m), 2) for m in mean], [round(float(v), 3) for v in variance]
    ([5.99, 0.0], [0.028, 0.01])
  """
  chex.assert_rank(features, 2)
  features = features.astype(fitted.mean.dtype)
  whitened = solve_triangular(fitted.cholesky, features.T, lower=True)  # [M, N]
  variance = fitted.prior_std**2 * jnp.sum(whitened**2, axis=0)
  if with_noise:
    variance = variance + noise_variance(fitted, features)
  return jnp.matmul(features, fitted.mean, precision="highest"), variance


def noise_variance(fitted: Posterior | MeanAndNoise, features: jax.Array) -> jax.Array:
  """Returns the variance [N] of the noise at features [N, M]."""
  constant = jnp.full(features.shape[:1], fitted.noise_std**2, features.dtype)
  if fitted.noise_weights is None or fitted.noise_offset is None:
    return constant
  level = jnp.matmul(features, fitted.noise_weights, precision="highest")
  return constant * jnp.exp(level + fitted.noise_offset)


def sample_weights(key: chex.PRNGKey, fitted: Posterior, num_samples: int) -> jax.Array:
  """Draws weights [num_samples, M] from the posterior: w̄ + λ L⁻ᵀ ε."""
  (num_features,) = fitted.mean.shape
  noise = jax.random.normal(key, (num_features, num_samples), fitted.mean.dtype)
  spread = solve_triangular(fitted.cholesky, noise, lower=True, trans="T")
  return (fitted.mean[:, None] + fitted.prior_std * spread).T


def negative_log_marginal_likelihood_from_stats(
  stats: SufficientStats, fitted: Posterior
) -> jax.Array:
  """Returns −log p(y | Φ, σ, λ) [], constants included, from pooled statistics alone.

  The statistics should be float64: the residual sum of squares yᵀy − 2bᵀw̄ + w̄ᵀSw̄, with
  moment b and Gram S, loses most digits to cancellation where the fit is good. In
  float32 use `negative_log_marginal_likelihood`, which has the features.

  Args:
    stats: Pooled statistics.
    fitted: `posterior(stats, σ, λ)`, for the σ and λ of interest.
  """
  mean = fitted.mean
  squares = stats.energy - 2.0 * jnp.dot(stats.moment, mean)
  squares = squares + jnp.dot(mean, jnp.matmul(stats.gram, mean, precision="highest"))
  squares = jnp.maximum(squares, 0.0)  # Rounding may make it negative.
  quadratic = squares / fitted.noise_std**2 + jnp.sum(mean**2) / fitted.prior_std**2
  log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(fitted.cholesky)))
  log_noise = stats.count * jnp.log(2.0 * jnp.pi * fitted.noise_std**2)
  return 0.5 * (log_noise + log_det + quadratic)


def weight_covariance(fitted: Posterior) -> jax.Array:
  """Returns A⁻¹ [M, M], the covariance of the weights under the posterior."""
  identity = jnp.eye(fitted.mean.shape[0], dtype=fitted.mean.dtype)
  return fitted.prior_std**2 * cho_solve((fitted.cholesky, True), identity)


def num_determined(fitted: Posterior) -> jax.Array:
  """Returns γ [] = tr(I − B⁻¹), the number of weights that the data determine."""
  identity = jnp.eye(fitted.mean.shape[0], dtype=fitted.mean.dtype)
  half = solve_triangular(fitted.cholesky, identity, lower=True)
  return identity.shape[0] - jnp.sum(half**2)


def covariance(
  gram: jax.Array, noise_std: jax.Array | float, prior_std: jax.Array | float
) -> jax.Array:
  """Returns A⁻¹ [M, M], the server's part of the paper's printed phase 2.

  Args:
    gram: [M, M] Gram matrix summed over clients.
    noise_std: [] σ, positive.
    prior_std: [] λ, positive.
  """
  noise_std, prior_std = _scales(noise_std, prior_std, gram.dtype)
  identity = jnp.eye(gram.shape[0], dtype=gram.dtype)
  lower = guarded_cholesky(identity + (prior_std / noise_std) ** 2 * gram)
  return prior_std**2 * cho_solve((lower, True), identity)


def partial_mean(
  covariance_: jax.Array, moment: jax.Array, noise_std: jax.Array | float
) -> jax.Array:
  """Returns w̄_c = σ⁻² A⁻¹ Φ_cᵀy_c [M], a client's part of the printed phase 2.

  The partial means of all clients add up to w̄.

  Args:
    covariance_: [M, M] A⁻¹.
    moment: [M] Φ_cᵀy_c.
    noise_std: [] σ, positive.
  """
  weighted = jnp.matmul(covariance_, moment, precision="highest")
  return weighted / jnp.asarray(noise_std, moment.dtype) ** 2


def _scales(
  noise_std: jax.Array | float, prior_std: jax.Array | float, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
  """Casts σ [] and λ [] to the dtype of the statistics."""
  return jnp.asarray(noise_std, dtype), jnp.asarray(prior_std, dtype)
