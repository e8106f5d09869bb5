"""Tables of a sweep's results: means over seeds, beside the paper's."""

import importlib.resources
import os
from collections.abc import Sequence
from typing import Any

import pandas as pd

from fedbnr_jax.data import read_table
from fedbnr_jax.errors import InputError

_KEYS = ["dataset", "num_clients", "method"]
_SCORES = ["test_rmse", "min_test_rmse", "test_ece", "rounds", "seconds"]
_VALIDATION = ["val_rmse", "val_ece", "val_nll"]
# Scores that only some files have.
_FURTHER = [
  *_VALIDATION,
  *("test_ece10", "test_mce", "test_bri", "test_nll", "test_crps"),
]
# How the columns of printed tables are formatted.
_PLACES = {
  "seeds": "{:.0f}",
  "test RMSE": "{:.3f}",
  "validation RMSE": "{:.3f}",
  "validation ECE": "{:.3f}",
  "validation NLL": "{:.3f}",
  "lowest": "{:.3f}",
  "paper": "{:.2f}",
  "ECE": "{:.3f}",
  "paper ECE": "{:.2f}",
  "rounds": "{:.0f}",
  "seconds": "{:.0f}",
}


def paper_results() -> pd.DataFrame:
  """Returns all numbers of the paper's tables, one per row."""
  file = importlib.resources.files("fedbnr_jax.report") / "paper_results.csv"
  with importlib.resources.as_file(file) as path:
    return pd.read_csv(path)


def read_results(*paths: str | os.PathLike[str]) -> pd.DataFrame:
  """Reads and joins the `results.csv` of one or several sweeps.

  Raises:
    InputError: If a file is not a table of results, or a run is there twice.
  """
  results = pd.concat([_read(path) for path in paths], ignore_index=True)
  twice = results.duplicated([*keys(results), "seed"])
  if twice.any():
    row = results[twice].iloc[0]
    raise InputError(
      f"{', '.join(str(path) for path in paths)} has the run {row.dataset}, "
      f"{row.num_clients} clients, {row.method}, seed {row.seed} twice: remove one row."
    )
  return results


def _read(path: str | os.PathLike[str]) -> pd.DataFrame:
  """Reads one file; scores that it lacks become NaN."""
  results = read_table(path)
  for name in (*_KEYS, "seed", "status"):
    if name not in results.columns:
      raise InputError(f"{path} is no table of results: it lacks column {name!r}.")
  # Only a sweep in which no run is done yet may have no scores.
  if "test_rmse" not in results.columns and (results.status == "done").any():
    raise InputError(f"{path} is no table of results: it lacks column 'test_rmse'.")
  results = results.reindex(columns=list(dict.fromkeys([*results.columns, *_SCORES])))
  scores = [name for name in _FURTHER if name in results.columns] + _SCORES
  for name in ("num_clients", "seed", *scores):
    try:
      results[name] = pd.to_numeric(results[name].replace("", None))
    except ValueError as error:
      raise InputError(
        f"{path}, column {name!r} is not of numbers: {error}."
      ) from error
  for name in (*_KEYS, "seed"):
    if (results[name].isna() | (results[name] == "")).any():
      raise InputError(f"{path} has a row without {name!r}: complete or remove it.")
  return results


def keys(results: pd.DataFrame) -> list[str]:
  """Returns the columns that identify a cell, including fields the sweep varied."""
  return _KEYS + [name for name in results.columns if name.startswith("config.")]


def on_validation(results: pd.DataFrame) -> pd.DataFrame:
  """Averages over seeds the scores on validation rows, by which settings are chosen.

  Args:
    results: As returned by `read_results`.

  Returns:
    One row per dataset, number of clients, method and setting, in the order of
    `results`.

  Raises:
    InputError: If the results lack these scores.
  """
  for name in _VALIDATION:
    if name not in results.columns:
      raise InputError(f"the results have no column {name!r}: run the sweep again.")
  done = results[results.status == "done"]
  cells = done.groupby(keys(results), sort=False, dropna=False)
  means = pd.DataFrame(
    {
      "seeds": cells.seed.count(),
      "validation RMSE": cells.val_rmse.mean(),
      "validation ECE": cells.val_ece.mean(),
      "validation NLL": cells.val_nll.mean(),
      "rounds": cells.rounds.mean(),
      "seconds": cells.seconds.mean(),
    }
  )
  return means.reset_index()


def beside_paper(results: pd.DataFrame) -> pd.DataFrame:
  """Averages over seeds the runs that are done, beside the paper's figures.

  Args:
    results: As returned by `read_results`.

  Returns:
    One row per dataset, number of clients, method and setting, in the order of
    `results`.
  """
  done = results[results.status == "done"]
  cells = done.groupby(keys(results), sort=False, dropna=False)
  ours = pd.DataFrame(
    {
      "seeds": cells.seed.count(),
      "test RMSE": cells.test_rmse.mean(),
      "lowest": cells.min_test_rmse.mean(),
      "ECE": cells.test_ece.mean(),
      "rounds": cells.rounds.mean(),
      "seconds": cells.seconds.mean(),
    }
  ).reset_index()
  paper = paper_results().pivot_table(index=_KEYS, columns="metric", values="value")
  paper = paper[["rmse", "ece"]].reset_index()
  paper = paper.rename(columns={"rmse": "paper", "ece": "paper ECE"})
  joined = ours.merge(paper, on=_KEYS, how="left")
  columns = ["seeds", "test RMSE", "lowest", "paper", "ECE", "paper ECE"]
  return joined[[*keys(results), *columns, "rounds", "seconds"]]


def markdown(table: pd.DataFrame) -> str:
  """Formats a table as Markdown: numbers rounded by column, missing cells a dash."""

  def cell(name: str, value: Any) -> str:
    if pd.isna(value):
      return "–"
    return _PLACES.get(name, "{}").format(value)

  rows = [
    [cell(name, row[name]) for name in table.columns] for _, row in table.iterrows()
  ]
  header = [str(name).replace("_", " ") for name in table.columns]
  return "\n".join(_line(row) for row in (header, ["---"] * len(header), *rows))


def _line(cells: Sequence[str]) -> str:
  return f"| {' | '.join(cells)} |"
