"""Bounds the global evidence by a sum of terms that clients can compute alone.

The global −log evidence is a function of summed statistics. It has an upper bound
Σ_c Q_c + const, Q_c = [‖y_c − Φ_c w̄‖² + tr(A⁻¹ Φ_cᵀΦ_c)] / 2σ², that touches it, with
the same gradient in the features, at the features for which w̄ and A⁻¹ were computed.
Client c needs nothing but its own rows, w̄ and A⁻¹ to evaluate Q_c.
"""

import jax
import jax.numpy as jnp

from fedbnr_jax.gp.blr.posterior import MeanAndNoise, Posterior
from fedbnr_jax.gp.blr.statistics import SufficientStats, masked


def majoriser(
  features: jax.Array,
  targets: jax.Array,
  fitted: Posterior | MeanAndNoise,
  covariance: jax.Array,
  mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns one client's Q_c and the sum of its squared residuals.

  Args:
    features: [N, M] Φ_c; the gradient of Q_c in them is that of the global evidence.
    targets: [N] y_c.
    fitted: The global posterior, with w̄, σ and λ.
    covariance: [M, M] A⁻¹, the posterior covariance of the weights.
    mask: [N] bool, false for padding.

  Returns:
    Q_c [] in nats, and ‖y_c − Φ_c w̄‖² [].
  """
  dtype = covariance.dtype
  features, targets, _ = masked(features.astype(dtype), targets.astype(dtype), mask)
  residual = targets - jnp.matmul(features, fitted.mean, precision="highest")
  squares = jnp.sum(residual**2)
  spread = jax.lax.stop_gradient(jnp.matmul(features, covariance, precision="highest"))
  # One product gives both ½ tr(Φ A⁻¹ Φᵀ) and its gradient Φ A⁻¹: `spread` counts as
  # a constant, so the whole product has that gradient, and half of it is taken away
  # as a constant.
  product = jnp.sum(features * spread)
  half_trace = product - 0.5 * jax.lax.stop_gradient(product)
  return (0.5 * squares + half_trace) / fitted.noise_std**2, squares


def scale_gradient(
  stats: SufficientStats,
  fitted: Posterior,
  covariance: jax.Array,
  squares: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the derivatives of the global −log evidence in log σ [] and log λ [].

  Args:
    stats: Summed statistics, of which only the count is used.
    fitted: The global posterior.
    covariance: [M, M] A⁻¹, the posterior covariance of the weights.
    squares: [] sum of squared residuals over all clients.
  """
  (num_features,) = fitted.mean.shape
  # γ, the number of weights that the data determine.
  determined = num_features - jnp.trace(covariance) / fitted.prior_std**2
  by_noise = stats.count - determined - squares / fitted.noise_std**2
  by_prior = determined - jnp.sum((fitted.mean / fitted.prior_std) ** 2)
  return by_noise, by_prior
