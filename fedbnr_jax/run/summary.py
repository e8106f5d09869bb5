"""The summary of a finished run: its scores by the history, and whether they agree."""

import json
from typing import Any

import ml_collections
import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.run.records import Record, RunFolder

TEST_SCORES = ("rmse", "ece", "mce", "bri", "nll", "crps", "coverage95", "ece10")
VALIDATION_SCORES = ("rmse", "nll", "ece")
# Columns that the summary takes from the best round, and those that it sums up.
_OF_BEST = (
  *(f"val_{name}" for name in VALIDATION_SCORES),
  *(f"test_{name}" for name in TEST_SCORES),
  *("noise_std", "prior_std"),
)
_SUMMED = ("floats_up", "floats_down", "seconds")
COLUMNS = ("clients_answered", *_OF_BEST, *_SUMMED)  # That every history has.


IN = "in_"  # Begins a column that says of a site if it took part in a round.


def best_round(history: list[Record], score: str = "val_rmse") -> int:
  """The first round, counted from 1, with the lowest validation score.

  Where sites were left out of a round, it has no score of their rows, and may look
  better for that: rounds with the most sites are compared.
  """
  values = [record[score] for record in history]
  num_in = [sum(r[name] for name in r if name.startswith(IN)) for r in history]
  compared = np.equal(num_in, max(num_in))
  return int(np.argmin(np.where(compared, values, np.inf))) + 1


def read_history(folder: RunFolder, score: str = "val_rmse") -> list[Record]:
  """The rows of `metrics.csv`, each with all columns that the loop and scores need.

  Raises:
    InputError: If a column is missing.
  """
  history = folder.metrics()
  for name in (score, *COLUMNS) if history else ():
    if name not in history[0]:
      raise InputError(
        f"{folder.history} has no column {name!r}: restore it; or to start from round "
        f"1, remove {folder.path}."
      )
  return history


def scores(history: list[Record], score: str = "val_rmse") -> dict[str, Any]:
  """The fields of `summary.json` that follow from the history."""
  number = best_round(history, score)
  best = history[number - 1]
  return {
    "rounds": len(history),
    "best_round": number,
    **{name: best[name] for name in _OF_BEST},
    "min_test_rmse": min(record["test_rmse"] for record in history),
    **{name: sum(record[name] for record in history) for name in _SUMMED},
  }


def read_summary(
  folder: RunFolder,
  config: ml_collections.ConfigDict,
  history: list[Record],
  num_sealed: int | None = None,
) -> dict[str, Any]:
  """The summary in a finished run's folder, which goes with its history.

  Args:
    folder: The run's.
    config: The run's.
    history: From `read_history`.
    num_sealed: Rows that a checkpoint has vouched for; None where none was read.

  Raises:
    InputError: If the summary lacks a field, or does not go with the history.
  """
  summary = folder.summary() or {}
  if not history:
    raise InputError(f"{folder.history} has no rows: restore it.")
  again = "restore it, or remove it and start the training again, which writes it anew."
  for name in ("dataset", "num_clients", "rmse_unit", *_expected(config, history)):
    if name not in summary:
      raise InputError(f"{folder.finished} has no {name!r}: {again}")
  changed = _changed(summary, _expected(config, history))
  if not changed:
    return summary
  sealed = history[:num_sealed]
  if num_sealed and not _changed(summary, _expected(config, sealed)):
    raise InputError(
      f"{folder.history} has {len(history)} rows, and the training wrote {num_sealed}: "
      "restore it, or remove the rows at its end."
    )
  name, value = next(iter(changed.items()))
  raise InputError(
    f"{folder.finished} does not go with {folder.history.name} ({name} is "
    f"{summary[name]!r}, and should be {value!r}): {again}"
  )


def read_outcome(
  folder: RunFolder, config: ml_collections.ConfigDict, num_sealed: int
) -> tuple[list[Record], dict[str, Any]]:
  """History and summary that go with a checkpoint; of an unfinished run no summary.

  Args:
    folder: The run's.
    config: The run's.
    num_sealed: The checkpoint's round.

  Raises:
    InputError: If they do not go with it, or it is older than the best round.
  """
  history = read_history(folder, f"val_{config.stop_on}")
  if not folder.finished.exists():
    return history[:num_sealed], {}
  summary = read_summary(folder, config, history, num_sealed)
  if summary["best_round"] > num_sealed:
    raise InputError(
      f"the best round of {folder.path} is {summary['best_round']}, but the newest "
      f"sound checkpoint is of round {num_sealed}: restore the checkpoints, or remove "
      f"{folder.finished} and start the training again, which goes on from there."
    )
  return history, summary


def _expected(
  config: ml_collections.ConfigDict, history: list[Record]
) -> dict[str, Any]:
  """Fields of the summary that a run of this config has after this history."""
  known = {"method": config.method, "seed": config.seed}
  return known | scores(history, f"val_{config.stop_on}")


def _changed(summary: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
  """The expected fields that a summary has otherwise; how long it took is free."""
  return {
    name: value
    for name, value in expected.items()
    # As texts, in which a NaN is equal to itself.
    if not name.endswith("seconds") and json.dumps(summary[name]) != json.dumps(value)
  }
