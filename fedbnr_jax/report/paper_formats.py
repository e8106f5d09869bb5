"""The paper's tables in Markdown, LaTeX and CSV.

As in the paper, rows are methods and columns are numbers of clients by dataset. A
method has a line with our results, and below it the paper's and the difference.
"""

import itertools
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from fedbnr_jax import algorithms
from fedbnr_jax.report import claims
from fedbnr_jax.report import tables as tables_lib
from fedbnr_jax.report.paper_tables import TABLES, Table, group, papers_places
from fedbnr_jax.report.significance import MIN_PAIRS

_MISSING = "–"


def _patience() -> str:
  """Says after how many rounds without a better score each method stops."""
  rounds: dict[int, list[str]] = {}
  for name, method in algorithms.METHODS.items():
    rounds.setdefault(method.patience, []).append(name)
  usual = max(rounds, key=lambda count: len(rounds[count]))
  texts = [
    f"{', '.join(names)} after {count}"
    for count, names in rounds.items()
    if count not in (0, usual)  # Those of one round have nothing to stop.
  ]
  return f"{'; '.join(texts)}; the others after {usual}"


_LEGEND = (
  "A column is a dataset and a number of clients; n is the number of seeds. Marks are "
  "of the one-tailed Wilcoxon signed-rank test, paired by seed and not corrected for "
  f"the number of cells; there are none below {MIN_PAIRS} pairs. Bold is the best "
  "mean, of those with the most seeds. central sees all rows at once, so it has no "
  "marks and is never bold. "
  f"{_MISSING} is missing. The difference is our mean minus the paper's. By default "
  f"runs stop without a better validation score: {_patience()}, as in the paper. Its "
  "ECE of fedbnr on Bike with 100 clients is probably a misprint: its MCE and BRI are "
  "those of an ECE of about 0.37."
)
# Characters that LaTeX reads as commands, or writes by a command.
_LATEX = str.maketrans(
  {
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "↑": r"$^\uparrow$",
    "⇑": r"$^\Uparrow$",
    "↓": r"$^\downarrow$",
    "⇓": r"$^\Downarrow$",
  }
)


class _Cell(NamedTuple):
  """The text of a cell, before a format adds its markup."""

  number: str
  rest: str = ""  # Mark, standard error and number of seeds.
  best: bool = False  # Whether the number is in bold.


class _Line(NamedTuple):
  """A line of a table."""

  method: str  # Empty below the first line of a method.
  whose: str  # "ours", "paper" or "difference".
  cells: list[_Cell]


def markdown(cells: pd.DataFrame, tables: Sequence[Table] = TABLES) -> str:
  """Formats tables and claims as Markdown, with aligned columns.

  Args:
    cells: As returned by `paper_tables.cells`.
    tables: The tables to format.
  """
  parts = [_LEGEND]
  for table in tables:
    part = cells[cells.table == table.name]
    parts += [f"### {table.name}: {table.title}", _caption(part, table)]
    if part.empty:
      continue
    columns = [f"{name}, {count}" for name, count in _columns(part)]
    rows = [["method", "", *columns]]
    for line in _lines(part, table):
      texts = [
        (f"**{cell.number}**" if cell.best else cell.number) + cell.rest
        for cell in line.cells
      ]
      rows.append([line.method, line.whose, *texts])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    parts.append("\n".join(_markdown_row(row, widths) for row in rows))
  parts += [
    "### The paper's claims: cells in which a mean is lower, of those with all runs",
    tables_lib.markdown(claims.counts(cells)),
  ]
  return "\n\n".join(parts) + "\n"


def latex(cells: pd.DataFrame, tables: Sequence[Table] = TABLES) -> str:
  """Formats tables as LaTeX, each as wide as the text; empty ones are left out.

  Args:
    cells: As returned by `paper_tables.cells`.
    tables: The tables to format.
  """
  parts = [f"% Needs \\usepackage{{booktabs, graphicx}}.\n% {_LEGEND}"]
  for table in tables:
    part = cells[cells.table == table.name]
    if part.empty:
      continue
    caption = f"{table.name}: {table.title}. {_caption(part, table)}"
    lines = [
      r"\begin{table}",
      r"\centering",
      rf"\caption{{{caption.translate(_LATEX)}}}",
      r"\resizebox{\linewidth}{!}{%",
      *_tabular(part, table),
      r"}",
      r"\end{table}",
    ]
    parts.append("\n".join(lines))
  return "\n\n".join(parts) + "\n"


def csv(cells: pd.DataFrame, path: str | os.PathLike[str]) -> None:
  """Writes the unrounded cells, one per row."""
  cells.to_csv(path, index=False)


def write(cells: pd.DataFrame, folder: str | os.PathLike[str]) -> None:
  """Writes `tables.md`, `tables.tex` and `tables.csv` into an existing folder."""
  folder = pathlib.Path(folder)
  (folder / "tables.md").write_text(markdown(cells), encoding="utf-8")
  (folder / "tables.tex").write_text(latex(cells), encoding="utf-8")
  csv(cells, folder / "tables.csv")


def _columns(part: pd.DataFrame) -> list[tuple[str, int]]:
  """Lists (dataset, num_clients) in the order of the cells."""
  pairs = part[["dataset", "num_clients"]].drop_duplicates()
  return list(pairs.itertuples(index=False, name=None))


def _usual_n(part: pd.DataFrame) -> int:
  """Returns the number of seeds that most cells have; 0 if there are no runs."""
  counts = part.n[part.n > 0]
  return 0 if counts.empty else int(counts.mode().iloc[-1])


def _caption(part: pd.DataFrame, table: Table) -> str:
  """Explains the number of seeds and the marks of one table."""
  usual = _usual_n(part)
  if not usual:
    return "No runs."
  brackets = "" if part.n.isin([0, usual]).all() else " unless brackets say otherwise"
  caption = f"n = {usual}{brackets}."
  if table.reference:
    caption += (
      f" Worse than {table.reference}: ↑ p < .05, ⇑ p < .01; better: ↓ p < .05, "
      "⇓ p < .01."
    )
  return caption


def _lines(part: pd.DataFrame, table: Table) -> list[_Line]:
  """Makes the lines of a table; the paper's are left out where it has none."""
  usual = _usual_n(part)
  lines = []
  for method, row in part.groupby("method", sort=False):
    cells: list[Any] = list(row.itertuples(index=False))
    lines.append(_Line(str(method), "ours", [_ours(c, table, usual) for c in cells]))
    papers = [_papers(cell, table) for cell in cells]
    changes = [_Cell(_number(cell.difference, table.places, "+")) for cell in cells]
    for whose, texts in (("paper", papers), ("difference", changes)):
      if any(text.number != _MISSING for text in texts):
        lines.append(_Line("", whose, texts))
  return lines


def _ours(cell: Any, table: Table, usual: int) -> _Cell:
  """Formats our result; the number of seeds is shown where it is not the usual one."""
  sem = _sem(cell.sem, table.places) if table.with_sem else ""
  seeds = "" if cell.n in (0, usual) else f" (n={cell.n})"
  return _Cell(_number(cell.mean, table.places), cell.mark + sem + seeds, cell.best)


def _papers(cell: Any, table: Table) -> _Cell:
  """Formats the paper's result with the decimals that the paper prints."""
  number = _number(cell.paper, papers_places(cell.paper))
  mark = cell.paper_mark if table.reference else ""
  return _Cell(number, mark + (_sem(cell.paper_sem, 2) if table.with_sem else ""))


def _number(value: float, places: int, sign: str = "") -> str:
  if math.isnan(value):
    return _MISSING
  return f"{value:{sign}.{places}f}".replace("-", "−")


def _sem(value: float, places: int) -> str:
  return "" if math.isnan(value) else f" ± {value:.{places}f}"


def _markdown_row(cells: Sequence[str], widths: Sequence[int]) -> str:
  padded = (text.ljust(width) for text, width in zip(cells, widths, strict=True))
  return f"| {' | '.join(padded)} |"


def _tabular(part: pd.DataFrame, table: Table) -> list[str]:
  """Makes the lines of a LaTeX tabular, with the paper's headings and rules."""
  columns = _columns(part)
  heads, rules, place = ["", ""], [], 3
  for name, members in itertools.groupby(columns, key=lambda column: column[0]):
    width = len(list(members))
    heads.append(rf"\multicolumn{{{width}}}{{c}}{{{name.translate(_LATEX)}}}")
    rules.append(rf"\cmidrule(lr){{{place}-{place + width - 1}}}")
    place += width
  counts = ["clients", "", *(str(count) for _, count in columns)]
  lines = [rf"\begin{{tabular}}{{ll{'l' * len(columns)}}}", r"\toprule"]
  lines += [_latex_row(heads), *rules, _latex_row(counts)]
  above = None
  for line in _lines(part, table):
    if line.method and group(line.method) != above:
      above = group(line.method)
      lines.append(r"\midrule")
    texts = [_latex_cell(cell) for cell in line.cells]
    lines.append(_latex_row([line.method.translate(_LATEX), line.whose, *texts]))
  return [*lines, r"\bottomrule", r"\end{tabular}"]


def _latex_cell(cell: _Cell) -> str:
  number, rest = cell.number.translate(_LATEX), cell.rest.translate(_LATEX)
  return (rf"\textbf{{{number}}}" if cell.best else number) + rest


def _latex_row(cells: Sequence[str]) -> str:
  return " & ".join(cells) + r" \\"
