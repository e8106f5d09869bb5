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

from fedbnr_jax import algorithms, blr, membership, training, urk
from fedbnr_jax.checkpoints import Checkpoints
from fedbnr_jax.config import require_choice
from fedbnr_jax.data import Preprocessor, tables
from fedbnr_jax.errors import InputError
from fedbnr_jax.experiment import Experiment
from fedbnr_jax.federation import Clients, Federation, ServerSet
from fedbnr_jax.names import listing
from fedbnr_jax.records import RunFolder

# Of the standard normal: 95 % of it lies within ±_QUANTILE.
_QUANTILE = 1.959963984540054
# Rows predicted at a time: bounds the memory, whatever the table.
_CHUNK = 8192
_RELEASED = "model.npz"  # In the folder of a private release.
_SCALES = ("noise_std", "prior_std")


@dataclasses.dataclass(frozen=True)
class Model:
  """Preprocessing, kernel and posterior: all that prediction needs."""

  config: ml_collections.ConfigDict
  preprocessor: Preprocessor
  state: Any  # ServerState
  client_names: tuple[str, ...] = ()

  def predict(
    self,
    features: pd.DataFrame,
    transform: Callable[[Any], Any] | None = None,
    client: str | None = None,
  ) -> pd.DataFrame:
    """Predicts every row of a table that has the training columns.

    Args:
      features: Raw columns, named as in training; others are ignored.
      transform: Applied to the prediction function; `jax.jit` pays for large tables.
      client: Whose model, where the method leaves one for each client.

    Returns:
      Columns mean, std, lower95, upper95 (noise included), in the target's unit, on
      the index of `features`.

    Raises:
      InputError: If the table lacks a column, or `client` is needed, or unknown.
    """
    prepared = self.preprocessor
    x = jnp.asarray(self._inputs(features))
    predict = self._predict_one(client)
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

  def _predict_one(self, client: str | None) -> Callable[[Any, jax.Array], Any]:
    """(state, x [N, D]) -> mean [N], variance [N], of one model."""
    algorithm, method = _algorithm(self.config), self.config.method
    predict = algorithm.predict
    if not algorithm.one_model_each:
      if client is not None:
        raise InputError(f"method {method!r} has one model for all: name no client.")
      return predict
    if client is None:
      raise InputError(
        f"method {method!r} has a model for each client: say whose (--client), one of "
        f"{listing(self.client_names)}."
      )
    require_choice("the client", client, self.client_names)
    index = self.client_names.index(client)

    def predict_one(state: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
      own = jax.tree.map(lambda leaf: leaf[index : index + 1], state.personal)
      mean, variance = predict(state.replace(personal=own), x)
      return mean[0], variance[0]

    return predict_one

  def rows(self, table: pd.DataFrame) -> membership.Rows:
    """Standardised rows of a table, for `membership`.

    Args:
      table: Raw columns, named as in training, the target among them.
    """
    y = tables.parse_target(table, self.preprocessor.target_name)
    y = self.preprocessor.standardise(y).astype(self.config.dtype)
    owners, client = None, self.config.data.client
    if client and client in table.columns:
      owners = tables.parse_clients(table, client)
    return membership.Rows(self._inputs(table), y, owners)

  def statistics(
    self, rows: membership.Rows, transform: Callable[[Any], Any] | None = None
  ) -> blr.SufficientStats:
    """What rows say about the last layer, for `membership`.

    Args:
      rows: Standardised, as by `rows`.
      transform: Applied to the function of a batch of rows, as `jax.jit`.
    """
    self.require_global_layer()
    batches = membership.row_batches(rows)
    return membership.statistics(
      urk.from_config(self.config), self.state, batches, transform
    )

  def require_global_layer(self) -> None:
    """Raises InputError for a method that has no last layer of all clients' rows."""
    if not isinstance(self.state.stats, blr.SufficientStats):
      raise InputError(
        f"method {self.config.method!r} has no last layer of all clients' rows, to be "
        "changed or released."
      )

  def _inputs(self, table: pd.DataFrame) -> np.ndarray:
    """Standardised inputs [N, D], as the kernel was trained on them."""
    prepared = self.preprocessor
    parsed = tables.parse_features(
      table, prepared.numeric_columns, prepared.categorical_columns
    )
    return prepared.transform(parsed).astype(self.config.dtype)


def from_result(experiment: Experiment, result: training.Result) -> Model:
  """The model of a training that was just done."""
  config = ml_collections.ConfigDict(experiment.config)
  return Model(config, experiment.preprocessor, result.state, experiment.client_names)


def load(workdir: str | os.PathLike[str]) -> Model:
  """The model at the best validation round of the run in `workdir`."""
  folder = RunFolder(workdir)
  config, preprocessor = folder.config(), folder.preprocessing()
  names, num_rows = folder.clients()
  if not folder.checkpoints.is_dir():
    raise InputError(f"{workdir} holds no checkpoint: train first.")
  checkpoints = Checkpoints(folder.checkpoints)
  try:
    like = _like(config, preprocessor, len(names) or 1, num_rows)
    saved = checkpoints.restore(like)
  finally:
    checkpoints.close()
  if saved is None:
    raise InputError(f"{workdir} holds no sound checkpoint: train again.")
  state = saved.best
  if folder.posterior.exists():
    ledger = membership.read(folder.posterior)
    if ledger.changes:
      membership.require_kernel(ledger, state, folder.posterior)
      state = membership.with_posterior(state, ledger)
  return Model(config, preprocessor, state, names)


def write_released(
  folder: RunFolder,
  trained: Model,
  stats: blr.SufficientStats,
  fitted: blr.Posterior,
) -> None:
  """Writes `released/`: the kernel and noisy statistics, and nothing that was exact."""
  target = RunFolder(folder.released)
  target.claim(trained.config)
  target.write_preprocessing(trained.preprocessor)
  kernel = (trained.state.omega, trained.state.params.theta)
  arrays: dict[str, Any] = {
    f"kernel_{index}": leaf for index, leaf in enumerate(jax.tree.leaves(kernel))
  }
  arrays |= vars(stats) | {name: getattr(fitted, name) for name in _SCALES}
  with open(target.path / _RELEASED, "wb") as file:
    np.savez(file, **jax.device_get(arrays))


def load_released(workdir: str | os.PathLike[str]) -> Model:
  """The model of a private release, in the run's folder or by itself."""
  folder = RunFolder(workdir)
  if (folder.released / _RELEASED).exists():
    folder = RunFolder(folder.released)
  path = folder.path / _RELEASED
  if not path.exists():
    raise InputError(
      f"{workdir} has no private release: make one by launch.privacy --release."
    )
  config, preprocessor = folder.config(), folder.preprocessing()
  like = _like(config, preprocessor)
  leaves, structure = jax.tree.flatten((like.omega, like.params.theta))
  with open(path, "rb") as file, np.load(file) as content:
    arrays = {name: content[name] for name in content.files}
  kernel = [arrays[f"kernel_{index}"] for index in range(len(leaves))]
  omega, theta = jax.tree.unflatten(structure, map(jnp.asarray, kernel))
  fields = ("gram", "moment", "energy", "count")
  stats = blr.SufficientStats(*(jnp.asarray(arrays[name]) for name in fields))
  fitted = blr.posterior(stats, *(arrays[name] for name in _SCALES))
  params = like.params.replace(theta=theta)
  state = like.replace(omega=omega, params=params, stats=stats, posterior=fitted)
  return Model(config, preprocessor, state)


def _like(
  config: ml_collections.ConfigDict,
  preprocessor: Preprocessor,
  num_clients: int = 1,
  num_rows: int = 1,
) -> Any:
  """Shapes and types of the method's state; nothing is computed."""
  return jax.eval_shape(
    _algorithm(config).init,
    jax.random.key(0),
    _empty(config, (num_clients, num_rows, preprocessor.num_inputs)),
  )


def _algorithm(config: ml_collections.ConfigDict) -> algorithms.FederatedAlgorithm:
  """The method on one device: where a model is used there may be fewer than before."""
  here = ml_collections.ConfigDict(config.to_dict())
  here.mesh = 1
  here.with_noise = True  # Without, it is a way to score; a user wants bars of y.
  return algorithms.method(here.method).build(here)


def _empty(
  config: ml_collections.ConfigDict, shape: tuple[int, int, int]
) -> Federation:
  """A federation of this shape [K, N, D], from which a method can be initialised."""
  x = jnp.zeros(shape, config.dtype)
  clients = Clients(x, x[:, :, 0], jnp.ones(shape[:2], bool))
  return Federation(clients, ServerSet(x[0], x[0, :, 0]))
