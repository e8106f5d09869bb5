"""Random Fourier features: stationary kernels by draws of their spectra."""

import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp.sincos import cos_sin
from fedbnr_jax.gp.urk.base import (
  FeatureMap,
  FeatureParams,
  check_positive,
  constant_norm,
)
from fedbnr_jax.names import require_choice

# Degrees of freedom, 2ν, of the multivariate t that is the spectrum of a Matérn kernel.
_FREEDOM = {"matern12": 1, "matern32": 3, "matern52": 5}
SPECTRA = ("gaussian", "laplacian", "cauchy", *_FREEDOM)
# Spectra that depend on the length of a frequency only, not on its direction.
_ROUND = ("gaussian", *_FREEDOM)


def sample_spectrum(key: chex.PRNGKey, spectrum: str, x: jax.Array) -> jax.Array:
  """Draws a frequency [D] of a stationary kernel with unit length-scale.

  By Bochner's theorem the frequencies of k(δ) follow its Fourier transform:
  normal for the Gaussian kernel, independent Cauchy for the Laplacian
  exp(−‖δ‖₁), independent Laplace for the Cauchy kernel Π 1/(1+δᵢ²), and
  multivariate t with 2ν degrees of freedom for Matérn ν.
  """
  shape, dtype = x.shape, x.dtype
  if spectrum == "gaussian":
    return jax.random.normal(key, shape, dtype)
  if spectrum == "laplacian":
    return jax.random.cauchy(key, shape, dtype)
  if spectrum == "cauchy":
    return jax.random.laplace(key, shape, dtype)
  key_normal, key_chi = jax.random.split(key)
  return jax.random.normal(key_normal, shape, dtype) * _stretch(
    key_chi, spectrum, dtype
  )


def _stretch(key: chex.PRNGKey, spectrum: str, dtype: Any) -> jax.Array:
  """Draws the factor [] that turns a normal vector into one of a Matérn spectrum."""
  freedom = _FREEDOM[spectrum]
  chi_squared = jnp.sum(jax.random.normal(key, (freedom,), dtype) ** 2)
  return jnp.sqrt(freedom / chi_squared)


def orthogonal_spectrum(
  key: chex.PRNGKey, spectrum: str, num_samples: int, x: jax.Array
) -> jax.Array:
  """Draws frequencies [S, D] that are orthogonal within blocks of D.

  Each follows the spectrum by itself, so that the kernel is unbiased; together they
  cover directions more evenly than independent ones, and the error is smaller.

  Args:
    key: The key of the draws.
    spectrum: One that is the same in all directions.
    num_samples: S.
    x: [D] a row, of which only the shape and type matter.
  """
  (num_inputs,), dtype = x.shape, x.dtype
  num_blocks = -(-num_samples // num_inputs)
  key_blocks, key_length, key_chi = jax.random.split(key, 3)
  blocks = jax.random.normal(key_blocks, (num_blocks, num_inputs, num_inputs), dtype)
  directions, upper = jnp.linalg.qr(blocks)
  # With the signs of R's diagonal, Q is uniform over rotations and reflections.
  signs = jnp.sign(jnp.diagonal(upper, axis1=1, axis2=2))
  directions = (directions * signs[:, None, :]).reshape(-1, num_inputs)[:num_samples]
  normal = jax.random.normal(key_length, (num_samples, num_inputs), dtype)
  lengths = jnp.linalg.norm(normal, axis=1)  # Of normal vectors, as chi draws.
  if spectrum != "gaussian":
    keys = jax.random.split(key_chi, num_samples)
    lengths = lengths * jax.vmap(lambda key: _stretch(key, spectrum, dtype))(keys)
  return directions * lengths[:, None]


def random_fourier(
  num_samples: int,
  spectrum: str = "gaussian",
  length_scale: float = 1.0,
  *,
  isotropic: bool = True,
  orthogonal: bool = False,
  spread: float = 0.0,
) -> FeatureMap:
  """Random Fourier features [cos, sin](ωᵀ(x/ℓ)) of a stationary kernel.

  Args:
    num_samples: S; there are 2S features.
    spectrum: One of `SPECTRA`.
    length_scale: Initial ℓ, trained in the logarithm; if each input has its own, in
      units of √D.
    isotropic: Whether all inputs share one ℓ [], or each has its own, ℓ [D].
    orthogonal: Whether frequencies are orthogonal in blocks; see
      `orthogonal_spectrum`.
    spread: Deviation of log ℓ under its prior, around the start; 0: no prior.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax import urk
    >>> kernel, x = urk.random_fourier(1000, "gaussian"), jnp.array([[0.0], [1.0]])
    >>> features = kernel.apply(kernel.init(jax.random.key(0), x), x)
    >>> features.shape
    (2, 2000)
    >>> bool(abs(features[0] @ features[1] - jnp.exp(-0.5)) < 0.1)
    True
  """
  require_choice("spectrum", spectrum, SPECTRA)
  check_positive(length_scale=length_scale)
  if num_samples < 2:
    raise InputError(f"num_samples must be at least 2, got {num_samples}.")
  if orthogonal and spectrum not in _ROUND:
    raise InputError(
      f"orthogonal draws need a spectrum that is the same in all directions, one of "
      f"{', '.join(_ROUND)}; {spectrum!r} is not."
    )

  def draw(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> jax.Array:
    del inputs
    chex.assert_rank(x, 2)
    key_omega, _ = jax.random.split(key)
    if orthogonal:
      return orthogonal_spectrum(key_omega, spectrum, num_samples, x[0])
    keys = jax.random.split(key_omega, num_samples)
    return jax.vmap(lambda key: sample_spectrum(key, spectrum, x[0]))(keys)

  def init(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> FeatureParams:
    theta = initial_length_scale(length_scale, x, isotropic=isotropic)
    return FeatureParams(draw(key, x, inputs), theta)

  def apply(params: FeatureParams, x: jax.Array) -> jax.Array:
    chex.assert_rank(x, 2)
    phase = scaled(params.theta, x) @ params.omega.T  # [N, S]
    features = jnp.concatenate(list(cos_sin(phase)), axis=1)
    return features * jnp.asarray(num_samples - 1, x.dtype) ** -0.5

  return FeatureMap(
    init,
    apply,
    draw,
    *constant_norm(num_samples / (num_samples - 1)),
    penalty=length_scale_penalty(length_scale, spread),
  )


def initial_length_scale(value: float, x: jax.Array, *, isotropic: bool) -> Any:
  """Makes θ of a stationary kernel: log ℓ, [] or [D], for rows x [N, D].

  With a length-scale for each input, its start is in units of √D, as which distances
  between standardised rows grow.
  """
  if isotropic:
    return {"log_length_scale": jnp.log(jnp.asarray(value, x.dtype))}
  num_inputs = x.shape[1]
  start = jnp.log(jnp.asarray(value * num_inputs**0.5, x.dtype))
  return {"log_length_scale": jnp.full(num_inputs, start)}


def length_scale_penalty(
  value: float, spread: float, *, power: float = 0.5
) -> Callable[[Any], jax.Array] | None:
  """Makes the penalty of a normal prior of log ℓ around its start.

  An input whose ℓ has grown so long that nothing depends on it any more would stay
  without effect, because the evidence is flat there; the prior calls it back.

  Args:
    value: Initial ℓ, as `initial_length_scale` takes it.
    spread: Deviation of log ℓ; 0: no prior.
    power: p, where the start of D length-scales is in units of Dᵖ.
  """
  if spread < 0:
    raise InputError(f"spread must be positive, or 0 for no prior, got {spread}.")
  if not spread:
    return None

  def penalty(theta: Any) -> jax.Array:
    scales = theta["log_length_scale"]
    start = value * scales.size**power if scales.ndim else value
    return 0.5 * jnp.sum(((scales - math.log(start)) / spread) ** 2)

  return penalty


def scaled(theta: Any, x: jax.Array) -> jax.Array:
  """Divides rows x [N, D] by the length-scales in θ."""
  factor = jnp.exp(-theta["log_length_scale"])
  return x * (factor if factor.ndim == 0 else factor[None, :])
