"""What a user who may pool would take: gradient boosting on the same splits.

python -m benchmarks.boosting [--seeds=0,1,2]

Scikit-learn's histogram boosting with its stopping on our validation rows, the better
there of a few settings, on the training rows of each seed; test RMSE in our unit.
"""

import argparse
import itertools

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


def best_error(dataset: str, seed: int) -> dict[str, float]:
  """Validation and test RMSE of the setting and number of trees validation prefers."""
  config = grid.config_of(f"configs/uci.py:{dataset}", {"seed": seed}, tools.ROOT)
  run = experiment.build(config)
  clients = run.federation.clients
  mask = np.asarray(clients.mask)
  x, y = np.asarray(clients.x)[mask], np.asarray(clients.y)[mask]
  best: dict[str, float] = {"validation RMSE": np.inf}
  for settings in _GRID:
    trees = HistGradientBoostingRegressor(
      max_iter=_MAX_TREES, early_stopping=False, random_state=seed, **settings
    ).fit(x, y)
    errors = [
      [_rmse(guess, rows.y) for guess in trees.staged_predict(np.asarray(rows.x))]
      for rows in (run.validation, run.test)
    ]
    stage = int(np.argmin(errors[0]))
    scores = {"validation RMSE": errors[0][stage], "test RMSE": errors[1][stage]}
    if scores["validation RMSE"] * run.error_scale < best["validation RMSE"]:
      best = {name: value * run.error_scale for name, value in scores.items()}
      best["trees"] = stage + 1
  return best


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
