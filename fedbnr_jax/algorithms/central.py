"""The pooled URK-GP: FedBNR with one client that holds every row."""

import dataclasses

import ml_collections

from fedbnr_jax.algorithms import fedbnr
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.federation import pooled


def central(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
  """Lets a method see all rows as one client's, for reference."""
  return dataclasses.replace(
    algorithm,
    view=pooled,
    sends=False,
    remedy="a smaller central.learning_rate (0: as learning_rate)",
  )


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `central`."""
  changed = ml_collections.ConfigDict(config.to_dict())  # A copy without references.
  changed.learning_rate = config.central.learning_rate or config.learning_rate
  changed.num_local_steps = config.central.num_steps or config.num_local_steps
  # One client takes part in every round, on one device.
  changed.participation, changed.dropout, changed.mesh = 1.0, 0.0, 1
  return central(fedbnr.from_config(changed))
