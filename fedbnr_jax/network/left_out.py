"""A coordinator's log of sites that a round went on without: left_out.csv."""

import os
import pathlib

from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.network.sent import add_line

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
      add_line(self.path, COLUMNS, (phase, site, what, reason))
