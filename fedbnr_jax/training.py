"""The host loop: rounds until validation stops improving, records, checkpoints."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedbnr_jax import metrics
from fedbnr_jax.algorithms import RoundInfo, ServerState
from fedbnr_jax.checkpoints import Checkpoints, Saved
from fedbnr_jax.errors import InputError
from fedbnr_jax.experiment import EvaluationSet, Experiment
from fedbnr_jax.federation import Federation
from fedbnr_jax.records import Record, RunFolder

Scores = dict[str, jax.Array]
Step = Callable[
  [chex.PRNGKey, ServerState, Federation, EvaluationSet, EvaluationSet],
  tuple[ServerState, RoundInfo, Scores, Scores],
]

_TEST_SCORES = ("rmse", "ece", "mce", "bri", "nll", "crps", "coverage95", "ece10")
_VALIDATION_SCORES = ("rmse", "nll", "ece")


class NonFiniteError(ArithmeticError):
  """A loss or a score is NaN or infinite; the last good checkpoint stays."""


@dataclasses.dataclass(frozen=True)
class Result:
  """What a training leaves behind."""

  state: Any  # Server state at the best validation round.
  history: list[Record]  # One record a round, in the target's unit.

  @property
  def best_round(self) -> int:
    return best_round(self.history)

  @property
  def best(self) -> Record:
    return self.history[self.best_round - 1]


class Program(NamedTuple):
  """What runs on the device: pure functions, for the caller to jit."""

  init: Callable[[chex.PRNGKey, Federation], ServerState]
  step: Step  # A round and the scores after it, in one.
  predict: Callable[[ServerState, jax.Array], tuple[jax.Array, jax.Array]]


def make_program(experiment: Experiment) -> Program:
  """The device side of an experiment, not jitted."""
  algorithm = experiment.algorithm

  def score(state: ServerState, rows: EvaluationSet) -> Scores:
    mean, variance = algorithm.predict(state, rows.x)
    return metrics.evaluate(mean, variance, rows.y)

  def step(
    key: chex.PRNGKey,
    state: ServerState,
    federation: Federation,
    validation: EvaluationSet,
    test: EvaluationSet,
  ) -> tuple[ServerState, RoundInfo, Scores, Scores]:
    state, info = algorithm.round(key, state, federation)
    return state, info, score(state, validation), score(state, test)

  return Program(algorithm.init, step, algorithm.predict)


def jit(program: Program) -> Program:
  """The same program compiled; the step takes over the memory of the old state."""
  return Program(
    init=jax.jit(program.init),
    step=jax.jit(program.step, donate_argnums=1),
    predict=jax.jit(program.predict),
  )


def train(
  experiment: Experiment,
  program: Program,
  folder: RunFolder | None = None,
  on_round: Callable[[Record], None] | None = None,
) -> Result:
  """Runs rounds until `patience` of them bring no better validation RMSE.

  Args:
    experiment: From `experiment.build`.
    program: `jit(make_program(experiment))`.
    folder: Where records and checkpoints go, and where a stopped run is taken up
      again, to the same bits as if it had not stopped; in memory only without it.
    on_round: Called with every new record, for a progress display.

  Raises:
    NonFiniteError: If a loss or score is not finite.
  """
  checkpoints = Checkpoints(folder.checkpoints) if folder else None
  try:
    return _loop(experiment, program, folder, checkpoints, on_round or (lambda _: None))
  finally:
    if checkpoints:
      checkpoints.close()


def _loop(
  experiment: Experiment,
  program: Program,
  folder: RunFolder | None,
  checkpoints: Checkpoints | None,
  on_round: Callable[[Record], None],
) -> Result:
  config = experiment.config
  state = program.init(experiment.key_init, experiment.federation)
  best, history = state, list[Record]()
  if folder and checkpoints:
    state, best, history = _resume(folder, checkpoints, state)
  while not finished(history, config.num_rounds, config.patience):
    number = len(history) + 1
    start = time.perf_counter()
    state, info, validation, test = program.step(
      jax.random.fold_in(experiment.key_rounds, number),
      state,
      experiment.federation,
      experiment.validation,
      experiment.test,
    )
    info, validation, test = jax.device_get((info, validation, test))
    _check_finite(number, experiment, info, validation, test)
    record = _record(number, experiment, state, info, validation, test)
    record["seconds"] = time.perf_counter() - start
    history.append(record)
    if best_round(history) == number:
      # A copy on the host: the step may donate, and so overwrite, the state.
      best = jax.tree.map(np.array, state)
    if folder and checkpoints:
      # The row first: a row without a checkpoint is dropped and made anew, but a
      # checkpoint without its row would leave a gap.
      folder.append_metrics(record)
      checkpoints.save(Saved(number, state, best))
    on_round(record)
  return Result(best, history)


def _resume(
  folder: RunFolder, checkpoints: Checkpoints, state: ServerState
) -> tuple[Any, Any, list[Record]]:
  """The newest checkpoint whose rounds are all recorded, or the start."""
  history = folder.metrics()
  saved = checkpoints.restore(like=state, max_round=len(history))
  if saved is None and not checkpoints.is_empty():
    raise InputError(
      f"no checkpoint in {folder.checkpoints} is sound and goes with metrics.csv: to "
      f"start from round 1, remove {folder.path}."
    )
  history = history[: saved.round] if saved else []
  checkpoints.discard_after(len(history))
  folder.keep_metrics(history)
  if saved is None:
    return state, state, history
  return jax.tree.map(jnp.array, saved.state), saved.best, history


def finished(history: list[Record], num_rounds: int, patience: int) -> bool:
  """Whether the rounds are used up or validation has stopped improving."""
  return len(history) >= num_rounds or (
    len(history) > 0 and len(history) - best_round(history) >= patience
  )


def best_round(history: list[Record]) -> int:
  """The first round, counted from 1, with the lowest validation RMSE."""
  return int(np.argmin([record["val_rmse"] for record in history])) + 1


def summarise(experiment: Experiment, history: list[Record]) -> dict[str, Any]:
  """The fields of `summary.json`."""
  config = experiment.config
  number = best_round(history)
  best = history[number - 1]
  summary: dict[str, Any] = {
    "dataset": experiment.dataset.name,
    "method": config.method,
    "num_clients": experiment.num_clients,
    "seed": config.seed,
    "rounds": len(history),
    "best_round": number,
    "val_rmse": best["val_rmse"],
    "test_rmse": best["test_rmse"],
    "min_test_rmse": min(record["test_rmse"] for record in history),
  }
  for name in _TEST_SCORES[1:]:
    summary[f"test_{name}"] = best[f"test_{name}"]
  summary |= {
    "noise_std": best["noise_std"],
    "prior_std": best["prior_std"],
    "rmse_unit": "std of target" if experiment.dataset.standardised_error else "target",
    "floats_up": sum(record["floats_up"] for record in history),
    "floats_down": sum(record["floats_down"] for record in history),
    "seconds": sum(record["seconds"] for record in history),
  }
  return summary


def in_unit(scores: dict[str, Any], scale: float) -> dict[str, float]:
  """Scores of standardised targets, told in a unit of 1/scale standard deviations."""
  told = {name: float(value) for name, value in scores.items()}
  for name in ("rmse", "crps"):
    told[name] *= scale
  told["nll"] += math.log(scale)
  return told


def _record(
  number: int,
  experiment: Experiment,
  state: ServerState,
  info: RoundInfo,
  validation: Scores,
  test: Scores,
) -> Record:
  scale = experiment.error_scale
  told_validation, told_test = in_unit(validation, scale), in_unit(test, scale)
  record: Record = {
    "round": number,
    "train_nll": float(info.train_nll) + math.log(scale),
  }
  record |= {f"val_{name}": told_validation[name] for name in _VALIDATION_SCORES}
  record |= {f"test_{name}": told_test[name] for name in _TEST_SCORES}
  return record | {
    "noise_std": float(state.posterior.noise_std) * scale,
    "prior_std": float(state.posterior.prior_std) * scale,
    "floats_up": int(info.floats_up),
    "floats_down": int(info.floats_down),
  }


def _check_finite(
  number: int,
  experiment: Experiment,
  info: RoundInfo,
  validation: Scores,
  test: Scores,
) -> None:
  bad = np.flatnonzero(~np.isfinite(info.client_loss))
  if bad.size:
    raise NonFiniteError(
      f"round {number}: the loss of {experiment.client_names[bad[0]]} is not finite "
      f"({bad.size} of {len(info.client_loss)} clients): try a smaller learning_rate "
      "or a larger min_noise_std. The last good checkpoint is kept."
    )
  for name, value in (
    *validation.items(),
    *test.items(),
    ("train_nll", info.train_nll),
  ):
    if not np.isfinite(value):
      raise NonFiniteError(
        f"round {number}: {name} of the global model is not finite: try a smaller "
        "learning_rate or a larger min_noise_std. The last good checkpoint is kept."
      )
