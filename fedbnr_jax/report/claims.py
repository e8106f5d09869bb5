"""In how many cells the paper's claims about RMSE hold in our runs."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from fedbnr_jax.report.paper_tables import GROUPS, papers_places

PAPERS = GROUPS["FedBNR"]
WITH_OURS = (*PAPERS, *GROUPS["beyond the paper"])


class Claim(NamedTuple):
  """That the best of some methods is below each of the others."""

  text: str
  others: tuple[str, ...]


CLAIMS = (
  Claim("below pFedGP and FedLoc", ("pfedgp", "fedloc")),
  Claim("below pFedGP and FedLoc by a product", ("pfedgp", "fedloc-poe")),
  Claim("below every ablation", GROUPS["ablations"]),
  Claim("below FedAvg and FedProx", ("fedavg", "fedprox")),
)
FIGURE = "at or below the paper's better figure, to its digits"
CENTRAL = "at or below the paper's central, to its digits"
# Name of a table of RMSE: how a column of counts is headed.
_TABLES = {"Table 1": "chosen round", "Table 1, lowest": "lowest of all rounds"}


class Count(NamedTuple):
  """Cells in which a claim holds, of those that have all the runs it needs."""

  holds: int
  cells: int

  def __str__(self) -> str:
    return f"{self.holds} of {self.cells}" if self.cells else "–"


def counts(cells: pd.DataFrame) -> pd.DataFrame:
  """How often each claim holds: with the paper's methods, and with ours too.

  It holds where a mean is lower, whether by chance or not. Every seed is another split,
  so only cells count in which all the methods in question have the same ones.

  Args:
    cells: As `paper_tables.cells` gives them.

  Returns:
    One row a claim: its text, and a `Count` for each protocol and set of methods.
  """
  columns: dict[str, Sequence[str | Count]] = {
    "best of the methods is": [claim.text for claim in CLAIMS] + [FIGURE, CENTRAL]
  }
  for whose, methods in (("FedBNR, -KD", PAPERS), ("and ours", WITH_OURS)):
    for table, protocol in _TABLES.items():
      part = cells[cells.table == table].set_index("method")
      parts = [cell for _, cell in part.groupby(["dataset", "num_clients"])]
      columns[f"{whose}: {protocol}"] = [
        *(
          _count(_below(cell, methods, claim.others) for cell in parts)
          for claim in CLAIMS
        ),
        _count(_reaches(cell, methods, PAPERS) for cell in parts),
        _count(_reaches(cell, methods, GROUPS["pooled data"]) for cell in parts),
      ]
  return pd.DataFrame(columns)


def _count(answers: Iterable[bool | None]) -> Count:
  known = [answer for answer in answers if answer is not None]
  return Count(sum(known), len(known))


def _below(
  cell: pd.DataFrame, methods: Sequence[str], others: Sequence[str]
) -> bool | None:
  """Whether the best of the methods is below each of the others; None if unknown."""
  runs = _runs(cell, (*methods, *others))
  if runs is None:
    return None
  return bool(runs[list(methods)].min() < runs[list(others)].min())


def _reaches(
  cell: pd.DataFrame, methods: Sequence[str], printed: Sequence[str]
) -> bool | None:
  """Whether their best, rounded as the paper rounds, is at most what it prints."""
  runs = _runs(cell, methods)
  figure = cell.paper.reindex(list(printed)).min()
  if runs is None or pd.isna(figure):
    return None
  return bool(round(runs.min(), papers_places(figure)) <= figure)


def _runs(cell: pd.DataFrame, methods: Sequence[str]) -> pd.Series | None:
  """Means by method; None unless all have runs, of the same seeds."""
  runs = cell.reindex(list(methods))
  same = runs.seeds.nunique(dropna=False) == 1
  return runs["mean"] if same and runs.n.min() else None
