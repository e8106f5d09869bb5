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

from fedbnr_jax.algorithms import last_layer
from fedbnr_jax.federated.exchange import Exchange, Message, ServerFn
from fedbnr_jax.federated.federation import ServerSet
from fedbnr_jax.federated.state import ServerState
from fedbnr_jax.gp import blr
from fedbnr_jax.gp.kernel_model import ModelParams

_SHRINK, _GROW = 0.25, 2.0  # Factors of the step after a failure, a success.


class Descent(struct.PyTreeNode):
  """What the server remembers of its steps; `ServerState.optimizer` of this method."""

  covariance: jax.Array  # [M, M] A⁻¹ under the parameters.
  # [] with the trace term, what the features of all rows lose of the kernel's variance.
  missing: Any
  optimizer: Any  # State of the optimiser.
  # What steps that may be taken back need:
  kept: ModelParams  # The last parameters that were accepted.
  value: jax.Array  # [] their negative log evidence per row.
  direction: Any  # The direction of the last step, a tree like the parameters.
  step: jax.Array  # [] the part of the direction that was stepped.
  failed: jax.Array  # [] bool, whether the last trial was taken back.


def first_descent(
  state: ServerState, optimizer_state: Any, *, trace: bool = False
) -> Descent:
  """Starts the memory of a server that has not stepped yet."""
  return Descent(
    covariance=blr.weight_covariance(state.posterior),
    missing=jnp.zeros_like(state.posterior.noise_std) if trace else (),
    optimizer=optimizer_state,
    kept=state.params,
    value=jnp.zeros((), state.posterior.noise_std.dtype),
    direction=jax.tree.map(jnp.zeros_like, state.params),
    step=jnp.ones((), state.params.log_noise_std.dtype),
    failed=jnp.zeros((), bool),
  )


def trace_weight(posterior: blr.Posterior) -> jax.Array:
  """Computes λ²/2σ² [], by which the trace term counts missing variance."""
  return 0.5 * (posterior.prior_std / posterior.noise_std) ** 2


def accept_or_return(
  statistics: Exchange,
  *,
  guarded: bool,
  unchanged: bool,
  penalty: Callable[[Any], jax.Array] | None = None,
) -> Exchange:
  """Lets the server compute A⁻¹ too, and accept a trial or return from it.

  Args:
    statistics: The exchange that conditions on statistics, `last_layer.condition`.
    guarded: Whether a trial may be taken back.
    unchanged: Without `guarded`, whether nothing has changed since the last trial.
    penalty: What the prior of θ adds to the value, `urk.FeatureMap.penalty`.
  """

  def server(
    state: ServerState, server_set: ServerSet | None, total: Message
  ) -> ServerState:
    new = statistics.server(state, server_set, total)
    before = state.optimizer
    value = last_layer.train_nll(new)
    if not isinstance(total.missing, tuple):
      value += trace_weight(new.posterior) * total.missing / new.stats.count
    if penalty is not None:
      by_prior = penalty(new.params.theta).astype(value.dtype)
      value += by_prior / new.stats.count
    accepted = before.replace(
      covariance=blr.weight_covariance(new.posterior),
      missing=total.missing,
      kept=new.params,
      value=value,
      step=jnp.minimum(1.0, _GROW * before.step).astype(before.step.dtype),
      failed=jnp.zeros((), bool),
    )
    if not guarded:
      failed = before.failed if unchanged else accepted.failed
      return new.replace(optimizer=accepted.replace(step=before.step, failed=failed))
    rejected = before.replace(step=_SHRINK * before.step, failed=jnp.ones((), bool))
    # Statistics and posterior of `state` are still those of what was kept.
    old = state.replace(params=before.kept, optimizer=rejected)
    better = value <= before.value  # False for NaN.
    return jax.tree.map(
      lambda a, b: jnp.where(better, a, b), new.replace(optimizer=accepted), old
    )

  wrapped: ServerFn = server
  return statistics._replace(server=wrapped)
