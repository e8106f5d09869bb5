"""One figure of the paper's tables: RMSE and ECE of every method."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from fedbnr_jax.report.figures import COLOURS, new_axes
from fedbnr_jax.report.paper_tables import GROUPS, OTHER, group

_BLUE, _ORANGE, _GREEN, _PINK, _YELLOW, _SKY, _BLACK = COLOURS
_COLOURS = dict(
  zip((*GROUPS, OTHER), (_BLACK, _PINK, _YELLOW, _BLUE, _GREEN, _SKY), strict=True)
)
_INK = "#222222"
_SCORES = {"Table 1": "RMSE", "Table 2": "ECE"}


def scores(cells: pd.DataFrame) -> Figure:
  """Draws RMSE and ECE of all methods, in a panel per dataset and number of clients.

  A dot is our mean, with its standard error as a bar; a tick is the paper's figure.
  There is a panel only where there are runs.

  Args:
    cells: As returned by `paper_tables.cells`; at least one has an RMSE of ours.
  """
  cells = cells[cells.table.isin(_SCORES)]
  runs = cells[cells.n > 0]
  columns = list(runs.dataset.unique())
  counts = sorted(runs.num_clients.unique())
  methods = {
    table: list(cells.method[cells.table == table].unique()) for table in _SCORES
  }
  rows = [(table, count) for table in _SCORES for count in counts]
  heights = [1.0 + 0.2 * len(methods[table]) for table, _ in rows]
  figure, axes = new_axes(
    *(len(rows), len(columns), (2.0 + 2.4 * len(columns), 0.6 + sum(heights))),
    sharey="row",
    height_ratios=heights,
  )
  panels = iter(axes)
  for table, count in rows:
    for dataset in columns:
      place = (cells.table == table) & (cells.num_clients == count)
      ax = next(panels)
      ax.set_title(f"{dataset}, {count} clients", loc="left", fontsize=10)
      ax.set_xlabel(_SCORES[table])
      panel = cells[place & (cells.dataset == dataset)]
      _draw(ax, panel, methods[table])
      if _SCORES[table] == "ECE":
        ax.set_xlim(-0.02, 0.52)  # ECE lies between 0 and 1/2.
      else:
        _scale(ax, panel)
  handles = _legend(runs)
  title = "dots: our means, with their SEM as bars"
  where: dict[str, Any] = {"loc": "outside lower center"}
  where["ncols"] = min(len(handles), 1 + len(columns))
  figure.legend(handles=handles, title=title, frameon=False, **where)
  return figure


def _draw(ax: Axes, panel: pd.DataFrame, methods: list[str]) -> None:
  """Draws one panel, with methods from top to bottom."""
  cells: list[Any] = list(panel.itertuples(index=False))
  for cell in cells:
    place = methods.index(cell.method)
    colour = _COLOURS[group(cell.method)]
    ax.plot(cell.paper, place, "|", color=_INK, ms=11, mew=1.6)
    ax.errorbar(
      *(cell.mean, place), xerr=cell.sem, fmt="o", color=colour, ms=5, capsize=2.5
    )
  ax.set_yticks(range(len(methods)), methods, fontsize=9)
  ax.set_ylim(len(methods) - 0.4, -0.6)
  ax.tick_params(axis="x", labelsize=8)


def _scale(ax: Axes, panel: pd.DataFrame) -> None:
  """Makes the axis logarithmic where a method is far worse than the others."""
  values = pd.concat([panel["mean"], panel.paper])
  ax.xaxis.set_major_locator(MaxNLocator(4))
  if values.max() > 3 * values.min() > 0:
    ax.set_xscale("log")
    ax.set_xlabel(f"{ax.get_xlabel()}, log scale")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _legend(runs: pd.DataFrame) -> list[Line2D]:
  """Explains dots, ticks and the colours of the groups that have runs."""
  entries = [
    Line2D([], [], ls="", marker="|", color=_INK, ms=11, mew=1.6, label="paper")
  ]
  present = set(map(group, runs.method))
  for name, colour in _COLOURS.items():
    if name in present:
      entries.append(Line2D([], [], marker="o", color=colour, ms=5, label=name))
  return entries
