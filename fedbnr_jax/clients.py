"""What runs at a client, and the one mechanism that maps it over all clients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedbnr_jax import blr, urk
from fedbnr_jax.errors import InputError
from fedbnr_jax.federation import Clients, zero_padding


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
    return sum(leaf.size for leaf in jax.tree.leaves(self))


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
  loss: Callable[[ModelParams], jax.Array],
  optimizer: optax.GradientTransformation,
  num_steps: int,
  min_noise_std: float,
  params: ModelParams,
) -> tuple[ModelParams, jax.Array]:
  """Takes `num_steps` optimiser steps from `params` with a fresh optimiser state.

  Returns:
    The parameters, and the loss before each step [num_steps].
  """
  floor = jnp.log(jnp.asarray(min_noise_std, params.log_noise_std.dtype))

  def step(carry: tuple[ModelParams, Any], _: None) -> tuple[Any, jax.Array]:
    params, optimizer_state = carry
    value, gradient = jax.value_and_grad(loss)(params)
    # Optax raises floats to integer powers, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
      updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
    params = optax.apply_updates(params, updates)
    # A projection: σ may rest on its floor and leave it again.
    params = params.replace(log_noise_std=jnp.maximum(params.log_noise_std, floor))
    return (params, optimizer_state), value

  carry = (params, optimizer.init(params))
  (params, _), values = jax.lax.scan(step, carry, length=num_steps)
  return params, values


def local_stats(
  feature_map: urk.FeatureMap, params: ModelParams, omega: Any, rows: Clients
) -> blr.SufficientStats:
  """Phase 2 at a client: the statistics of its rows under the global kernel."""
  features = features_of(feature_map, params, omega, rows.x)
  return blr.sufficient_stats(features, rows.y, rows.mask)


def map_clients(
  fn: Callable[[Clients], tuple[Any, Any]],
  clients: Clients,
  batch_size: int | None = None,
) -> tuple[Any, Any]:
  """Runs `fn` for every client, its padding zeroed, and sums the messages.

  Args:
    fn: Maps the rows of one client, without the client axis, to a message, which
      is summed over clients, and a report, which is kept for each.
    clients: Arrays [K, N, ...].
    batch_size: Clients batched by vmap at a time; all by default. Chunks bound the
      memory, and on a CPU suit wide networks, whose activations leave the cache.

  Returns:
    The sum of the messages, and the reports stacked [K, ...].
  """
  chex.assert_equal_shape_prefix(jax.tree.leaves(clients), 2)  # [K, N]
  num_clients = clients.y.shape[0]
  if batch_size is not None and batch_size < 1:
    raise InputError(f"the client batch size must be at least 1, got {batch_size}.")

  def run(chunk: Clients) -> tuple[Any, Any]:
    messages, reports = jax.vmap(fn)(zero_padding(chunk))
    return jax.tree.map(partial(jnp.sum, axis=0), messages), reports

  if batch_size is None or batch_size >= num_clients:
    return run(clients)
  num_chunks, rest = divmod(num_clients, batch_size)
  split = num_chunks * batch_size
  chunks = jax.tree.map(
    lambda leaf: leaf[:split].reshape(num_chunks, batch_size, *leaf.shape[1:]), clients
  )
  one = jax.tree.map(lambda leaf: leaf[0], chunks)
  zero = jax.tree.map(
    lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run, one)[0]
  )

  def accumulate(total: Any, chunk: Clients) -> tuple[Any, Any]:
    message, reports = run(chunk)
    return jax.tree.map(jnp.add, total, message), reports

  total, reports = jax.lax.scan(accumulate, zero, chunks)
  reports = jax.tree.map(lambda leaf: leaf.reshape(split, *leaf.shape[2:]), reports)
  if rest:
    message, last = run(jax.tree.map(lambda leaf: leaf[split:], clients))
    total = jax.tree.map(jnp.add, total, message)
    reports = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), reports, last)
  return total, reports
