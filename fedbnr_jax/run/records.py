"""The files of a run's folder: config, metrics by round, summary, preprocessing."""

import contextlib
import csv
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import ml_collections
import pandas as pd

from fedbnr_jax import lock
from fedbnr_jax.data import Dataset, Preprocessor
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import (
  PARTIAL,
  explain_os_errors,
  read_object,
  replacing,
  write_json,
)
from fedbnr_jax.run import config_file
from fedbnr_jax.run.config import differences
from fedbnr_jax.run.task import TableNote, Task, table_note

Record = dict[str, float | int]

CANDIDATES = "candidates.json"  # What method `auto` tried before the run began.
# Folder of a coordinator of real sites, which begins before the config is chosen.
NETWORK = "network"
# Fields of data.json that tell one table from another.
_IDENTITY = ("name", "rows", "digest")


class RunFolder:
  """A run's folder; made on first use, refused if it belongs to another config."""

  def __init__(self, path: str | os.PathLike[str]) -> None:
    self.path = pathlib.Path(path)
    self.checkpoints = self.path / "checkpoint"
    self.figures = self.path / "figures"
    self.report = self.path / "report.html"  # See report/run_page.py.
    self.posterior = self.path / "posterior.npz"  # See ledger_file.py.
    self.candidates = self.path / CANDIDATES  # See auto.py.
    self.calibration = self.path / "calibration.json"  # See calibration.py.
    self.released = self.path / "released"  # Folder; see privacy.py.
    self.network = self.path / NETWORK  # Folder; see network/coordinator.py.
    self._config = self.path / "config.json"
    self._data = self.path / "data.json"
    self.history = self.path / "metrics.csv"
    self.finished = self.path / "summary.json"  # Marks a run as finished.
    self._preprocessing = self.path / "preprocessing.json"
    self._clients = self.path / "clients.json"
    # What checkpoints belong with, beside the history; see seal.py.
    self.sealed = (self._config, self._data, self._preprocessing, self._clients)

  def check(self, config: ml_collections.ConfigDict) -> None:
    """Raises InputError if the folder holds something other than a run of `config`."""
    with explain_os_errors(self.path):
      if self._config.exists():
        changed = differences(read_object(self._config), as_json(config))
        if changed:
          more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
          raise InputError(
            f"workdir {self.path} belongs to another config (config.{changed[0]} "
            f"differs{more}): choose another workdir, or remove this one."
          )
      elif self.path.is_dir() and not _is_fresh(self.path):
        raise InputError(
          f"workdir {self.path} is not empty and holds no run: choose another workdir."
        )

  def claim(self, config: ml_collections.ConfigDict) -> None:
    """Makes the folder this config's.

    Raises:
      InputError: If it holds a run of another config, or cannot be written.
    """
    self.check(config)
    with explain_os_errors(self.path):
      self.path.mkdir(parents=True, exist_ok=True)
      # Written even when it is there: this is where a read-only folder shows.
      write_json(self._config, as_json(config))

  def claim_task(self, task: Task) -> None:
    """Makes the folder this task's, with all that a model needs beside its state.

    Raises:
      InputError: If it holds a run of another config or of other rows, or a file that
        such a run does not write, or cannot be written.
    """
    self.claim(task.config)
    self.claim_data(task.table)
    for path, content in (
      (self._preprocessing, task.preprocessor.to_json()),
      (self._clients, _clients(task.client_names, task.num_padded_rows)),
    ):
      with explain_os_errors(self.path):
        # Not mended in silence: whoever changed it may have meant the checkpoints too.
        if path.exists() and read_object(path) != content:
          raise InputError(
            f"{path} is not what this run writes: restore it, or remove it and start "
            "the training again, which writes it anew."
          )
        write_json(path, content)

  def check_data(self, dataset: Dataset) -> None:
    """Raises InputError if the folder holds a run of other rows."""
    self._check_data(table_note(dataset))

  def _check_data(self, table: TableNote) -> None:
    if not self._data.exists():
      return
    recorded, given = read_object(self._data), _described(table)
    if any(recorded.get(name) != given[name] for name in _IDENTITY):
      raise InputError(
        f"the rows of {table.name!r} are not those that the run in {self.path} "
        "started with: restore them, or choose another workdir."
      )

  def claim_data(self, table: TableNote) -> None:
    """Notes which rows the run is of, and refuses others when it is taken up again."""
    self._check_data(table)
    with explain_os_errors(self.path):
      write_json(self._data, _described(table))

  def feature_columns(self) -> tuple[str, ...]:
    """Columns that the run predicts from, in their order; () in an older folder."""
    recorded = read_object(self._data) if self._data.exists() else {}
    return tuple(recorded.get("features", ()))

  def config(self) -> ml_collections.ConfigDict:
    """The config of the run that this folder holds."""
    if not self._config.exists():
      raise InputError(
        f"{self.path} holds no run: there is no {self._config.name} in it."
      )
    config = config_file.read(self._config)
    if config.num_seeds > 1:
      raise InputError(
        f"{self.path} holds {config.num_seeds} runs: name one of its folders, as "
        f"{self.path}/seed_{config.seed}."
      )
    return config

  def copy_to(self, target: "RunFolder") -> None:
    """Copies the run to another folder, or does nothing where that is this one.

    Raises:
      InputError: If this folder is gone or written to, or the other one holds anything
        but this run, or more of it.
    """
    if target.path.resolve() == self.path.resolve():
      self.config()
      return
    self._require_room(target)  # Before a lock is left in somebody's folder.
    with contextlib.ExitStack() as locks:
      locks.enter_context(explain_os_errors(target.path))
      if os.access(self.path, os.W_OK):  # Else there is nobody who writes.
        locks.enter_context(lock.alone_in(self.path, shared=True))
      locks.enter_context(lock.alone_in(target.path))
      self._require_room(target)
      files = [path for path in _files(self.path) if path.is_file()]
      # The config first: what is copied in part is known as this run's. The summary
      # last: it is what marks a run as finished.
      order = {self._config: 0, self.finished: 2}
      for path in sorted(files, key=lambda path: order.get(path, 1)):
        copy = target.path / path.relative_to(self.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with replacing(copy) as part:
          shutil.copyfile(path, part)

  def _require_room(self, target: "RunFolder") -> None:
    """Raises InputError unless this run may be written to another folder."""
    target.check(self.config())
    recorded = [read_object(one._data) for one in (self, target) if one._data.exists()]
    if any(one.get("digest") != recorded[0].get("digest") for one in recorded):
      raise InputError(
        f"{target.path} holds a model of other rows: choose another folder."
      )
    if len(target.metrics()) > len(self.metrics()):
      raise InputError(
        f"{target.path} holds more rounds of this run than {self.path}: choose another "
        "folder."
      )

  # ------------------------------------------------------------------- metrics

  def append_metrics(self, record: Record) -> None:
    """Adds the row of one round and sees it to the disk."""
    new = not self.history.exists()
    with open(self.history, "a", newline="", encoding="utf-8") as file:
      writer = csv.DictWriter(file, list(record), lineterminator="\n")
      if new:
        writer.writeheader()
      writer.writerow(record)
      file.flush()
      os.fsync(file.fileno())

  def metrics(self) -> list[Record]:
    """The complete rows so far; a row cut short by a kill ends the list."""
    if not self.history.exists():
      return []
    records: list[Record] = []
    text = self.history.read_text(encoding="utf-8", errors="replace")
    complete = text[: text.rfind("\n") + 1]
    for row in csv.DictReader(complete.splitlines()):
      record = _record(row)
      if record is None or record.get("round") != len(records) + 1:
        break
      records.append(record)
    return records

  def keep_metrics(self, records: list[Record]) -> None:
    """Replaces the rows by these, at one stroke."""
    if not records:
      self.history.unlink(missing_ok=True)
      return
    with (
      replacing(self.history) as part,
      open(part, "w", newline="", encoding="utf-8") as file,
    ):
      writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
      writer.writeheader()
      writer.writerows(records)

  def metrics_frame(self) -> pd.DataFrame:
    return pd.DataFrame(self.metrics())

  # ------------------------------------------------- summary and preprocessing

  def summary(self) -> dict[str, Any] | None:
    """The summary, once the run is finished."""
    return read_object(self.finished) if self.finished.exists() else None

  def write_summary(self, summary: dict[str, Any]) -> None:
    write_json(self.finished, summary)

  def write_preprocessing(self, preprocessor: Preprocessor) -> None:
    write_json(self._preprocessing, preprocessor.to_json())

  def preprocessing(self) -> Preprocessor:
    if not self._preprocessing.exists():
      raise InputError(f"{self.path} holds no trained model: train one first.")
    try:
      return Preprocessor.from_json(read_object(self._preprocessing))
    except InputError as error:
      raise InputError(f"{self._preprocessing}: {error}") from error

  def is_of_other_rows(self, preprocessor: Preprocessor) -> bool:
    """Whether the folder has a preprocessing, and another one than this."""
    return self._preprocessing.exists() and self.preprocessing() != preprocessor

  def write_clients(self, names: Sequence[str], num_rows: int) -> None:
    write_json(self._clients, _clients(names, num_rows))

  def clients(self) -> tuple[tuple[str, ...], int]:
    """Names of the clients, and N, their padded rows; (), 1 in an older folder."""
    if not self._clients.exists():
      return (), 1
    clients = read_object(self._clients)
    names, num_rows = clients.get("names"), clients.get("num_rows", 1)
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
      raise InputError(f"{self._clients} has no list 'names': restore it.")
    if not isinstance(num_rows, int) or num_rows < 1:
      raise InputError(f"{self._clients}: num_rows is {num_rows!r}: restore it.")
    return tuple(names), num_rows


def _described(table: TableNote) -> dict[str, Any]:
  """The content of data.json."""
  return {
    "name": table.name,
    "rows": table.rows,
    "digest": table.digest,
    "features": list(table.features),
  }


def _clients(names: Sequence[str], num_rows: int) -> dict[str, Any]:
  """The content of `clients.json`."""
  return {"names": list(names), "num_rows": num_rows}


def _is_fresh(path: pathlib.Path) -> bool:
  """Whether a folder is empty, but for what comes before a run's config."""
  before = (CANDIDATES, NETWORK)
  entries = (entry for entry in path.iterdir() if entry.name not in before)
  return all(_is_passing(entry) for entry in entries)


def _files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields all that is in a folder and its folders to stay."""
  for path in folder.iterdir():
    if not _is_passing(path):
      yield path
      yield from _files(path) if path.is_dir() else ()


def _is_passing(path: pathlib.Path) -> bool:
  """Whether an entry is for whoever writes the folder, and no part of the run."""
  return path.suffix == PARTIAL or path.name == lock.NAME


def as_json(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The config as it reads back from a file: tuples as lists, and so on."""
  content: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
  return content


def _record(row: dict[str, Any]) -> Record | None:
  """A row of the table as numbers; None if it is damaged."""
  try:
    return {name: _number(value) for name, value in row.items()}
  except (TypeError, ValueError):
    return None


def _number(text: str) -> float | int:
  try:
    return int(text)
  except ValueError:
    return float(text)
