"""Whether intervals keep their promise: shares of fresh rows that they cover.

python -m benchmarks.coverage [--rows=100,200,1000] [--seeds=0-19] [--output=FILE.csv]
python -m benchmarks.coverage --config.sparse.noise=held-out (any field of a config)

Tables are drawn from a known law: one smooth with even noise, one with noise of heavy
tails (t with 3 degrees of freedom) whose size grows along an input, one with inputs
that do not matter; or, by its name, from the rows of a UCI table, the others of which
are fresh. Five clients train on 80 % of a table, and 10,000 fresh rows say
what share of them the 95 % intervals of the model cover. The conformal threshold is
compared with that of crepes, which has all scores instead of summed counts. A row is
appended to the file when it is known, and what stands in it is not computed again; one
process at a time may write a file. The method is `auto`, with the calibration that
people's own tables get.
"""

import argparse
import csv
import math
import os
import pathlib
import time
import warnings
from typing import Any

from benchmarks import tools
from launch import common  # Prepares the process; before JAX is imported.

# ruff: isort: split

import crepes
import numpy as np
import pandas as pd

from fedbnr_jax import auto, calibration, model, workflow
from fedbnr_jax.data import Dataset, uci
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import conformal
from fedbnr_jax.intervals import Calibration
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import cores, experiment, training

_FRESH = 10_000
_LEVEL = 0.95


def smooth(rng: np.random.Generator, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
  """Draws five inputs, of which one does not matter, and even Gaussian noise."""
  x = rng.uniform(-2, 2, (num_rows, 5))
  y = 2 * np.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] ** 2 + 1.5 * np.exp(-(x[:, 2] ** 2))
  return x, y + 0.8 * x[:, 3] + 0.5 * rng.normal(size=num_rows)


def heavy(rng: np.random.Generator, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
  """Draws four inputs, and noise of heavy tails that grows along the first."""
  x = rng.uniform(-2, 2, (num_rows, 4))
  size = 0.1 + 0.3 * (x[:, 0] + 2)
  y = 2 * np.sin(1.5 * x[:, 0]) + x[:, 1]
  return x, y + size * rng.standard_t(3, size=num_rows)


def friedman(rng: np.random.Generator, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
  """Draws Friedman's first function: ten inputs, of which five do not matter."""
  x = rng.uniform(size=(num_rows, 10))
  y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
  return x, y + 10 * x[:, 3] + 5 * x[:, 4] + rng.normal(size=num_rows)


LAWS = {"smooth": smooth, "heavy": heavy, "friedman": friedman}


def table(law: str, num_rows: int, seed: int) -> tuple[Dataset, pd.DataFrame]:
  """A table to train on, and fresh rows of the same law, target included."""
  rng = np.random.default_rng([seed, num_rows])
  if law in uci.NAMES:
    known = uci.load(law)
    rows = known.features.assign(y=known.targets).iloc[rng.permutation(known.num_rows)]
  else:
    x, y = LAWS[law](rng, num_rows + _FRESH)
    columns = [f"x{index}" for index in range(x.shape[1])]
    rows = pd.DataFrame(x, columns=columns).assign(y=y)
  seen = rows.iloc[:num_rows].reset_index(drop=True)
  dataset = Dataset(law, seen.drop(columns="y"), seen["y"].to_numpy(), "y")
  return dataset, rows.iloc[num_rows:]


def measured(fields: dict[str, Any], law: str, num_rows: int, seed: int) -> dict:
  """Trains on a table and looks at fresh rows."""
  dataset, fresh = table(law, num_rows, seed)
  config = config_lib.base()
  config.update_from_flattened_dict({"seed": seed, "num_clients": 5} | fields)
  start, begun = time.perf_counter(), None
  if config.method == config_lib.AUTO:
    config, _, begun = auto.choose(config, auto.of_rows(dataset), workflow.program_for)
  run = experiment.build(config, dataset)
  program = workflow.program_for(run)
  result = training.train(run, program, begun=begun)
  trained = time.perf_counter()
  pooled = np.concatenate(list(calibration.scores(run, program, result)))
  by = "rows" if len(run.calibration_rows) else "folds"
  made = Calibration(conformal.count(pooled), by)
  fitted = model.from_result(run, result, made)
  predicted = fitted.predict(fresh, warn=False)
  y, width = fresh["y"].to_numpy(), np.mean(predicted["std"])
  row: dict[str, Any] = {
    "calibrated by": by,
    "calibration rows": made.num_rows,
    "rmse": float(np.sqrt(np.mean(np.square(y - predicted["mean"])))),
  }
  for kind, reach in (("gaussian", 1.959964), ("conformal", _threshold(made))):
    inside = np.abs(y - predicted["mean"]) <= reach * predicted["std"]
    known = math.isfinite(reach)
    row[f"{kind} coverage"] = float(np.mean(inside)) if known else math.nan
    row[f"{kind} width"] = float(2 * reach * width) if known else math.nan
  row["threshold"], row["of crepes"] = _threshold(made), _oracle(pooled)
  row["seconds to train"] = trained - start
  row["seconds to calibrate"] = time.perf_counter() - trained
  return row


def _threshold(made: Calibration) -> float:
  try:
    return made.threshold(_LEVEL)
  except InputError:  # Too few rows.
    return math.inf


def _oracle(scores: np.ndarray) -> float:
  """The threshold that crepes finds when it has all scores at once."""
  with warnings.catch_warnings(action="ignore"):  # It says so of too few rows.
    oracle = crepes.ConformalRegressor().fit(scores)
    return float(oracle.predict_int(np.zeros(1), confidence=_LEVEL)[0, 1])


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Means over seeds, with standard errors of the coverages."""
  frame = pd.DataFrame(rows)
  frame["bins apart"] = np.log(frame["threshold"] / frame["of crepes"]) / np.log(
    conformal.EDGES[1] / conformal.EDGES[0]
  )
  lines = []
  for (law, num_rows), group in frame.groupby(["law", "rows"], sort=False):
    line = {"law": law, "rows": num_rows, "seeds": len(group)}
    for kind in ("gaussian", "conformal"):
      share = group[f"{kind} coverage"]
      line[kind] = f"{share.mean():.3f} ± {share.sem():.3f}"
      line[f"{kind} least"] = float(share.min())
      line[f"{kind} width"] = float(group[f"{kind} width"].mean())
    line["most bins apart"] = float(group["bins apart"].max())
    names = ("rmse", "seconds to train", "seconds to calibrate")
    lines.append(line | {name: float(group[name].mean()) for name in names})
  return lines


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rows", default="100,200,1000")
  parser.add_argument("--laws", default="smooth,heavy")
  parser.add_argument("--seeds", default="0-19")
  parser.add_argument("--output", default=str(tools.RESULTS / "coverage.csv"))
  options, rest = parser.parse_known_args()
  fields: dict[str, Any] = {"method": config_lib.AUTO}
  fields |= {f"data.{name}": value for name, value in config_lib.CALIBRATED.items()}
  for argument in rest:
    name, _, value = argument.removeprefix("--config.").partition("=")
    like = config_lib.get(config_lib.base(), name)
    is_truth = isinstance(like, bool)  # To Python, any text is true.
    fields[name] = value == "True" if is_truth else type(like)(value)
  common.set_up_jax()
  os.nice(10)
  first, last = map(int, options.seeds.split("-"))
  path = pathlib.Path(options.output)
  done = pd.read_csv(path).to_dict("records") if path.exists() else []
  known = {(row["law"], row["rows"], row["seed"]) for row in done}
  # Seeds on the outside: a run that is stopped has some of everything.
  for seed in range(first, last + 1):
    for num_rows in map(int, options.rows.split(",")):
      for law in options.laws.split(","):
        if (law, num_rows, seed) not in known:
          row = {"law": law, "rows": num_rows, "seed": seed}
          row |= measured(fields, law, num_rows, seed)
          with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if not done:
              writer.writeheader()
            writer.writerow(row)
          done.append(row)
  print(tools.markdown(summary(done)))


if __name__ == "__main__":
  with cores.pinned(cores.available_cores()[-1]):
    main()
