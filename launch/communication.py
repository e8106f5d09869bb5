"""Error against communication: what a method sends to become how good.

python -m launch.communication --runs=runs/a,runs/b,... --output=communication.png

Draws test RMSE, at the best validation round so far, against the floats that a client
has sent and received, and prints the rounds and floats that each run takes to reach
--goal; by default the paper's FedBNR on the same data and number of clients.
"""

import pathlib

import ml_collections
import pandas as pd
from absl import flags

from fedbnr_jax.errors import InputError
from fedbnr_jax.records import RunFolder, usable
from fedbnr_jax.report import curves, tables
from launch import common

_RUNS = flags.DEFINE_list("runs", [], "Folders of runs of one dataset.")
_GOAL = flags.DEFINE_float("goal", None, "Error to reach.")


def main() -> None:
  if not _RUNS.value or not common.OUTPUT.value:
    raise InputError("--runs and --output are needed: folders to read, PNG to write.")
  compare(
    [pathlib.Path(path) for path in _RUNS.value], common.OUTPUT.value, _GOAL.value
  )


def compare(paths: list[pathlib.Path], output: str, goal: float | None = None) -> None:
  """Draws the runs and tells when each reaches the goal."""
  runs: dict[str, list[pd.DataFrame]] = {}
  cells = set()
  configs = {path: RunFolder(path).config() for path in paths}
  usual = max(config.hidden_size for config in configs.values())
  for path, config in configs.items():
    folder = RunFolder(path)
    frame, summary = folder.metrics_frame(), folder.summary()
    if summary is None:
      raise InputError(f"the training in {path} is not finished: let it finish.")
    if summary["floats_up"] + summary["floats_down"] == 0:
      raise InputError(f"{path} is of method {config.method!r}, which sends nothing.")
    cells.add((summary["dataset"], summary["num_clients"], summary["rmse_unit"]))
    # Messages are as long as the network is wide, so a narrower one is told apart.
    width = config.hidden_size
    name = name_of(config) + (f", width {width}" if width != usual else "")
    runs.setdefault(name, []).append(curves.progress(frame, f"val_{config.stop_on}"))
  if len(cells) > 1:
    raise InputError(
      f"the runs are of several data sets or numbers of clients: {sorted(cells)}."
    )
  ((dataset, num_clients, unit),) = cells
  goal = goal if goal is not None else papers_goal(dataset, num_clients)
  title = f"{dataset}, {num_clients} clients"
  with usable(pathlib.Path(output).parent, "--output"):
    curves.communication(runs, output, unit=unit, title=title, goal=goal)
  print(tables.markdown(reached(runs, goal)))
  print(f"drawn to {output}")


def name_of(config: ml_collections.ConfigDict) -> str:
  """The method, and how it departs from its plain form."""
  options = config.exact
  name = str(config.method)
  if name == "fedbnr-exact":
    name += f", {options.optimizer}" if options.optimizer != "adam" else ""
    name += f", {options.local_steps} local" if options.local_steps else ""
    rounds = options.warm_start_rounds
    name += f", {rounds} rounds of fedbnr first" if rounds else ""
  return name


def papers_goal(dataset: str, num_clients: int) -> float | None:
  paper = tables.paper_results()
  row = paper[
    (paper.dataset == dataset)
    & (paper.num_clients == num_clients)
    & (paper.method == "fedbnr")
    & (paper.metric == "rmse")
  ]
  return float(row.value.iloc[0]) if len(row) else None


def reached(runs: dict[str, list[pd.DataFrame]], goal: float | None) -> pd.DataFrame:
  """Of each method: where it ends, and where it first reaches the goal."""
  rows = []
  for method, frames in runs.items():
    for frame in frames:
      last = frame.iloc[-1]
      row = {
        "method": method,
        "rounds": int(last["round"]),
        "million floats": round(last.floats / 1e6, 2),
        "test RMSE": last.test_rmse,
      }
      first = None if goal is None else curves.first_at_most(frame, goal)
      if first is not None:
        row["rounds to goal"] = int(first["round"])
        row["million floats to goal"] = round(first.floats / 1e6, 2)
      rows.append(row)
  return pd.DataFrame(rows)


if __name__ == "__main__":
  common.run(main)
