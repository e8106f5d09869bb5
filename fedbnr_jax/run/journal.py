"""What one training has reached: records, the best round, checkpoints, a summary."""

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import ml_collections
import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.state import RoundInfo, State
from fedbnr_jax.run import processes
from fedbnr_jax.run import seal as seal_lib
from fedbnr_jax.run.checkpoints import Checkpoints, Content, Saved
from fedbnr_jax.run.coverage import exact_range
from fedbnr_jax.run.program import Scores
from fedbnr_jax.run.records import Record, RunFolder
from fedbnr_jax.run.seal import Seal
from fedbnr_jax.run.summary import (
  IN,
  TEST_SCORES,
  VALIDATION_SCORES,
  best_round,
  read_history,
  read_outcome,
  scores,
)
from fedbnr_jax.run.task import Task


class NonFiniteError(ArithmeticError):
  """A loss or a score is NaN or infinite; the last good checkpoint stays."""


class Journal:
  """The records of one training, its best state, and its folder."""

  def __init__(self, task: Task, folder: RunFolder | None) -> None:
    self.task = task
    self.history: list[Record] = []
    self.best: Any = None
    self.last: Any = None
    self.failure: NonFiniteError | None = None
    self._folder = folder
    if folder:
      folder.claim_task(task)
    files = seal_lib.of_files(folder) if folder else {}
    self._seal = Seal(files, seal_lib.of_history([]))
    self._checkpoints = Checkpoints(folder.checkpoints) if folder else None

  @property
  def finished(self) -> bool:
    """Whether no more rounds are to come."""
    config = self.task.config
    return self.failure is not None or finished(
      self.history, config.num_rounds, self.task.patience, self.score
    )

  @property
  def score(self) -> str:
    """The column of the records that chooses the best round."""
    return self.task.stopping_score

  @property
  def key(self) -> chex.PRNGKey:
    """The random key of the next round."""
    return jax.random.fold_in(self.task.key_rounds, len(self.history) + 1)

  def resume(self, state: Any) -> Any:
    """Takes up what the folder holds; returns the state to go on from."""
    if self.task.algorithm.placement.mesh is None:
      saved = self._restored(state)
    else:
      saved = processes.first_does(lambda: self._restored(state))
    state, self.best = (saved.state, saved.best) if saved else (state, state)
    if self.task.algorithm.placement.mesh is not None:
      # Processes that write no files follow the one that does.
      self.history = processes.from_first(self.history)
      state, self.best = processes.arrays_from_first((state, self.best))
    self.last = state
    return state

  def _restored(self, state: Any) -> Saved | None:
    """The newest sound checkpoint of the folder; the history goes as far as it."""
    if not self._folder or not self._checkpoints:
      return None
    self.history = read_history(self._folder, self.score)
    saved = self._checkpoints.restore(
      state, len(self.history), functools.partial(seal_lib.require, self._folder)
    )
    if saved is None and not self._checkpoints.is_empty():
      raise InputError(
        f"no checkpoint in {self._folder.checkpoints} is sound and goes with "
        f"metrics.csv: to start from round 1, remove {self._folder.path}."
      )
    self.history = self.history[: saved.round] if saved else []
    self._checkpoints.discard_after(len(self.history))
    self._folder.keep_metrics(self.history)
    self._seal = self._seal._replace(history=seal_lib.of_history(self.history))
    return saved

  def note(
    self,
    state: Any,
    info: RoundInfo,
    validation: Scores,
    test: Scores,
    seconds: float,
    on_round: Callable[[Record], None],
  ) -> None:
    """Notes a round; all arrays are on the host."""
    number = len(self.history) + 1
    try:
      _check_finite(number, self.task, info, validation, test)
    except NonFiniteError as error:
      self.failure = error
      return
    record = _record(number, self.task, state, info, validation, test)
    record["seconds"] = seconds
    best = best_round([*self.history, record], self.score) == number
    self.keep([record], state, state if best else self.best, on_round)

  def keep(
    self,
    records: list[Record],
    last: Any,
    best: Any,
    on_round: Callable[[Record], None],
  ) -> None:
    """Keeps the records of the next rounds, also of rounds that were done elsewhere.

    Args:
      records: One a round.
      last: The state after them.
      best: The state after the best round so far.
      on_round: Is called with each record.
    """
    self.history += records
    self.last, self.best = last, best
    if self._folder and self._checkpoints:
      # The rows first: a row without a checkpoint is dropped and made anew, but a
      # checkpoint without its row would leave a gap.
      for record in records:
        self._folder.append_metrics(record)
        history = seal_lib.extended(self._seal.history, record)
        self._seal = self._seal._replace(history=history)
      self._checkpoints.save(Saved(len(self.history), last, best), self._seal)
    for record in records:
      on_round(record)


def finished(
  history: list[Record], num_rounds: int, patience: int, score: str = "val_rmse"
) -> bool:
  """Whether the rounds are used up or validation has stopped improving.

  Rounds in which nobody answered, and so nothing changed, do not try its patience; and
  without any patience, the first answer is the last.
  """
  if len(history) >= num_rounds:
    return True
  if not history:
    return False
  since = history[best_round(history, score) :]
  anybody = any(record["clients_answered"] for record in history)
  return anybody and sum(r["clients_answered"] > 0 for r in since) >= patience


def summarise(task: Task, history: list[Record]) -> dict[str, Any]:
  """The fields of `summary.json`."""
  unit = "std of target" if task.table.standardised_error else "target"
  known = scores(history, task.stopping_score)
  low, high = exact_range(known["test_coverage95"], task.counts.test)
  return {
    "dataset": task.table.name,
    "method": task.config.method,
    "num_clients": task.num_clients,
    "seed": task.config.seed,
    "train_rows": task.counts.train,
    "validation_rows": task.counts.validation,
    "test_rows": task.counts.test,
    "rmse_unit": unit,
    **known,
    "test_coverage95_low": low,
    "test_coverage95_high": high,
  }


def require_own_files(
  folder: RunFolder, config: ml_collections.ConfigDict
) -> Content | None:
  """Raises InputError unless the files of a finished run belong together.

  The newest checkpoint vouches for them by its note, as when the model is loaded. A
  folder without checkpoints passes: who wants the scores alone may delete them.

  Args:
    folder: The run's.
    config: Of the run, and of no other seed.

  Returns:
    The checkpoint that vouches for them, of its arrays the kernel; None without one.
  """
  if not folder.checkpoints.is_dir():
    return None
  checkpoints = Checkpoints(folder.checkpoints)
  if checkpoints.is_empty():
    return None
  folder.check(config)
  found = checkpoints.newest_kernel()
  if found is None:
    raise InputError(
      f"no checkpoint in {folder.checkpoints} is sound: restore one; or to start from "
      f"round 1, remove {folder.path}."
    )
  seal_lib.require(folder, found.round, found.seal)
  read_outcome(folder, config, found.round)
  return found


def in_unit(scores: dict[str, Any], scale: float) -> dict[str, float]:
  """Converts scores of standardised targets to a unit of 1/scale deviations."""
  converted = {name: float(value) for name, value in scores.items()}
  for name in ("rmse", "crps"):
    converted[name] *= scale
  converted["nll"] += math.log(scale)
  return converted


def _record(
  number: int,
  task: Task,
  state: State,
  info: RoundInfo,
  validation: Scores,
  test: Scores,
) -> Record:
  scale = task.error_scale
  noise_std, prior_std = task.algorithm.scales(state)
  in_validation, in_test = in_unit(validation, scale), in_unit(test, scale)
  record: Record = {
    "round": number,
    "train_nll": float(info.train_nll) + math.log(scale),
  }
  record |= {f"val_{name}": in_validation[name] for name in VALIDATION_SCORES}
  record |= {f"test_{name}": in_test[name] for name in TEST_SCORES}
  if task.notes_clients:
    pairs = zip(task.client_names, info.answered, strict=True)
    record |= {f"{IN}{name}": int(answered) for name, answered in pairs}
  return record | {
    "noise_std": float(noise_std) * scale,
    "prior_std": float(prior_std) * scale,
    "clients_answered": int(np.sum(info.answered)),
    "clients_in_posterior": int(state.server.num_clients),
    "floats_up": int(info.floats_up),
    "floats_down": int(info.floats_down),
  }


def _check_finite(
  number: int,
  task: Task,
  info: RoundInfo,
  validation: Scores,
  test: Scores,
) -> None:
  bad = np.zeros(0, int)
  if not isinstance(info.client_loss, tuple):  # Else reports stay with the clients.
    bad = np.flatnonzero(info.answered & ~np.isfinite(info.client_loss))
  if bad.size:
    raise NonFiniteError(
      f"round {number}: the loss of {task.client_names[bad[0]]} is not finite "
      f"({bad.size} of {np.sum(info.answered)} clients): try "
      f"{task.algorithm.remedy}. The last good checkpoint is kept."
    )
  for name, value in (
    *validation.items(),
    *test.items(),
    ("train_nll", info.train_nll),
  ):
    if not np.isfinite(value):
      raise NonFiniteError(
        f"round {number}: {name} is not finite: try "
        f"{task.algorithm.remedy}. The last good checkpoint is kept."
      )
