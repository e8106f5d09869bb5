"""Method `auto`: a few candidates are tried, and the best on held-out rows is taken.

A candidate is `fedbnr-ard` with sizes that fit the table, and its trial is its first
round. First the two readings of numeric inputs are compared, unless config.data.inputs
says which it is, then other kernels, if some are named, under the better of them. What
is chosen is a config like any other: it is trained, resumed, loaded and changed as if
it had been written by hand, and its training goes on from its trial. Scores are sums
over held-out rows, so that nothing leaves a client that a training would not send
anyway.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from fedbnr_jax import candidates
from fedbnr_jax.candidates import Choice, Trial
from fedbnr_jax.data import Dataset, Preprocessor
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import urk
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import processes, training
from fedbnr_jax.run.config import AUTO, base, get
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.program import Program
from fedbnr_jax.run.records import RunFolder
from fedbnr_jax.run.task import Task

METHOD = "fedbnr-ard"
# Beyond so many deviations a cell squashes the rest of its column, and a linear part
# multiplies it; held-out rows seldom show such a cell.
_FAR = 20.0
# Below so many held-out rows their error is mostly chance. The evidence of all rows,
# trained and held out, then chooses.
_ENOUGH = 100
# By so much, in units of Trial.score, standardised inputs must be better than scores to
# be taken: a row that lies alone may be far off with them, and held-out rows of which
# there are few seldom show it.
_MARGIN = 0.05
_START, _START_STEPS = 200, 50  # Inducing inputs, and steps, of the first round.
# Products of rows and squared inducing inputs that a step, and the last layer, may
# cost, and the most inducing inputs that they have.
_STEP_COST, _MOST = 4e9, 800
_LAYER_COST, _WIDEST = 1e11, 2000
_SMALL = 400  # Up to so many rows there are as many inducing inputs.
# A round of few inducing inputs, and one in which more go on from it: validation rows
# choose between them, because the evidence of more may fit training rows too well.
_MOST_ROUNDS = 2
_SECONDS = 20  # Within which no candidate is compiled and trained.
# With declared bounds a private release may follow, of which fewer features are better,
# and to which sizes that follow the number of rows would add what they are not to tell.
PRIVATE_METHOD = "fedbnr-ev"
# Fields that a user may expect to be read. Presets of the paper's data set others too.
_UNREAD = (
  *("kernel", "num_samples", "posterior_samples"),
  *("sparse.kernel", "sparse.start_samples", "sparse.start_steps"),
  *("sparse.num_samples", "sparse.posterior_samples"),
)
_UNREAD_OF_TABLES = ("noise", "learning_rate", "num_local_steps", "hidden_size")


class Candidate(NamedTuple):
  """What is tried: how inputs are read, and a kernel."""

  inputs: str
  kernel: str

  @property
  def name(self) -> str:
    return candidates.name(self.inputs, self.kernel)

  def config(self, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Writes the candidate into a copy of a config."""
    result = ml_collections.ConfigDict(config.to_dict())
    result.method = METHOD
    result.data.inputs = self.inputs
    result.sparse.kernel = self.kernel
    return result


# Builds the task of a config; what is odd about the data is said when one is trained.
Build = Callable[[ml_collections.ConfigDict], Task]
ProgramFor = Callable[[Any], Program]  # Gives the jitted program of such a task.


def of_rows(dataset: Dataset) -> Build:
  """Builds experiments of rows that are at hand."""

  def build(config: ml_collections.ConfigDict) -> Experiment:
    with warnings.catch_warnings(action="ignore"):
      return experiment_lib.build(config, dataset)

  return build


def choose(
  config: ml_collections.ConfigDict,
  build: Build,
  program_for: ProgramFor,
  trials: Sequence[Trial] = (),
  on_trial: Callable[[Trial], None] = lambda trial: None,
  on_begin: Callable[[str], None] = lambda name: None,
) -> Choice:
  """Tries candidates one after another, and returns the best as a config.

  Args:
    config: Its method is `auto`; config.auto says what is tried, and how long.
    build: Builds a task of the rows.
    program_for: Gives the program of a task.
    trials: Those of an earlier call that was stopped; they are not repeated.
    on_trial: Is called after each trial.
    on_begin: Is called with the name of each candidate before it is tried.

  Raises:
    InputError: If the config or the data cannot be used, or time does not suffice.
  """
  plain = check(config, build)
  if config.data.bounds:
    return Choice(_private(config), tuple(trials))
  num_rows, started = plain.counts.train, time.monotonic()
  first, *others = _listed(config.auto.kernels)
  readings = [config.data.inputs]
  if config.data.inputs == AUTO:
    readings = ["standard", "scores"]
  done = {trial.name: trial for trial in trials}
  begun: dict[str, training.Result] = {}

  def is_late() -> bool:
    passed = time.monotonic() - started
    longest = max((trial.seconds for trial in done.values()), default=0.0)
    return bool(config.auto.seconds and done and passed + longest > config.auto.seconds)

  def tried(candidate: Candidate) -> bool:
    """Sees that there is a trial of a candidate, unless time is up."""
    if candidate.name not in done:
      if processes.from_first(is_late()):
        return False
      on_begin(candidate.name)
      trial, result = _try(candidate, config, build, num_rows, program_for)
      done[candidate.name] = trial
      if result is not None:
        begun[candidate.name] = result
      on_trial(trial)
    return True

  if len(readings) == 2 and _has_far_cells(plain.preprocessor):
    readings = ["scores"]
  if len(readings) == 1 and not others:  # There is nothing to choose.
    only = Candidate(readings[0], first).config(config)
    return Choice(_sized(only, num_rows), tuple(done.values()))
  so_far = [c for c in (Candidate(one, first) for one in readings) if tried(c)]
  reading = _best(so_far, done).inputs
  so_far += [c for c in (Candidate(reading, one) for one in others) if tried(c)]
  best = _best(so_far, done)
  chosen = _sized(best.config(config), num_rows)
  return Choice(chosen, tuple(done.values()), begun.get(best.name))


def choose_in(
  folder: RunFolder,
  config: ml_collections.ConfigDict,
  build: Build,
  program_for: ProgramFor,
  on_begin: Callable[[str], None] = lambda name: None,
) -> Choice:
  """Chooses as `choose` does, and keeps each trial in the folder.

  Every process calls it; the first one reads and writes.
  """

  def read() -> dict[str, Any]:
    chosen, trials = candidates.read(config, folder)
    return candidates.content(config, trials, chosen)

  before = processes.from_first(processes.first_does(read))
  trials = [Trial(**trial) for trial in before["trials"]]
  if before["chosen"] is not None:
    return Choice(ml_collections.ConfigDict(before["chosen"]), tuple(trials))

  def write(chosen: ml_collections.ConfigDict | None) -> None:
    processes.first_does(lambda: candidates.write(folder, config, trials, chosen))

  def on_trial(trial: Trial) -> None:
    trials.append(trial)
    write(None)

  choice = choose(config, build, program_for, tuple(trials), on_trial, on_begin)
  write(choice.config)
  return choice


def check(config: ml_collections.ConfigDict, build: Build) -> Task:
  """Builds the first candidate with standardised inputs, before anything is tried.

  Raises:
    InputError: If it cannot do what the config asks for, or the data cannot be used.
  """
  check_fields(config)
  first, *_ = _listed(config.auto.kernels)
  plain = Candidate("standard", first).config(config)
  # Sizes follow from the rows, which are not counted yet.
  plain.sparse.start_samples = plain.sparse.posterior_samples = 0
  plain.sparse.num_samples = _START
  return build(plain)


def check_fields(config: ml_collections.ConfigDict) -> None:
  """Raises InputError for what `auto` cannot do, whatever the data is."""
  if config.num_seeds > 1:
    raise InputError(
      "method 'auto' chooses for one seed: leave config.num_seeds at 1, or train the "
      "seeds one after another, as launch.sweep does."
    )
  if config.compare_clients:
    raise InputError(
      "config.compare_clients trains every client alone by the method's own settings, "
      "which 'auto' has none of: choose a method, such as 'fedbnr-ev'."
    )
  usual, own_table = base(), config.data.source == "table"
  unread = (*_UNREAD, *(_UNREAD_OF_TABLES if own_table else ()))
  if config.data.bounds:  # The method that is then taken reads them.
    unread = tuple(name for name in unread if name.startswith("sparse."))
  for name in unread:
    if get(config, name) != get(usual, name):
      raise InputError(
        f"config.{name} is {get(config, name)!r}, but method 'auto' does not read it: "
        f"choose a method, such as {METHOD!r}; config.auto.kernels says what it tries."
      )
  for kernel in _listed(config.auto.kernels):
    urk.parts(kernel)
  if config.auto.seconds and not config.auto.seconds >= _SECONDS:
    raise InputError(
      f"config.auto.seconds is {config.auto.seconds:g}, too few for one candidate: "
      f"give at least {_SECONDS}, or 0 for no limit."
    )


def _private(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Takes the method for data with declared bounds; nothing is tried."""
  result = ml_collections.ConfigDict(config.to_dict())
  result.method = PRIVATE_METHOD
  return result


def _try(
  candidate: Candidate,
  config: ml_collections.ConfigDict,
  build: Build,
  num_rows: int,
  program_for: ProgramFor,
) -> tuple[Trial, training.Result | None]:
  """Trains a candidate for its first round; returns its score and its training.

  Where that diverged, there is neither.
  """
  started = time.monotonic()
  trial = _sized(candidate.config(config), num_rows)
  trial.num_rounds = 1
  task = build(trial)
  try:
    result = training.train(task, program_for(task))
  except training.NonFiniteError:
    seconds = time.monotonic() - started
    return Trial(candidate.name, None, None, None, None, seconds), None
  record = result.history[-1]
  seconds = time.monotonic() - started
  rmse, val_nll, train_nll = (
    float(record[name]) for name in ("val_rmse", "val_nll", "train_nll")
  )
  score = math.log(max(rmse, 1e-300))
  num_held_out = task.counts.validation
  if num_held_out < _ENOUGH:
    # log p(y of all) = log p(y trained on) + log p(y held out | y trained on), but that
    # held-out rows have scaled their own error bars a little.
    total = num_rows * train_nll + num_held_out * val_nll
    score = total / (num_rows + num_held_out)
  return Trial(candidate.name, score, rmse, val_nll, train_nll, seconds), result


def _best(candidates: Sequence[Candidate], done: dict[str, Trial]) -> Candidate:
  """Finds the candidate of the lowest score, with an advantage for scores.

  Raises:
    InputError: If no candidate has one.
  """
  scored = [c for c in candidates if done[c.name].score is not None]
  if not scored:
    raise InputError(
      "method 'auto': every candidate diverged: look at the targets, or "
      "choose another method."
    )

  def by(candidate: Candidate) -> float:
    score = done[candidate.name].score or 0.0
    return score - _MARGIN if candidate.inputs == "scores" else score

  return min(scored, key=by)


def _listed(text: str) -> list[str]:
  """Splits a list of names at commas.

  Raises:
    InputError: If it is empty.
  """
  names = [name.strip() for name in text.split(",") if name.strip()]
  if not names:
    raise InputError("config.auto.kernels names no kernel: name at least one.")
  return names


def _has_far_cells(preprocessor: Preprocessor) -> bool:
  """Whether an input of standardised training rows lies far from all others."""
  mean, std = np.array(preprocessor.input_mean), np.array(preprocessor.input_std)
  # Indicators are 0 or 1; numbers have a range.
  ends = np.array([np.zeros_like(mean), np.ones_like(mean)])
  if preprocessor.numeric_ranges:
    ends[:, : len(preprocessor.numeric_columns)] = np.transpose(
      preprocessor.numeric_ranges
    )
  return bool(np.max(np.abs(ends - mean) / std) > _FAR)


def _sized(
  config: ml_collections.ConfigDict, num_rows: int
) -> ml_collections.ConfigDict:
  """Gives the chosen config sizes that fit the table."""

  def affordable(cost: float, least: int, most: int) -> int:
    wanted = min(most, max(least, int((cost / num_rows) ** 0.5)))
    return max(2, min(wanted, num_rows))

  if config.num_rounds == base().num_rounds:  # Nobody has asked for more or fewer.
    config.num_rounds = _MOST_ROUNDS
  sparse = config.sparse
  if num_rows <= _SMALL:
    sparse.start_samples = sparse.posterior_samples = 0
    sparse.num_samples, sparse.num_steps = max(2, num_rows), _START_STEPS
    return config
  sparse.start_samples = _START
  sparse.start_steps = _START_STEPS
  sparse.num_samples = affordable(_STEP_COST, _START, _MOST)
  sparse.posterior_samples = affordable(_LAYER_COST, sparse.num_samples, _WIDEST)
  return config
