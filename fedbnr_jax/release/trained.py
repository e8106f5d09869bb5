"""A finished run whose statistics can be made private, and its training rows."""

import dataclasses
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedbnr_jax import ledger_file, model, precision
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.kernel_model import features_of
from fedbnr_jax.prediction import feature_map as kernel_of
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.records import RunFolder


@dataclasses.dataclass(frozen=True)
class TrainedRun:
  """A finished run whose statistics can be made private."""

  folder: RunFolder
  summary: dict[str, Any]
  model: model.Model
  experiment: Experiment  # Rebuilt from the run's config, with the same rows.
  feature_map: urk.FeatureMap
  squared_norm: float  # Which the squared norm of no row's features exceeds.

  def features(self, x: jax.Array | np.ndarray) -> jax.Array:
    """Returns the features [N, M] of standardised inputs x [N, D]."""
    state = self.model.state.server
    return jax.jit(
      lambda x: features_of(self.feature_map, state.params.theta, state.omega, x)
    )(x)

  def wide_kernel(self) -> tuple[Any, Any]:
    """Returns θ and ω in the type of the statistics, float64 where it is enabled."""
    wide, server = blr.statistics_dtype(), self.model.state.server

    def widened(leaf: Any) -> jax.Array:
      array = jnp.asarray(leaf)
      return array.astype(wide) if jnp.issubdtype(array.dtype, jnp.floating) else array

    return jax.tree.map(widened, (server.params.theta, server.omega))

  def training_rows(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns the standardised training rows of all clients, x [N, D] and y [N]."""
    clients = self.experiment.federation.clients
    mask = np.asarray(clients.mask)
    wide = blr.statistics_dtype()
    return np.asarray(clients.x, wide)[mask], np.asarray(clients.y, wide)[mask]


def load_run(
  workdir: str | os.PathLike[str], frame: pd.DataFrame | None = None
) -> TrainedRun:
  """Loads a finished run and the rows that it was trained on.

  Args:
    workdir: The folder of the run.
    frame: The table of a run of `fit(frame)`, whose folder names no file of rows.

  Raises:
    InputError: If the run is not finished, its statistics have no bounded sensitivity
      or are not summed over clients, or rows have joined or left since the training.
  """
  folder, trained = RunFolder(workdir), model.load(workdir)
  summary = folder.summary()
  if summary is None:
    raise InputError(f"the training in {workdir} is not finished: let it finish.")
  trained.require_global_layer()
  feature_map = kernel_of(trained.config, trained.preprocessor.largest_input)
  if feature_map.norm_bound is None:
    name = kernels.name_of(trained.config)
    raise InputError(
      f"the features of kernel {name!r} have no bounded norm, and so no sensitivity: "
      "train a kernel of cosines and sines, such as 'deep' or "
      "'gaussian'; a linear part needs data.inputs=scores, or data.bounds."
    )
  with precision.float64():
    squared_norm = float(feature_map.norm_bound(trained.state.server.params.theta))
  if ledger_file.changes(folder.posterior):
    raise InputError(
      f"rows have joined or left {workdir} since its training, and a release is made "
      "of those it was trained on: train again."
    )
  data = trained.config.data
  if frame is None and data.source == "table" and not data.path:
    raise InputError(
      f"{workdir} was trained on a frame, whose rows are not in the folder: give that "
      "frame too, as frame=; the commands need a run of a file."
    )
  trained.config.mesh = 1
  with warnings.catch_warnings(action="ignore"):  # The training has given them.
    dataset = experiment_lib.load_dataset(trained.config, frame)
    experiment = experiment_lib.build(trained.config, dataset)
  folder.check_data(experiment.dataset)
  return TrainedRun(folder, summary, trained, experiment, feature_map, squared_norm)
