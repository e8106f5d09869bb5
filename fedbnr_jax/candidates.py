"""candidates.json: what method `auto` has tried in a run's folder, and chosen."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import read_object, write_json
from fedbnr_jax.run import training
from fedbnr_jax.run.config import differences
from fedbnr_jax.run.records import RunFolder, as_json


class Trial(NamedTuple):
  """What became of a candidate; scores are None where its training diverged."""

  name: str
  # Log error of held-out rows, or, where they are few, nats a row; the lowest wins.
  score: float | None
  val_rmse: float | None
  val_nll: float | None
  train_nll: float | None
  seconds: float


class Choice(NamedTuple):
  """The config to train, and what was tried before it was chosen."""

  config: ml_collections.ConfigDict
  trials: tuple[Trial, ...] = ()
  begun: training.Result | None = None  # Its first round, if that was a trial just now.


def name(inputs: str, kernel: str) -> str:
  """Returns how a candidate is called, of the inputs' reading and the kernel."""
  return f"{inputs} {kernel}"


def taken(config: ml_collections.ConfigDict) -> str:
  """Returns the name of the candidate from which a config was chosen."""
  return name(config.data.inputs, config.sparse.kernel)


def read(
  config: ml_collections.ConfigDict, folder: RunFolder
) -> tuple[ml_collections.ConfigDict | None, tuple[Trial, ...]]:
  """Reads what was chosen in a folder, or None, and what has been tried so far.

  Raises:
    InputError: If it was for another config, or the file is not what `write` wrote.
  """
  path = folder.candidates
  if not path.exists():
    return None, ()
  found = read_object(path)
  try:
    changed = differences(found["given"], as_json(config))
    trials = tuple(Trial(**trial) for trial in found["trials"])
    chosen = found["chosen"]
    chosen = None if chosen is None else ml_collections.ConfigDict(chosen)
  except (KeyError, TypeError, AttributeError) as error:
    raise InputError(f"{path} is damaged: remove it to choose again.") from error
  if changed:
    raise InputError(
      f"workdir {folder.path} belongs to another config (config.{changed[0]} differs): "
      "choose another workdir, or remove this one."
    )
  return chosen, trials


def write(
  folder: RunFolder,
  config: ml_collections.ConfigDict,
  trials: Sequence[Trial],
  chosen: ml_collections.ConfigDict | None,
) -> None:
  """Writes what has been tried, and what was chosen if that is settled.

  Args:
    folder: Of the run.
    config: As it was given, of method `auto`.
    trials: So far.
    chosen: The config to train, or None.
  """
  write_json(folder.candidates, content(config, trials, chosen))


def content(
  config: ml_collections.ConfigDict,
  trials: Sequence[Trial],
  chosen: ml_collections.ConfigDict | None,
) -> dict[str, Any]:
  """Returns what stands in candidates.json, as JSON types."""
  return {
    "given": as_json(config),
    "trials": [trial._asdict() for trial in trials],
    "chosen": None if chosen is None else as_json(chosen),
  }
