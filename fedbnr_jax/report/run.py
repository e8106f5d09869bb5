"""Figures and text of one finished run."""

import dataclasses
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pandas as pd

from fedbnr_jax import algorithms, training
from fedbnr_jax import federation as federation_lib
from fedbnr_jax.experiment import Experiment
from fedbnr_jax.report import figures

_GRID_SIZE = 400
_TABLE_SCORES = ("rmse", "nll", "crps", "ece", "coverage95")


def write_figures(
  experiment: Experiment,
  program: training.Program,
  result: training.Result,
  folder: str | os.PathLike[str],
) -> None:
  """Learning curve, reliability, predicted against true; for 1-D, the function."""
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
    return  # The scores are means over models, of which there is no one picture.
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
    figures.function_band(
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
  """A few lines for the terminal."""
  return (
    f"{summary['dataset']}, {summary['method']}, {summary['num_clients']} clients, "
    f"seed {summary['seed']}: round {summary['best_round']} is the best of "
    f"{summary['rounds']} ({summary['seconds']:.1f} s)\n"
    f"test RMSE {summary['test_rmse']:.4g} (lowest of all rounds "
    f"{summary['min_test_rmse']:.4g}), ECE {summary['test_ece']:.3f}, "
    f"NLL {summary['test_nll']:.4g}, 95 % interval covers "
    f"{summary['test_coverage95']:.1%}"
  )


def mean_summary(summaries: list[dict[str, Any]]) -> dict[str, Any]:
  """One summary of several seeds: numbers averaged, what they share as it is."""
  mean: dict[str, Any] = {}
  for name, first in summaries[0].items():
    values = [summary[name] for summary in summaries]
    same = all(value == first for value in values)
    mean[name] = first if same or isinstance(first, str) else float(np.mean(values))
  return mean | {
    "seeds": [summary["seed"] for summary in summaries],
    "seconds": sum(summary["seconds"] for summary in summaries),
  }


# ------------------------------------------- the global model against each client


def train_clients_alone(
  experiment: Experiment,
  transform: Callable[[training.Program], training.Program],
) -> tuple[training.Program, list[training.Result | None]]:
  """Trains each client on its own rows only, judged on the same rows as the others.

  Args:
    experiment: Of the global model.
    transform: Applied to the program of a client alone, as `training.jit`.

  Returns:
    The program that trained them, and a result a client; None, with a warning, for
    one whose training diverged.
  """
  results: list[training.Result | None] = []
  # Plain FedBNR, whatever the method: a client alone has no server and nobody else.
  config = ml_collections.ConfigDict(experiment.config.to_dict())
  config.participation, config.dropout = 1.0, 0.0
  config.mesh, config.stream_clients = 1, 0
  experiment = dataclasses.replace(
    experiment,
    config=ml_collections.FrozenConfigDict(config),
    algorithm=algorithms.method("fedbnr").build(config),
  )
  program = transform(training.make_program(experiment))
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
  """A table of test scores: the global model, then each client's own."""
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
  program: training.Program,
  result: training.Result,
  alone: tuple[training.Program, list[training.Result | None]],
  folder: str | os.PathLike[str],
) -> None:
  """The two-panel figure, for data with one input: a client alone, and all."""
  program_alone, (first, *_) = alone
  one_each = experiment.algorithm.one_model_each
  if first is None or not is_one_dimensional(experiment) or one_each:
    return
  name = experiment.client_names[0]
  figures.two_panels(
    band_panel(experiment, program_alone, first, f"{name} alone", used_client=0),
    band_panel(
      experiment, program, result, f"Global model ({experiment.config.method})"
    ),
    pathlib.Path(folder) / "comparison.png",
    input_name=experiment.preprocessor.numeric_columns[0],
    target_name=experiment.dataset.target_name,
  )


def is_one_dimensional(experiment: Experiment) -> bool:
  """Whether there is one numeric input, and so a function to draw."""
  names = experiment.preprocessor.numeric_columns
  return len(names) == 1 == experiment.preprocessor.num_inputs


def band_panel(
  experiment: Experiment,
  program: training.Program,
  result: training.Result,
  title: str,
  used_client: int | None = None,
) -> figures.BandPanel:
  """What a model says over the range of its one input, in raw units."""
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
  return figures.BandPanel(
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
  scaler = experiment.preprocessor
  return scaler.unstandardise_mean(mean), variance * scaler.target_std**2
