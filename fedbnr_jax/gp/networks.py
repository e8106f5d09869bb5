"""Defines the Flax modules of the deep kernel: extractor f for x, shifter h for ω."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedbnr_jax.gp.perceptron import hidden_then_linear


class Extractor(nn.Module):
  """The extractor f is an MLP: ReLU layers of one width s, then a linear map.

  The last layer has no bias. Under random Fourier features a bias would only rotate
  their phases, so its gradient would be zero, and Adam would move it by rounding
  noise. The layer is stored as [latent, s], which makes its gradient faster.
  """

  hidden_size: int
  latent_size: int
  num_hidden_layers: int = 1
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:  # [N, D] -> [N, latent]
    for _ in range(self.num_hidden_layers - 1):
      x = nn.relu(nn.Dense(self.hidden_size, param_dtype=self.param_dtype)(x))
    size, dtype = self.hidden_size, self.param_dtype
    kernel = self.param(
      "kernel", nn.initializers.lecun_normal(), (x.shape[-1], size), dtype
    )
    bias = self.param("bias", nn.initializers.zeros, (size,), dtype)
    output = self.param(
      "output",
      nn.initializers.lecun_normal(in_axis=-1, out_axis=-2),
      (self.latent_size, size),
      dtype,
    )
    return hidden_then_linear(x, kernel, bias, output)


class Regressor(nn.Module):
  """The regressor is an extractor with a linear head, and predicts by itself."""

  hidden_size: int
  latent_size: int
  num_hidden_layers: int = 1
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:  # [N, D] -> [N]
    latent = Extractor(
      self.hidden_size, self.latent_size, self.num_hidden_layers, self.param_dtype
    )(x)
    return nn.Dense(1, param_dtype=self.param_dtype)(latent)[:, 0]


class Shifter(nn.Module):
  """The shifter is h(ω) = a (ω + MLP(ω)), the identity if a = 1 and MLP = 0.

  The factor a is trained. It starts at `scale`, the inverse of the kernel's initial
  length-scale in the latent space.
  """

  hidden_size: int
  scale: float
  activation: Callable[[jax.Array], jax.Array] = nn.tanh
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, omega: jax.Array) -> jax.Array:  # [latent] -> [latent]
    (size,) = omega.shape
    hidden = nn.Dense(self.hidden_size, param_dtype=self.param_dtype)(omega)
    shift = nn.Dense(size, param_dtype=self.param_dtype)(self.activation(hidden))
    scale = self.param(
      "scale", nn.initializers.constant(self.scale), (), self.param_dtype
    )
    return scale * (omega + shift)
