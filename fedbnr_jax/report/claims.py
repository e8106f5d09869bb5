"""In how many cells the paper's claims about RMSE hold in our runs.

A cell is a dataset and a number of clients.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from fedbnr_jax.report.paper_tables import GROUPS, papers_places

PAPERS = GROUPS["FedBNR"]
WITH_OURS = (*PAPERS, *GROUPS["beyond the paper"])


class Claim(NamedTuple):
  """A claim that the best of FedBNR's variants has a lower RMSE than other methods."""

  text: str  # How the printed table words it.
  others: tuple[str, ...]  # Methods that must be worse, each of them.


CLAIMS = (
  Claim("below pFedGP and FedLoc", ("pfedgp", "fedloc")),
  Claim("below pFedGP and FedLoc by a product", ("pfedgp", "fedloc-poe")),
  Claim("below every ablation", GROUPS["ablations"]),
  Claim("below FedAvg and FedProx", ("fedavg", "fedprox")),
)
FIGURE = "at or below the paper's better figure, to its digits"
CENTRAL = "at or below the paper's central, to its digits"
# Tables of RMSE in which claims are counted, and the names of their protocols.
TABLES = {"Table 1": "chosen round", "Table 1, lowest": "lowest of all rounds"}


class Count(NamedTuple):
  """In how many cells a claim holds."""

  holds: int
  cells: int  # Cells that have all the runs which the claim needs.

  def __str__(self) -> str:
    return f"{self.holds} of {self.cells}" if self.cells else "–"


def counts(cells: pd.DataFrame) -> pd.DataFrame:
  """Counts how often each claim holds, for the paper's variants alone and with ours.

  A claim holds where a mean is lower, whether or not the difference is significant.
  Every seed is a different split, so a cell counts only if all methods in question were
  run with the same seeds.

  Args:
    cells: As returned by `paper_tables.cells`.

  Returns:
    One row per claim: its text, and a `Count` for each set of methods and protocol.
  """
  columns: dict[str, Sequence[str | Count]] = {
    "best of the methods is": [claim.text for claim in CLAIMS] + [FIGURE, CENTRAL]
  }
  for whose, methods in (("FedBNR, -KD", PAPERS), ("and ours", WITH_OURS)):
    for table, protocol in TABLES.items():
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
  """Counts the true answers among those that are known."""
  known = [answer for answer in answers if answer is not None]
  return Count(sum(known), len(known))


def _below(
  cell: pd.DataFrame, methods: Sequence[str], others: Sequence[str]
) -> bool | None:
  """Returns whether the best of `methods` is below all `others`; None if unknown."""
  runs = _runs(cell, (*methods, *others))
  if runs is None:
    return None
  return bool(runs[list(methods)].min() < runs[list(others)].min())


def _reaches(
  cell: pd.DataFrame, methods: Sequence[str], printed: Sequence[str]
) -> bool | None:
  """Returns whether the best of `methods` is at most the paper's best of `printed`.

  Ours is rounded to the decimals that the paper prints. None if a figure is missing.
  """
  runs = _runs(cell, methods)
  figure = cell.paper.reindex(list(printed)).min()
  if runs is None or pd.isna(figure):
    return None
  return bool(round(runs.min(), papers_places(figure)) <= figure)


def _runs(cell: pd.DataFrame, methods: Sequence[str]) -> pd.Series | None:
  """Returns the means by method; None unless all have runs, with the same seeds."""
  runs = cell.reindex(list(methods))
  same = runs.seeds.nunique(dropna=False) == 1
  return runs["mean"] if same and runs.n.min() else None
