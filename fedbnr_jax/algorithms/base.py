"""The interface that every method implements: init, round, predict."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
from flax import struct

from fedbnr_jax.blr import Posterior, SufficientStats
from fedbnr_jax.clients import ModelParams
from fedbnr_jax.federation import Federation


class ServerState(struct.PyTreeNode):
  """What the server carries from round to round."""

  omega: Any  # [S, ...] random draws of the kernel; constants.
  params: ModelParams  # Global kernel, σ and λ.
  stats: SufficientStats  # Summed over all clients, under `params`.
  posterior: Posterior  # Of the last layer.
  num_rounds: jax.Array  # [] int32


class RoundInfo(struct.PyTreeNode):
  """Diagnostics of a round; not carried."""

  client_loss: jax.Array  # [K] before the last local step, nats per row; or NaN.
  train_nll: jax.Array  # [] global negative log evidence per row.
  floats_up: jax.Array  # [] floats a client sends in the round.
  floats_down: jax.Array  # [] floats it receives.


class FederatedAlgorithm(NamedTuple):
  """Three pure functions; the caller jits them."""

  init: Callable[[chex.PRNGKey, Federation], ServerState]
  round: Callable[
    [chex.PRNGKey, ServerState, Federation], tuple[ServerState, RoundInfo]
  ]
  # x [N, D] -> mean [N], variance [N] of the standardised target.
  predict: Callable[[ServerState, jax.Array], tuple[jax.Array, jax.Array]]
