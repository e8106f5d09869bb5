"""The paper's tables as data: which cells they have, and ours beside the paper's.

Every score is one of which less is better. As in the paper, `central` sees all rows
at once and is there for orientation: it is never the best and never marked. The
tests are not corrected for their number.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from fedbnr_jax import significance
from fedbnr_jax.errors import InputError
from fedbnr_jax.report.tables import paper_results

# In the paper's order; each group has its own rule above it.
GROUPS = {
  "pooled data": ("central",),
  "ablations": ("local+local", "local+global", "avg+local", "kd+local"),
  "earlier work": ("fedavg", "fedprox", "pfedgp", "fedloc", "fedloc-poe"),
  "FedBNR": ("fedbnr", "fedbnr-kd"),
  "beyond the paper": ("fedbnr-ev", "fedbnr-kd-ev", "fedbnr-exact"),
}
OTHER = "others"
_ALL = tuple(method for methods in GROUPS.values() for method in methods)
# Of the others' confidence the paper says nothing: they stand below, if there are runs.
_WITH_CONFIDENCE = tuple(
  method for method in _ALL if method not in (*GROUPS["ablations"], "fedavg", "fedprox")
)
_POOLED = GROUPS["pooled data"]
# The paper's FedLoc is one line: it does not say by which rule it fuses.
_PRINTED_AS = {"fedloc-poe": "fedloc"}
_KEYS = ["dataset", "num_clients", "method"]
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
  """One table: a score of every method, dataset and number of clients."""

  name: str
  title: str
  score: str  # Column of results.csv.
  metric: str | None  # In `paper_results`; None where the paper has nothing.
  methods: tuple[str, ...]  # In order. Others that have runs are appended.
  reference: str | None = None  # Method that the marks compare with; None for no marks.
  with_sem: bool = True  # Whether the written table shows it; the cells always have it.
  with_best: bool = True
  places: int = 3


def _error(name: str, title: str, score: str, **options: Any) -> Table:
  return Table(name, title, score, "rmse", _ALL, **options)


def _confidence(name: str, title: str, score: str, metric: str | None) -> Table:
  return Table(name, title, score, metric, _WITH_CONFIDENCE, reference="fedbnr-kd")


_CHOSEN = "RMSE at the round that validation chose"
_LOWEST = "lowest RMSE of all rounds, the paper's protocol"
# The paper has the SEM of RMSE in a table of its own, without marks.
_MARKED: dict[str, Any] = {"reference": "fedbnr", "with_sem": False}
TABLES = (
  _error("Table 1", _CHOSEN, "test_rmse", **_MARKED),
  _error("Table 1, lowest", _LOWEST, "min_test_rmse", **_MARKED),
  _confidence("Table 2", "expected calibration error (ECE)", "test_ece", "ece"),
  # By what it prints, the paper has ten levels where ours are a hundred.
  _confidence("Table 2, 10 levels", "ECE of ten levels", "test_ece10", "ece"),
  _confidence("Table A.2", "maximum calibration error (MCE)", "test_mce", "mce"),
  _confidence("Table A.3", "Brier score (BRI)", "test_bri", "bri"),
  _error("Table A.4", f"{_CHOSEN}, and SEM", "test_rmse"),
  _error("Table A.4, lowest", f"{_LOWEST}, and SEM", "min_test_rmse"),
  _confidence("NLL", "negative log-likelihood of a row", "test_nll", None),
  _confidence("CRPS", "continuous ranked probability score", "test_crps", None),
  # Less time is no merit by itself: a bad method may stop at once.
  Table("Seconds", "of a run", "seconds", None, _ALL, with_best=False, places=1),
)


def papers_places(value: float) -> int:
  """Decimals that the paper prints of a score: three digits, 0.98 and 10.9."""
  return 1 if value >= 10 else 2


def group(method: str) -> str:
  """The group that a method stands in."""
  return next((name for name, methods in GROUPS.items() if method in methods), OTHER)


def cells(results: pd.DataFrame, tables: Iterable[Table] = TABLES) -> pd.DataFrame:
  """Every cell of the tables, one row each, also those that are missing.

  A table has the paper's datasets and numbers of clients, then what else has runs;
  of the methods those of which the paper has a figure or the results have a score.

  Args:
    results: As `tables.read_results` gives it; only runs that are done count.
    tables: Which.

  Returns:
    Columns table, dataset, num_clients, method; of our runs n (0 if missing), seeds
    (as text), mean, sem, mark, best; of the paper's paper, paper_sem, paper_mark; and
    difference, which is our mean minus the paper's. Rows in the order in which they are
    shown.

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
  """Datasets, the paper's first, with their numbers of clients in rising order."""
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
  """The cells of one table, dataset by dataset."""
  # Files of earlier versions lack some scores.
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
    # Every seed is another split: means over fewer seeds, or others, do not compare.
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
  """One cell but for `best`, which takes the whole column."""
  dataset, num_clients, method = key
  runs = scores.get(key, pd.Series(dtype=float))
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
