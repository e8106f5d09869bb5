"""Refuses a last layer that does not fit into memory, before anything is computed."""

import math
import os

from fedbnr_jax.errors import InputError

# Matrices [M, M] of float64 that a round holds at once: the summed Gram and that of a
# client, the factor, the eigenvectors, and copies of them on the host.
_NUM_MATRICES = 8


def available() -> int | None:
  """Returns the bytes of memory that are free; None where the system does not say."""
  try:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
  except (AttributeError, OSError, ValueError):
    return None


def require(num_features: int, field: str, num_samples: int) -> None:
  """Raises InputError if the last layer of M features needs more than there is.

  Args:
    num_features: M.
    field: The field of the config that has the number of draws.
    num_samples: That number.
  """
  free = available()
  needed = _NUM_MATRICES * 8 * num_features**2
  if free is None or needed <= free:
    return
  fits = int(num_samples * math.sqrt(free / needed))
  raise InputError(
    f"config.{field} is {num_samples}, which makes {num_features} features, and a last "
    f"layer of them needs about {needed / 1e9:.1f} GB where {free / 1e9:.1f} are free: "
    f"at most {fits} will do."
  )
