"""The pooled URK-GP: FedBNR with one client that holds every row."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from fedbnr_jax.algorithms import fedbnr
from fedbnr_jax.algorithms.base import FederatedAlgorithm, RoundInfo, ServerState
from fedbnr_jax.federation import ServerSet, pooled


def central(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
  """Wraps a method so that it sees the pooled rows, for reference."""

  def describe(
    state: ServerState,
    server: ServerSet | None,
    reports: list[Any],
    answered: jax.Array,
  ) -> RoundInfo:
    info = algorithm.describe(state, server, reports, answered)
    nothing = jnp.zeros_like(info.floats_up)  # Pooled rows need no messages.
    return info.replace(floats_up=nothing, floats_down=nothing)

  return dataclasses.replace(algorithm, describe=describe, view=pooled)


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `central`."""
  changed = ml_collections.ConfigDict(config.to_dict())  # A copy without references.
  changed.learning_rate = config.central.learning_rate or config.learning_rate
  # One client takes part in every round, on one device.
  changed.participation, changed.dropout, changed.mesh = 1.0, 0.0, 1
  return central(fedbnr.from_config(changed))
