"""What a finished training leaves in its folder: figures, page, ledger, summary."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from fedbnr_jax import calibration, ledger_file, membership
from fedbnr_jax.candidates import Trial
from fedbnr_jax.intervals import Calibration
from fedbnr_jax.ledger import Ledger
from fedbnr_jax.run import seal, training
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.program import Program
from fedbnr_jax.run.records import RunFolder


class Finished(NamedTuple):
  """What is said of a run that was just finished.

  Attributes:
    summary: The fields of `summary.json`.
    comparison: Scores of each client trained alone, a table as text, where the config
      asks for it.
  """

  summary: dict[str, Any]
  comparison: str | None


def write(
  experiment: Experiment,
  program: Program,
  result: training.Result,
  folder: RunFolder,
  calibrated: Calibration | None = None,
  trials: Sequence[Trial] = (),
) -> Finished:
  """Writes all files of a run that follow from its training.

  Args:
    experiment, program, result: A training and what it left.
    folder: Of the run.
    calibrated: Its calibration, if there is one.
    trials: What method `auto` has tried before it, if it has.
  """
  # Here, because Matplotlib takes long to import and a prediction needs none of it.
  from fedbnr_jax.report import comparison as comparison_lib
  from fedbnr_jax.report import page, run_page
  from fedbnr_jax.report import run as report

  ledger = membership.of_training(experiment, result.state)
  if ledger is not None:
    _write_ledger(folder.posterior, ledger)
  if calibrated is not None:
    number = len(result.history)
    calibration.write(folder, calibrated, seal.of_folder(folder, number), number)
  rows = report.predict_test_rows(experiment, program, result)
  drawn = report.draw(experiment, program, result, rows)
  comparison = None
  if experiment.config.compare_clients and len(experiment.client_names) > 1:
    alone = comparison_lib.train_alone(experiment, jax.jit)
    comparison = comparison_lib.text(experiment, result, alone[1])
    figure = comparison_lib.draw(experiment, program, result, alone)
    drawn |= {} if figure is None else {"comparison": figure}
  report.write_figures(drawn, folder.figures)
  summary = calibration.summarise(experiment, result, calibrated)
  outcome = run_page.Outcome(
    experiment, result, summary, rows, drawn, calibrated, trials, comparison
  )
  page.write(folder.report, run_page.run_page(outcome))
  folder.write_summary(summary)  # Last: it is what marks the run as finished.
  return Finished(summary, comparison)


def _write_ledger(path: pathlib.Path, ledger: Ledger) -> None:
  """Writes the ledger of a training, unless there is one of it with changes since."""
  # Where a summary is made anew, rows may have joined or left; they are not forgotten.
  if path.exists() and (before := ledger_file.read(path)).changes:
    membership.require_same_kernel(before.kernel, ledger.kernel, path)
  else:
    ledger_file.write(path, ledger)
