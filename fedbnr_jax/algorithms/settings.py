"""What every method checks before anything is traced, and takes from the config."""

from typing import Any

import ml_collections

from fedbnr_jax.errors import InputError
from fedbnr_jax.mapping import Placement, client_mesh
from fedbnr_jax.participation import Participation


def check(
  participation: Participation, placement: Placement, **positive: float
) -> None:
  """Raises InputError for the first setting that no method can have."""
  batch_size = 1 if placement.batch_size is None else placement.batch_size
  check_positive(**positive, batch_size=batch_size)
  participation.check()


def check_positive(**settings: float) -> None:
  """Raises InputError for the first that is not."""
  for name, value in settings.items():
    if not value > 0:
      raise InputError(f"{name} must be positive, got {value}.")


def from_config(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Who takes part, and where it is computed."""
  return {
    "participation": Participation(
      config.participation, config.dropout, config.statistics == "answering"
    ),
    "placement": Placement(config.client_batch_size or None, client_mesh(config.mesh)),
  }
