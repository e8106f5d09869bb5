"""What a run's releases have spent: kept in its folder, and added up by zCDP.

Every release is ρ-zCDP, and the ρ of several releases of the same rows add up. What a
total of ρ means as (ε, δ) is computed by the Rényi accountant of dp-accounting.
"""

import os
import pathlib
from typing import Any, NamedTuple

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import read_json, write_json
from fedbnr_jax.release.noise import INSTALL

NAME = "budget.json"
_NUM_BISECTIONS = 60


class Spent(NamedTuple):
  """What one release has spent."""

  rho: float
  epsilon: float  # By itself, at this δ.
  delta: float
  noise: str


def total_epsilon(rhos: list[float], delta: float) -> float:
  """Returns the ε, at this δ, of releases that are each ρ-zCDP, taken together.

  Raises:
    InputError: If dp_accounting, which computes it, is not installed.
  """
  try:
    from dp_accounting import dp_event, rdp
  except ImportError as error:
    raise InputError(INSTALL) from error
  accountant = rdp.RdpAccountant()
  for rho in rhos:
    accountant.compose(dp_event.ZCDpEvent(rho))
  return float(accountant.get_epsilon(delta))


def rho_of(epsilon: float, delta: float) -> float:
  """Returns the largest ρ, by bisection, that is (ε, δ) private."""
  low, high = 0.0, epsilon  # The privacy loss is ρ on average: more than ε is too much.
  for _ in range(_NUM_BISECTIONS):
    middle = 0.5 * (low + high)
    fits = total_epsilon([middle], delta) <= epsilon
    low, high = (middle, high) if fits else (low, middle)
  if low <= 0.0:
    raise InputError(f"ε = {epsilon:g} is too small for δ = {delta:g}: give more.")
  return low


def read(folder: str | os.PathLike[str]) -> list[Spent]:
  """Reads what the releases of a run have spent, in their order.

  Raises:
    InputError: If the file is damaged.
  """
  path = pathlib.Path(folder) / NAME
  if not path.exists():
    return []
  try:
    releases: list[dict[str, Any]] = read_json(path)["releases"]
    return [
      Spent(
        float(one["rho"]), float(one["epsilon"]), float(one["delta"]), str(one["noise"])
      )
      for one in releases
    ]
  except (InputError, KeyError, TypeError, ValueError) as error:
    raise InputError(
      f"{path} is damaged, which says what was spent before: restore it."
    ) from error


def write(folder: str | os.PathLike[str], releases: list[Spent]) -> None:
  """Writes what all releases have spent; the caller holds the lock of the folder."""
  content = {
    "releases": [release._asdict() for release in releases],
    "rho": sum(release.rho for release in releases),
  }
  write_json(pathlib.Path(folder) / NAME, content)
