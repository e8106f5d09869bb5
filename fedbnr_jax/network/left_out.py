"""A coordinator's log of sites that a round went on without: left_out.csv."""

import csv
import datetime
import os
import pathlib

from fedbnr_jax.files import explain_os_errors

COLUMNS = ("time", "phase", "site", "what", "reason")


class LeftOutLog:
  """A file to which lines are added; nothing of a run depends on it."""

  def __init__(self, path: str | os.PathLike[str]) -> None:
    self.path = pathlib.Path(path)

  def note(self, phase: str, site: str, what: str, reason: str) -> None:
    """Adds a line.

    Args:
      phase: Of the run, such as a round.
      site: Which one.
      what: It was asked.
      reason: Words that follow its name.
    """
    with explain_os_errors(self.path.parent):
      self.path.parent.mkdir(parents=True, exist_ok=True)
      new = not self.path.exists()
      with open(self.path, "a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
          writer.writerow(COLUMNS)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        writer.writerow([now, phase, site, what, reason])
