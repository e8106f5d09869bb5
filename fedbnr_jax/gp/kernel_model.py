"""A Gaussian process with a feature map as its kernel: θ, σ, λ and the evidence."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedbnr_jax.gp import blr, urk


class ModelParams(struct.PyTreeNode):
  """What is trained: kernel parameters θ, and σ and λ by their logarithms."""

  theta: Any
  log_noise_std: jax.Array  # []
  log_prior_std: jax.Array  # []

  @property
  def noise_std(self) -> jax.Array:
    """σ []."""
    return jnp.exp(self.log_noise_std)

  @property
  def prior_std(self) -> jax.Array:
    """λ []."""
    return jnp.exp(self.log_prior_std)


def model_params(theta: Any, noise_std: float, prior_std: float, dtype: Any) -> Any:
  """Makes parameters from θ and the values of σ and λ."""
  return ModelParams(
    theta=theta,
    log_noise_std=jnp.log(jnp.asarray(noise_std, dtype)),
    log_prior_std=jnp.log(jnp.asarray(prior_std, dtype)),
  )


def features_of(
  feature_map: urk.FeatureMap, theta: Any, omega: Any, x: jax.Array
) -> jax.Array:
  """Computes features [N, M] of rows x [N, D] under the kernel parameters θ."""
  return feature_map.apply(urk.FeatureParams(omega, theta), x)


class ReadyKernel(NamedTuple):
  """A kernel of which all is computed that does not depend on rows."""

  theta: Any
  omega: Any  # [S, ...] draws of ω.
  shared: Any  # What all rows share; see `urk.Shared`.


def ready_kernel(
  feature_map: urk.FeatureMap, source: urk.Source, theta: Any, like: jax.Array
) -> ReadyKernel:
  """Draws ω and computes what all rows share; `like` [1, D] has a row's type."""
  omega = urk.draw_omega(feature_map, source, like)
  params = urk.FeatureParams(omega, theta)
  return ReadyKernel(theta, omega, urk.shared_part(feature_map, params))


def ready_features(
  feature_map: urk.FeatureMap, kernel: ReadyKernel, x: jax.Array
) -> jax.Array:
  """Computes features [N, M] of rows x [N, D] under a kernel that is ready."""
  params = urk.FeatureParams(kernel.omega, kernel.theta)
  return urk.apply_shared(feature_map, params, x, kernel.shared)


def evidence_loss(
  feature_map: urk.FeatureMap,
  params: ModelParams,
  omega: Any,
  x: jax.Array,
  y: jax.Array,
  mask: jax.Array,
) -> jax.Array:
  """Computes the negative log marginal likelihood [] per row.

  Args:
    feature_map: The kernel.
    params: Its parameters, σ and λ.
    omega: [S, ...] its draws.
    x: [N, D] inputs.
    y: [N] targets.
    mask: [N] bool, false for padding.
  """
  features = features_of(feature_map, params.theta, omega, x)
  nll = blr.negative_log_marginal_likelihood(
    features, y, params.noise_std, params.prior_std, mask
  )
  return nll / jnp.sum(mask, dtype=nll.dtype)
