"""A Cholesky factor that exists even where rounding has eaten definiteness."""

import jax
import jax.numpy as jnp


def guarded_cholesky(system: jax.Array) -> jax.Array:
  """Lower factor [m, m] of I + ρG, in exact arithmetic positive definite.

  When ρG is so large that its rounding errors outweigh the identity, a plain factor
  is NaN. Then a ridge of the size of those errors is added, which is the same model
  with ρ held to what the precision can tell from infinity.
  """
  size = system.shape[0]
  failed = ~jnp.all(jnp.isfinite(jnp.linalg.cholesky(jax.lax.stop_gradient(system))))
  error = size * jnp.finfo(system.dtype).eps * jnp.max(jnp.diagonal(system))
  # The ridge is chosen first and the factor taken once more, so that derivatives
  # never see the one that failed.
  ridge = jnp.where(failed, jax.lax.stop_gradient(error), jnp.zeros_like(error))
  return jnp.linalg.cholesky(system + ridge * jnp.eye(size, dtype=system.dtype))
