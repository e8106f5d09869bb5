"""Rows of a table join or leave a ledger, or are refused by their numbers.

A row that is in counts once: it cannot join again, whatever its table is called. Rows
that are equal within one new table are different rows of it, and count as often as they
occur; so is an equal row of another owner.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp.blr import SufficientStats
from fedbnr_jax.ledger import Ledger, emptied, is_finite, less, make_part
from fedbnr_jax.tags import OwnedRows, paired, row_tags

# Targets farther out than this, in root mean squares of the training's, are mistakes; a
# few of them would also take the last digits of the energy.
_FARTHEST = 1e6

Statistics = Callable[[OwnedRows], SufficientStats]


def with_rows(
  ledger: Ledger,
  rows: OwnedRows,
  source: str,
  statistics: Statistics,
  *,
  allow_equal: bool = False,
) -> Ledger:
  """The ledger with the rows of one more table in it.

  Args:
    ledger: As it was.
    rows: Of the table. Equal rows within it count as often as they occur.
    source: The table's name.
    statistics: Sums rows under the model's kernel.
    allow_equal: Whether a row may join that is equal to one that is in or was held out.

  Raises:
    InputError: If a row is in already, was held out, or has an absurd target.
  """
  tags = row_tags(rows)
  _require_near(ledger, rows.y, source)
  if not allow_equal:
    _require_new(ledger, tags, source)
  part = make_part(source, statistics(rows), tags)
  if not is_finite(part):
    raise InputError(
      f"the features of {source} are too large to be summed: look for inputs far from "
      "those of the training. Nothing is changed."
    )
  ledger = ledger._replace(joined=(*ledger.joined, part))
  change = {"action": "add", "table": source, "rows": len(tags)}
  return _changed(ledger, change, rows, 1)


def _require_near(ledger: Ledger, y: np.ndarray, source: str) -> None:
  """Raises InputError if a target is absurdly far from those of the training."""
  own = ledger.training.sums
  known = own if own.count > 0 else ledger.stats
  scale = float(np.sqrt(known.energy / known.count)) or 1.0
  far = ~(np.abs(y) <= _FARTHEST * scale)
  if far.any():
    raise InputError(
      f"the target in row {np.argmax(far) + 1} of {source} is more than "
      f"{_FARTHEST:,.0f} deviations away from those of the training: correct or drop "
      "that row. Nothing is changed."
    )


def _require_new(ledger: Ledger, tags: np.ndarray, source: str) -> None:
  """Raises InputError if a row is in the posterior or was held out."""
  inside, held_out = np.isin(tags, ledger.tags), np.isin(tags, ledger.held_out)
  known = inside | held_out
  if not known.any():
    return
  first = int(np.argmax(known))
  where = "is in the posterior" if inside[first] else "is held out from the training"
  raise InputError(
    f"row {first + 1} of {source} {where} (of {len(tags)} rows, {np.sum(inside)} are "
    f"in and {np.sum(known & ~inside)} held out): leave such rows out. If they are "
    "other measurements that happen to be equal, say so (--allow_equal, or "
    "allow_equal=True). Nothing is changed."
  )


# ----------------------------------------------------------------------------- leaving


def without_rows(
  ledger: Ledger, rows: OwnedRows, source: str, statistics: Statistics
) -> tuple[Ledger, int]:
  """The ledger without the rows of a table; those held out were never in.

  Args:
    ledger: As it was.
    rows: Of the table.
    source: The table's name.
    statistics: Sums rows under the model's kernel.

  Returns:
    The ledger, and how many of the rows were held out.

  Raises:
    InputError: If a row is neither in nor was held out, none is in, or rows that can
      only be subtracted would leave too few digits.
  """
  tags = row_tags(rows)
  leave = _leaving(ledger, tags, source)
  held_out = tags[~leave]
  departed = held_out[~paired(held_out, ledger.departed)]
  ledger, of_training = _without(ledger, rows.where(leave), source, statistics)
  change = {
    "action": "remove",
    "table": source,
    "rows": int(np.sum(leave)),
    "of_training": of_training,
  }
  ledger = ledger._replace(departed=np.concatenate([ledger.departed, departed]))
  return _changed(ledger, change, rows.where(leave), -1), len(held_out)


def _leaving(ledger: Ledger, tags: np.ndarray, source: str) -> np.ndarray:
  """Marks the rows [n] of a table that are in and can leave: all but those held out."""
  leave = paired(tags, ledger.tags)
  strange = ~leave
  strange[strange] = ~paired(tags[~leave], ledger.held_out)
  if strange.any():
    raise InputError(
      f"row {np.argmax(strange) + 1} of {source} is not in the posterior: remove "
      "tables as they came in, with all their columns. Nothing is changed."
    )
  if not leave.any():
    raise InputError(
      f"no row of {source} is in the posterior: all were held out from the training "
      "to validate, calibrate or test it. Nothing is changed."
    )
  return leave


def _without(
  ledger: Ledger, rows: OwnedRows, source: str, statistics: Statistics
) -> tuple[Ledger, int]:
  """Drops tables whose rows all leave, and subtracts from others; counts training's."""
  parts, todo = [ledger.training, *ledger.joined], rows
  for index, part in reversed(list(enumerate(parts))):  # Later ones leave first.
    tags = row_tags(todo)
    if paired(part.tags, tags).all():
      parts[index], todo = emptied(part), todo.where(~paired(tags, part.tags))
  for index, part in enumerate(parts):
    own = paired(row_tags(todo), part.tags)
    if own.any():
      gone, todo = todo.where(own), todo.where(~own)
      parts[index] = less(part, statistics(gone), row_tags(gone), source)
  training, *joined = parts
  of_training = len(ledger.training.tags) - len(training.tags)
  kept = tuple(part for part in joined if len(part.tags))
  return ledger._replace(training=training, joined=kept), of_training


def _changed(
  ledger: Ledger, change: dict[str, Any], rows: OwnedRows, sign: int
) -> Ledger:
  """Notes a change, and how many rows of each owner are in after it."""
  owners = ledger.owners
  if owners is not None and rows.owners is not None:
    moved = Counter(rows.owners.tolist())
    owners = {
      name: owners.get(name, 0) + sign * moved[name] for name in {**owners, **moved}
    }
    owners = {name: count for name, count in owners.items() if count > 0}
  return ledger._replace(
    owners=owners,
    changes=(*ledger.changes, change),
    erased=ledger.erased and sign > 0,
  )
