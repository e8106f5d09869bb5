"""Draws the error of our methods as multiples of that of pooled gradient boosting.

python -m benchmarks.multiples [--output=benchmarks/results/multiples.png]
  [--comparators=benchmarks/results/comparators.csv] [--table=results/paper_table.csv]

The first panel has the paper's ten cells, means over the seeds that a method and
boosting have in common; the second every other table of the comparators' file, where
the reference is the better of boosting and CatBoost. Left of one is better than what
someone who may pool all rows would take. Prints both as tables, with the rows they
rest on.
"""

import argparse
import pathlib
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import tools
from configs import uci
from fedbnr_jax.report.figures import COLOURS, new_axes, save

REFERENCES = ("boosting", "catboost", "catboost-rmse")
_FROM_TABLE = ("fedbnr-exact", "fedbnr-ev", "fedloc")
_MARKERS = "os^Dvx"
_ENDS, _TICKS = (0.3, 3.0), (0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
_BETTER = "#EEF6EE"  # Behind points that are better than the reference.


def read(comparators: pathlib.Path, table: pathlib.Path) -> pd.DataFrame:
  """Reads dataset, num_clients, seed, method and test_rmse of all runs."""
  columns = ["dataset", "num_clients", "seed", "method", "test_rmse", "status"]
  runs = pd.read_csv(table)[columns]
  frames = [pd.read_csv(comparators)[columns], runs[runs.method.isin(_FROM_TABLE)]]
  whole = pd.concat(frames)
  return whole[whole.status == "done"].drop(columns="status")


def multiples(runs: pd.DataFrame, reference: tuple[str, ...]) -> pd.DataFrame:
  """Divides mean errors by the reference's, over the seeds that both have.

  Args:
    runs: Of some datasets, as `read` returns them.
    reference: Pooled methods, of which the one with the lowest mean counts.

  Returns:
    A row for each dataset, number of clients and method of ours: `multiple`, `seeds`.
  """
  pooled = runs[runs.method.isin(reference)]
  rows = []
  ours = runs[(runs.num_clients > 1) & ~runs.method.isin(REFERENCES)]
  for key, own in ours.groupby(["dataset", "num_clients", "method"], sort=False):
    beside = pooled[(pooled.dataset == key[0]) & pooled.seed.isin(own.seed)]
    if beside.empty:
      continue
    seeds = own[own.seed.isin(beside.seed)]
    best = beside.groupby("method").test_rmse.mean().min()
    value = seeds.test_rmse.mean() / best
    rows.append((*key, value, len(seeds)))
  names = ["dataset", "num_clients", "method", "multiple", "seeds"]
  return pd.DataFrame(rows, columns=names)


def draw(panels: list[tuple[str, pd.DataFrame]], path: pathlib.Path) -> None:
  """Draws a panel for each title and frame of `multiples`, a line a cell.

  Lines are in the order of the frame. What lies beyond the ends of the axis stands at
  its end, with its number.
  """
  heights = [frame.groupby(["dataset", "num_clients"]).ngroups for _, frame in panels]
  size = (6.5 * len(panels), 1.6 + 0.28 * max(heights))
  figure, axes = new_axes(1, len(panels), size)
  methods = list(dict.fromkeys(m for _, frame in panels for m in frame.method))
  for ax, (title, frame) in zip(axes, panels, strict=True):
    cells = list(dict.fromkeys(zip(frame.dataset, frame.num_clients, strict=True)))
    ax.set_xscale("log")
    ax.axvspan(_ENDS[0] / 2, 1.0, color=_BETTER, zorder=0)
    ax.axvline(1.0, color="#222222", linewidth=1)
    for number, method in reversed(list(enumerate(methods))):  # The first on top.
      own = frame[frame.method == method]
      if own.empty:
        continue
      places = [
        cells.index(cell) for cell in zip(own.dataset, own.num_clients, strict=True)
      ]
      style = {"color": COLOURS[number % len(COLOURS)], "marker": _MARKERS[number % 6]}
      shown = np.clip(own.multiple, *_ENDS)
      ax.plot(shown, places, linestyle="", label=method, markersize=7, **style)
    for place, (_, own) in enumerate(
      frame.groupby(["dataset", "num_clients"], sort=False)
    ):
      _note_beyond(ax, own.multiple.to_numpy(), place)
    ax.set_yticks(range(len(cells)), [_label(*cell) for cell in cells])
    ax.set_ylim(len(cells) - 0.5, -0.5)
    ax.set_xlim(_ENDS[0] / 2, _ENDS[1] * 2)
    ax.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    ax.minorticks_off()
    ax.set_title(title, loc="left", fontsize=11)
    handles, labels = ax.get_legend_handles_labels()
    if labels:
      ax.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8)
  save(figure, path)


def _note_beyond(ax: Any, values: np.ndarray, place: int) -> None:
  """Writes the numbers of a line that lie beyond the ends of the axis."""
  low, high = _ENDS
  for beyond, end, side, offset in (
    (values[values < low], low, "right", -7),
    (values[values > high], high, "left", 7),
  ):
    ax.annotate(
      ", ".join(f"{value:.2g}" for value in np.sort(beyond)),
      (end, place),
      xytext=(offset, 0),
      textcoords="offset points",
      ha=side,
      va="center",
      fontsize=7,
    )


def _label(dataset: str, num_clients: int) -> str:
  return f"{dataset} {num_clients}" if dataset in uci.PAPER else dataset


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  results = tools.RESULTS
  parser.add_argument("--output", default=results / "multiples.png", type=pathlib.Path)
  parser.add_argument(
    "--comparators", default=results / "comparators.csv", type=pathlib.Path
  )
  table = tools.ROOT / "results" / "paper_table.csv"
  parser.add_argument("--table", default=table, type=pathlib.Path)
  options = parser.parse_args()
  runs = read(options.comparators, options.table)
  in_paper = runs.dataset.isin(uci.PAPER)
  cells = multiples(runs[in_paper], ("boosting",))
  others = multiples(runs[~in_paper], REFERENCES).sort_values("multiple")
  panels = [
    ("Error as a multiple of pooled boosting's", cells),
    ("Other tables: of the better of boosting and CatBoost", others),
  ]
  draw([(title, frame) for title, frame in panels if len(frame)], options.output)
  for title, frame in panels:
    if frame.empty:
      continue
    print(f"\n{title}:\n")
    print(tools.markdown(frame.to_dict("records")))
    for method, own in frame.groupby("method"):
      print(f"geometric mean of {method}: {np.exp(np.log(own.multiple).mean()):.3f}")


if __name__ == "__main__":
  main()
