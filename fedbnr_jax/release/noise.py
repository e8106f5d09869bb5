"""Discrete Gaussian noise on integers, by OpenDP's exact sampler.

A float drawn from a Gaussian has low bits that tell what it was added to. The discrete
Gaussian is drawn in exact arithmetic from the system's randomness, and integers have no
low bits. Independent noises of scales sᵢ on integers that one row changes by dᵢ are
ρ-zCDP with ρ = Σ dᵢ²/(2sᵢ²) (Canonne, Kamath and Steinke, 2020).
"""

import dataclasses
import math

import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.release.grid import Grid, IntegerSums

_LARGEST = 2**50  # 2⁶³ is then thousands of deviations away.
INSTALL = "the privacy extra is not installed: pip install 'fedbnr-jax[privacy]'."


@dataclasses.dataclass(frozen=True)
class Scales:
  """The noise's scales on a grid, in its steps.

  An entry beside the diagonal stands twice in the matrix, and counts twice in its norm;
  it is released once, with a scale that is smaller by √2. Then the sum of dᵢ²/(2sᵢ²) is
  the squared Frobenius norm of a row's matrix, and its count's square, over 2s².
  """

  diagonal: int  # s, also of the count.
  beside: int

  @classmethod
  def of(cls, grid: Grid, rho: float) -> "Scales":
    """Returns the smallest scales that are ρ-zCDP.

    Raises:
      InputError: If ρ takes so much noise that integers of 64 bits do not hold it.
    """
    diagonal = math.isqrt(math.ceil(grid.squared_sensitivity / (2.0 * rho))) + 1
    if diagonal > _LARGEST:
      raise InputError("so small an ε leaves nothing but noise: give more.")
    half = math.isqrt(diagonal**2 // 2) + 1
    return cls(diagonal, half)

  def rho(self, grid: Grid) -> float:
    """The ρ that these scales spend, rounded up."""
    return math.nextafter(grid.squared_sensitivity / (2 * self.diagonal**2), math.inf)


def with_noise(sums: IntegerSums, scales: Scales, num_noises: int = 1) -> IntegerSums:
  """Adds discrete Gaussian noise to every entry of the sums.

  Args:
    sums: Exact.
    scales: Of one noise.
    num_noises: Independent noises that are added up: one, or one of each client.
  """
  size = len(sums.gram)
  rows, columns = np.tril_indices(size, -1)
  diagonal = [*np.diagonal(sums.gram).tolist(), sums.count]
  beside = sums.gram[rows, columns].tolist()
  for _ in range(num_noises):
    diagonal = discrete_gaussian(diagonal, scales.diagonal)
    beside = discrete_gaussian(beside, scales.beside)
  gram = np.diag(np.array(diagonal[:-1], np.int64))
  gram[rows, columns] = gram[columns, rows] = np.array(beside, np.int64)
  return IntegerSums(gram, diagonal[-1])


def discrete_gaussian(values: list[int], scale: int) -> list[int]:
  """Adds independent discrete Gaussian noise to integers.

  Raises:
    InputError: If OpenDP is not installed.
  """
  try:
    from opendp import domains, measurements, metrics, mod
  except ImportError as error:
    raise InputError(INSTALL) from error
  # OpenDP asks for this word wherever a mechanism's proof has not been through its own
  # reviewers.
  mod.enable_features("contrib")
  domain = domains.vector_domain(domains.atom_domain(T="i64"))
  measurement = measurements.make_gaussian(
    domain, metrics.l2_distance(T="i64"), scale=float(scale)
  )
  noisy: list[int] = measurement(values)
  return noisy
