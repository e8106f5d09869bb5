"""A site's plain log of what has left it, for people: sent.csv."""

import csv
import datetime
import os
import pathlib
from collections.abc import Sequence

from fedbnr_jax.files import explain_os_errors

COLUMNS = ("time", "run", "kind", "what", "numbers", "bytes", "masked", "meaning")
SUM = "sum"  # The kind of an answer that is added up.


class SentLog:
  """The log of one site; a line is written before its message may leave."""

  def __init__(self, path: str | os.PathLike[str]) -> None:
    self.path = pathlib.Path(path)

  def note(
    self,
    run: str,
    kind: str,
    what: str,
    *,
    numbers: int = 0,
    size: int = 0,
    masked: bool = False,
    meaning: str = "",
  ) -> None:
    """Adds a line.

    Args:
      run: Digest of the run.
      kind: Such as `SUM`.
      what: What was asked.
      numbers: How many numbers left.
      size: How many bytes left.
      masked: Whether the numbers tell nothing without the other sites' numbers.
      meaning: What they are, in words.
    """
    marked = "yes" if masked else "no"
    line = (run[:16], kind, what, numbers, size, marked, meaning)
    with explain_os_errors(self.path.parent, "the folder of a site"):
      add_line(self.path, COLUMNS, line)

  def num_sums(self, run: str) -> int:
    """Counts the sums that have left in a run."""
    if not self.path.exists():
      return 0
    with open(self.path, newline="", encoding="utf-8") as file:
      return sum(
        row["run"] == run[:16] and row["kind"] == SUM for row in csv.DictReader(file)
      )


def add_line(
  path: pathlib.Path, columns: Sequence[str], line: Sequence[object]
) -> None:
  """Adds a line to a log, after the time; the first one comes after the columns."""
  path.parent.mkdir(parents=True, exist_ok=True)
  new = not path.exists()
  with open(path, "a", newline="", encoding="utf-8") as file:
    writer = csv.writer(file, lineterminator="\n")
    if new:
      writer.writerow(columns)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    writer.writerow([now, *line])
