"""The table of a sweep: a row for each run that is done or has failed."""

import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections
import pandas as pd

from fedbnr_jax.files import TEXT, explain_os_errors, replacing
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run.records import RunFolder
from fedbnr_jax.sweep.grid import Run


class RunTable:
  """The table, made from what is on disk: summaries, and why other runs failed."""

  def __init__(
    self,
    path: pathlib.Path,
    logs: pathlib.Path,
    runs: Mapping[Run, ml_collections.ConfigDict],
    folders: Mapping[str, RunFolder],
  ) -> None:
    """Writes nothing yet.

    Args:
      path: The table's file.
      logs: Folder that keeps why a run failed.
      runs: Runs that the table is of, with their configs.
      folders: Folder of each run, by the run's name.
    """
    self._path = path
    self._logs = logs
    self._runs = runs
    self._folders = folders
    self._summaries: dict[str, dict[str, Any]] = {}  # Read once: they do not change.

  def record(self, run: Run, failure: str | None) -> None:
    """Keeps why a run failed, until it is done; None says that it is."""
    file = self._failure_file(run)
    with explain_os_errors(self._path.parent):
      if failure is None:
        file.unlink(missing_ok=True)
      else:
        file.write_text(failure, **TEXT)

  def write(self) -> None:
    """Writes the table; not before the first run has ended."""
    with explain_os_errors(self._path.parent):
      rows = [row for run in self._runs for row in self._rows(run)]
      if rows:
        with replacing(self._path) as part:
          pd.DataFrame(rows).to_csv(part, index=False)

  def _rows(self, run: Run) -> list[dict[str, Any]]:
    """Returns no row for a run that has not ended, several for a pooled method."""
    config = self._runs[run]
    known = {
      "dataset": config.data.name or pathlib.Path(config.data.path).stem,
      "method": config.method,
      "num_clients": config.num_clients,
      "seed": config.seed,
    }
    summary = self._summaries.get(run.name) or self._folders[run.name].summary()
    state = {"status": "done", "reason": ""}
    if summary:
      self._summaries[run.name] = summary
    elif self._failure_file(run).exists():
      # Tables hold text only, and a file may be named by something else.
      file = self._failure_file(run)
      reason = file.read_text(encoding="utf-8", errors="replace")
      state = {"status": "failed", "reason": reason}
    else:
      return []
    fields = {f"config.{name}": v for name, v in run.fields if name not in known}
    row = known | (summary or {}) | fields | state
    if config.method == config_lib.AUTO:
      row["method"] = config.method  # The summary has the name of what was chosen.
    counts = [{"num_clients": count} for count in run.counts if len(run.counts) > 1]
    return [row | count for count in counts or [{}]]

  def _failure_file(self, run: Run) -> pathlib.Path:
    return self._logs / f"{run.name}.failed"
