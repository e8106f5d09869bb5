"""Calibrates a trained model: rows that it has not seen are scored and counted.

These rows were set aside before training, so that the promise of `gp/conformal.py`
holds. Where there are too few to set aside, the training is repeated without each fold
of its rows, up to the round that was its best, and each fold is scored by the model
that has not seen it. What follows is
then true of the models of the folds, and of the one that was trained on all rows only
as far as it is like them; it is more accurate, if anything. Inputs are standardised,
and inducing inputs drawn, by all training rows.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_collections
import numpy as np

from fedbnr_jax import files, prediction
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.federation import Rows
from fedbnr_jax.gp import conformal
from fedbnr_jax.intervals import Calibration, gaussian_reach
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import journal, seal, training
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.program import Program
from fedbnr_jax.run.records import RunFolder
from fedbnr_jax.run.seal import Seal
from fedbnr_jax.tags import dataset_tags, paired

Changes = Sequence[dict[str, Any]]
OnFold = Callable[[int, int], None]  # Gets the number of a fold, from 1, and of all.


def of_training(
  experiment: Experiment,
  program: Program,
  result: training.Result,
  on_fold: OnFold | None = None,
) -> Calibration | None:
  """Calibrates a model that was just trained, if its config asks for that.

  Every process of the training calls it. Where a training without a fold diverges,
  there is a warning, and no calibration.

  Args:
    experiment: The training's.
    program: The training's.
    result: What the training has reached.
    on_fold: Is called before each training without a fold.
  """
  by = "rows" if len(experiment.calibration_rows) else "folds"
  if by == "folds" and not experiment.num_folds:
    return None
  try:
    messages = [
      conformal.count(one) for one in scores(experiment, program, result, on_fold)
    ]
  except training.NonFiniteError as error:
    warn_of_diverged(experiment.num_folds, error)
    return None
  return Calibration(np.sum(messages, axis=0), by)


def warn_of_diverged(num_folds: int, error: object) -> None:
  """Warns that a training without a fold has failed, and so calibrates nothing."""
  warnings.warn(
    "there are no conformal intervals: in a training without one of "
    f"{num_folds} folds, {error}",
    stacklevel=3,
  )


def scores(
  experiment: Experiment,
  program: Program,
  result: training.Result,
  on_fold: OnFold | None = None,
) -> Iterator[np.ndarray]:
  """Yields the scores [n] that never leave a client, of rows that are to be counted.

  Raises:
    NonFiniteError: If a training without a fold diverges.
  """
  if len(experiment.calibration_rows):
    yield _scores(experiment, result.state, experiment.calibration_rows)
    return
  folds = experiment.folds()
  # Rounds after the best one are not in the model: folds do without them.
  config = ml_collections.ConfigDict(experiment.config.to_dict())
  config.num_rounds = result.best_round
  shorter = dataclasses.replace(
    experiment, config=ml_collections.FrozenConfigDict(config)
  )
  for number in range(experiment.num_folds):
    if on_fold is not None:
      on_fold(number + 1, experiment.num_folds)
    inside = [fold == number for fold in folds]
    trained = training.train(_without(shorter, inside), program)
    for rows, chosen in zip(experiment.client_rows, inside, strict=True):
      yield _scores(experiment, trained.state, rows[chosen])


def summarise(
  experiment: Experiment, result: training.Result, calibrated: Calibration | None
) -> dict[str, Any]:
  """The fields of `summary.json`, with what test rows tell of conformal intervals."""
  summary = journal.summarise(experiment, result.history)
  if calibrated is None:
    return summary

  def covered(reach: float) -> float:
    off = _scores(experiment, result.state, experiment.split.test)
    return float(np.mean(off <= reach))

  return summary | of_intervals(calibrated, covered)


def of_intervals(
  calibrated: Calibration, covered: Callable[[float], float]
) -> dict[str, Any]:
  """The fields of `summary.json` that tell of conformal intervals.

  Args:
    calibrated: What they rest on.
    covered: Gives the share of test rows that are off by so many deviations at most.
  """
  told = {
    "calibrated_by": calibrated.by,
    "calibration_rows": calibrated.num_rows,
    # Of Gaussian intervals.
    "calibration_coverage95": conformal.share_within(
      calibrated.counts, gaussian_reach(0.95)
    ),
  }
  try:
    reach = calibrated.threshold(0.95)
  except InputError:  # There are too few rows, as whoever predicts is told.
    return told
  return told | {"test_coverage95_conformal": covered(reach)}


def _without(experiment: Experiment, left_out: Sequence[np.ndarray]) -> Experiment:
  """The experiment without some rows of each client.

  Its arrays keep their shapes, so that nothing is compiled again.
  """
  clients = experiment.federation.clients
  mask = np.array(clients.mask)
  for number, chosen in enumerate(left_out):
    mask[number, : len(chosen)] &= ~chosen
  arrays: Any = (
    np.where(mask[..., None], clients.x, np.zeros_like(clients.x)),
    np.where(mask, clients.y, np.zeros_like(clients.y)),
    mask,
  )
  federation = experiment.federation.replace(clients=Rows(*arrays))
  return dataclasses.replace(experiment, federation=federation)


def _scores(experiment: Experiment, state: Any, rows: np.ndarray) -> np.ndarray:
  """Scores rows of the dataset [n] by a model."""
  if not len(rows):
    return np.zeros(0)
  scaler, dataset = experiment.preprocessor, experiment.dataset
  with warnings.catch_warnings(action="ignore"):  # Given when the training started.
    x = scaler.transform(dataset.features.iloc[rows])
  mean, variance = prediction.predict(
    experiment.config, state, x.astype(experiment.config.dtype)
  )
  # As they are: rows to learn from are clipped to bounds, new rows will not be.
  targets = scaler.standardise(dataset.targets[rows], clip=False)
  return conformal.scores(mean, variance, targets)


def again(
  folder: RunFolder,
  config: ml_collections.ConfigDict,
  state: Any,
  held_out: np.ndarray,
) -> Calibration | None:
  """Calibrates a run's model after a change, by the rows that were set aside for it.

  Args:
    folder: The run's.
    config: The run's.
    state: The model's, after the change.
    held_out: [m] tags of the rows that were held out and have not left since.

  Returns:
    None if no rows were set aside, or they are not where the training read them.
  """
  try:
    with warnings.catch_warnings(action="ignore"):
      dataset = experiment_lib.load_dataset(config)
      folder.check_data(dataset)
      experiment = experiment_lib.build(config, dataset)
  except InputError:  # The table has moved or changed.
    return None
  rows = experiment.calibration_rows
  rows = rows[paired(dataset_tags(experiment)[rows], held_out)]
  if not len(rows):
    return None
  return Calibration(conformal.count(_scores(experiment, state, rows)), "rows")


# ------------------------------------------------------------------------- its file


def write(
  folder: RunFolder,
  calibration: Calibration,
  sealed: Seal,
  number: int,
  changes: Changes = (),
) -> None:
  """Writes `calibration.json`.

  Args:
    folder: The run's.
    calibration: What it holds.
    sealed: Tells which files of the folder it belongs with.
    number: Rounds of the run.
    changes: The ledger's: by which rows joined or left the model that is calibrated.
  """
  occupied = np.flatnonzero(calibration.counts)
  content = {
    "by": calibration.by,
    "rows": calibration.num_rows,
    # By number of the bin; see gp/conformal.py.
    "counts": {str(index): int(calibration.counts[index]) for index in occupied},
    "round": number,
    "changes": seal.of_changes(changes),
    "seal": sealed._asdict(),
  }
  files.write_json(folder.calibration, content)


def read(folder: RunFolder, changes: Changes = ()) -> Calibration | None:
  """Reads `calibration.json`, if there is one.

  Args:
    folder: The run's.
    changes: By which rows have joined or left its model.

  Raises:
    InputError: If it is damaged, or belongs to another run.
  """
  path = folder.calibration
  if not path.exists():
    return None
  content = files.read_object(path)
  remedy = "remove it and do without conformal intervals"
  try:
    counts = np.zeros(len(conformal.EDGES) + 1, np.int64)
    for index, number in content["counts"].items():
      counts[int(index)] = number
    found = Calibration(counts, content["by"])
    if counts.min() < 0 or found.num_rows != content["rows"]:
      raise ValueError("its counts do not add up")
    sealed, number = Seal(**content["seal"]), int(content["round"])
    outdated = content["changes"] != seal.of_changes(changes)
  except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
    raise InputError(
      f"{path} is damaged ({error}): restore it, or {remedy}."
    ) from error
  seal.require_same_run(folder, path, number, sealed, remedy)
  return found._replace(outdated=outdated)
