"""Rows join or leave the model in a run's folder, exactly and without training."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from fedbnr_jax import files, membership, precision
from fedbnr_jax.errors import InputError
from fedbnr_jax.lock import alone_in
from fedbnr_jax.model import load
from fedbnr_jax.run.records import RunFolder


class ChangedRows(NamedTuple):
  """What `change_rows` has done.

  Attributes:
    changes: All changes since training, these included: action, table, rows.
    passed_over: Tables that left, with how many of their rows had been held out for
      validation or test, and so never in, and how many rows they have.
    num_rows: Rows in the posterior now.
    noise_std: σ, in the target's unit.
    prior_std: λ, in the target's unit.
  """

  changes: Sequence[dict[str, Any]]
  passed_over: Sequence[tuple[str, int, int]]
  num_rows: int
  noise_std: float
  prior_std: float


def change_rows(
  workdir: str | os.PathLike[str],
  add: Iterable[tuple[str, pd.DataFrame]] = (),
  remove: Iterable[tuple[str, pd.DataFrame]] = (),
) -> ChangedRows:
  """Adds and removes rows of the model in a folder, all or none, without training.

  Args:
    workdir: The folder of a finished run.
    add: Names and contents of tables whose rows join.
    remove: Names and contents of tables whose rows leave.

  Raises:
    InputError: If the run is not finished, its method has no last layer of all
      clients' rows, or a row to remove is not in.
  """
  load(workdir)  # Refuses a folder that holds no run before anything is written to it.
  with alone_in(workdir):
    return _change_rows(workdir, add, remove)


def _change_rows(
  workdir: str | os.PathLike[str],
  add: Iterable[tuple[str, pd.DataFrame]],
  remove: Iterable[tuple[str, pd.DataFrame]],
) -> ChangedRows:
  """Does what `change_rows` says, while nobody else writes the folder."""
  folder, trained = RunFolder(workdir), load(workdir)
  if not trained.scores:
    raise InputError(f"the training in {workdir} is not finished: let it finish.")
  trained.require_global_layer()
  ledger = membership.read(folder.posterior)
  membership.require_kernel(ledger, trained.state, folder.posterior)
  before, passed_over = ledger, []
  for source, table in add:
    rows = trained.rows(table)
    stats, tags = trained.statistics(rows, jax.jit), membership.row_tags(rows)
    ledger = membership.joined(ledger, stats, tags, source)
  for source, table in remove:
    rows = trained.rows(table)
    tags = membership.row_tags(rows)
    leave = membership.leaving(ledger, tags, source)
    stats = trained.statistics(rows.where(leave), jax.jit)
    ledger = membership.left(ledger, stats, tags[leave], source)
    if not leave.all():
      passed_over.append((source, int(np.sum(~leave)), len(leave)))
  if ledger is not before:
    with files.explain_os_errors(folder.path):
      membership.write(folder.posterior, ledger)
  state = trained.state
  if ledger.changes:
    with precision.float64():
      state = membership.with_posterior(state, ledger)
  scale = trained.preprocessor.target_std
  return ChangedRows(
    changes=ledger.changes,
    passed_over=passed_over,
    num_rows=int(np.rint(ledger.stats.count)),
    noise_std=float(state.server.posterior.noise_std) * scale,
    prior_std=float(state.server.posterior.prior_std) * scale,
  )
