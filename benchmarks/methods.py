"""What every method costs: compilation, a round, a run, and the paper's whole sweep.

python -m benchmarks.methods [--cells=ccpp-10,sml-100] [--methods=fedbnr,fedavg]

One pinned thread, as a worker of a sweep has, and no compiled programs from before.
Rounds and seconds of a run, and the hours of ten seeds of every cell on two cores, are
those of results/paper_table.csv.
"""

import argparse
import os
import time
from typing import Any

# Before NumPy and JAX are imported, which count the cores.
if hasattr(os, "sched_setaffinity"):  # Linux.
  os.sched_setaffinity(0, {0})

import launch  # noqa: F401  Prepares the process.
from benchmarks import tools

# ruff: isort: split

import jax
import pandas as pd

from fedbnr_jax import algorithms
from fedbnr_jax.federated import placement
from fedbnr_jax.report.tables import read_results
from fedbnr_jax.run import cores, experiment
from fedbnr_jax.run.program import make_program
from fedbnr_jax.sweep import grid

_NUM_ROUNDS, _NUM_SEEDS, _NUM_CORES = 3, 10, 2


def measure(dataset: str, num_clients: int, method: str) -> dict[str, Any]:
  """Seconds to compile init and a round with its scores, and the shortest round."""
  fields = {"method": method, "num_clients": num_clients}
  run = experiment.build(
    grid.config_of(f"configs/uci.py:{dataset}", fields, tools.ROOT)
  )
  program = make_program(run.algorithm, transform=jax.jit)
  mesh = run.algorithm.placement.mesh
  data = placement.put_federation(run.federation, mesh)
  scored = placement.replicate((run.validation, run.test), mesh)
  start = time.perf_counter()
  init = program.init.lower(run.key_init, data).compile()
  state = init(run.key_init, data)
  step = program.step.lower(run.key_rounds, state, data, *scored).compile()
  compiled = time.perf_counter() - start
  seconds = []
  for _ in range(_NUM_ROUNDS):
    start = time.perf_counter()
    state, *scores = step(run.key_rounds, state, data, *scored)
    jax.block_until_ready(scores)
    seconds.append(time.perf_counter() - start)
  return {"compile_seconds": compiled, "round_seconds": min(seconds)}


def projected_hours(results: pd.DataFrame) -> float:
  """Projects the hours of ten seeds of every cell; pooled methods are trained once."""
  cells = results.groupby(["dataset", "num_clients", "method"]).seconds.mean()
  cells = cells.reset_index()
  pooled = [name for name, kind in algorithms.METHODS.items() if kind.pooled]
  again = cells.method.isin(pooled) & cells.duplicated(["dataset", "method"])
  return float(cells[~again].seconds.sum() * _NUM_SEEDS / _NUM_CORES / 3600)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--cells", default="ccpp-10,sml-100")
  parser.add_argument("--methods", default=",".join(algorithms.METHODS))
  options = parser.parse_args()
  os.environ.update(cores.one_thread_environment())
  jax.config.update("jax_enable_x64", True)
  results = read_results(tools.ROOT / "results" / "paper_table.csv")
  results = results[results.status == "done"]
  runs = results.groupby(["dataset", "num_clients", "method"])[["rounds", "seconds"]]
  means = runs.mean()
  rows = []
  for cell in options.cells.split(","):
    dataset, _, count = cell.partition("-")
    for method in options.methods.split(","):
      key = (dataset, int(count), method)
      known = means.loc[key].to_dict() if key in means.index else {}
      rows.append(
        {
          **{"cell": cell, "method": method, **measure(*key)},
          "run_rounds": known.get("rounds", ""),
          "run_seconds": known.get("seconds", ""),
        }
      )
      print(tools.markdown(rows[-1:]).splitlines()[-1], flush=True)
      jax.clear_caches()
  print(tools.markdown(rows))
  tools.write("methods", rows)
  hours = projected_hours(results)
  print(
    f"{len(means)} cells of results/paper_table.csv, {_NUM_SEEDS} seeds each, on "
    f"{_NUM_CORES} cores: {hours:.1f} hours"
  )


if __name__ == "__main__":
  main()
