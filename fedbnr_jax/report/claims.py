"""In how many cells the paper's claims about RMSE hold in our runs."""

import math
from collections.abc import Mapping, Sequence
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
      part = cells[cells.table == table]
      columns[f"{whose}: {protocol}"] = [
        *(_below(part, methods, claim.others) for claim in CLAIMS),
        _reaches(part, methods, PAPERS),
        _reaches(part, methods, GROUPS["pooled data"]),
      ]
  return pd.DataFrame(columns)


def _below(
  part: pd.DataFrame, methods: tuple[str, ...], others: tuple[str, ...]
) -> Count:
  results = []
  for ours, _ in _by_cell(part):
    best = _lowest(ours, methods)
    if best is not None and all(other in ours for other in others):
      results.append(all(best < ours[other] for other in others))
  return Count(sum(results), len(results))


def _reaches(
  part: pd.DataFrame, methods: tuple[str, ...], printed: tuple[str, ...]
) -> Count:
  results = []
  for ours, papers in _by_cell(part):
    best, figure = _lowest(ours, methods), _lowest(papers, printed)
    if best is not None and figure is not None:
      results.append(round(best, papers_places(figure)) <= figure)
  return Count(sum(results), len(results))


def _by_cell(part: pd.DataFrame) -> list[tuple[dict[str, float], dict[str, float]]]:
  """Of each dataset and number of clients, our means and the paper's by method."""

  def known(column: pd.Series) -> dict[str, float]:
    return {str(name): float(value) for name, value in column.dropna().items()}

  groups = part.set_index("method").groupby(["dataset", "num_clients"], sort=False)
  return [(known(cell["mean"]), known(cell["paper"])) for _, cell in groups]


def _lowest(scores: Mapping[str, float], methods: tuple[str, ...]) -> float | None:
  """Of those methods that have one; None if none has."""
  lowest = min((scores[name] for name in methods if name in scores), default=math.inf)
  return lowest if math.isfinite(lowest) else None
