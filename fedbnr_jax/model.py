"""A trained model: predictions with error bars, in the target's unit, for any table."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pandas as pd

from fedbnr_jax import algorithms, training
from fedbnr_jax.checkpoints import Checkpoints
from fedbnr_jax.data import Preprocessor, tables
from fedbnr_jax.errors import InputError
from fedbnr_jax.experiment import Experiment
from fedbnr_jax.federation import Clients, Federation, ServerSet
from fedbnr_jax.records import RunFolder

# Of the standard normal: 95 % of it lies within ±_QUANTILE.
_QUANTILE = 1.959963984540054
# Rows predicted at a time: bounds the memory, whatever the table.
_CHUNK = 8192


@dataclasses.dataclass(frozen=True)
class Model:
  """Preprocessing, kernel and posterior: all that prediction needs."""

  config: ml_collections.ConfigDict
  preprocessor: Preprocessor
  state: Any  # ServerState

  def predict(
    self, features: pd.DataFrame, transform: Callable[[Any], Any] | None = None
  ) -> pd.DataFrame:
    """Predicts every row of a table that has the training columns.

    Args:
      features: Raw columns, named as in training; others are ignored.
      transform: Applied to the prediction function; `jax.jit` pays for large tables.

    Returns:
      Columns mean, std, lower95, upper95 (noise included), in the target's unit, on
      the index of `features`.
    """
    prepared = self.preprocessor
    parsed = tables.parse_features(
      features, prepared.numeric_columns, prepared.categorical_columns
    )
    x = jnp.asarray(prepared.transform(parsed), self.config.dtype)
    predict = _algorithm(self.config).predict
    if transform is not None:
      predict = transform(predict)
    parts = [
      jax.device_get(predict(self.state, x[start : start + _CHUNK]))
      for start in range(0, x.shape[0], _CHUNK)
    ]
    mean = prepared.unstandardise_mean(np.concatenate([part[0] for part in parts]))
    std = np.sqrt(np.concatenate([part[1] for part in parts])) * prepared.target_std
    return pd.DataFrame(
      {
        "mean": mean,
        "std": std,
        "lower95": mean - _QUANTILE * std,
        "upper95": mean + _QUANTILE * std,
      },
      index=features.index,
    )


def from_result(experiment: Experiment, result: training.Result) -> Model:
  """The model of a training that was just done."""
  config = ml_collections.ConfigDict(experiment.config)
  return Model(config, experiment.preprocessor, result.state)


def load(workdir: str | os.PathLike[str]) -> Model:
  """The model at the best validation round of the run in `workdir`."""
  folder = RunFolder(workdir)
  config, preprocessor = folder.config(), folder.preprocessing()
  # Only shapes and dtypes of the state are wanted: nothing is computed.
  like = jax.eval_shape(
    _algorithm(config).init,
    jax.random.key(0),
    _empty(config, preprocessor.num_inputs),
  )
  if not folder.checkpoints.is_dir():
    raise InputError(f"{workdir} holds no checkpoint: train first.")
  checkpoints = Checkpoints(folder.checkpoints)
  try:
    saved = checkpoints.restore(like)
  finally:
    checkpoints.close()
  if saved is None:
    raise InputError(f"{workdir} holds no sound checkpoint: train again.")
  return Model(config, preprocessor, saved.best)


def _algorithm(config: ml_collections.ConfigDict) -> algorithms.FederatedAlgorithm:
  """The method on one device: where a model is used there may be fewer than before."""
  here = ml_collections.ConfigDict(config.to_dict())
  here.mesh = 1
  return algorithms.method(here.method).build(here)


def _empty(config: ml_collections.ConfigDict, num_inputs: int) -> Federation:
  """The smallest federation from which a method can be initialised."""
  x = jnp.zeros((1, 1, num_inputs), config.dtype)
  clients = Clients(x, x[:, :, 0], jnp.ones((1, 1), bool))
  return Federation(clients, ServerSet(x[0], x[0, :, 0]))
