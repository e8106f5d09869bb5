"""Flax modules of the deep kernel: extractor f for inputs, shifter h for ω."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn


class Extractor(nn.Module):
  """f: fully connected ReLU layers of one width, then a linear map to the latent space.

  The last layer has no bias: it would only rotate the phases of the random
  Fourier features, so its gradient is zero and Adam would move it on rounding
  noise.
  """

  hidden_size: int
  latent_size: int
  num_hidden_layers: int = 1
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:  # [D] -> [latent]
    for _ in range(self.num_hidden_layers):
      x = nn.relu(nn.Dense(self.hidden_size, param_dtype=self.param_dtype)(x))
    return nn.Dense(self.latent_size, use_bias=False, param_dtype=self.param_dtype)(x)


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
