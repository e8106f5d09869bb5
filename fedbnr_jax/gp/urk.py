"""Unifying random kernel: a feature map g(ω, x), lifted over ω-samples and rows.

A kernel is k(x, x') = E_ω[g(ω, x)ᵀ g(ω, x')]. Given S draws of ω, the features
of x are the S vectors g(ω_r, x) side by side, divided by √(S−1), so that their
inner product is the paper's URK(x, x'). Any distribution of ω and any g give a
positive semi-definite kernel; `from_function` takes both.

Every map has the interface of `FeatureMap`. Its parameters keep the draws of ω,
made once and shared by all clients, apart from θ, which is trained.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import networks
from fedbnr_jax.gp.sincos import cos_sin

# One ω and one x, both without a batch axis: (θ, ω, x [D]) -> [d] or [].
RandomFeature = Callable[[Any, Any, jax.Array], jax.Array]
# Draws ω for inputs of the shape and dtype of x: (key, x [D]) -> pytree.
SampleOmega = Callable[[chex.PRNGKey, jax.Array], Any]
InitTheta = Callable[[chex.PRNGKey, Any, jax.Array], Any]
# What a network makes of all rows at once: (θ, ω [S, ...], x [N, D]) -> [N, E], or
# [N, S, E] where each sample sees a row in its own way.
Embed = Callable[[Any, Any, jax.Array], jax.Array]

SPECTRA = ("gaussian", "laplacian", "cauchy", "matern12", "matern32", "matern52")


class FeatureParams(struct.PyTreeNode):
  """Parameters of a feature map."""

  omega: Any  # [S, ...] draws of ω; constants.
  theta: Any  # Trained pytree; empty for a fixed kernel.


class FeatureMap(NamedTuple):
  """A kernel as pure functions, as in Flax and Optax."""

  # (key, x [N, D]) -> parameters; only the shape and type of x matter.
  init: Callable[[chex.PRNGKey, jax.Array], FeatureParams]
  apply: Callable[[FeatureParams, jax.Array], jax.Array]  # x [N, D] -> [N, M]
  # (key, x [N, D]) -> ω [S, ...], the draws that `init` makes of the same key.
  draw: Callable[[chex.PRNGKey, jax.Array], Any]
  # The squared norm of the features of every row, where all rows have the same one.
  squared_norm: float | None = None


def num_features(feature_map: FeatureMap, x: jax.Array) -> int:
  """Counts the features M that a map gives to rows x [N, D]."""
  params = jax.eval_shape(feature_map.init, jax.random.key(0), x)
  return jax.eval_shape(feature_map.apply, params, x).shape[-1]


def draw_omega(feature_map: FeatureMap, seed: jax.Array, x: jax.Array) -> Any:
  """Draws ω [S, ...] from a seed, so that the seed can be sent in its place.

  Args:
    feature_map: The kernel.
    seed: [2] uint32, `jax.random.key_data` of the key that `init` was given.
    x: [N, D] rows, of which only the shape and type matter.
  """
  return feature_map.draw(jax.random.wrap_key_data(seed), jnp.zeros_like(x))


def from_function(
  g: RandomFeature,
  sample_omega: SampleOmega,
  num_samples: int,
  init_theta: InitTheta | None = None,
  embed: Embed | None = None,
  *,
  unit_norm: bool = False,
) -> FeatureMap:
  """Lifts `g`, written for one ω and one x, to rows and S samples.

  Args:
    g: Maps (θ, ω, x [D]) to d features [d], or to one feature [].
    sample_omega: Draws one ω, given a key and one row x [D].
    num_samples: S, the number of draws; at least 2.
    init_theta: Makes θ from a key, one ω and one x [D]; without it θ is empty.
    embed: A network that wants all rows at once; `g` then sees what it makes of x in
      place of x.
    unit_norm: Whether every g(ω, x) has norm one, as a cosine and sine have.

  Returns:
    A feature map with M = d·S features.
  """
  if num_samples < 2:
    raise InputError(f"num_samples must be at least 2, got {num_samples}.")

  def draw(key: chex.PRNGKey, x: jax.Array) -> Any:
    chex.assert_rank(x, 2)
    key_omega, _ = jax.random.split(key)
    keys = jax.random.split(key_omega, num_samples)
    return jax.vmap(sample_omega, in_axes=(0, None))(keys, x[0])

  def init(key: chex.PRNGKey, x: jax.Array) -> FeatureParams:
    omega = draw(key, x)
    _, key_theta = jax.random.split(key)
    one_omega = jax.tree.map(lambda draws: draws[0], omega)
    theta = {} if init_theta is None else init_theta(key_theta, one_omega, x[0])
    return FeatureParams(omega, theta)

  def apply(params: FeatureParams, x: jax.Array) -> jax.Array:
    chex.assert_rank(x, 2)
    # What depends on x alone is computed once for all samples, and what depends
    # on ω alone once for all rows: vmap batches only what it must.
    rows = x if embed is None else embed(params.theta, params.omega, x)
    by_sample = None if rows.ndim == 2 else 0
    over_samples = jax.vmap(g, in_axes=(None, 0, by_sample), out_axes=-1)
    over_rows = jax.vmap(over_samples, in_axes=(None, None, 0))
    features = over_rows(params.theta, params.omega, rows)  # [N, d, S] or [N, S]
    scale = jnp.asarray(num_samples - 1, features.dtype) ** -0.5
    return features.reshape(x.shape[0], -1) * scale

  squared_norm = num_samples / (num_samples - 1) if unit_norm else None
  return FeatureMap(init, apply, draw, squared_norm)


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
  freedom = {"matern12": 1, "matern32": 3, "matern52": 5}[spectrum]
  key_normal, key_chi = jax.random.split(key)
  chi_squared = jnp.sum(jax.random.normal(key_chi, (freedom,), dtype) ** 2)
  return jax.random.normal(key_normal, shape, dtype) * jnp.sqrt(freedom / chi_squared)


def random_fourier(
  num_samples: int, spectrum: str = "gaussian", length_scale: float = 1.0
) -> FeatureMap:
  """Random Fourier features [cos, sin](ωᵀx/ℓ) of a stationary kernel.

  Args:
    num_samples: S; there are 2S features.
    spectrum: One of `SPECTRA`.
    length_scale: Initial ℓ, trained in the logarithm.
  """
  if spectrum not in SPECTRA:
    raise InputError(f"spectrum must be one of {', '.join(SPECTRA)}; got {spectrum!r}.")
  _check_positive("length_scale", length_scale)

  def sample_omega(key: chex.PRNGKey, x: jax.Array) -> jax.Array:
    return sample_spectrum(key, spectrum, x)

  def init_theta(key: chex.PRNGKey, omega: jax.Array, x: jax.Array) -> Any:
    del key, omega
    return {"log_length_scale": jnp.log(jnp.asarray(length_scale, x.dtype))}

  def g(theta: Any, omega: jax.Array, x: jax.Array) -> jax.Array:
    return cos_sin(jnp.dot(x * jnp.exp(-theta["log_length_scale"]), omega))

  return from_function(g, sample_omega, num_samples, init_theta, unit_norm=True)


def exponential(num_samples: int) -> FeatureMap:
  """exp(ωᵀx) with normal ω: the non-stationary kernel exp(‖x + x'‖²/2)."""

  def sample_omega(key: chex.PRNGKey, x: jax.Array) -> jax.Array:
    return jax.random.normal(key, x.shape, x.dtype)

  def g(theta: Any, omega: jax.Array, x: jax.Array) -> jax.Array:
    del theta
    return jnp.exp(jnp.dot(omega, x))

  return from_function(g, sample_omega, num_samples)


def polynomial(num_samples: int, degree: int = 2, offset: float = 1.0) -> FeatureMap:
  """The polynomial kernel (xᵀx' + c)ⁿ by the paper's multinomial construction.

  With x̄ = [√(2c), √(2D) x] and ω ~ Multinomial(n, [1/2, 1/(2D), …]) the feature
  is Π x̄ᵢ^ωᵢ. We keep the n trials of the multinomial instead of their counts and
  multiply the entries of x̄ that they name: the same number, and right for
  negative inputs, whose logarithm the paper's formula would need.
  """
  if not (degree >= 1 and degree == int(degree)):
    raise InputError(f"degree must be a whole number of at least 1, got {degree}.")
  if not offset >= 0:
    raise InputError(f"offset must not be negative, got {offset}.")

  def sample_omega(key: chex.PRNGKey, x: jax.Array) -> jax.Array:
    (num_inputs,) = x.shape
    rest = jnp.full((num_inputs,), 0.5 / num_inputs, x.dtype)
    probability = jnp.concatenate([jnp.full((1,), 0.5, x.dtype), rest])
    return jax.random.categorical(key, jnp.log(probability), shape=(int(degree),))

  def g(theta: Any, omega: jax.Array, x: jax.Array) -> jax.Array:
    del theta
    constant = jnp.full((1,), (2.0 * offset) ** 0.5, x.dtype)
    extended = jnp.concatenate([constant, (2.0 * x.shape[0]) ** 0.5 * x])
    return jnp.prod(extended[omega])

  return from_function(g, sample_omega, num_samples)


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
  """
  sizes = {
    "hidden_size": hidden_size,
    "latent_size": latent_size,
    "num_hidden_layers": num_hidden_layers,
    "shifter_size": shifter_size,
    "length_scale": length_scale,
  }
  for name, value in sizes.items():
    _check_positive(name, value)

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
  sizes = {
    "hidden_size": hidden_size,
    "noise_scale": noise_scale,
    "latent_size": latent_size,
    "num_hidden_layers": num_hidden_layers,
    "length_scale": length_scale,
  }
  for name, value in sizes.items():
    _check_positive(name, value)

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


# Every kernel by name, with the function that builds it. A config passes the fields
# that are named like the function's arguments: see algorithms/kernels.py.
KERNELS: dict[str, Callable[..., FeatureMap]] = {
  "deep": deep,
  "replicate": replicate,
  "exponential": exponential,
  "polynomial": polynomial,
  **{name: functools.partial(random_fourier, spectrum=name) for name in SPECTRA},
}


def _check_positive(name: str, value: float) -> None:
  if not value > 0:
    raise InputError(f"{name} must be positive, got {value}.")
