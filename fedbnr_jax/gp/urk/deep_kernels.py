"""Deep kernels: Fourier features of what a network makes of a row."""

from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import networks
from fedbnr_jax.gp.sincos import cos_sin
from fedbnr_jax.gp.urk.base import FeatureMap, check_positive, from_function


def deep(
  num_samples: int,
  hidden_size: int,
  *,
  latent_size: int = 5,
  num_hidden_layers: int = 1,
  shifter_size: int = 10,
  length_scale: float = 1.0,
) -> FeatureMap:
  """The paper's deep kernel [cos, sin](h(ω)ᵀ f(x)), ω ~ N(0, I) in the latent space.

  Args:
    num_samples: S; there are 2S features.
    hidden_size: Width s of the extractor f.
    latent_size: Size of f(x) and of ω (the paper has 5).
    num_hidden_layers: Hidden layers of f.
    shifter_size: Width of the hidden layer of the shifter h.
    length_scale: Initial length-scale in the latent space; h starts at 1/ℓ times
      (ω + MLP(ω)) with random weights of the MLP.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax import urk
    >>> kernel, x = urk.deep(num_samples=10, hidden_size=16), jnp.zeros((5, 3))
    >>> kernel.apply(kernel.init(jax.random.key(0), x), x).shape
    (5, 20)
  """
  check_positive(
    hidden_size=hidden_size,
    latent_size=latent_size,
    num_hidden_layers=num_hidden_layers,
    shifter_size=shifter_size,
    length_scale=length_scale,
  )

  def modules(dtype: Any) -> tuple[networks.Extractor, networks.Shifter]:
    extractor = networks.Extractor(
      hidden_size, latent_size, num_hidden_layers, param_dtype=dtype
    )
    return extractor, networks.Shifter(
      shifter_size, 1.0 / length_scale, param_dtype=dtype
    )

  def sample_omega(key: chex.PRNGKey, x: jax.Array) -> jax.Array:
    return jax.random.normal(key, (latent_size,), x.dtype)

  def init_theta(key: chex.PRNGKey, omega: jax.Array, x: jax.Array) -> Any:
    key_f, key_h = jax.random.split(key)
    extractor, shifter = modules(x.dtype)
    return {
      "extractor": extractor.init(key_f, x[None])["params"],
      "shifter": shifter.init(key_h, omega)["params"],
    }

  def embed(theta: Any, omega: jax.Array, x: jax.Array) -> jax.Array:
    del omega
    latent: Any = modules(x.dtype)[0].apply({"params": theta["extractor"]}, x)
    return latent

  def g(theta: Any, omega: jax.Array, latent: jax.Array) -> jax.Array:
    shifter = modules(latent.dtype)[1]
    frequency: Any = shifter.apply({"params": theta["shifter"]}, omega)
    return cos_sin(jnp.dot(latent, frequency))  # Rows first: [N, S] once lifted.

  return from_function(g, sample_omega, num_samples, init_theta, embed, unit_norm=True)


def replicate(
  num_samples: int,
  hidden_size: int,
  *,
  policy: Literal["multiply", "add"] = "multiply",
  noise_scale: float = 0.5,
  latent_size: int = 5,
  num_hidden_layers: int = 1,
  length_scale: float = 1.0,
) -> FeatureMap:
  """The appendix's replicate policy: each ω sees its own randomised copy of x.

  The copy is x·(1 + noise_scale·ε) or x + noise_scale·ε with normal ε [D], and the
  features are [cos, sin](νᵀ f(copy)/ℓ) with normal ν; ω = (ε, ν). There is no
  shifter, hence no parameter beyond those of f, but f runs once per row and
  sample: S times the work of `deep`.
  """
  if policy not in ("multiply", "add"):
    raise InputError(f"policy must be 'multiply' or 'add', got {policy!r}.")
  check_positive(
    hidden_size=hidden_size,
    noise_scale=noise_scale,
    latent_size=latent_size,
    num_hidden_layers=num_hidden_layers,
    length_scale=length_scale,
  )

  def extractor(dtype: Any) -> networks.Extractor:
    return networks.Extractor(
      hidden_size, latent_size, num_hidden_layers, param_dtype=dtype
    )

  def sample_omega(key: chex.PRNGKey, x: jax.Array) -> Any:
    key_noise, key_frequency = jax.random.split(key)
    return {
      "noise": noise_scale * jax.random.normal(key_noise, x.shape, x.dtype),
      "frequency": jax.random.normal(key_frequency, (latent_size,), x.dtype),
    }

  def init_theta(key: chex.PRNGKey, omega: Any, x: jax.Array) -> Any:
    del omega
    return {"extractor": extractor(x.dtype).init(key, x[None])["params"]}

  def embed(theta: Any, omega: Any, x: jax.Array) -> jax.Array:
    noise = omega["noise"][None, :, :]  # [1, S, D]
    rows = x[:, None, :]
    copies = rows * (1.0 + noise) if policy == "multiply" else rows + noise
    flat = copies.reshape(-1, x.shape[1])
    latent: Any = extractor(x.dtype).apply({"params": theta["extractor"]}, flat)
    return latent.reshape(*copies.shape[:2], latent_size)

  def g(theta: Any, omega: Any, latent: jax.Array) -> jax.Array:
    del theta
    return cos_sin(jnp.dot(latent, omega["frequency"]) / length_scale)

  return from_function(g, sample_omega, num_samples, init_theta, embed, unit_norm=True)
