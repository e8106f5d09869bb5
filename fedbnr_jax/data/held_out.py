"""Sets rows aside, or divides them into folds, from every owner in proportion."""

import numpy as np


def set_aside(
  rng: np.random.Generator,
  rows: np.ndarray,
  share: float,
  owners: np.ndarray | None = None,
) -> np.ndarray:
  """Chooses a share of rows, from every owner in proportion, each row as likely.

  An owner keeps at least one row.

  Args:
    rng: Source of the choice.
    rows: `[n]` row numbers.
    share: From 0 to one half.
    owners: `[n]` labels, or None if all rows have one owner.

  Returns:
    `[n]` truth values, true for the chosen ones.
  """
  order = _by_owner(rng, rows, owners)
  # Evenly spaced along the order, from a random start on: at most every second row.
  steps = np.floor(np.arange(len(order) + 1) * share + rng.random())
  chosen = np.zeros(len(rows), bool)
  chosen[order[np.diff(steps) > 0]] = True
  return chosen


def folds(
  rng: np.random.Generator,
  rows: np.ndarray,
  num_folds: int,
  owners: np.ndarray | None = None,
) -> np.ndarray:
  """Divides rows into folds of equal size, the rows of every owner too.

  Args:
    rng: Source of the choice.
    rows: `[n]` row numbers.
    num_folds: At least 2.
    owners: `[n]` labels, or None if all rows have one owner.

  Returns:
    `[n]` the fold of each row, from 0 on; -1 for the only row of an owner, without
    which there would be no such owner.
  """
  order = _by_owner(rng, rows, owners)
  fold = np.full(len(rows), -1)
  fold[order] = np.arange(len(order)) % num_folds
  return fold


def _by_owner(
  rng: np.random.Generator, rows: np.ndarray, owners: np.ndarray | None
) -> np.ndarray:
  """Puts positions within `rows` in an order: owner by owner, at random within each.

  Owners of a single row are left out.
  """
  order = rng.permutation(len(rows))
  if owners is None:
    return order if len(rows) > 1 else order[:0]
  _, number, size = np.unique(owners, return_inverse=True, return_counts=True)
  order = order[np.argsort(number[order], kind="stable")]
  return order[size[number[order]] > 1]
