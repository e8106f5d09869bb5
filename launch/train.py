"""Trains and evaluates one model.

python -m launch.train --config=configs/default.py --workdir=runs/demo

A second start on the same folder goes on where the first stopped. See
launch/distributed.py for several processes, on one machine or more.
"""

import sys
import warnings

import jax
import ml_collections
import numpy as np
from tqdm import tqdm

from fedbnr_jax import config as config_lib
from fedbnr_jax import experiment as experiment_lib
from fedbnr_jax import membership, processes, training, urk
from fedbnr_jax.blr import SufficientStats
from fedbnr_jax.experiment import Experiment
from fedbnr_jax.records import Record, RunFolder, as_json, usable
from fedbnr_jax.report import run as report
from launch import common, distributed


def main() -> None:
  num_local = distributed.num_local()
  if num_local > 1:
    sys.exit(distributed.run_locally("launch.train", num_local))
  config, workdir = common.config(), common.workdir()
  distributed.join()
  train(config, workdir)


def train(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Trains in `workdir`, or says that this is done; called by every process."""
  processes.all_do(lambda: config_lib.validate(config))
  processes.require_same("config", as_json(config))
  folder = RunFolder(workdir)
  if processes.first_does(lambda: common.is_finished(folder, config)):
    print(f"{workdir}: this run is finished; its results are in summary.json.")
  if processes.from_first(folder.summary() is not None):
    return
  experiments = processes.all_do(lambda: experiment_lib.build_seeds(config))
  processes.require_same("data", [one.dataset.digest() for one in experiments])
  with usable(folder.path):
    if len(experiments) == 1:
      run(experiments[0], folder)
    else:
      run_seeds(config, experiments, folder)


def run(experiment: Experiment, folder: RunFolder) -> None:
  """Trains, and writes all files of the run."""
  processes.first_does(lambda: _claim(experiment, folder))
  own = folder if processes.is_first() else None
  if own is None and experiment.algorithm.placement.mesh is None:
    return  # Nothing to share: the first does it alone.
  program = training.jit(training.make_program(experiment))
  with Progress(experiment, own) as bar:
    result = training.train(experiment, program, own, on_round=bar.tell)
  if own is None:
    return
  finish(experiment, program, result, own)
  if experiment.config.compare_clients and len(experiment.client_names) > 1:
    alone = report.train_clients_alone(experiment, training.jit)
    print(report.comparison_text(experiment, result, alone[1]))
    report.write_comparison(experiment, program, result, alone, own.figures)
  # Last: it is what marks the run as finished.
  own.write_summary(training.summarise(experiment, result.history))
  print(f"written to {own.path}")


def run_seeds(
  config: ml_collections.ConfigDict, experiments: list[Experiment], folder: RunFolder
) -> None:
  """Trains several seeds side by side on the device, each with its own folder."""
  folders = common.seed_folders(folder, config)

  def claim() -> None:
    folder.claim(config)
    for experiment, own in zip(experiments, folders, strict=True):
      _claim(experiment, own)

  processes.first_does(claim)
  plain = training.make_program(experiments[0])
  first = processes.is_first()
  with Progress(experiments[0], None, num_runs=len(experiments)) as bar:
    results = training.train_batch(
      experiments,
      training.jit(training.batched(plain)),
      folders if first else [None] * len(folders),
      on_round=bar.tell,
    )
  if not first:
    return
  program = training.jit(plain)
  summaries, failure = [], None
  for experiment, result, own in zip(experiments, results, folders, strict=True):
    if isinstance(result, training.NonFiniteError):
      failure = failure or training.NonFiniteError(
        f"seed {experiment.config.seed}: {result}"
      )
      continue
    finish(experiment, program, result, own)
    summaries.append(training.summarise(experiment, result.history))
    own.write_summary(summaries[-1])
  if failure:
    raise failure
  folder.write_summary(report.mean_summary(summaries))
  print(f"written to {folder.path}, a folder a seed")


def finish(
  experiment: Experiment,
  program: training.Program,
  result: training.Result,
  folder: RunFolder,
) -> None:
  """Draws the figures and tells the result."""
  report.write_figures(experiment, program, result, folder.figures)
  if isinstance(result.state.stats, SufficientStats):
    stats = statistics(experiment, result)
    if round(float(stats.count)) == round(float(result.state.stats.count)):
      tags = row_tags(experiment)
      in_posterior = np.concatenate(experiment.client_rows)
      held_out = np.concatenate([experiment.split.validation, experiment.split.test])
      ledger = membership.opened(
        stats, result.state, tags[in_posterior], tags[held_out]
      )
      membership.write(folder.posterior, ledger)
  print(report.summary_text(training.summarise(experiment, result.history)))


def statistics(experiment: Experiment, result: training.Result) -> SufficientStats:
  """Of all training rows, under the kernel of the best round in float64."""
  return membership.statistics(
    urk.from_config(experiment.config),
    result.state,
    membership.client_batches(experiment.federation.clients),
    jax.jit,
  )


def row_tags(experiment: Experiment) -> np.ndarray:
  """Of all rows of the dataset."""
  dataset, preprocessor = experiment.dataset, experiment.preprocessor
  with warnings.catch_warnings(action="ignore"):  # They were told at the start.
    x = preprocessor.transform(dataset.features)
  # As in tables that join or leave, of which only this column names the client.
  owners = dataset.clients if experiment.config.data.client else None
  y = preprocessor.standardise(dataset.targets)
  return membership.row_tags(membership.Rows(x, y, owners))


def _claim(experiment: Experiment, folder: RunFolder) -> None:
  folder.claim(experiment.config)
  folder.claim_data(experiment.dataset)
  folder.write_preprocessing(experiment.preprocessor)
  num_rows = experiment.federation.clients.x.shape[1]
  folder.write_clients(experiment.client_names, num_rows)


class Progress:
  """A progress bar over rounds with the scores that early stopping looks at."""

  def __init__(
    self, experiment: Experiment, folder: RunFolder | None, num_runs: int = 1
  ) -> None:
    config = experiment.config
    self._bar = tqdm(
      total=config.num_rounds * num_runs,
      initial=len(folder.metrics()) if folder else 0,
      desc=f"{experiment.dataset.name} {config.method}",
      unit="round",
      # On a terminal only, and one process of many.
      disable=None if processes.is_first() else True,
    )

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *exception: object) -> None:
    self._bar.close()

  def tell(self, record: Record) -> None:
    self._bar.set_postfix_str(
      f"val rmse {record['val_rmse']:.4g}, ece {record['val_ece']:.3f}"
    )
    self._bar.update()


if __name__ == "__main__":
  common.run(main)
