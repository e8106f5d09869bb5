"""What 64-bit types are worth: how far predictions without them are from those with.

python -m benchmarks.float32 [--datasets=sml,parkinsons] [--rounds=4]

Each dataset is trained twice from one seed, with the CPU preset, each time in a process
of its own: as it is, and as under JAX_ENABLE_X64=0. The table has the differences of
the predicted mean over the test rows, in standard deviations of the target.
"""

import argparse
import json
import os

from benchmarks import tools
from launch import common  # Prepares the process; before JAX is imported.

# ruff: isort: split

import jax
import numpy as np

from fedbnr_jax import workflow
from fedbnr_jax.run import experiment, training
from fedbnr_jax.sweep import grid


def predicted(dataset: str, rounds: int) -> dict[str, object]:
  """The predicted means of the test rows, standardised, and the test RMSE."""
  fields = {"num_rounds": rounds, "mesh": 1}
  config = grid.config_of(f"configs/uci.py:{dataset}", fields, tools.ROOT)
  run = experiment.build(config)
  program = workflow.program_for(run)
  result = training.train(run, program)
  mean, _ = jax.device_get(program.predict(result.state, run.test.x))
  return {"mean": np.asarray(mean, float).tolist(), "rmse": result.best["test_rmse"]}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--datasets", default="sml,parkinsons")
  parser.add_argument("--rounds", type=int, default=4)
  parser.add_argument("--only", choices=["float32", "float64"], help=argparse.SUPPRESS)
  options = parser.parse_args()
  datasets = options.datasets.split(",")
  if options.only:
    if options.only == "float32":
      os.environ["JAX_ENABLE_X64"] = "0"
    common.set_up_jax()
    print(json.dumps(predicted(datasets[0], options.rounds)))
    return
  rows = []
  for dataset in datasets:
    wide, narrow = (
      tools.run_json(
        [
          "benchmarks.float32",
          *tools.flags(datasets=dataset, rounds=options.rounds, only=only),
        ]
      )
      for only in ("float64", "float32")
    )
    gaps = np.abs(np.subtract(wide["mean"], narrow["mean"]))
    rows.append(
      {
        "dataset": dataset,
        "rounds": options.rounds,
        "largest": float(gaps.max()),
        "median": float(np.median(gaps)),
        "rmse64": wide["rmse"],
        "rmse32": narrow["rmse"],
      }
    )
  print(tools.markdown(rows))
  tools.write("float32", rows)


if __name__ == "__main__":
  main()
