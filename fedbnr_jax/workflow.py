"""A whole run: claim its folder, train, write figures, ledger and summary."""

import contextlib
import functools
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import ml_collections

from fedbnr_jax import (
  auto,
  calibration,
  candidates,
  ledger_file,
  membership,
  precision,
  run_files,
)
from fedbnr_jax.candidates import Choice, Trial
from fedbnr_jax.data import Dataset
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.intervals import Calibration
from fedbnr_jax.lock import alone_in
from fedbnr_jax.model import rows_have_changed
from fedbnr_jax.prediction import method_key
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import config_checks, journal, processes, seal, training
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run.checkpoints import Checkpoints, Saved, kernel_digest
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.program import Program, make_batched_program, make_program
from fedbnr_jax.run.records import Record, RunFolder, as_json
from fedbnr_jax.run.task import Task


class Progress(Protocol):
  """What watches a run, such as a progress bar."""

  def trying(self, name: str) -> None:
    """Takes notice that method `auto` tries a candidate of this name."""

  def start(self, task: Task, rounds_done: int, num_runs: int) -> None:
    """Takes notice that rounds begin; `rounds_done` were done by an earlier start."""

  def update(self, record: Record) -> None:
    """Takes notice of a round, with its row of `metrics.csv`."""

  def calibrating(self, fold: int, num_folds: int) -> None:
    """Takes notice that a training without a fold begins, to calibrate intervals."""

  def close(self) -> None:
    """Takes notice that the training has ended, well or not."""


class Watchers:
  """Several that watch a run as one."""

  def __init__(self, *watchers: Progress) -> None:
    self._watchers = watchers

  def trying(self, name: str) -> None:
    for one in self._watchers:
      one.trying(name)

  def start(self, task: Task, rounds_done: int, num_runs: int) -> None:
    for one in self._watchers:
      one.start(task, rounds_done, num_runs)

  def update(self, record: Record) -> None:
    for one in self._watchers:
      one.update(record)

  def calibrating(self, fold: int, num_folds: int) -> None:
    for one in self._watchers:
      one.calibrating(fold, num_folds)

  def close(self) -> None:
    for one in self._watchers:
      one.close()


class Outcome(NamedTuple):
  """What became of a run.

  Attributes:
    was_finished: Whether the folder held the finished run, so that nothing was done.
    summaries: The fields of `summary.json`, of each seed that was trained; none in
      processes other than the first.
    comparison: A table of test scores, of the global model and of each client trained
      alone, where the config asks for it.
    failure: Says which of several seeds diverged, if one did; the others are complete.
    result: The training, if it was one, in the process that wrote its files.
    trials: What method `auto` has tried before it, if it has.
    taken: The name of the one with which it went on.
  """

  was_finished: bool = False
  summaries: Sequence[dict[str, Any]] = ()
  comparison: str | None = None
  failure: training.NonFiniteError | None = None
  result: training.Result | None = None
  trials: Sequence[Trial] = ()
  taken: str = ""


def train(
  config: ml_collections.ConfigDict,
  workdir: str | os.PathLike[str],
  progress: Progress | None = None,
  dataset: Dataset | None = None,
) -> Outcome:
  """Trains in a folder, or takes up what was stopped there; every process calls it.

  Args:
    config: Of one training, or of `num_seeds` of them.
    workdir: The folder of the run; made if need be.
    progress: Is called as rounds go by.
    dataset: Instead of the one that `config.data` names.

  Raises:
    InputError: If the config, the data or the folder cannot be used.
    NonFiniteError: If the only training diverges.
  """
  processes.all_do(lambda: config_checks.validate(config))
  config = processes.all_do(lambda: experiment_lib.with_bounds_read(config))
  processes.require_same("config", as_json(config))
  folder = RunFolder(workdir)
  done = processes.first_does(lambda: is_finished(folder, config, dataset))
  if processes.from_first(bool(done)):
    return Outcome(was_finished=True)
  if processes.is_first():
    precision.warn_of_float32()
  given, choice = config, Choice(config)
  if config.method == config_lib.AUTO:
    choice = _chosen(config, folder, dataset, progress)
    config = choice.config
  with config_lib.left_open(given):
    experiments = processes.all_do(
      lambda: (
        experiment_lib.build_seeds(config)
        if dataset is None
        else [experiment_lib.build(config, dataset)]
      )
    )
  processes.require_same("data", [one.dataset.digest() for one in experiments])
  with explain_os_errors(folder.path), contextlib.ExitStack() as lock:
    processes.first_does(lambda: lock.enter_context(alone_in(folder.path)))
    # Again: another program may have done it while the data were read.
    done = processes.first_does(lambda: is_finished(folder, config, dataset))
    if processes.from_first(bool(done)):
      return Outcome(was_finished=True)
    if len(experiments) == 1:
      return train_one(experiments[0], folder, progress, choice.begun, choice.trials)
    return train_seeds(config, experiments, folder, progress, lock)


def _chosen(
  config: ml_collections.ConfigDict,
  folder: RunFolder,
  dataset: Dataset | None,
  progress: Progress | None,
) -> Choice:
  """Lets method `auto` choose, alone in the run's folder."""
  rows = processes.all_do(
    lambda: experiment_lib.load_dataset(config) if dataset is None else dataset
  )
  processes.require_same("data", rows.digest())
  build = auto.of_rows(rows)
  processes.all_do(lambda: auto.check(config, build))  # Before there is a folder.
  with explain_os_errors(folder.path), contextlib.ExitStack() as lock:
    processes.first_does(lambda: lock.enter_context(alone_in(folder.path)))
    on_begin = progress.trying if progress else lambda name: None
    return auto.choose_in(folder, config, build, program_for, on_begin)


def train_one(
  experiment: Experiment,
  folder: RunFolder,
  progress: Progress | None = None,
  begun: training.Result | None = None,
  trials: Sequence[Trial] = (),
) -> Outcome:
  """Trains one experiment and writes all files of its run.

  Args:
    experiment: From `experiment.build`.
    folder: Of the run.
    progress: Is called as rounds go by.
    begun: Its first rounds, if they were done before.
    trials: What method `auto` has tried before it, if it has.
  """
  processes.first_does(lambda: folder.claim_task(experiment))
  is_first = processes.is_first()
  if not is_first and experiment.algorithm.placement.mesh is None:
    return Outcome()  # Nothing is shared: the first process does it alone.
  program = program_for(experiment)
  rounds_done = len(folder.metrics()) if is_first else 0
  with watched(progress, experiment, rounds_done) as on_round:
    own = folder if is_first else None
    result = training.train(experiment, program, own, on_round, begun)
    on_fold = progress.calibrating if progress else None
    calibrated = calibration.of_training(experiment, program, result, on_fold)
  if not is_first:
    return Outcome()
  finished = run_files.write(experiment, program, result, folder, calibrated, trials)
  return Outcome(
    summaries=[finished.summary],
    comparison=finished.comparison,
    result=result,
    trials=trials,
    taken=candidates.taken(experiment.config) if trials else "",
  )


def train_seeds(
  config: ml_collections.ConfigDict,
  experiments: Sequence[Experiment],
  folder: RunFolder,
  progress: Progress | None = None,
  lock: contextlib.ExitStack | None = None,
) -> Outcome:
  """Trains several seeds side by side on the device, each with its own folder.

  Args:
    config: Of all seeds.
    experiments: One a seed.
    folder: Holds the folders of the seeds.
    progress: Is called as rounds go by.
    lock: Gets the locks of these folders, whose models others may use by themselves.
  """
  folders = seed_folders(folder, config)

  def claim() -> None:
    folder.claim(config)
    for experiment, own in zip(experiments, folders, strict=True):
      if lock is not None:
        lock.enter_context(alone_in(own.path))
      own.claim_task(experiment)

  processes.first_does(claim)
  is_first = processes.is_first()
  with watched(progress, experiments[0], 0, len(experiments)) as on_round:
    results = training.train_batch(
      experiments,
      make_batched_program(experiments[0].algorithm, transform=jax.jit),
      folders if is_first else [None] * len(folders),
      on_round=on_round,
    )
  if not is_first:
    return Outcome()
  program = program_for(experiments[0])
  summaries, failure = [], None
  for experiment, result, own in zip(experiments, results, folders, strict=True):
    if isinstance(result, training.NonFiniteError):
      failure = failure or training.NonFiniteError(
        f"seed {experiment.config.seed}: {result}"
      )
      continue
    calibrated = calibration.of_training(experiment, program, result)
    finished = run_files.write(experiment, program, result, own, calibrated)
    summaries.append(finished.summary)
  if failure is None:
    from fedbnr_jax.report import run as report

    folder.write_summary(report.mean_summary(summaries))
  return Outcome(summaries=summaries, failure=failure)


def save(
  config: ml_collections.ConfigDict,
  dataset: Dataset,
  result: training.Result,
  workdir: str | os.PathLike[str],
  calibrated: Calibration | None = None,
  chosen: tuple[ml_collections.ConfigDict, Choice] | None = None,
) -> None:
  """Writes the folder of a training that was done in memory, as `train` would have.

  Args:
    config: Of the training.
    dataset: Its rows.
    result: What it has reached.
    workdir: The folder; made if need be.
    calibrated: Its calibration, if there is one.
    chosen: The config of method `auto`, and what it has chosen, if it has.

  Raises:
    InputError: If the folder holds something else, or this run with rows that joined
      or left it since.
  """
  folder = RunFolder(workdir)
  with warnings.catch_warnings(action="ignore"):  # They were given when it was fitted.
    experiment = experiment_lib.build(config, dataset)
  folder.check(config)
  folder.check_data(dataset)
  with explain_os_errors(folder.path), alone_in(folder.path):
    if ledger_file.changes(folder.posterior):
      raise rows_have_changed(folder)
    if chosen is not None:
      given, choice = chosen
      candidates.write(folder, given, choice.trials, choice.config)
    folder.claim_task(experiment)
    folder.keep_metrics(result.history)
    checkpoints, number = Checkpoints(folder.checkpoints), len(result.history)
    checkpoints.discard_after(number)
    saved = Saved(number, result.last, result.state)
    checkpoints.save(saved, seal.of_folder(folder, number))
    program, trials = program_for(experiment), chosen[1].trials if chosen else ()
    run_files.write(experiment, program, result, folder, calibrated, trials)


def is_finished(
  folder: RunFolder, config: ml_collections.ConfigDict, dataset: Dataset | None = None
) -> bool:
  """Whether the folder holds a finished run of this config.

  Raises:
    InputError: If the folder is another's, the table has changed since the run, or a
      finished run's files do not belong together.
  """
  config = experiment_lib.with_bounds_read(config)
  if config.method == config_lib.AUTO:
    chosen, _ = candidates.read(config, folder)
    if chosen is None:
      folder.check(config)  # It may hold another run.
      return False
    config = chosen
  folder.check(config)
  summary = folder.summary()
  if summary is None:
    return False
  with explain_os_errors(folder.path):
    for own, of_own in zip(
      _model_folders(folder, config), experiment_lib.seed_configs(config), strict=True
    ):
      _require_own_files(own, of_own)
  if "test_rmse" not in summary:
    raise InputError(
      f"{folder.finished} has no 'test_rmse': restore it, or remove it and start the "
      "training again, which writes it anew."
    )
  # Other data than a table cannot have changed; and a table may be gone by now.
  is_file = config.data.source == "table" and pathlib.Path(config.data.path).is_file()
  if dataset is None and is_file:
    with warnings.catch_warnings(action="ignore"):  # The training has given them.
      dataset = experiment_lib.load_dataset(config)
  if dataset is not None:
    for own in (folder, *seed_folders(folder, config)):
      own.check_data(dataset)
  return True


def _require_own_files(folder: RunFolder, config: ml_collections.ConfigDict) -> None:
  """Raises InputError unless a finished run's files, the ledger too, are its own."""
  checkpoint = journal.require_own_files(folder, config)
  if checkpoint is not None and folder.posterior.exists():
    kernel = ledger_file.kernel(folder.posterior)  # Large sums are not read for that.
    membership.require_same_kernel(kernel, kernel_digest(checkpoint), folder.posterior)


def seed_folders(
  folder: RunFolder, config: ml_collections.ConfigDict
) -> list[RunFolder]:
  """The folders of a training of several seeds, one each."""
  seeds = range(config.seed, config.seed + config.num_seeds)
  return [RunFolder(folder.path / f"seed_{seed}") for seed in seeds]


def _model_folders(
  folder: RunFolder, config: ml_collections.ConfigDict
) -> list[RunFolder]:
  """The folders that hold a model each: this one, or those of its seeds."""
  return [folder] if config.num_seeds == 1 else seed_folders(folder, config)


def program_for(experiment: Experiment) -> Program:
  """The experiment's jitted program, shared by all that differ in data or seed only.

  So trainings of one shape in one process, as in a grid search, compile once.
  """
  slot = _slot(method_key(experiment.config))
  if not slot:
    # It holds the algorithm, and nothing of the experiment's data.
    slot.append(
      make_program(
        experiment.algorithm,
        stream_clients=experiment.config.stream_clients,
        transform=jax.jit,
      )
    )
  return slot[0]


@functools.lru_cache(maxsize=8)
def _slot(key: str) -> list[Program]:
  """Where the program of a config is kept."""
  del key
  return []


@contextlib.contextmanager
def watched(
  progress: Progress | None,
  task: Task,
  rounds_done: int,
  num_runs: int = 1,
) -> Iterator[Callable[[Record], None] | None]:
  """Starts a progress display, gives what to call after a round, and closes it."""
  if progress is None:
    yield None
    return
  progress.start(task, rounds_done, num_runs)
  try:
    yield progress.update
  finally:
    progress.close()
