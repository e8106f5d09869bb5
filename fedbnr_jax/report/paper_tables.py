"""The paper's tables as data: one row per cell, our result beside the paper's.

In every score lower is better. As in the paper, `central` sees all rows at once and is
shown for orientation: it is never the best and never has a mark of significance. The
significance tests are not corrected for their number.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from fedbnr_jax.errors import InputError
from fedbnr_jax.report import significance
from fedbnr_jax.report.tables import paper_results

# In the paper's order; LaTeX tables have a horizontal rule above each group.
GROUPS = {
  "pooled data": ("central",),
  "ablations": ("local+local", "local+global", "avg+local", "kd+local"),
  "earlier work": ("fedavg", "fedprox", "pfedgp", "fedloc", "fedloc-poe"),
  "FedBNR": ("fedbnr", "fedbnr-kd"),
  "beyond the paper": ("fedbnr-ev", "fedbnr-kd-ev", "fedbnr-exact"),
}
OTHER = "others"  # Group of methods that are not listed above.
_ALL = tuple(method for methods in GROUPS.values() for method in methods)
# Methods whose calibration the paper reports, and ours. Tables of calibration show the
# others below these, and only if there are runs of them.
_WITH_CONFIDENCE = tuple(
  method for method in _ALL if method not in (*GROUPS["ablations"], "fedavg", "fedprox")
)
_POOLED = GROUPS["pooled data"]
# The paper has one FedLoc and does not say by which rule it fuses, so both of ours are
# compared with it.
_PRINTED_AS = {"fedloc-poe": "fedloc"}
_KEYS = ["dataset", "num_clients", "method"]
_NO_RUNS = pd.Series(dtype=float)
_COLUMNS = [
  *("table", *_KEYS, "n", "seeds", "mean", "sem", "mark", "best"),
  *("paper", "paper_sem", "paper_mark", "difference"),
]
_PAPERS_MARKS = {
  "worse,p<0.05": "↑",
  "worse,p<0.01": "⇑",
  "better,p<0.05": "↓",
  "better,p<0.01": "⇓",
}


@dataclasses.dataclass(frozen=True)
class Table:
  """One table: a score for every method, dataset and number of clients."""

  name: str
  title: str
  score: str  # Column of results.csv; lower is better.
  metric: str | None  # Value in `paper_results`; None where the paper has no table.
  methods: tuple[str, ...]  # In this order. Others that have runs are appended.
  reference: str | None = None  # Method that the marks compare with; None for no marks.
  with_sem: bool = True  # Whether the text shows the standard error of the mean.
  with_best: bool = True  # Whether the best method is in bold.
  places: int = 3  # Decimals of our results.


def _error(name: str, title: str, score: str, **options: Any) -> Table:
  """Makes a table of RMSE, which has all methods."""
  return Table(name, title, score, "rmse", _ALL, **options)


def _confidence(name: str, title: str, score: str, metric: str | None) -> Table:
  """Makes a table of calibration, with marks against fedbnr-kd."""
  return Table(name, title, score, metric, _WITH_CONFIDENCE, reference="fedbnr-kd")


_CHOSEN = "RMSE at the round that validation chose"
_LOWEST = "lowest RMSE of all rounds, the paper's protocol"
# The paper prints the standard errors of RMSE in a separate table, without marks.
_MARKED: dict[str, Any] = {"reference": "fedbnr", "with_sem": False}
TABLES = (
  _error("Table 1", _CHOSEN, "test_rmse", **_MARKED),
  _error("Table 1, lowest", _LOWEST, "min_test_rmse", **_MARKED),
  _confidence("Table 2", "expected calibration error (ECE)", "test_ece", "ece"),
  # The paper's numbers suggest ten levels; our default is a hundred.
  _confidence("Table 2, 10 levels", "ECE of ten levels", "test_ece10", "ece"),
  _confidence("Table A.2", "maximum calibration error (MCE)", "test_mce", "mce"),
  _confidence("Table A.3", "Brier score (BRI)", "test_bri", "bri"),
  _error("Table A.4", f"{_CHOSEN}, and SEM", "test_rmse"),
  _error("Table A.4, lowest", f"{_LOWEST}, and SEM", "min_test_rmse"),
  _confidence("NLL", "negative log-likelihood of a row", "test_nll", None),
  _confidence("CRPS", "continuous ranked probability score", "test_crps", None),
  # No method is the best here: a bad method may simply stop early.
  Table("Seconds", "of a run", "seconds", None, _ALL, with_best=False, places=1),
)


def papers_places(value: float) -> int:
  """Returns the decimals that the paper prints: three digits, as in 0.98 and 10.9."""
  return 1 if value >= 10 else 2


def group(method: str) -> str:
  """Returns the name of a method's group."""
  return next((name for name, methods in GROUPS.items() if method in methods), OTHER)


def cells(results: pd.DataFrame, tables: Iterable[Table] = TABLES) -> pd.DataFrame:
  """Computes every cell of the tables, including those without runs.

  A table has the paper's datasets and numbers of clients, followed by others that have
  runs. It has the methods for which the paper has a figure or the results have a score.

  Args:
    results: As returned by `tables.read_results`; only runs that are done count.
    tables: The tables to compute.

  Returns:
    One row per cell, in the order in which they are shown. The columns table, dataset,
    num_clients and method identify it; n (0 if there are no runs), seeds (as text),
    mean, sem, mark and best are ours; paper, paper_sem and paper_mark are the paper's;
    difference is our mean minus the paper's.

  Raises:
    InputError: If a cell has runs of several settings.
  """
  done = results[results.status == "done"]
  if done.duplicated([*_KEYS, "seed"]).any():
    raise InputError(
      "the results have several settings of one method, and a cell of the paper's "
      "tables takes one: keep the rows of one, or look at them by --brief."
    )
  paper = paper_results()
  columns = _columns(done, paper)
  rows = [row for table in tables for row in _table(table, done, paper, columns)]
  frame = pd.DataFrame(rows, columns=_COLUMNS)
  return frame.astype({"best": bool, "n": int})


def _columns(done: pd.DataFrame, paper: pd.DataFrame) -> list[tuple[str, int]]:
  """Lists (dataset, num_clients): the paper's datasets first, clients ascending."""
  pairs = pd.concat([frame[["dataset", "num_clients"]] for frame in (paper, done)])
  counts = pairs.groupby("dataset", sort=False).num_clients.unique()
  return [
    (str(name), int(count)) for name in counts.index for count in sorted(counts[name])
  ]


def _table(
  table: Table,
  done: pd.DataFrame,
  paper: pd.DataFrame,
  columns: list[tuple[str, int]],
) -> list[dict[str, Any]]:
  """Computes the cells of one table, dataset by dataset."""
  # Files of earlier versions lack some scores; a missing column becomes NaN.
  done = done.reindex(columns=[*_KEYS, "seed", table.score])
  done = done[done[table.score].notna()]
  paper = paper[paper.metric == table.metric]
  printed: dict[Any, Any] = paper.set_index(_KEYS).to_dict("index")
  shown = {*done.method, *paper.method}
  methods = dict.fromkeys([*table.methods, *done.method])
  scores = dict(iter(done.set_index("seed").groupby(_KEYS)[table.score]))
  rows = []
  for dataset, num_clients in columns:
    column = [
      _cell(table, (dataset, num_clients, method), scores, printed)
      for method in methods
      if method in shown
    ]
    rivals = [row for row in column if row["n"] and row["method"] not in _POOLED]
    # Every seed is a different split, so only means over the same seeds are compared:
    # those of the methods with the most seeds.
    most = max((row["n"] for row in rivals), default=0)
    rivals = [row for row in rivals if row["n"] == most]
    comparable = len({row["seeds"] for row in rivals}) == 1
    lowest = min(row["mean"] for row in rivals) if comparable else None
    for row in column:
      row["best"] = table.with_best and row in rivals and row["mean"] == lowest
    rows += column
  return rows


def _cell(
  table: Table,
  key: tuple[str, int, str],
  scores: dict[Any, pd.Series],
  printed: dict[Any, Any],
) -> dict[str, Any]:
  """Computes one cell, except for `best`, which depends on the whole column."""
  dataset, num_clients, method = key
  runs = scores.get(key, _NO_RUNS)
  reference = scores.get((dataset, num_clients, table.reference))
  mark = ""
  if reference is not None and method not in (*_POOLED, table.reference):
    mark = significance.mark(runs, reference)
  figure = (dataset, num_clients, _PRINTED_AS.get(method, method))
  paper = printed.get(figure, {"value": math.nan, "sem": math.nan, "significance": ""})
  mean = float(runs.mean())
  return {
    "table": table.name,
    **dict(zip(_KEYS, key, strict=True)),
    "n": len(runs),
    "seeds": " ".join(str(int(seed)) for seed in sorted(runs.index)),
    "mean": mean,
    "sem": significance.sem(runs),
    "mark": mark,
    "paper": paper["value"],
    "paper_sem": paper["sem"],
    "paper_mark": _PAPERS_MARKS.get(paper["significance"], ""),
    "difference": mean - paper["value"],
  }
