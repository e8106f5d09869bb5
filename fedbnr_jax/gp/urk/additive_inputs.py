"""An additive kernel: a function of each input by itself, through knots of that input.

k(x, x') = Σ_d a_d²/D · k_d(x_d, x'_d), with a length-scale and an amplitude for each of
the D inputs. A function of one input needs few features: those of m knots at quantiles
of its marginal are nearly exact, where a kernel of all inputs would need thousands.
Main effects are most of what many tables hold; a kernel beside it has the rest.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp.urk.base import FeatureMap, FeatureParams, Shared, check_positive
from fedbnr_jax.gp.urk.fourier import length_scale_penalty
from fedbnr_jax.gp.urk.inducing_inputs import JITTER, PROFILES, InputSummary
from fedbnr_jax.names import require_choice

# With more features than this in all, every input has fewer knots, but two at least: an
# indicator has two values, and needs no more.
_MOST_FEATURES = 600


def knots(num_knots: int, inputs: InputSummary, dtype: Any) -> jax.Array:
  """Places knots [m, D] at evenly spaced quantiles, or at both values of an indicator.

  Args:
    num_knots: The most that an input has.
    inputs: What is known of the D inputs.
    dtype: Of the knots.
  """
  num_quantiles, num_inputs = inputs.quantiles.shape
  count = max(2, min(num_knots, _MOST_FEATURES // num_inputs))
  places = [int((k + 0.5) / count * num_quantiles) for k in range(count)]
  numeric = jnp.asarray(inputs.quantiles, dtype)[jnp.asarray(places)]
  off, on = jnp.asarray(inputs.levels, dtype)
  is_on = jnp.arange(count)[:, None] % 2 == 1
  indicator = jnp.where(is_on, on[None, :], off[None, :])
  return jnp.where((inputs.column == num_inputs)[None, :], numeric, indicator)


def additive(
  num_knots: int = 16,
  spectrum: str = "matern32",
  length_scale: float = 1.0,
  *,
  spread: float = 0.0,
) -> FeatureMap:
  """Features a_d/√D · L_d⁻¹k(z_d, x_d) of a sum of kernels of one input each.

  ω is the knots, which a seed does not change; θ has log ℓ [D] and log a [D].

  Args:
    num_knots: m, the most knots of an input.
    spectrum: One of `PROFILES`.
    length_scale: Initial ℓ of every input.
    spread: Deviation of log ℓ under its prior, around the start; 0: no prior.
  """
  require_choice("spectrum", spectrum, PROFILES)
  check_positive(length_scale=length_scale)
  if num_knots < 2:
    raise InputError(f"num_knots must be at least 2, got {num_knots}.")
  profile = PROFILES[spectrum]

  def draw(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> jax.Array:
    del key
    if not isinstance(inputs, InputSummary):
      raise TypeError("knots are placed by an InputSummary.")
    return knots(num_knots, inputs, x.dtype)

  def init(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> FeatureParams:
    num_inputs = x.shape[1]
    start = jnp.log(jnp.asarray(length_scale, x.dtype))
    theta = {
      "log_length_scale": jnp.full(num_inputs, start),
      "log_amplitude": jnp.zeros(num_inputs, x.dtype),
    }
    return FeatureParams(draw(key, x, inputs), theta)

  def kernels(theta: Any, x: jax.Array, points: jax.Array) -> jax.Array:
    """Computes k_d [D, N, m] between x [N, D] and points [m, D]."""
    wide = jax.dtypes.canonicalize_dtype(jnp.float64)
    scale = jnp.exp(theta["log_length_scale"].astype(wide))[:, None, None]
    rows, columns = x.astype(wide).T, points.astype(wide).T
    return profile(jnp.abs(rows[:, :, None] - columns[:, None, :]) / scale)

  def factor(theta: Any, omega: jax.Array) -> jax.Array:
    """Computes L_d [D, m, m]; jitter lets knots coincide."""
    among = kernels(theta, omega, omega)
    jitter = JITTER[str(among.dtype)] * jnp.eye(omega.shape[0], dtype=among.dtype)
    return jnp.linalg.cholesky(among + jitter[None])

  def whitening(params: FeatureParams) -> jax.Array:
    """Computes L_d⁻¹ [D, m, m]."""
    lower = factor(params.theta, params.omega)
    identity = jnp.broadcast_to(
      jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape
    )
    return jax.scipy.linalg.solve_triangular(lower, identity, lower=True)

  def weights(theta: Any, dtype: Any) -> jax.Array:
    """Computes a_d²/D [D]."""
    amplitudes = theta["log_amplitude"].astype(dtype)
    return jnp.exp(2.0 * amplitudes) / amplitudes.size

  def by_input(params: FeatureParams, x: jax.Array, inverse: jax.Array) -> jax.Array:
    """Computes features [N, D, m] of unit amplitude."""
    chex.assert_rank(x, 2)
    across = kernels(params.theta, x, params.omega)
    return jnp.einsum("dnk,dmk->ndm", across, inverse, precision="highest")

  def apply_whitened(
    params: FeatureParams, x: jax.Array, inverse: jax.Array
  ) -> jax.Array:
    scale = jnp.sqrt(weights(params.theta, inverse.dtype))[None, :, None]
    return (scale * by_input(params, x, inverse)).reshape(x.shape[0], -1)

  def by_whitening(
    params: FeatureParams, inverse: jax.Array, products: jax.Array
  ) -> Any:
    # As of inducing features, input by input: see there.
    num_inputs, count, _ = inverse.shape
    blocks = products.reshape(num_inputs, count, num_inputs, count)
    own = jnp.einsum("imin->imn", blocks).astype(inverse.dtype)
    _, pull = jax.vjp(lambda theta: factor(theta, params.omega), params.theta)
    slope = jnp.einsum("dkm,dkn->dmn", inverse, own, precision="highest")
    return pull(-jnp.tril(slope))[0]

  def apply(params: FeatureParams, x: jax.Array) -> jax.Array:
    return apply_whitened(params, x, whitening(params))

  def missing(params: FeatureParams, x: jax.Array, inverse: jax.Array) -> jax.Array:
    kept = jnp.sum(by_input(params, x, inverse) ** 2, axis=2)
    return jnp.dot(1.0 - kept, weights(params.theta, inverse.dtype))

  def norm_bound(theta: Any) -> jax.Array:
    return jnp.sum(weights(theta, theta["log_amplitude"].dtype))

  prior = length_scale_penalty(length_scale, spread, power=0.0)
  return FeatureMap(
    init,
    apply,
    draw,
    norm_bound=norm_bound,
    missing=missing,
    needs_inputs=True,
    penalty=prior,
    shared=Shared(whitening, apply_whitened, by_whitening),
  )
