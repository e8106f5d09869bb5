"""Scores of what others would take, on the splits of our own runs.

python -m benchmarks.comparators --output=F.csv [--tables=ccpp,runs/tables/steps.csv]
  [--methods=boosting,catboost,fedloc] [--seeds=0,1,2] [--clients=10,100]

A table is one of the five UCI ones, or a CSV or Parquet file whose column to predict is
`target`, and whose column `client`, if it has one, says whose row it is (as those of
benchmarks/other_tables.py). Methods are those of benchmarks/pooled_models.py, which
pool all rows, and our own by their names, which are trained with each number of
clients. A row is written for each table, number of clients, seed and method; what is in
F.csv already is left out, and a method that fails is noted, and tried again the next
time. `cpu_seconds` do not depend on what else the machine does. Pooled methods need the
extra `comparators`.
"""

import argparse
import csv
import importlib.util
import itertools
import json
import pathlib
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks import tools
from launch import common  # Prepares the process; before JAX is imported.

# ruff: isort: split

import jax
import pandas as pd

from benchmarks import other_tables, pooled_models
from configs import uci
from fedbnr_jax import algorithms, auto, workflow
from fedbnr_jax.data.reader import read_table
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import metrics
from fedbnr_jax.names import require_choice
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import experiment, journal, summary, training
from fedbnr_jax.sweep import grid

_SCORES = ("rmse", "nll", "crps", "coverage95", "ece")
COLUMNS = (
  *("dataset", "num_clients", "seed", "method", "status"),
  *(f"test_{name}" for name in _SCORES),
  *("val_rmse", "val_nll", "seconds", "cpu_seconds", "floats_up", "floats_down"),
  *("rows", "inputs", "settings"),
)
_ALL = (*pooled_models.MODELS, *algorithms.METHODS, config_lib.AUTO)
_FOR_POOLED = "central"  # The method whose run pooled models share.
_POOLED = 1  # What stands for the number of clients where all rows are pooled.


class Job(NamedTuple):
  """One row of the results."""

  table: str  # Name of a UCI table, or path of a file.
  num_clients: int
  seed: int
  method: str

  @property
  def key(self) -> tuple[str, str, str, str]:
    """What the row is known by in the file."""
    name = self.table if self.table in uci.PAPER else pathlib.Path(self.table).stem
    return name, str(self.num_clients), str(self.seed), self.method


def config_of(table: str, method: str, num_clients: int, seed: int) -> Any:
  """Makes the config whose splits, standardisation and unit all methods share."""
  fields: dict[str, Any] = {"method": method, "num_clients": num_clients, "seed": seed}
  # All train on the same rows: none is set aside for intervals.
  fields |= {f"data.{name}": 0 for name in config_lib.CALIBRATED}
  if method == _FOR_POOLED:  # Those who pool see inputs as they are.
    fields |= {"data.inputs": "standard"}
  if table in uci.PAPER:
    base = f"configs/uci.py:{table}"
  else:
    base = "configs/csv.py"
    client = other_tables.CLIENT if own_clients(table) else ""
    fields |= {"data.path": table, "data.target": other_tables.TARGET}
    fields |= {"data.client": client}
  return grid.config_of(base, fields, tools.ROOT)


def run_of(table: str, method: str, num_clients: int, seed: int) -> Any:
  """Builds the run of a method on a table."""
  return experiment.build(config_of(table, method, num_clients, seed))


def own_clients(table: str) -> int:
  """Counts the clients that a file names; 0 where it names none."""
  if table in uci.PAPER:
    return 0
  frame = read_table(table)
  return frame[other_tables.CLIENT].nunique() if other_tables.CLIENT in frame else 0


def result(job: Job) -> dict[str, Any]:
  """Trains and scores: the columns of a row that are not its key."""
  pooled = job.method in pooled_models.MODELS
  method = _FOR_POOLED if pooled else job.method
  config = config_of(job.table, method, job.num_clients, job.seed)
  dataset = experiment.load_dataset(config)
  started = time.perf_counter(), time.process_time()
  chosen, begun = "", None
  if method == config_lib.AUTO:
    config, _, begun = auto.choose(config, auto.of_rows(dataset), workflow.program_for)
    chosen = f"{config.data.inputs} {config.sparse.kernel}"
  run = experiment.build(config, dataset)
  shape = {"rows": run.dataset.num_rows, "inputs": run.preprocessor.num_inputs}
  if pooled:
    scores = pooled_scores(run, job.method)
  else:
    scores = federated_scores(run, chosen, begun)
  spent = {
    "seconds": time.perf_counter() - started[0],
    "cpu_seconds": time.process_time() - started[1],
  }
  return {"status": "done", **scores, **spent, **shape}


def pooled_scores(run: experiment.Experiment, method: str) -> dict[str, Any]:
  """Scores a model of all rows as the summary of a run is scored."""
  said = pooled_models.MODELS[method].predict(run)
  scored = {
    "val": metrics.evaluate(*said.validation, run.validation.y),
    "test": metrics.evaluate(*said.test, run.test.y),
  }
  named = {
    f"{rows}_{name}": value
    for rows, scores in scored.items()
    for name, value in journal.in_unit(scores, run.error_scale).items()
  }
  return named | {"settings": json.dumps(said.settings)}


def federated_scores(
  run: experiment.Experiment, chosen: str, begun: training.Result | None
) -> dict[str, Any]:
  """Trains one of our own methods; its scores are those of its summary."""
  program = workflow.program_for(run)
  history = training.train(run, program, begun=begun).history
  scores = summary.scores(history, run.stopping_score)
  settings = {name: scores[name] for name in ("rounds", "best_round")}
  if chosen:
    settings["chosen"] = chosen
  return scores | {"settings": json.dumps(settings)}


def jobs(
  tables: list[str], methods: list[str], seeds: list[int], clients: list[int]
) -> list[Job]:
  """Lists the rows that are wanted, table by table."""
  wanted = []
  for table in tables:
    # Where the table says whose its rows are, there is one number of clients.
    own = own_clients(table)
    for seed, method in itertools.product(seeds, methods):
      pooled = method in pooled_models.MODELS
      counts = [_POOLED] if pooled else [own] if own else clients
      wanted += [Job(table, count, seed, method) for count in counts]
  return wanted


def work(wanted: Iterable[Job], output: pathlib.Path) -> None:
  """Does what the file lacks, and adds a row to it after each."""
  done = _done(output)
  for job in wanted:
    if job.key in done:
      continue
    key = dict(zip(COLUMNS[:4], job.key, strict=True))
    try:
      row = result(job)
    except Exception as error:  # One that fails does not stop the others.
      first = str(error).splitlines()[:1]
      row = {"status": f"failed: {type(error).__name__}: {' '.join(first)[:200]}"}
    _append(output, key | row)
    line = {name: row.get(name, "") for name in ("test_rmse", "test_nll", "seconds")}
    print(tools.markdown([key | line]).splitlines()[-1], row["status"], flush=True)
    jax.clear_caches()  # Every table has shapes of its own.


def _done(output: pathlib.Path) -> set[tuple[str, ...]]:
  if not output.exists():
    return set()
  rows = pd.read_csv(output, dtype=str)
  if tuple(rows.columns) != COLUMNS:
    raise InputError(
      f"{output} has other columns than this program writes: name another file."
    )
  finished = rows[rows["status"] == "done"]
  return set(finished[list(COLUMNS[:4])].itertuples(index=False, name=None))


def _append(output: pathlib.Path, row: dict[str, Any]) -> None:
  output.parent.mkdir(parents=True, exist_ok=True)
  is_new = not output.exists()
  with open(output, "a", newline="") as file:
    writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
    if is_new:
      writer.writeheader()
    writer.writerow(row)


def check_methods(methods: list[str]) -> None:
  """Raises InputError for a method that there is not, or that is not installed."""
  for method in methods:
    require_choice("the method", method, _ALL)
    model = pooled_models.MODELS.get(method)
    if model and importlib.util.find_spec(model.package) is None:
      raise InputError(
        f"method {method!r} needs the package {model.package!r}: "
        "pip install -e '.[comparators]'."
      )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--output", required=True, type=pathlib.Path)
  parser.add_argument("--tables", default=",".join(uci.PAPER))
  parser.add_argument("--methods", default=",".join(pooled_models.MODELS))
  parser.add_argument("--seeds", default=[0, 1, 2], type=_numbers)
  parser.add_argument("--clients", default=[10], type=_numbers)
  options = parser.parse_args()
  common.set_up_jax()
  with tools.errors_in_one_line():
    tables, methods = options.tables.split(","), options.methods.split(",")
    check_methods(methods)
    work(jobs(tables, methods, options.seeds, options.clients), options.output)


def _numbers(text: str) -> list[int]:
  return [int(number) for number in text.split(",")]


if __name__ == "__main__":
  main()
