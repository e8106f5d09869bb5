"""Trainings over real sites without each fold of their rows, to calibrate intervals.

Each site deals its own training rows into folds, by its own seed. All leave out the
fold of the same number, train for as many rounds as the best one took, and then count
by how much the rows that were left out are off. What follows of that is told in
`fedbnr_jax.calibration`. A run that was stopped goes on with the round it was in.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import ml_collections
import numpy as np

from fedbnr_jax import calibration, files
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import conformal
from fedbnr_jax.intervals import Calibration
from fedbnr_jax.network.preparation import NetworkTask
from fedbnr_jax.network.question import Question
from fedbnr_jax.network.rounds import model_arrays, place_of, program_of
from fedbnr_jax.network.site import training_digest
from fedbnr_jax.network.sums import END, Sums
from fedbnr_jax.run import training
from fedbnr_jax.run.records import RunFolder, as_json

_NUM_BINS = len(conformal.EDGES) + 1
_KNOWN, _DIVERGED = "counts", "diverged"  # What the file of a fold has, one of them.
OnFold = Callable[[int, int], None]  # Gets the number of a fold, from 1, and of all.


def calibrate(
  task: NetworkTask,
  sums: Sums,
  result: training.Result,
  folder: RunFolder,
  on_fold: OnFold | None = None,
) -> Calibration | None:
  """Calibrates a model that was just trained, if folds were agreed on.

  Where a training without a fold diverges, there is a warning, and no calibration.

  Args:
    task, result: A training and what it left.
    sums: Reaches the sites.
    folder: Of the run; what is known of each fold is kept in it.
    on_fold: Is called before each training without a fold.

  Raises:
    InputError: If fewer sites answer than was agreed on; the same command goes on.
  """
  if not task.num_folds:
    return None
  counts = np.zeros(_NUM_BINS, np.int64)
  own = folder.network / "folds"
  for fold in range(task.num_folds):
    path = own / f"{fold + 1}.json"
    if not path.exists():
      if on_fold is not None:
        on_fold(fold + 1, task.num_folds)
      # Of a training that diverges too: one that is resumed does not try it again.
      told = _tell(task, sums, result.best_round, fold, own / str(fold + 1))
      files.write_json(path, told)
    shutil.rmtree(own / str(fold + 1), ignore_errors=True)
    found = _read(path)
    if isinstance(found, str):
      calibration.warn_of_diverged(task.num_folds, found)
      return None
    counts += found
  return Calibration(counts, "folds")


def _tell(
  task: NetworkTask, sums: Sums, num_rounds: int, fold: int, path: pathlib.Path
) -> dict[str, Any]:
  """Trains without a fold; returns what is kept of that."""
  try:
    counts = _counts(task, sums, num_rounds, fold, path)
  except training.NonFiniteError as error:
    return {_DIVERGED: str(error)}
  return {_KNOWN: counts.astype(int).tolist()}


def _counts(
  task: NetworkTask, sums: Sums, num_rounds: int, fold: int, path: pathlib.Path
) -> np.ndarray:
  """Trains without a fold; returns counts [B + 1] of its rows' scores."""
  without = _without(task, sums, num_rounds, fold)
  trained = training.train(without, program_of(without, sums), RunFolder(path))
  sums.begin_round(without.name, END)
  model = model_arrays(without, trained.state)
  place = place_of(without, trained.best_round)
  told = sums.tree(Question("left-out", without.name, 0, (), model, place))
  counts: np.ndarray = told["left-out"]
  return counts


def _without(task: NetworkTask, sums: Sums, num_rounds: int, fold: int) -> NetworkTask:
  """Makes the task of a training without a fold, and tells the sites of it.

  Preprocessing stays as it is, and so do shapes: nothing is compiled again.
  """
  config = ml_collections.ConfigDict(task.config.to_dict())
  own, record = as_json(config), task.preprocessor.to_json()
  name = training_digest(own, record, fold)
  sums.members.begin(name, own, record, fold)
  sums.answers.begin_training(name, config, task.preprocessor, fold)
  config.num_rounds = num_rounds  # Rounds after the best one are not in the model.
  return dataclasses.replace(
    task,
    config=ml_collections.FrozenConfigDict(config),
    name=name,
    without=f"fold {fold + 1}",
  )


def _read(path: pathlib.Path) -> np.ndarray | str:
  """Reads the counts [B + 1] of a fold, or why there are none.

  Raises:
    InputError: If the file is damaged.
  """
  content = files.read_object(path)
  if isinstance(content.get(_DIVERGED), str):
    return str(content[_DIVERGED])
  try:
    counts = np.asarray(content[_KNOWN], np.int64)
    if counts.shape != (_NUM_BINS,) or counts.min() < 0:
      raise ValueError("it has no count for each bin")
  except (KeyError, TypeError, ValueError) as error:
    raise InputError(
      f"{path} is damaged ({error}): remove it, and this fold is done again."
    ) from error
  return counts
