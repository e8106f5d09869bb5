"""Rows join or leave the model in a run's folder, exactly and without training."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from fedbnr_jax import (
  calibration,
  erasure,
  ledger_changes,
  ledger_file,
  membership,
  precision,
)
from fedbnr_jax.data.ranges import warn_of_joining
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.state import State
from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.intervals import Calibration
from fedbnr_jax.ledger import Ledger
from fedbnr_jax.lock import alone_in
from fedbnr_jax.model import Model, load
from fedbnr_jax.names import listing
from fedbnr_jax.run import seal
from fedbnr_jax.run.records import RunFolder
from fedbnr_jax.tags import without

Tables = Iterable[tuple[str, pd.DataFrame]]


class ChangedRows(NamedTuple):
  """What `change_rows` has done.

  Attributes:
    changes: All changes since training, these included: action, table, rows.
    passed_over: Tables that left, with how many of their rows had been held out to
      validate, calibrate or test, and so never in, and how many rows they have.
    num_rows: Rows in the posterior now.
    noise_std: σ, in the target's unit.
    prior_std: λ, in the target's unit.
    traces: What the folder still holds of rows that have left, now or earlier.
    calibration: For conformal intervals, by rows that were set aside; outdated where
      it could not be made anew; None if there is none.
  """

  changes: Sequence[dict[str, Any]]
  passed_over: Sequence[tuple[str, int, int]]
  num_rows: int
  noise_std: float
  prior_std: float
  traces: erasure.Traces
  calibration: Calibration | None


def change_rows(
  workdir: str | os.PathLike[str],
  add: Tables = (),
  remove: Tables = (),
  *,
  erase: bool = False,
  allow_equal: bool = False,
) -> ChangedRows:
  """Removes and adds rows of the model in a folder, all or none, without training.

  Args:
    workdir: The folder of a finished run.
    add: Names and contents of tables whose rows join.
    remove: Names and contents of tables whose rows leave, before others join.
    erase: Whether to rewrite or delete what the folder holds of rows that have left,
      now or earlier; without it, the ledger before the change is kept beside the new.
    allow_equal: Whether rows may join that are equal to rows which are in or were held
      out.

  Raises:
    InputError: If the run is not finished, its method has no last layer of all
      clients' rows, a row to remove is not in, or one to add is.
  """
  load(workdir)  # Refuses a folder that holds no run before anything is written to it.
  with alone_in(workdir):
    return _change_rows(workdir, add, remove, erase, allow_equal)


def _change_rows(
  workdir: str | os.PathLike[str],
  add: Tables,
  remove: Tables,
  erase: bool,
  allow_equal: bool,
) -> ChangedRows:
  """Does what `change_rows` says, while nobody else writes the folder."""
  folder, trained = RunFolder(workdir), load(workdir)
  if not trained.scores:
    raise InputError(f"the training in {workdir} is not finished: let it finish.")
  trained.require_global_layer()
  if folder.network.exists():
    raise InputError(
      f"{workdir} holds a model of real sites, whose rows are not here: sites join and "
      "leave by fedbnr_jax.network.changes."
    )
  with precision.float64():
    precision.warn_of_float32(precision.POSTERIOR)
  before = ledger_file.read(folder.posterior)
  membership.require_kernel(before, trained.state, folder.posterior)
  ledger, passed_over = _removed(before, trained, remove)
  ledger = _added(ledger, trained, add, allow_equal)
  state = _state(trained, ledger)
  if erase:
    erasure.require_departures(folder, ledger)
  with explain_os_errors(folder.path):
    if erase:
      ledger = erasure.erase(folder, ledger, state)
    elif ledger is not before:
      ledger_file.replace(folder.posterior, ledger)
    if ledger is not before:
      _calibrate_again(folder, trained, ledger, state)
  scale, fitted = trained.preprocessor.target_std, state.server.posterior
  return ChangedRows(
    changes=ledger.changes,
    passed_over=passed_over,
    num_rows=len(ledger.tags),
    noise_std=float(fitted.noise_std) * scale,
    prior_std=float(fitted.prior_std) * scale,
    traces=erasure.traces(folder, ledger),
    calibration=calibration.read(folder, ledger.changes),
  )


def _calibrate_again(
  folder: RunFolder, trained: Model, ledger: Ledger, state: State
) -> None:
  """Scores the rows that were set aside by the changed model, if they are at hand."""
  if not trained.config.data.calibration:
    return
  held_out = without(ledger.held_out, ledger.departed)
  made = calibration.again(folder, trained.config, state, held_out)
  if made is not None:
    number = len(trained.records)
    sealed = seal.of_folder(folder, number)
    calibration.write(folder, made, sealed, number, ledger.changes)


def _removed(
  ledger: Ledger, trained: Model, tables: Tables
) -> tuple[Ledger, list[tuple[str, int, int]]]:
  """The ledger without the rows of tables, and what of them was never in."""
  passed_over = []
  for source, table in tables:
    rows = trained.rows(table)
    ledger, num_held_out = ledger_changes.without_rows(
      ledger, rows, source, _statistics(trained)
    )
    if not len(ledger.tags):
      raise InputError(
        f"without {source} no row would be in the posterior: at least one row must be "
        "left. Nothing is changed."
      )
    if num_held_out:
      passed_over.append((source, num_held_out, len(rows.y)))
  return ledger, passed_over


def _added(ledger: Ledger, trained: Model, tables: Tables, allow_equal: bool) -> Ledger:
  """The ledger with the rows of tables; warns of those unlike the training's."""
  client, outside = trained.config.data.client, []
  for source, table in tables:
    if client and client not in table.columns:
      raise InputError(
        f"{source} has no column {client!r}, by which the training told whose rows are "
        "whose, and rows that are in from new ones: add it. Nothing is changed."
      )
    ledger = ledger_changes.with_rows(
      ledger, trained.rows(table), source, _statistics(trained), allow_equal=allow_equal
    )
    outside.append((trained.outside(table), source))
  for cells, source in outside:  # After all of them: a refusal is one line.
    warn_of_joining(cells, source)
  return ledger


def _statistics(trained: Model) -> ledger_changes.Statistics:
  return lambda rows: trained.statistics(rows, jax.jit)


def _state(trained: Model, ledger: Ledger) -> State:
  """The model's state with the posterior of the rows that are in.

  Raises:
    InputError: If it is not finite.
  """
  if not ledger.changes:
    return trained.state
  with precision.float64():
    state = jax.device_get(membership.with_posterior(trained.state, ledger))
  if not all(
    np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.server.posterior)
  ):
    tables = listing({change["table"] for change in ledger.changes})
    raise InputError(
      f"the posterior would not be finite after the changes by {tables}. Nothing is "
      "changed."
    )
  return state
