"""Tables of results, ours beside the paper's."""

import importlib.resources
import os
from collections.abc import Sequence
from typing import Any

import pandas as pd

from fedbnr_jax.data import read_table
from fedbnr_jax.errors import InputError

_KEYS = ["dataset", "num_clients", "method"]
_SCORES = ["test_rmse", "min_test_rmse", "test_ece", "rounds", "seconds"]
_PLACES = {
  "seeds": "{:.0f}",
  "test RMSE": "{:.3f}",
  "lowest": "{:.3f}",
  "paper": "{:.2f}",
  "ECE": "{:.3f}",
  "paper ECE": "{:.2f}",
  "rounds": "{:.0f}",
  "seconds": "{:.0f}",
}


def paper_results() -> pd.DataFrame:
  """Every number of the paper's tables, one row each."""
  file = importlib.resources.files("fedbnr_jax.report") / "paper_results.csv"
  with importlib.resources.as_file(file) as path:
    return pd.read_csv(path)


def read_results(path: str | os.PathLike[str]) -> pd.DataFrame:
  """Reads a `results.csv` of a sweep.

  Raises:
    InputError: If it is not one, or has a run twice.
  """
  results = read_table(path)
  for name in (*_KEYS, "seed", "status"):
    if name not in results.columns:
      raise InputError(f"{path} is no table of results: it lacks column {name!r}.")
  # A sweep of which nothing is done yet has no scores.
  results = results.reindex(columns=list(dict.fromkeys([*results.columns, *_SCORES])))
  for name in ("num_clients", "seed", *_SCORES):
    results[name] = pd.to_numeric(results[name].replace("", None))
  twice = results.duplicated([*_KEYS, "seed"])
  if twice.any():
    row = results[twice].iloc[0]
    raise InputError(
      f"{path} has the run {row.dataset}, {row.num_clients} clients, {row.method}, "
      f"seed {row.seed} twice: remove one row."
    )
  return results


def beside_paper(results: pd.DataFrame) -> pd.DataFrame:
  """Means over seeds of what is done, and the paper's figures for the same cells.

  Args:
    results: As `read_results` gives it.

  Returns:
    One row a dataset, number of clients and method, in the order of `results`.
  """
  done = results[results.status == "done"]
  cells = done.groupby(_KEYS, sort=False)
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
  return joined[[*_KEYS, *_PLACES]]


def markdown(table: pd.DataFrame) -> str:
  """A table in Markdown, numbers rounded by column, missing cells as a dash."""

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
