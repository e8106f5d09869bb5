"""A trained model: predictions with error bars, in the target's unit, for any table."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import ml_collections
import numpy as np
import pandas as pd

from fedbnr_jax import (
  calibration,
  intervals,
  ledger_file,
  membership,
  precision,
  prediction,
  relevance,
)
from fedbnr_jax.data import Preprocessor, tables
from fedbnr_jax.data.ranges import warn_of_outside
from fedbnr_jax.data.reader import place
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import blr
from fedbnr_jax.names import listing, require_choice
from fedbnr_jax.run import seal, training
from fedbnr_jax.run.checkpoints import Checkpoints
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.records import Record, RunFolder
from fedbnr_jax.run.summary import read_outcome
from fedbnr_jax.tags import OwnedRows


class Source(Protocol):
  """Where a model comes from, and so what its folder holds beside the model."""

  def save(self, workdir: str | os.PathLike[str]) -> None:
    """Writes the folder of the run, as `launch.train` does."""


@dataclasses.dataclass(frozen=True, eq=False)  # Arrays do not compare to one truth.
class Model:
  """A trained model: preprocessing, kernel and posterior, and how it was trained.

  Attributes:
    config: The config of its run.
    preprocessor: Takes raw columns to inputs [N, D], and targets to z-scores.
    state: The algorithm's state at the best validation round, NumPy arrays.
    client_names: [K], in the order of the state's clients.
    columns: Raw feature columns, in the order of the training's table or array.
    records: A record a round, as in `metrics.csv`.
    scores: The fields of `summary.json`; none while the run is unfinished.
    source: Knows how to save the model.
    calibration: Scores of rows that it has not seen, for conformal intervals; None if
      its config did not ask for them.
  """

  config: ml_collections.ConfigDict
  preprocessor: Preprocessor
  state: Any
  client_names: tuple[str, ...] = ()
  columns: tuple[str, ...] = ()
  records: Sequence[Record] = ()
  scores: dict[str, Any] = dataclasses.field(default_factory=dict)
  source: Source | None = None
  calibration: intervals.Calibration | None = None

  def __repr__(self) -> str:
    rmse = self.scores.get("test_rmse")
    rows = self.scores.get("test_rows", "?")
    score = "" if rmse is None else f", test RMSE {rmse:.4g} of {rows} rows"
    return (
      f"<Model {self.config.method} of {self.preprocessor.target_name!r}, "
      f"{len(self.client_names)} clients, {len(self.records)} rounds{score}>"
    )

  @property
  def history(self) -> pd.DataFrame:
    """A frame with losses, scores, floats sent and seconds of every round."""
    return pd.DataFrame(list(self.records))

  @property
  def summary(self) -> dict[str, Any]:
    """Scores at the best validation round, and the numbers of rows they rest on."""
    return dict(self.scores)

  def relevance(self, client: str | None = None) -> pd.Series:
    """Measures how far predictions move when a single column is drawn anew.

    Args:
      client: Whose model, where the method leaves one for each client.

    Returns:
      A number for each column, in the target's unit, the largest first; see
      `fedbnr_jax.relevance.relevance`.
    """
    return relevance.relevance(self.config, self.preprocessor, self._state_of(client))

  def length_scales(self) -> pd.DataFrame:
    """Reads the length-scale of each input, of every part of the kernel that has them.

    Raises:
      InputError: If the kernel has none; see `fedbnr_jax.relevance.length_scales`.
    """
    return relevance.length_scales(self.config, self.preprocessor, self.state)

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes the folder that `launch.train` writes; `load` reads it.

    Raises:
      InputError: If the folder holds something other than this model.
    """
    if self.source is None:
      raise InputError(
        "this model does not know its training, and so cannot be saved: save one that "
        "fit or load returned."
      )
    self.source.save(folder)

  def predict(
    self,
    features: pd.DataFrame | np.ndarray,
    client: str | None = None,
    *,
    levels: float | Sequence[float] | None = None,
    warn: bool = True,
  ) -> pd.DataFrame:
    """Predicts every row of a table that has the training columns.

    The first table of a size compiles, later ones in the same process do not; sizes
    are rounded up to powers of two.

    Args:
      features: A frame of raw columns, named as in training; others are ignored. For
        a model that was fitted to arrays also an array [N, D].
      client: Whose model, where the method leaves one for each client.
      levels: Of the intervals, between 0 and 1; None for 0.95.
      warn: Whether to warn of rows outside what was trained on, and of conformal
        intervals that cannot be had.

    Returns:
      Columns mean, std, lower95, upper95 (noise included), in the target's unit, on
      the index of `features`; lower95_conformal and upper95_conformal, if the model
      was calibrated; and outside, true for a row with a number beyond its training
      range by more than a tenth of that range, or with a category that no training row
      had.

    Raises:
      InputError: If the table lacks a column, `client` is needed, or unknown, a level
        is none or was asked for without enough rows to calibrate it, or a prediction is
        not finite.
    """
    frame = self._frame(features)
    parsed = self._parsed(frame)
    x = self._inputs(frame, parsed)
    state = self._state_of(client)
    z, variance = prediction.predict(self.config, state, x)
    mean = self.preprocessor.unstandardise_mean(z)
    std = np.sqrt(variance) * self.preprocessor.target_std
    self._require_finite(frame, x, np.isfinite(mean) & np.isfinite(std))
    outside = self.preprocessor.outside(parsed)
    if warn:
      warn_of_outside(outside)
    return pd.DataFrame(
      {
        "mean": mean,
        "std": std,
        **intervals.columns(mean, std, levels, self.calibration, warn=warn),
        "outside": outside.any(axis=1).to_numpy(),
      },
      index=frame.index,
    )

  def _frame(self, features: pd.DataFrame | np.ndarray) -> pd.DataFrame:
    """Names the columns of an array as `fit` named those of the training's array."""
    if isinstance(features, pd.DataFrame):
      return features
    scaler = self.preprocessor
    named = self.columns or (*scaler.number_columns, *scaler.categorical_columns)
    if self.columns != tables.array_columns(len(named)):
      raise InputError(
        "the model was trained on named columns: give a frame that has "
        f"{listing(named)}."
      )
    return tables.array_frame(features, len(self.columns))

  def _state_of(self, client: str | None) -> Any:
    """The state to predict with: of one client where each has a model."""
    method = self.config.method
    algorithm = prediction.algorithm(self.config)
    if not algorithm.one_model_each:
      if client is not None:
        raise InputError(f"method {method!r} has one model for all: name no client.")
      return self.state
    if client is None:
      raise InputError(
        f"method {method!r} has a model for each client: say whose (--client, or "
        f"client=), one of {listing(self.client_names)}."
      )
    require_choice("the client", client, self.client_names)
    index = self.client_names.index(client)
    return algorithm.of_client(self.state, index)

  def rows(self, table: pd.DataFrame) -> OwnedRows:
    """Standardises the rows of a table, for `statistics` and `row_tags`.

    Args:
      table: Raw columns, named as in training, the target among them.
    """
    y = tables.parse_target(table, self.preprocessor.target_name)
    self.preprocessor.warn_of_clipped_targets(y)
    with np.errstate(over="ignore"):  # The ledger refuses what is too far out.
      y = self.preprocessor.standardise(y).astype(self.config.dtype)
    owners, client = None, self.config.data.client
    if client and client in table.columns:
      owners = tables.parse_clients(table, client)
    return OwnedRows(self._inputs(table, self._parsed(table)), y, owners)

  def outside(self, table: pd.DataFrame) -> pd.DataFrame:
    """Marks the cells [N, columns] of a table outside what was trained on."""
    return self.preprocessor.outside(self._parsed(table))

  def statistics(
    self, rows: OwnedRows, transform: Callable[[Any], Any] | None = None
  ) -> blr.SufficientStats:
    """Sums the sufficient statistics of rows under the model's kernel.

    Args:
      rows: Standardised, as by `rows`.
      transform: Is applied to the function of a batch of rows, such as `jax.jit`.
    """
    self.require_global_layer()
    batches = membership.row_batches(rows)
    with precision.float64():
      return membership.statistics(
        prediction.feature_map(self.config), self.state, batches, transform
      )

  def require_global_layer(self) -> None:
    """Raises InputError for a method that has no last layer of all clients' rows."""
    if not isinstance(self.state.server.stats, blr.SufficientStats):
      raise InputError(
        f"method {self.config.method!r} has no last layer of all clients' rows, to be "
        "changed or released."
      )

  def _parsed(self, table: pd.DataFrame) -> pd.DataFrame:
    """The columns of a table that the model predicts from, as numbers and labels."""
    prepared = self.preprocessor
    return tables.parse_features(
      table, prepared.number_columns, prepared.categorical_columns, prepared.missing
    )

  def _inputs(self, table: pd.DataFrame, parsed: pd.DataFrame) -> np.ndarray:
    """Standardised inputs [N, D], as the kernel was trained on them."""
    with np.errstate(over="ignore"):
      x = self.preprocessor.transform(parsed).astype(self.config.dtype)
    self._require_finite(table, x, np.isfinite(x).all(axis=1))
    return x

  def _require_finite(
    self, table: pd.DataFrame, x: np.ndarray, finite: np.ndarray
  ) -> None:
    """Raises InputError at the first row of which `finite` [N] is false."""
    if finite.all():
      return
    row = int(np.argmin(finite))
    farthest = int(np.argmax(np.abs(x[row])))
    raise InputError(
      f"{place(table, row)}: its prediction is not finite; farthest from the training "
      f"rows is its input {self.preprocessor.input_names[farthest]!r}: correct it or "
      "drop that row"
    )


def from_result(
  experiment: Experiment,
  result: training.Result,
  calibrated: intervals.Calibration | None = None,
) -> Model:
  """The model of a training that was just done."""
  return Model(
    config=ml_collections.ConfigDict(experiment.config.to_dict()),
    preprocessor=experiment.preprocessor,
    state=result.state,
    client_names=experiment.client_names,
    columns=tuple(experiment.dataset.features.columns),
    records=tuple(result.history),
    scores=calibration.summarise(experiment, result, calibrated),
    calibration=calibrated,
  )


def rows_have_changed(folder: RunFolder) -> InputError:
  """The error of saving over a model that rows joined or left since training."""
  return InputError(
    f"rows have joined or left the model in {folder.path} since it was trained, which "
    "saving would undo: choose another folder."
  )


@dataclasses.dataclass(frozen=True)
class SavedRun:
  """A run's folder, from which a model was loaded."""

  path: str

  def save(self, workdir: str | os.PathLike[str]) -> None:
    """Copies the run to another folder; does nothing where that is its own."""
    source, target = RunFolder(self.path), RunFolder(workdir)
    if ledger_file.changes(target.posterior) not in (
      (),
      ledger_file.changes(source.posterior),
    ):
      raise rows_have_changed(target)
    source.copy_to(target)


def load(workdir: str | os.PathLike[str]) -> Model:
  """The model at the best validation round of the run in `workdir`.

  Raises:
    InputError: If the folder holds no run, or none with a sound checkpoint, or files
      that do not belong together.
  """
  folder = RunFolder(workdir)
  config, preprocessor = folder.config(), folder.preprocessing()
  names, num_rows = folder.clients()
  if not folder.checkpoints.is_dir():
    raise InputError(f"{workdir} holds no checkpoint: train first.")
  with precision.float64():
    like = prediction.state_shapes(config, preprocessor, len(names) or 1, num_rows)
    if folder.network.is_dir() and jax.tree.leaves(like.own):
      raise InputError(
        f"{workdir} is a coordinator's, and each site has a model of its own: load the "
        "folder 'model' in a site's."
      )
    check = functools.partial(seal.require, folder)
    checkpoints = Checkpoints(folder.checkpoints)
    saved = checkpoints.restore(like, check=check)
    if saved is None:
      raise InputError(f"{workdir} holds no sound checkpoint: train again.")
    history, summary = read_outcome(folder, config, saved.round)
    state = saved.best
    changes: Sequence[dict[str, Any]] = ()
    if folder.posterior.exists():
      ledger = ledger_file.read(folder.posterior)
      changes = ledger.changes
      if changes or summary:  # Before a run is finished, it may write another.
        kernel = checkpoints.kernel_digest(saved.round)
        membership.require_same_kernel(ledger.kernel, kernel, folder.posterior)
      if changes:
        state = jax.device_get(membership.with_posterior(state, ledger))
  return Model(
    config=config,
    preprocessor=preprocessor,
    state=state,
    client_names=names,
    columns=folder.feature_columns(),
    records=tuple(history),
    scores=summary,
    source=SavedRun(os.path.abspath(workdir)),
    calibration=calibration.read(folder, changes),
  )
