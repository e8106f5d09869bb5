"""Settings that all methods share: their checks, and how a config gives them."""

from typing import Any

import ml_collections

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.federated.placement import Placement, client_mesh


def check(
  participation: Participation, placement: Placement, **positive: float
) -> None:
  """Raises InputError for the first setting that no method can have."""
  batch_size = 1 if placement.batch_size is None else placement.batch_size
  check_positive(**positive, batch_size=batch_size)
  participation.check()


def check_positive(**settings: float) -> None:
  """Raises InputError for the first setting that is not positive."""
  for name, value in settings.items():
    if not value > 0:
      raise InputError(f"{name} must be positive, got {value}.")


def from_config(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Reads who takes part in a round, and where it is computed."""
  return {
    "participation": Participation(
      config.participation, config.dropout, config.statistics_from
    ),
    "placement": Placement(config.client_batch_size or None, client_mesh(config.mesh)),
  }
