"""Figures and texts of one finished run."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedbnr_jax.report import bands, figures
from fedbnr_jax.run import training
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.program import Program

_GRID_SIZE = 400  # Inputs at which a one-dimensional model is drawn.
_TABLE_SCORES = ("rmse", "nll", "crps", "ece", "coverage95")


def write_figures(drawn: Mapping[str, Figure], folder: str | os.PathLike[str]) -> None:
  """Writes the figures of a run into a folder, as PNG files of these names."""
  for name, figure in drawn.items():
    figures.save(figure, pathlib.Path(folder) / f"{name}.png")


class TestRows(NamedTuple):
  """What the global model says of the test rows, in the target's unit."""

  mean: np.ndarray  # [N]
  variance: np.ndarray  # [N], noise included.
  targets: np.ndarray  # [N]
  owners: np.ndarray | None  # [N] labels; None where nobody owns a test row.


def predict_test_rows(
  experiment: Experiment, program: Program, result: training.Result
) -> TestRows | None:
  """Predicts the test rows; None for a method with a model for each client.

  Scores of such a method are means over the clients' models.
  """
  if experiment.algorithm.one_model_each:
    return None
  mean, variance = jax.device_get(program.predict(result.state, experiment.test.x))
  test, owners = experiment.split.test, experiment.dataset.clients
  # Rows that are dealt out by another rule are so for training alone.
  owned = owners is not None and experiment.config.partition in ("auto", "column")
  return TestRows(
    *_unstandardised(experiment, mean, variance),
    experiment.dataset.targets[test],
    owners[test] if owners is not None and owned else None,
  )


def draw(
  experiment: Experiment,
  program: Program,
  result: training.Result,
  rows: TestRows | None,
) -> dict[str, Figure]:
  """Draws the figures of a run, by name.

  These are the learning curve, the reliability diagram, predictions against true values
  and, where there is one input, the predicted function.

  Args:
    experiment, program, result: A training and what it left.
    rows: From `predict_test_rows`.
  """
  target = experiment.dataset.target_name
  drawn = {
    "learning_curve": figures.learning_curve(
      pd.DataFrame(result.history),
      unit=unit(experiment),
      best_round=result.best_round,
    )
  }
  if rows is None:
    return drawn
  drawn["reliability"] = figures.reliability(*rows[:3])
  drawn["predicted"] = figures.predicted_against_true(*rows[:3], target_name=target)
  if is_one_dimensional(experiment):
    panel = band_panel(experiment, program, result, "Global model")
    drawn["function"] = bands.function_band(
      panel.x,
      panel.mean,
      panel.variance,
      train_x=panel.train_x,
      train_y=panel.train_y,
      clients=panel.train_client,
      truth=panel.truth,
      title=panel.title,
      client_names=panel.client_names,
      input_name=experiment.preprocessor.numeric_columns[0],
      target_name=target,
    )
  return drawn


def unit(experiment: Experiment) -> str:
  """Names the unit of errors: the target's, or its standard deviation."""
  name = experiment.dataset.target_name
  return f"std of {name}" if experiment.dataset.standardised_error else name


def summary_text(summary: dict[str, Any]) -> str:
  """Formats a summary in a few lines for the terminal."""
  conformal = summary.get("test_coverage95_conformal")
  others = "" if conformal is None else f"; the conformal one covers {conformal:.1%}"
  return (
    f"{summary['dataset']}, {summary['method']}, {summary['num_clients']} clients, "
    f"seed {summary['seed']}: validation rows chose round {summary['best_round']} of "
    f"{summary['rounds']}, which took {summary['seconds']:.1f} s\n"
    f"test RMSE {summary['test_rmse']:.4g} (lowest of any round "
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
