"""The pooled URK-GP: FedBNR with one client that holds every row."""

import chex
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
    return algorithm.round(key, state, pooled(federation))

  return algorithm._replace(init=init, round=round_fn)


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `central`."""
  return central(fedbnr.from_config(config))
