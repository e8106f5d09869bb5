"""What can be seen of sums without the rows: whether any rows could have made them.

Each function takes what a site has sent, or a sum of it over sites, and says what no
rows could have: numbers that are not finite, rows that were not told of, a Gram matrix
with a negative direction, or with another trace than features of this kernel give. A
message ends up in the model, so what is not looked for here is believed. Parameters
and gradients have no such marks: of them only what is not finite is seen.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbnr_jax.algorithms import fedavg, held_out, last_layer
from fedbnr_jax.algorithms.proposals import GradientMessage
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.aggregation import Weighted
from fedbnr_jax.gp import blr
from fedbnr_jax.gp.metrics import ScoreSums

NEGATIVE = 1e-10  # Of the largest eigenvalue, which the least may be below zero.
_ROUGH = 1e-3  # Relative: features in float32, whitened, lose no more digits.
_WHOLE = 1e-6  # By which a sum of whole numbers may miss one.
_POWER_STEPS = 30


class Norm(NamedTuple):
  """What the squared norms of the features of n rows add up to.

  It is n·least at the least, and n·most + extra at the most.
  """

  least: float = 0.0
  most: float = math.inf
  extra: float = 0.0


class Known(NamedTuple):
  """What is known of a sum before it comes.

  Attributes:
    members: How many sites are in it.
    rows: Of these sites; None where they have not told them.
    most_rows: Of all sites.
    norm: Of the features under which it is taken.
    energy: What squares of standardised targets add up to at the most.
  """

  members: int = 1
  rows: float | None = None
  most_rows: float = math.inf
  norm: Norm = Norm()
  energy: float = math.inf


def require_possible(message: Any, known: Known) -> None:
  """Raises InputError if no rows can have made a message.

  What is raised is a predicate, such as "has numbers that are not finite".

  Args:
    message: A tree of NumPy arrays, as sites send it or as it adds up.
    known: What must be so.
  """
  require_finite(message)
  check = _CHECKS.get(type(message))
  if check is not None:
    check(message, known)
  elif isinstance(message, dict):
    for part in message.values():
      require_possible(part, known)


# --------------------------------------------------------------------- parts of checks


def require_finite(message: Any) -> None:
  """Raises InputError if a number is NaN or infinite."""
  if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(message)):
    raise InputError("has numbers that are not finite")


def require_whole(counts: Any, what: str, most: float = math.inf) -> None:
  """Raises InputError unless counts are whole numbers from 0 to `most`."""
  counts = np.asarray(counts, np.float64)
  if np.any(np.abs(counts - np.rint(counts)) > _WHOLE):
    raise InputError(f"has {what} that are no whole numbers")
  if np.any(counts < -_WHOLE):
    raise InputError(f"has a negative number of {what}")
  if np.any(counts > most + _WHOLE):
    raise InputError(f"has {np.max(counts):.0f} {what}, of {most:.0f} at the most")


def require_rows(count: Any, known: Known) -> None:
  """Raises InputError unless a count of rows is what was told."""
  require_whole(count, "rows", known.most_rows if known.rows is None else math.inf)
  if known.rows is not None and abs(float(count) - known.rows) > _WHOLE:
    raise InputError(f"has {float(count):.0f} rows instead of {known.rows:.0f}")


def require_total(counts: Any, what: str, total: float | None) -> None:
  """Raises InputError unless whole counts [B] add up to a total, if that is known."""
  require_whole(counts, what)
  if total is not None and abs(float(np.sum(counts)) - total) > _WHOLE * max(
    1, np.size(counts)
  ):
    raise InputError(
      f"has {float(np.sum(counts)):.0f} {what} in all instead of {total:.0f}"
    )


def require_not_negative(value: Any, what: str) -> None:
  """Raises InputError if a sum of squares is below zero."""
  if np.any(np.asarray(value) < 0):
    raise InputError(f"has a negative {what}")


def require_at_most(value: float, most: float, what: str) -> None:
  """Raises InputError if a sum exceeds what it can be, but for rounding."""
  if value > most * (1.0 + _ROUGH):
    raise InputError(f"has {what} of {value:.3g}, of {most:.3g} at the most")


def require_sum_of_squares(matrix: np.ndarray, what: str) -> None:
  """Raises InputError unless a matrix [n, n] is symmetric, without negative direction.

  Its least eigenvalue may be below zero by rounding, `NEGATIVE` of the largest.
  """
  if not np.array_equal(matrix, matrix.T):
    raise InputError(f"has {what} that is not symmetric")
  if not is_sum_of_squares(matrix):
    raise InputError(f"has {what} that is no sum of squares: an eigenvalue is negative")


def is_sum_of_squares(matrix: np.ndarray) -> bool:
  """Whether a symmetric matrix [n, n] has no direction below zero but by rounding."""
  size = _largest_eigenvalue(matrix)
  if size == 0.0:
    return not matrix.any()
  shifted = matrix / size + NEGATIVE * np.eye(len(matrix))
  try:
    np.linalg.cholesky(shifted)  # A third of the time that eigenvalues take.
  except np.linalg.LinAlgError:
    return False
  return True


def _largest_eigenvalue(matrix: np.ndarray) -> float:
  """Finds the largest size of an eigenvalue from below, to a few per cent."""
  scale = float(np.max(np.abs(matrix), initial=0.0))
  if scale == 0.0:
    return 0.0
  matrix = matrix / scale  # So that no square of it overflows.
  vector = matrix[:, np.argmax(np.linalg.norm(matrix, axis=0))]
  found = 0.0
  for _ in range(_POWER_STEPS):
    vector = matrix @ (vector / np.linalg.norm(vector))
    found = float(np.linalg.norm(vector))
    if found == 0.0:
      break
  return found * scale


def _require_trace(gram: np.ndarray, missing: Any, known: Known, rows: float) -> None:
  """Raises InputError unless a Gram's trace can be of so many rows of features.

  What features lose of the kernel's variance adds up to the kernel's with them.
  """
  least, most, extra = known.norm
  lost = 0.0 if isinstance(missing, tuple) else float(missing)
  if lost < -_ROUGH * rows * (most if math.isfinite(most) else 1.0):
    raise InputError("has features that exceed the variance of their kernel")
  trace, most = float(np.trace(gram)), rows * most + extra if rows else 0.0
  require_at_most(trace + lost, most, "a Gram matrix with a trace")
  if trace < rows * least * (1.0 - _ROUGH):
    raise InputError(
      f"has a Gram matrix with a trace of {trace:.3g}, of {rows * least:.3g} at least"
    )


# ------------------------------------------------------------------- a check a message


def _statistics(message: last_layer.StatisticsMessage, known: Known) -> None:
  _members(message.num_clients, known)
  require_rows(message.count, known)
  rows = float(message.count)
  stats = last_layer.statistics_of(message)
  gram = np.asarray(stats.gram)
  require_not_negative(message.energy, "sum of squares of targets")
  require_at_most(float(message.energy), known.energy, "squares of targets with a sum")
  _require_trace(gram, message.missing, known, rows)
  augmented = _bordered(gram, np.asarray(stats.moment), float(stats.energy))
  require_sum_of_squares(augmented, "a Gram matrix of features and targets")


def _moments(message: held_out.MomentsMessage, known: Known) -> None:
  """Checks the Gram of [φ, 1, g], with g the level of a row's residual."""
  require_rows(message.count, known)
  rows, levels = float(message.count), message.moments
  gram = np.asarray(blr.unpack(message.gram))
  _require_trace(gram, (), known, rows)
  with_one = _bordered(gram, np.asarray(levels.features), rows)
  by_all = np.append(np.asarray(levels.by_features), float(levels.total))
  augmented = _bordered(with_one, by_all, float(levels.energy))
  require_sum_of_squares(augmented, "a Gram matrix of features and residuals")


def _noise_moments(message: blr.NoiseMoments, known: Known) -> None:
  """Checks sums that come without their Gram, by Cauchy's inequality alone."""
  require_not_negative(message.energy, "sum of squares of residuals' levels")
  rows = known.most_rows if known.rows is None else known.rows
  if not math.isfinite(rows):
    return
  energy = float(message.energy)
  most = rows * known.norm.most + known.norm.extra
  for value, limit, what in (
    (message.total, rows * energy, "residuals' levels"),
    (message.by_features, most * energy, "residuals' levels by features"),
    (message.features, most * rows, "features"),
  ):
    require_at_most(float(np.sum(np.square(value))), limit, f"a squared sum of {what}")


def _ratio(message: held_out.RatioMessage, known: Known) -> None:
  require_rows(message.count, known)
  require_not_negative(message.ratio, "sum of squares of residuals")


def _errors(message: blr.ErrorSums, known: Known) -> None:
  require_rows(message.count, known)
  require_not_negative(message.squares, "sum of squares of errors")
  require_total(message.bins, "rows in bins", float(message.count))


def _scores(message: ScoreSums, known: Known) -> None:
  require_rows(message.count, known)
  require_not_negative(message.squares, "sum of squares of errors")
  require_not_negative(message.crps, "sum of scores")
  require_whole(message.inside, "rows inside intervals", float(message.count))


def _residuals(message: fedavg.ResidualSums, known: Known) -> None:
  _members(message.num_clients, known)
  require_rows(message.count, known)
  require_not_negative(message.squares, "sum of squares of residuals")


def _gradient(message: GradientMessage, known: Known) -> None:
  del known
  require_not_negative(message.squares, "sum of squares of residuals")


def _weighted(message: Weighted, known: Known) -> None:
  """Checks the weight of parameters, which is one a site, or the rows of each."""
  weight = float(message.weight)
  if abs(weight - known.members) > _WHOLE:
    require_rows(weight, known)


def _bare(message: np.ndarray, known: Known) -> None:
  """Checks the one sum that comes alone: squared residuals by their variance."""
  del known
  require_not_negative(message, "sum of squares of residuals")


def _members(number: Any, known: Known) -> None:
  if abs(float(number) - known.members) > _WHOLE:
    raise InputError(
      f"has the statistics of {float(number):.0f} sites instead of {known.members}"
    )


def _bordered(matrix: np.ndarray, column: np.ndarray, corner: float) -> np.ndarray:
  """Adds a last row and column to a symmetric matrix, [n + 1, n + 1]."""
  return np.block(
    [[matrix, column[:, None]], [column[None, :], np.full((1, 1), corner)]]
  )


_CHECKS: dict[type, Callable[[Any, Known], None]] = {
  last_layer.StatisticsMessage: _statistics,
  held_out.MomentsMessage: _moments,
  held_out.RatioMessage: _ratio,
  blr.NoiseMoments: _noise_moments,
  blr.ErrorSums: _errors,
  ScoreSums: _scores,
  fedavg.ResidualSums: _residuals,
  GradientMessage: _gradient,
  Weighted: _weighted,
  np.ndarray: _bare,
}
