"""The ledger of a model: sums of the rows that are in, kept apart by table.

A table that joins keeps its own sums, and the posterior is that of all sums together.
When it leaves, its sums are dropped, and what was there before is there again, to the
bit. Rows of the training's own table, and some rows of a table that joined, leave by
subtraction, which is refused where too few digits of the rest would be left.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import blr
from fedbnr_jax.gp.blr import SufficientStats
from fedbnr_jax.tags import without

# The rounding of what was there may be this part of what is left, by bytes of a float.
_TOLERANCE = {8: 1e-10, 4: 1e-4}


class Part(NamedTuple):
  """The rows of one table that are in."""

  table: str  # Its name; of the training's own "".
  sums: SufficientStats  # NumPy arrays; the Gram matrix as a triangle [M(M + 1)/2].
  tags: np.ndarray  # [n], `row_tags` of the rows; equal rows repeat.
  # [M + 1] the last binary digit of the Gram's diagonal and of the energy when the
  # table came in. Rows that leave take their sums with them, but not the rounding.
  rounding: np.ndarray


class Ledger(NamedTuple):
  """The sums in a model's posterior, and what has changed since training."""

  training: Part
  kernel: str  # Digest of the kernel under which they were taken.
  # Where the noise varies, the c of its variance σ² exp(φᵀu + c), for a σ by evidence
  # times `scale`.
  noise_offset: float | None
  held_out: np.ndarray  # [m], tags of the rows held out from the training.
  departed: np.ndarray  # [d], those of them whose table has left.
  joined: tuple[Part, ...] = ()
  # Rows in by owner, where clients are values of a column; None where they are not.
  owners: dict[str, int] | None = None
  changes: tuple[dict[str, Any], ...] = ()
  # Whether nothing in the run's folder is of rows that left, as far as that can be.
  erased: bool = False
  scale: float = 1.0  # By which held-out rows have scaled all error bars.

  @property
  def stats(self) -> SufficientStats:
    """The statistics of all rows that are in."""
    total = self.training.sums
    for part in self.joined:
      total = jax.tree.map(np.add, total, part.sums)
    return total.replace(gram=blr.unpack(total.gram))

  @property
  def tags(self) -> np.ndarray:
    """The tags [n] of all rows that are in."""
    return np.concatenate([part.tags for part in (self.training, *self.joined)])

  @property
  def departures(self) -> list[dict[str, Any]]:
    """The changes by which rows have left."""
    return [change for change in self.changes if change["action"] == "remove"]


def make_part(table: str, stats: SufficientStats, tags: np.ndarray) -> Part:
  """Keeps the statistics of a table's rows."""
  sums = jax.tree.map(np.asarray, stats)
  sums = sums.replace(gram=blr.pack(sums.gram))
  largest = _diagonal(sums)
  with np.errstate(invalid="ignore"):  # Who keeps the part checks that it is finite.
    rounding = np.where(largest > 0, np.spacing(largest), 0)
  return Part(table, sums, tags, rounding)


def is_finite(part: Part) -> bool:
  """Whether all sums are."""
  return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(part.sums))


def _diagonal(sums: SufficientStats) -> np.ndarray:
  """The diagonal of the Gram matrix and the energy, [M + 1]."""
  index = np.arange(len(sums.moment))
  return np.append(sums.gram[index * (index + 3) // 2], sums.energy)


def emptied(part: Part) -> Part:
  """The part of a table that has left as a whole: exactly nothing."""
  zeros = jax.tree.map(np.zeros_like, part.sums)
  return part._replace(
    sums=zeros, tags=part.tags[:0], rounding=np.zeros_like(part.rounding)
  )


def less(part: Part, stats: SufficientStats, tags: np.ndarray, source: str) -> Part:
  """Subtracts some rows of a table.

  Raises:
    InputError: If what is left is too near the rounding of what was there, or cannot be
      a sum of rows.
  """
  rest = jax.tree.map(np.subtract, part.sums, make_part("", stats, tags).sums)
  tolerance = _TOLERANCE[rest.gram.dtype.itemsize]
  known = np.all(tolerance * _diagonal(rest) >= part.rounding)
  if not (known and _is_sum_of_squares(rest, tolerance)):
    remedy = (
      f"remove {part.table} as a whole and add its other rows again"
      if part.table
      else "train again without them"
    )
    raise InputError(
      f"{source} cannot leave by subtraction: of the sums that it would leave behind, "
      f"too few digits are known. Instead, {remedy}. Nothing is changed."
    )
  return part._replace(sums=rest, tags=without(part.tags, tags))


def _is_sum_of_squares(sums: SufficientStats, tolerance: float) -> bool:
  """Whether sums can be those of rows: Σ uuᵀ with u = [φ; y] has no direction below 0.

  Every entry of u is measured by its own size, so that a large one hides no small one.
  """
  column = sums.moment[:, None]
  energy = np.reshape(sums.energy, (1, 1))
  matrix = np.block([[blr.unpack(sums.gram), column], [column.T, energy]])
  size = np.sqrt(np.diagonal(matrix))
  scale = np.where(size > 0, size, 1)
  matrix /= scale[:, None] * scale[None, :]
  matrix[np.diag_indices_from(matrix)] += tolerance * len(matrix)
  try:
    np.linalg.cholesky(matrix)
  except np.linalg.LinAlgError:
    return False
  return True
