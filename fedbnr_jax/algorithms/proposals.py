"""How `fedbnr-exact` comes to new parameters: two exchanges to choose from.

Told w̄ and A⁻¹, clients pull the gradient of the global evidence back through their
network and the server steps; or they descend by themselves on a bound of it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedbnr_jax import aggregation, blr, urk
from fedbnr_jax.algorithms import last_layer
from fedbnr_jax.algorithms.base import Exchange, Floats, ServerState
from fedbnr_jax.algorithms.safeguard import Memory
from fedbnr_jax.clients import (
  ModelParams,
  descend,
  features_of,
  keep_above,
  unless_finite,
)
from fedbnr_jax.federation import Clients, ServerSet
from fedbnr_jax.optimizers import adam


def follow_gradient(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  *,
  min_noise_std: float,
  safeguard: bool = False,
) -> Exchange:
  """w̄ and A⁻¹ down, the pull-back through the network up, an optimiser's step."""

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, jax.Array]:
    del server

    def bound(theta: Any) -> tuple[jax.Array, jax.Array]:
      params = state.params.replace(theta=theta)
      return _majoriser(feature_map, state, params, rows)

    (value, squares), gradient = jax.value_and_grad(bound, has_aux=True)(
      state.params.theta
    )
    loss = value / jnp.sum(rows.mask, dtype=value.dtype)
    return (gradient, squares), unless_finite(gradient, loss, rows.y.dtype)

  def server(
    state: ServerState, server_set: ServerSet | None, total: Any
  ) -> ServerState:
    del server_set
    by_theta, squares = total
    memory, params = state.memory, state.params
    by_scales = blr.scale_gradient(
      state.stats, state.posterior, memory.covariance, squares
    )
    gradient = jax.tree.map(
      lambda leaf, like: (leaf / state.stats.count.astype(leaf.dtype)).astype(
        like.dtype
      ),
      ModelParams(by_theta, *by_scales),
      params,
    )
    direction, optimizer_state = _direction(optimizer, gradient, memory, params)
    step = jnp.ones_like(memory.step)
    if safeguard:  # A direction that went too far is gone again, and shorter.
      direction, optimizer_state = jax.tree.map(
        lambda a, b: jnp.where(memory.failed, a, b),
        (memory.direction, memory.optimizer),
        (direction, optimizer_state),
      )
      step = memory.step
    trial = jax.tree.map(lambda p, d: p + (step * d).astype(p.dtype), params, direction)
    memory = memory.replace(
      optimizer=optimizer_state, kept=params, direction=direction, step=step
    )
    return state.replace(params=keep_above(min_noise_std, trial), memory=memory)

  def floats(state: ServerState, server_set: ServerSet | None) -> Floats:
    del server_set
    num_kernel = state.params.size - 2  # σ and λ are the server's.
    return Floats(num_kernel + 1, last_layer.num_floats(state.stats))

  return Exchange(client, server, floats)


def _direction(
  optimizer: optax.GradientTransformation,
  gradient: ModelParams,
  memory: Memory,
  params: ModelParams,
) -> tuple[Any, Any]:
  """The optimiser's updates, in the parameters' types, and its new state."""
  # Optax raises floats to integer powers, which strict promotion refuses.
  with jax.numpy_dtype_promotion("standard"):
    updates, new = optimizer.update(gradient, memory.optimizer, params)
  cast = jax.tree.map(lambda a, b: a.astype(b.dtype), updates, params)
  return cast, jax.tree.map(lambda a, b: a.astype(b.dtype), new, memory.optimizer)


def follow_majoriser(
  feature_map: urk.FeatureMap,
  learning_rate: float,
  *,
  num_local_steps: int,
  min_noise_std: float,
) -> Exchange:
  """w̄ and A⁻¹ down, local steps on the bound, parameters up, their mean by rows."""
  aggregator = aggregation.mean(by_rows=True)

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, jax.Array]:
    count = jnp.sum(rows.mask, dtype=state.memory.value.dtype)

    def bound(params: ModelParams) -> jax.Array:
      return _majoriser(feature_map, state, params, rows)[0] / count

    local, losses = descend(
      bound,
      adam(learning_rate * state.memory.step),
      num_local_steps,
      state.params,
      partial(keep_above, min_noise_std),
    )
    message = aggregator.message(local, state.omega, rows, server)
    return message, unless_finite(local, losses[-1], rows.y.dtype)

  def server(
    state: ServerState, server_set: ServerSet | None, total: Any
  ) -> ServerState:
    trial = aggregator.combine(state.params, state.omega, total, server_set)
    memory = state.memory.replace(kept=state.params)
    return state.replace(params=trial, memory=memory)

  def floats(state: ServerState, server_set: ServerSet | None) -> Floats:
    return Floats(
      aggregator.floats(state.params, server_set), last_layer.num_floats(state.stats)
    )

  return Exchange(client, server, floats)


def _majoriser(
  feature_map: urk.FeatureMap, state: ServerState, params: ModelParams, rows: Clients
) -> tuple[jax.Array, jax.Array]:
  features = features_of(feature_map, params, state.omega, rows.x)
  return blr.majoriser(
    features, rows.y, state.posterior, state.memory.covariance, rows.mask
  )
