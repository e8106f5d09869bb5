"""What the server of `fedbnr-exact` remembers, and steps that it takes back.

A step of Adam is taken as it comes. Other steps are trials: the statistics under the
new parameters say what the evidence has become, and where it has fallen, the server
goes back to the parameters before and tries a shorter step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from fedbnr_jax import blr
from fedbnr_jax.algorithms import last_layer
from fedbnr_jax.algorithms.base import Exchange, ServerState
from fedbnr_jax.clients import ModelParams
from fedbnr_jax.federation import ServerSet

_SHRINK, _GROW = 0.25, 2.0  # Of the step, after a trial that failed or succeeded.


class Memory(struct.PyTreeNode):
  """What the server keeps between exchanges."""

  covariance: jax.Array  # [M, M] A⁻¹ under the parameters.
  optimizer: Any  # State of the optimiser.
  # For steps that may be taken back:
  kept: ModelParams  # The last parameters that were accepted,
  value: jax.Array  # [] and their negative log evidence per row.
  direction: Any  # Of the last step, like the parameters.
  step: jax.Array  # [] part of the direction that is gone.
  failed: jax.Array  # [] bool, whether the last trial was taken back.


def first_memory(state: ServerState, optimizer_state: Any) -> Memory:
  """Of a server that has not stepped yet."""
  return Memory(
    covariance=covariance_of(state),
    optimizer=optimizer_state,
    kept=state.params,
    value=jnp.zeros((), state.posterior.noise_std.dtype),
    direction=jax.tree.map(jnp.zeros_like, state.params),
    step=jnp.ones((), state.params.log_noise_std.dtype),
    failed=jnp.zeros((), bool),
  )


def judging(
  exchange: Exchange, *, guarded: bool, unchanged: bool
) -> Callable[[ServerState, ServerSet | None, Any], ServerState]:
  """The server's side of the statistics: A⁻¹ too, and whether a trial is accepted.

  Args:
    exchange: The statistics.
    guarded: Whether a trial may be taken back.
    unchanged: Otherwise, whether nothing has changed since the last trial was judged.
  """

  def server(
    state: ServerState, server_set: ServerSet | None, total: Any
  ) -> ServerState:
    new = exchange.server(state, server_set, total)
    memory = state.memory
    value = last_layer.train_nll(new)
    accepted = memory.replace(
      covariance=covariance_of(new),
      kept=new.params,
      value=value,
      step=jnp.minimum(1.0, _GROW * memory.step).astype(memory.step.dtype),
      failed=jnp.zeros((), bool),
    )
    if not guarded:
      failed = memory.failed if unchanged else accepted.failed
      return new.replace(memory=accepted.replace(step=memory.step, failed=failed))
    rejected = memory.replace(step=_SHRINK * memory.step, failed=jnp.ones((), bool))
    # Statistics and posterior of `state` are still those of what was kept.
    old = state.replace(params=memory.kept, memory=rejected)
    better = value <= memory.value  # False for NaN.
    return jax.tree.map(
      lambda a, b: jnp.where(better, a, b), new.replace(memory=accepted), old
    )

  return server


def covariance_of(state: ServerState) -> jax.Array:
  """[M, M] A⁻¹, which clients are told."""
  return blr.weight_covariance(state.posterior)
