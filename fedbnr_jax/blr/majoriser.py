"""What a client needs to follow the global evidence: a bound that touches it.

The global −log evidence is a function of summed statistics. At the broadcast point
Σ_c Q_c + const touches it with the same gradient in the features, and lies above it
everywhere else, where Q_c = [‖y_c − Φ_c w̄‖² + tr(A⁻¹ Φ_cᵀΦ_c)] / 2σ² needs the rows of
client c, w̄ and A⁻¹ only.
"""

import jax
import jax.numpy as jnp

from fedbnr_jax.blr.posterior import Posterior
from fedbnr_jax.blr.statistics import SufficientStats, masked


def majoriser(
  features: jax.Array,
  targets: jax.Array,
  fitted: Posterior,
  covariance: jax.Array,
  mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Q_c of one client's rows, and its sum of squared residuals.

  Args:
    features: [N, M]; first derivatives in them are those of the global evidence.
    targets: [N].
    fitted: The global posterior, w̄, σ and λ.
    covariance: [M, M] A⁻¹, of its weights.
    mask: [N] bool, false for padding.

  Returns:
    Q_c [] in nats, and ‖y_c − Φ_c w̄‖² [].
  """
  dtype = covariance.dtype
  features, targets, _ = masked(features.astype(dtype), targets.astype(dtype), mask)
  residual = targets - jnp.matmul(features, fitted.mean, precision="highest")
  squares = jnp.sum(residual**2)
  spread = jax.lax.stop_gradient(jnp.matmul(features, covariance, precision="highest"))
  # ½ tr(Φ A⁻¹ Φᵀ) and its gradient Φ A⁻¹ out of one product.
  product = jnp.sum(features * spread)
  half_trace = product - 0.5 * jax.lax.stop_gradient(product)
  return (0.5 * squares + half_trace) / fitted.noise_std**2, squares


def scale_gradient(
  stats: SufficientStats,
  fitted: Posterior,
  covariance: jax.Array,
  squares: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Derivatives of the global −log evidence in log σ [] and log λ [].

  Args:
    stats: Summed statistics; their count is used.
    fitted: The posterior.
    covariance: [M, M] A⁻¹.
    squares: [] residual sum of squares over all clients.
  """
  (num_features,) = fitted.mean.shape
  # γ, the weights that the data determine.
  determined = num_features - jnp.trace(covariance) / fitted.prior_std**2
  by_noise = stats.count - determined - squares / fitted.noise_std**2
  by_prior = determined - jnp.sum((fitted.mean / fitted.prior_std) ** 2)
  return by_noise, by_prior
