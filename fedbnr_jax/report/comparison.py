"""The global model against each client that trains alone."""

import dataclasses
import warnings

import ml_collections
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedbnr_jax import algorithms
from fedbnr_jax.federated import federation as federation_lib
from fedbnr_jax.federated.host_chunks import Transform
from fedbnr_jax.report import bands
from fedbnr_jax.report import run as report
from fedbnr_jax.run import training
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.program import Program, make_program

_TABLE_SCORES = ("rmse", "nll", "crps", "ece", "coverage95")


def train_alone(
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


def text(
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


def draw(
  experiment: Experiment,
  program: Program,
  result: training.Result,
  alone: tuple[Program, list[training.Result | None]],
) -> Figure | None:
  """Draws the first client alone beside the global model, if there is one input."""
  program_alone, (first, *_) = alone
  one_each = experiment.algorithm.one_model_each
  if first is None or not report.is_one_dimensional(experiment) or one_each:
    return None
  name = experiment.client_names[0]
  return bands.two_panels(
    report.band_panel(experiment, program_alone, first, f"{name} alone", used_client=0),
    report.band_panel(
      experiment, program, result, f"Global model ({experiment.config.method})"
    ),
    input_name=experiment.preprocessor.numeric_columns[0],
    target_name=experiment.dataset.target_name,
  )
