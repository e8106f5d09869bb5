"""Computes a Cholesky factor even where rounding has destroyed definiteness."""

import jax
import jax.numpy as jnp


def guarded_cholesky(system: jax.Array) -> jax.Array:
  """Returns the lower Cholesky factor [m, m] of a system I + ρG [m, m].

  In exact arithmetic the system is positive definite. When ρG is so large that its
  rounding errors outweigh the identity, the plain factor is NaN. Then a ridge of the
  size of those errors is added, which amounts to the same model with a smaller ρ, as
  large as the precision can distinguish from infinity.
  """
  size = system.shape[0]
  failed = ~jnp.all(jnp.isfinite(jnp.linalg.cholesky(jax.lax.stop_gradient(system))))
  error = size * jnp.finfo(system.dtype).eps * jnp.max(jnp.diagonal(system))
  # The first factor only decides on the ridge. Derivatives pass through the second
  # one alone, and so never meet the NaN of a first that failed.
  ridge = jnp.where(failed, jax.lax.stop_gradient(error), jnp.zeros_like(error))
  return jnp.linalg.cholesky(system + ridge * jnp.eye(size, dtype=system.dtype))
