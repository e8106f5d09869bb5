"""Flax modules of the deep kernel: extractor f for inputs, shifter h for ω."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedbnr_jax.perceptron import hidden_then_linear


class Extractor(nn.Module):
  """f: fully connected ReLU layers of one width, then a linear map to the latent space.

  The last layer has no bias: under random Fourier features it would only rotate
  their phases, so its gradient would be zero and Adam would move it on rounding
  noise. It is stored as [latent, s], which its gradient likes.
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
  """The extractor with a linear head: a network that predicts by itself."""

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
  """h(ω) = a (ω + MLP(ω)): with a = 1 and MLP = 0 it is the identity.

  `a` starts at `scale`, the inverse of the initial length-scale of the kernel
  in the latent space, and is trained.
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
