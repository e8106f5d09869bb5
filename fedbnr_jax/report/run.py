"""Figures and texts of one finished run."""

import dataclasses
import os
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pandas as pd

from fedbnr_jax import algorithms
from fedbnr_jax.federated import federation as federation_lib
from fedbnr_jax.federated.host_chunks import Transform
from fedbnr_jax.report import bands, figures
from fedbnr_jax.run import training
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.program import Program, make_program

_GRID_SIZE = 400  # Inputs at which a one-dimensional model is drawn.
_TABLE_SCORES = ("rmse", "nll", "crps", "ece", "coverage95")


def write_figures(
  experiment: Experiment,
  program: Program,
  result: training.Result,
  folder: str | os.PathLike[str],
) -> None:
  """Draws the figures of a run into a folder.

  These are the learning curve, the reliability diagram, predictions against true values
  and, where there is one input, the predicted function.
  """
  folder = pathlib.Path(folder)
  unit = experiment.dataset.target_name
  if experiment.dataset.standardised_error:
    unit = f"std of {unit}"
  figures.learning_curve(
    pd.DataFrame(result.history),
    folder / "learning_curve.png",
    unit=unit,
    best_round=result.best_round,
  )
  if experiment.algorithm.one_model_each:
    return  # Scores are means over the clients' models; no single one can be drawn.
  mean, variance = jax.device_get(program.predict(result.state, experiment.test.x))
  mean, variance = _unstandardised(experiment, mean, variance)
  targets = experiment.dataset.targets[experiment.split.test]
  figures.reliability(mean, variance, targets, folder / "reliability.png")
  figures.predicted_against_true(
    mean,
    variance,
    targets,
    folder / "predicted.png",
    target_name=experiment.dataset.target_name,
  )
  if is_one_dimensional(experiment):
    panel = band_panel(experiment, program, result, "Global model")
    bands.function_band(
      panel.x,
      panel.mean,
      panel.variance,
      folder / "function.png",
      train_x=panel.train_x,
      train_y=panel.train_y,
      clients=panel.train_client,
      truth=panel.truth,
      title=panel.title,
      client_names=panel.client_names,
      input_name=experiment.preprocessor.numeric_columns[0],
      target_name=experiment.dataset.target_name,
    )


def summary_text(summary: dict[str, Any]) -> str:
  """Formats a summary in a few lines for the terminal."""
  conformal = summary.get("test_coverage95_conformal")
  others = "" if conformal is None else f"; the conformal one covers {conformal:.1%}"
  return (
    f"{summary['dataset']}, {summary['method']}, {summary['num_clients']} clients, "
    f"seed {summary['seed']}: round {summary['best_round']} is the best of "
    f"{summary['rounds']} ({summary['seconds']:.1f} s)\n"
    f"test RMSE {summary['test_rmse']:.4g} (lowest of all rounds "
    f"{summary['min_test_rmse']:.4g}), ECE {summary['test_ece']:.3f}, "
    f"NLL {summary['test_nll']:.4g}, 95 % interval covers "
    f"{summary['test_coverage95']:.1%} of {summary['test_rows']} test rows, so "
    f"probably {summary['test_coverage95_low']:.1%} to "
    f"{summary['test_coverage95_high']:.1%} of all{others}"
  )


def mean_summary(summaries: list[dict[str, Any]]) -> dict[str, Any]:
  """Averages the numbers of several seeds' summaries; equal values stay unchanged."""
  mean: dict[str, Any] = {}
  for name, first in summaries[0].items():
    # Some seeds may have no conformal intervals.
    values = [summary[name] for summary in summaries if name in summary]
    same = all(value == first for value in values)
    mean[name] = first if same or isinstance(first, str) else float(np.mean(values))
  return mean | {
    "seeds": [summary["seed"] for summary in summaries],
    "seconds": sum(summary["seconds"] for summary in summaries),
  }


# ------------------------------------------- the global model against each client


def train_clients_alone(
  experiment: Experiment,
  transform: Transform | None,
) -> tuple[Program, list[training.Result | None]]:
  """Trains a model for each client on its own rows only.

  All are validated and tested on the same rows as the global model.

  Args:
    experiment: The global model's.
    transform: Applied to the program of these trainings, such as `jax.jit`.

  Returns:
    The program that trained them, and a result per client; None, with a warning, if a
    training diverged.
  """
  results: list[training.Result | None] = []
  # A client alone has no server and no peers, so the method is always plain FedBNR.
  config = ml_collections.ConfigDict(experiment.config.to_dict())
  config.participation, config.dropout = 1.0, 0.0
  config.mesh, config.stream_clients = 1, 0
  experiment = dataclasses.replace(
    experiment,
    config=ml_collections.FrozenConfigDict(config),
    algorithm=algorithms.method("fedbnr").build(config),
  )
  program = make_program(experiment.algorithm, transform=transform)
  for index, name in enumerate(experiment.client_names):
    alone = dataclasses.replace(
      experiment,
      federation=federation_lib.single_client(experiment.federation, index),
      client_names=(name,),
    )
    try:
      results.append(training.train(alone, program))
    except training.NonFiniteError as error:
      warnings.warn(f"{name} alone: {error}", stacklevel=2)
      results.append(None)
  return program, results


def comparison_text(
  experiment: Experiment, result: training.Result, alone: list[training.Result | None]
) -> str:
  """Formats a table of test scores: the global model, then each client's own."""
  names = [f"global ({experiment.config.method})"]
  names += [f"{name} alone" for name in experiment.client_names]
  scores = [
    [one.best[f"test_{score}"] if one else np.nan for score in _TABLE_SCORES]
    for one in (result, *alone)
  ]
  table = pd.DataFrame(
    scores, index=names, columns=[f"test {s}" for s in _TABLE_SCORES]
  )
  return table.to_string(float_format=lambda value: f"{value:.3f}")


def write_comparison(
  experiment: Experiment,
  program: Program,
  result: training.Result,
  alone: tuple[Program, list[training.Result | None]],
  folder: str | os.PathLike[str],
) -> None:
  """Draws the first client alone beside the global model, if there is one input."""
  program_alone, (first, *_) = alone
  one_each = experiment.algorithm.one_model_each
  if first is None or not is_one_dimensional(experiment) or one_each:
    return
  name = experiment.client_names[0]
  bands.two_panels(
    band_panel(experiment, program_alone, first, f"{name} alone", used_client=0),
    band_panel(
      experiment, program, result, f"Global model ({experiment.config.method})"
    ),
    pathlib.Path(folder) / "comparison.png",
    input_name=experiment.preprocessor.numeric_columns[0],
    target_name=experiment.dataset.target_name,
  )


def is_one_dimensional(experiment: Experiment) -> bool:
  """Returns whether the only input is numeric, so that the function can be drawn."""
  names = experiment.preprocessor.numeric_columns
  return len(names) == 1 == experiment.preprocessor.num_inputs


def band_panel(
  experiment: Experiment,
  program: Program,
  result: training.Result,
  title: str,
  used_client: int | None = None,
) -> bands.BandPanel:
  """Predicts over the range of the only input, in raw units.

  Args:
    experiment, program, result: A training and what it left.
    title: Of the panel.
    used_client: The client whose rows the model saw; None if it saw all rows.
  """
  dataset = experiment.dataset
  (name,) = experiment.preprocessor.numeric_columns
  column = dataset.features[name].to_numpy(np.float64)
  grid = np.linspace(column.min(), column.max(), _GRID_SIZE)
  frame = pd.DataFrame({name: grid})
  x = jnp.asarray(experiment.preprocessor.transform(frame), experiment.config.dtype)
  mean, variance = jax.device_get(program.predict(result.state, x))
  mean, variance = _unstandardised(experiment, mean, variance)
  rows = np.concatenate(experiment.client_rows)
  owner = np.repeat(
    np.arange(len(experiment.client_rows)), [len(r) for r in experiment.client_rows]
  )
  return bands.BandPanel(
    x=grid,
    mean=mean,
    variance=variance,
    train_x=column[rows],
    train_y=dataset.targets[rows],
    train_client=owner,
    truth=None if dataset.truth is None else dataset.truth(grid[:, None]),
    title=title,
    client_names=experiment.client_names,
    used=None if used_client is None else owner == used_client,
  )


def _unstandardised(
  experiment: Experiment, mean: np.ndarray, variance: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Converts predictions [N] and their variances [N] to the target's unit."""
  scaler = experiment.preprocessor
  return scaler.unstandardise_mean(mean), variance * scaler.target_std**2
