"""Error against communication: how much a method sends to become how good."""

import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import ml_collections
import numpy as np
import pandas as pd

from fedbnr_jax.errors import InputError
from fedbnr_jax.report import curves, figures, tables
from fedbnr_jax.run.records import RunFolder
from fedbnr_jax.run.summary import read_history, read_summary


class Comparison(NamedTuple):
  """Finished runs of one dataset and number of clients, side by side."""

  runs: dict[str, list[pd.DataFrame]]  # `progress` of each run, by method.
  dataset: str
  num_clients: int
  unit: str  # Unit of the error.
  goal: float | None  # The error to reach.


def read(paths: Sequence[pathlib.Path], goal: float | None = None) -> Comparison:
  """Reads the runs to compare.

  Args:
    paths: Their folders.
    goal: The error to reach; by default the paper's for FedBNR, where it has one.

  Raises:
    InputError: If a run is not finished or its method sends nothing, or if the runs
      differ in dataset, number of clients or unit.
  """
  runs: dict[str, list[pd.DataFrame]] = {}
  cells = set()
  configs = {path: RunFolder(path).config() for path in paths}
  widest = max(config.hidden_size for config in configs.values())
  for path, config in configs.items():
    folder = RunFolder(path)
    if not folder.finished.exists():
      raise InputError(f"the training in {path} is not finished: let it finish.")
    score = f"val_{config.stop_on}"
    history = read_history(folder, score)
    summary = read_summary(folder, config, history)
    if summary["floats_up"] + summary["floats_down"] == 0:
      raise InputError(f"{path} is of method {config.method!r}, which sends nothing.")
    cells.add((summary["dataset"], summary["num_clients"], summary["rmse_unit"]))
    frame = progress(pd.DataFrame(history), score)
    runs.setdefault(label(config, widest), []).append(frame)
  if len(cells) > 1:
    raise InputError(
      f"the runs are of several data sets or numbers of clients: {sorted(cells)}."
    )
  ((dataset, num_clients, unit),) = cells
  if goal is None:
    goal = papers_goal(dataset, num_clients)
  return Comparison(runs, dataset, num_clients, unit, goal)


def draw(comparison: Comparison, path: str | os.PathLike[str]) -> None:
  """Draws test RMSE against floats sent and received, as a PNG."""
  figure = curves.communication(
    comparison.runs,
    unit=comparison.unit,
    title=f"{comparison.dataset}, {comparison.num_clients} clients",
    goal=comparison.goal,
  )
  figures.save(figure, path)


def label(config: ml_collections.ConfigDict, widest: int) -> str:
  """Names a run by its method and the options in which it differs from the default.

  Args:
    config: Of the run.
    widest: The largest `hidden_size` of all runs. A narrower network is named, because
      the length of its messages depends on the width.
  """
  options = config.exact
  name = str(config.method)
  if name == "fedbnr-exact":
    name += f", {options.optimizer}" if options.optimizer != "adam" else ""
    name += f", {options.local_steps} local" if options.local_steps else ""
    rounds = options.warm_start_rounds
    name += f", {rounds} rounds of fedbnr first" if rounds else ""
  width = config.hidden_size
  return name + (f", width {width}" if width != widest else "")


def papers_goal(dataset: str, num_clients: int) -> float | None:
  """Returns the RMSE that the paper prints for FedBNR; None if it prints none."""
  paper = tables.paper_results()
  row = paper[
    (paper.dataset == dataset)
    & (paper.num_clients == num_clients)
    & (paper.method == "fedbnr")
    & (paper.metric == "rmse")
  ]
  return float(row.value.iloc[0]) if len(row) else None


def progress(metrics: pd.DataFrame, score: str = "val_rmse") -> pd.DataFrame:
  """Follows a run by what it has sent so far and how good it has become.

  A round's test error is that of the best round until then, which is chosen by a
  validation score so that no test error is selected.

  Args:
    metrics: The run's `metrics.csv`, one row per round.
    score: Column of the validation score; lower is better.

  Returns:
    Columns round, floats (up and down, summed over the rounds until then), test_rmse.
  """
  floats = (metrics.floats_up + metrics.floats_down).cumsum()
  validation = metrics[score].to_numpy()
  best = [int(np.argmin(validation[: end + 1])) for end in range(len(metrics))]
  return pd.DataFrame(
    {
      "round": metrics["round"],
      "floats": floats,
      "test_rmse": metrics.test_rmse.to_numpy()[best],
    }
  )


def table(comparison: Comparison) -> pd.DataFrame:
  """Lists where each run ends, and where it first reaches the goal.

  Returns:
    One row per run; without the columns of the goal if no run reaches it.
  """
  rows = []
  for method, frames in comparison.runs.items():
    for frame in frames:
      last = frame.iloc[-1]
      row = {
        "method": method,
        "rounds": int(last["round"]),
        "million floats": round(last.floats / 1e6, 2),
        "test RMSE": last.test_rmse,
      }
      if comparison.goal is not None:
        reached = frame[frame.test_rmse <= comparison.goal]
        if not reached.empty:
          first = reached.iloc[0]
          row["rounds to goal"] = int(first["round"])
          row["million floats to goal"] = round(first.floats / 1e6, 2)
      rows.append(row)
  return pd.DataFrame(rows)
