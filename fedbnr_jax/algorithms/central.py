"""The pooled URK-GP: FedBNR with one client that holds every row."""

import chex
import jax.numpy as jnp
import ml_collections

from fedbnr_jax.algorithms import fedbnr
from fedbnr_jax.algorithms.base import FederatedAlgorithm, RoundInfo, ServerState
from fedbnr_jax.federation import Federation, pooled


def central(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
  """Wraps a method so that it sees the pooled rows, for reference."""

  def init(key: chex.PRNGKey, federation: Federation) -> ServerState:
    return algorithm.init(key, pooled(federation))

  def round_fn(
    key: chex.PRNGKey, state: ServerState, federation: Federation
  ) -> tuple[ServerState, RoundInfo]:
    state, info = algorithm.round(key, state, pooled(federation))
    nothing = jnp.zeros_like(info.floats_up)  # Pooled rows need no messages.
    return state, info.replace(floats_up=nothing, floats_down=nothing)

  return algorithm._replace(init=init, round=round_fn)


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `central`."""
  changed = ml_collections.ConfigDict(config.to_dict())  # A copy without references.
  changed.learning_rate = config.central.learning_rate or config.learning_rate
  return central(fedbnr.from_config(changed))
