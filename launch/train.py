"""Trains and evaluates one model.

python -m launch.train --config=configs/default.py --workdir=runs/demo

A second start on the same folder goes on where the first stopped.
"""

import ml_collections
from tqdm import tqdm

from fedbnr_jax import config as config_lib
from fedbnr_jax import experiment as experiment_lib
from fedbnr_jax import training
from fedbnr_jax.experiment import Experiment
from fedbnr_jax.records import Record, RunFolder, usable
from fedbnr_jax.report import run as report
from launch import common


def main() -> None:
  train(common.config(), common.workdir())


def train(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Trains in `workdir`, or says that this is done."""
  config_lib.validate(config)
  folder = RunFolder(workdir)
  folder.check(config)
  if folder.summary() is not None:
    print(f"{workdir}: this run is finished; its results are in summary.json.")
    return
  experiment = experiment_lib.build(config)
  with usable(folder.path):
    run(experiment, folder)


def run(experiment: Experiment, folder: RunFolder) -> None:
  """Trains, and writes all files of the run."""
  folder.claim(experiment.config)
  folder.claim_data(experiment.dataset)
  folder.write_preprocessing(experiment.preprocessor)
  program = training.jit(training.make_program(experiment))
  with Progress(experiment, len(folder.metrics())) as bar:
    result = training.train(experiment, program, folder, on_round=bar.tell)
  summary = training.summarise(experiment, result.history)
  report.write_figures(experiment, program, result, folder.figures)
  print(report.summary_text(summary))
  if experiment.config.compare_clients and len(experiment.client_names) > 1:
    alone = report.train_clients_alone(experiment, training.jit)
    print(report.comparison_text(experiment, result, alone))
    report.write_comparison(experiment, program, result, alone, folder.figures)
  folder.write_summary(summary)  # Last: it is what marks the run as finished.
  print(f"written to {folder.path}")


class Progress:
  """A progress bar over rounds with the scores that early stopping looks at."""

  def __init__(self, experiment: Experiment, num_done: int) -> None:
    config = experiment.config
    text = f"{experiment.dataset.name} {config.method}"
    self._bar = tqdm(
      total=config.num_rounds, initial=num_done, desc=text, unit="round", disable=None
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
