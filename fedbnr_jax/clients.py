"""What runs at a client: local steps on the evidence, statistics of its rows."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedbnr_jax import blr, urk
from fedbnr_jax.federation import Clients


class ModelParams(struct.PyTreeNode):
  """What is trained: kernel parameters θ, and σ and λ by their logarithms."""

  theta: Any
  log_noise_std: jax.Array  # []
  log_prior_std: jax.Array  # []

  @property
  def noise_std(self) -> jax.Array:
    return jnp.exp(self.log_noise_std)

  @property
  def prior_std(self) -> jax.Array:
    return jnp.exp(self.log_prior_std)

  @property
  def size(self) -> int:
    """Floats in a message that carries all of them."""
    return num_floats(self)


def num_floats(params: Any) -> int:
  """Floats in a message that carries a pytree."""
  return sum(leaf.size for leaf in jax.tree.leaves(params))


Params = TypeVar("Params")  # A pytree of parameters.

# (params, features' ω, rows of one client) -> [].
Loss = Callable[[ModelParams, Any, Clients], jax.Array]


def features_of(
  feature_map: urk.FeatureMap, params: ModelParams, omega: Any, x: jax.Array
) -> jax.Array:
  """Features [N, M] of rows x [N, D] under the kernel parameters."""
  return feature_map.apply(urk.FeatureParams(omega, params.theta), x)


def evidence_loss(feature_map: urk.FeatureMap) -> Loss:
  """The local loss: negative log marginal likelihood per row of one client."""

  def loss(params: ModelParams, omega: Any, rows: Clients) -> jax.Array:
    features = features_of(feature_map, params, omega, rows.x)
    nll = blr.negative_log_marginal_likelihood(
      features, rows.y, params.noise_std, params.prior_std, rows.mask
    )
    return nll / jnp.sum(rows.mask, dtype=nll.dtype)

  return loss


def descend(
  loss: Callable[[Params], jax.Array],
  optimizer: optax.GradientTransformation,
  num_steps: int,
  params: Params,
  project: Callable[[Params], Params] = lambda params: params,
) -> tuple[Params, jax.Array]:
  """Takes `num_steps` optimiser steps from `params` with a fresh optimiser state.

  Args:
    loss: Of the parameters.
    optimizer: Whose steps are taken.
    num_steps: How many.
    params: To start from.
    project: Applied after each step.

  Returns:
    The parameters, and the loss before each step [num_steps].
  """

  def step(carry: tuple[Params, Any], _: None) -> tuple[Any, jax.Array]:
    params, optimizer_state = carry
    value, gradient = jax.value_and_grad(loss)(params)
    # Optax raises floats to integer powers, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
      updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
    params = project(optax.apply_updates(params, updates))
    return (params, optimizer_state), value

  carry = (params, optimizer.init(params))
  (params, _), values = jax.lax.scan(step, carry, length=num_steps)
  return params, values


def keep_above(min_noise_std: float, params: Any) -> Any:
  """A projection of what has a log σ: it may rest on its floor and leave it again."""
  floor = jnp.log(jnp.asarray(min_noise_std, params.log_noise_std.dtype))
  return params.replace(log_noise_std=jnp.maximum(params.log_noise_std, floor))


def unless_finite(tree: Any, loss: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """The loss, or NaN where something in the tree is not finite, as a report."""
  sound = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((tree, loss))]
  return jnp.where(jnp.all(jnp.stack(sound)), loss, jnp.nan).astype(dtype)


def local_stats(
  feature_map: urk.FeatureMap, params: ModelParams, omega: Any, rows: Clients
) -> blr.SufficientStats:
  """Phase 2 at a client: the statistics of its rows under the global kernel."""
  features = features_of(feature_map, params, omega, rows.x)
  return blr.sufficient_stats(features, rows.y, rows.mask)
