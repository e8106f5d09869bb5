"""What a user who may pool would take: gradient boosting on the same splits.

python -m benchmarks.boosting [--seeds=0,1,2]

Scikit-learn's histogram boosting with its stopping on our validation rows, the better
there of a few settings, on the training rows of each seed; test RMSE in our unit.
"""

import argparse
import itertools
from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingRegressor

from benchmarks import tools
from configs import uci
from fedbnr_jax.run import experiment
from fedbnr_jax.sweep import grid

_GRID = [
  {"learning_rate": rate, "max_leaf_nodes": leaves, "min_samples_leaf": 5}
  for rate, leaves in itertools.product((0.05, 0.1), (15, 31, 63))
]
_MAX_TREES = 1000


class Fitted(NamedTuple):
  """What the setting and the number of trees that validation prefers predict."""

  validation: np.ndarray  # [N] standardised targets, as are `test`.
  test: np.ndarray
  settings: dict[str, float]


def fit(run: experiment.Experiment) -> Fitted:
  """Boosts on the training rows of a run, as many trees as its validation rows want."""
  x, y = training_rows(run)
  best, lowest = None, np.inf
  for settings in _GRID:
    trees = HistGradientBoostingRegressor(
      max_iter=_MAX_TREES,
      early_stopping=False,
      random_state=run.config.seed,
      **settings,
    ).fit(x, y)
    guesses = list(trees.staged_predict(np.asarray(run.validation.x)))
    errors = [_rmse(guess, run.validation.y) for guess in guesses]
    stage = int(np.argmin(errors))
    if errors[stage] < lowest:
      lowest = errors[stage]
      stages = trees.staged_predict(np.asarray(run.test.x))
      test = next(itertools.islice(stages, stage, None))
      best = Fitted(guesses[stage], test, settings | {"trees": stage + 1})
  assert best is not None, "no validation error is finite"
  return best


def training_rows(run: experiment.Experiment) -> tuple[np.ndarray, np.ndarray]:
  """Returns inputs [N, D] and targets [N] of all clients, standardised."""
  clients = run.federation.clients
  mask = np.asarray(clients.mask)
  return np.asarray(clients.x)[mask], np.asarray(clients.y)[mask]


def best_error(dataset: str, seed: int) -> dict[str, float]:
  """Validation and test RMSE of the setting and number of trees validation prefers."""
  config = grid.config_of(f"configs/uci.py:{dataset}", {"seed": seed}, tools.ROOT)
  run = experiment.build(config)
  best = fit(run)
  return {
    "validation RMSE": _rmse(best.validation, run.validation.y) * run.error_scale,
    "test RMSE": _rmse(best.test, run.test.y) * run.error_scale,
    "trees": best.settings["trees"],
  }


def _rmse(guess: np.ndarray, targets: object) -> float:
  return float(np.sqrt(np.mean(np.square(guess - np.asarray(targets)))))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seeds", default="0,1,2")
  options = parser.parse_args()
  rows = []
  for dataset in uci.PAPER:
    runs = [
      best_error(dataset, int(seed)) | {"seed": seed}
      for seed in options.seeds.split(",")
    ]
    means = pd.DataFrame(runs).drop(columns="seed").mean().to_dict()
    rows.append({"dataset": dataset, "seeds": len(runs)} | means)
    print(tools.markdown(rows[-1:]).splitlines()[-1], flush=True)
  print(tools.markdown(rows))
  tools.write("boosting", rows)


if __name__ == "__main__":
  main()
