"""The page of a results file: means over seeds in a table to sort, and their figure."""

import os

import pandas as pd

from fedbnr_jax.report import page, paper_tables, score_figure, tables
from fedbnr_jax.report.page import Section, Tile

_UP = "million floats up"
# Names of columns on the page, by the column of a results file whose mean they are.
_SCORES = {
  "test_rmse": "RMSE",
  "min_test_rmse": "lowest RMSE",
  "test_ece": "ECE",
  "test_coverage95": "in 95 %",
  "test_nll": "NLL",
  "test_crps": "CRPS",
  "val_rmse": "validation RMSE",
  "rounds": "rounds",
  "seconds": "seconds",
  "floats_up": _UP,
}
_FORMATS = {
  **dict.fromkeys(("seeds", "rounds", "seconds"), "{:.0f}".format),
  **{"its SEM": "{:.2g}".format, "ECE": "{:.3f}".format},
  **{"in 95 %": "{:.1%}".format, _UP: "{:.3g}".format},
}


def write(results: pd.DataFrame, title: str, path: str | os.PathLike[str]) -> None:
  """Writes the page of results.

  Args:
    results: From `tables.read_results`.
    title: Of the page, such as the name of the sweep.
    path: The file to write.
  """
  done = results[results.status == "done"]
  means = _means(results)
  tiles = [
    Tile("runs done", str(len(done)), f"of {len(results)}"),
    Tile("data sets", str(done.dataset.nunique())),
    Tile("methods", str(done.method.nunique())),
    Tile("hours", f"{done.seconds.sum() / 3600:.1f}", "of training, all runs"),
  ]
  lead = (
    "Every line is the mean over seeds of test scores at the round that validation "
    "chose. A click on the head of a column sorts by it."
  )
  table = page.table(means, _FORMATS, sortable=True)
  sections = [*_figure(results), Section("Scores", table, wide=True)]
  sections += _failures(results)
  page.write(path, page.page(title, lead, tiles, sections))


def _means(results: pd.DataFrame) -> pd.DataFrame:
  """Averages the runs of each cell and setting, beside the paper's error."""
  beside = tables.beside_paper(results)
  keys = tables.keys(results)
  done = results[results.status == "done"]
  groups = done.groupby(keys, sort=False, dropna=False)
  means = pd.DataFrame(index=groups.size().index)
  for column, name in _SCORES.items():
    if column in done.columns:
      means[name] = groups[column].apply(lambda v: pd.to_numeric(v).mean())
  if _UP in means:
    means[_UP] /= 1e6
  place = 0
  if "RMSE" in means:
    place = list(means.columns).index("RMSE") + 1
    means.insert(place, "its SEM", groups.test_rmse.sem())
    means.insert(place + 1, "paper", beside.set_index(keys).paper)
    # Behind the first scores, which should be seen on a phone without scrolling.
    place += 2
  means.insert(place, "seeds", groups.seed.count())
  return means.reset_index().rename(columns={"num_clients": "clients"})


def _failures(results: pd.DataFrame) -> list[Section]:
  """Lists the runs that are not done, with the reason."""
  others = results[results.status != "done"]
  if others.empty:
    return []
  columns = ["dataset", "num_clients", "method", "seed", "status"]
  columns += ["reason"] if "reason" in others.columns else []
  shown = others[columns].fillna("").astype(str)
  return [Section("Not done", page.table(shown, sortable=True), wide=True)]


def _figure(results: pd.DataFrame) -> list[Section]:
  """Draws RMSE and ECE of all methods, where runs differ in nothing but these."""
  if len(tables.keys(results)) > 3:
    return []
  cells = paper_tables.cells(results)
  if not cells.n[cells.table == "Table 1"].any():
    return []
  picture = page.picture(score_figure.scores(cells))
  return [Section("RMSE and ECE", picture, wide=True)]
