"""Whether normal scores from summed histograms are as good as those of exact ranks.

python -m benchmarks.scores [--seed=100] [--train=skillcraft,ccpp] [--rounds=12]

For each of the five UCI tables: the largest difference of a score of any row, held-out
rows included. For those in `--train` also the validation RMSE of `fedbnr-ard` with
scores from histograms, with exact ones, and with standardised inputs; the first two
must agree within 0.001, or the program ends with an error.
"""

import argparse
import sys
from collections.abc import Sequence
from unittest import mock

from benchmarks import tools
from launch import common  # Prepares the process; before JAX is imported.

# ruff: isort: split

import numpy as np
from scipy import stats

from configs import uci
from fedbnr_jax import workflow
from fedbnr_jax.data import marginals, scores
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import require_choice
from fedbnr_jax.run import experiment, training
from fedbnr_jax.sweep import grid

_AGREE = 1e-3


def exact_maps(
  inputs: Sequence[np.ndarray], names: Sequence[str]
) -> tuple[scores.ScoreMap, ...]:
  """Does as `scores.fit` does, but by the ranks of all rows, which nobody may see."""
  (rows,) = inputs
  maps = []
  for d, _ in enumerate(names):
    values, first = np.unique(rows[:, d], return_index=True)
    levels = (stats.rankdata(rows[:, d], method="average") - 0.5) / len(rows)
    made = values if len(values) < 3 else marginals.normal_scores(levels[first])
    maps.append(scores.ScoreMap(tuple(values.tolist()), tuple(made.tolist())))
  return tuple(maps)


def built(
  dataset: str, inputs: str, options: argparse.Namespace
) -> experiment.Experiment:
  """The experiment with these inputs: "standard", "scores", or "exact" scores."""
  fields = {
    "method": "fedbnr-ard",
    "seed": options.seed,
    "num_rounds": options.rounds,
    "data.inputs": "standard" if inputs == "standard" else "scores",
  }
  config = grid.config_of(f"configs/uci.py:{dataset}", fields, tools.ROOT)
  if inputs != "exact":
    return experiment.build(config)
  with mock.patch.object(scores, "fit", exact_maps):
    return experiment.build(config)


def largest_difference(
  scores: experiment.Experiment, exact: experiment.Experiment
) -> float:
  """The largest difference between two experiments in an input of any row."""
  features = scores.dataset.features
  gaps = scores.preprocessor.transform(features) - exact.preprocessor.transform(
    features
  )
  return float(np.max(np.abs(gaps)))


def validation_error(run: experiment.Experiment) -> float:
  """The validation RMSE of the best round, in the dataset's unit."""
  history = training.train(run, workflow.program_for(run)).history
  return min(float(record["val_rmse"]) for record in history)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seed", type=int, default=100)
  parser.add_argument("--train", default="skillcraft,ccpp", help="'' for none")
  parser.add_argument("--rounds", type=int, default=12)
  options = parser.parse_args()
  trained = [name for name in options.train.split(",") if name]
  try:
    for name in trained:
      require_choice("--train", name, uci.PAPER)
  except InputError as error:
    sys.exit(f"error: {error}")
  common.set_up_jax()
  rows, apart = [], []
  for dataset in uci.PAPER:
    runs = {kind: built(dataset, kind, options) for kind in ("scores", "exact")}
    row = {"dataset": dataset, "largest difference": largest_difference(**runs)}
    runs["standard"] = built(dataset, "standard", options)
    errors = {}
    for kind, run in runs.items() if dataset in trained else ():
      errors[kind] = validation_error(run)
      print(f"{dataset}, {kind}: validation RMSE {errors[kind]:.4f}", flush=True)
    if errors and abs(errors["scores"] - errors["exact"]) > _AGREE:
      apart.append(dataset)
    for kind in runs:
      row[f"val RMSE, {kind}"] = f"{errors[kind]:.4f}" if errors else "–"
    rows.append(row)
  print(tools.markdown(rows))
  tools.write("scores", rows)
  if apart:
    sys.exit(f"error: histograms and exact ranks disagree: {', '.join(apart)}")


if __name__ == "__main__":
  main()
