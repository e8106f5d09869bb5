"""Attempts at masked sums that a coordinator has begun, noted before it asks.

A coordinator that resumes goes on with the attempt at which it stopped, because sites
that have revealed do not go on with another one.
"""

import json
import os
import pathlib
from typing import NamedTuple

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.network.attempt import Attempt, Broadcast


class Begun(NamedTuple):
  """An attempt, and whether reveals have been asked for."""

  attempt: Attempt
  revealing: bool


class AttemptLog:
  """A file to which lines are added; a line cut short was never acted upon."""

  def __init__(self, path: str | os.PathLike[str]) -> None:
    """Reads the log, if there is one.

    Raises:
      InputError: If it is damaged.
    """
    self._path = pathlib.Path(path)
    self._last: Begun | None = None
    # Members that have revealed for a question, and answer it with no others.
    self._opened: dict[str, tuple[str, ...]] = {}
    if not self._path.exists():
      return
    text = self._path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
      with open(self._path, "rb+") as file:
        file.truncate(len(whole))
    try:
      for line in whole.splitlines():
        note = json.loads(line)
        self._take(Begun(Attempt.from_note(note["attempt"]), bool(note["revealing"])))
    except (ValueError, KeyError, TypeError, InputError) as error:
      raise InputError(
        f"{self._path} is damaged ({error}): start a new run in another folder."
      ) from error

  def begin(self, run: str, question: str, present: tuple[str, ...]) -> Begun:
    """Finds the attempt to go on with at a question, or makes the first one.

    Args:
      run: Digest of the run.
      question: Its digest.
      present: Members that are to answer, unless others have revealed for it before.

    Raises:
      InputError: If these are too few.
    """
    last = self._last
    if last is not None and last.attempt.broadcast.question == question:
      return last
    step = 0 if last is None else last.attempt.broadcast.step + 1
    members = self._opened.get(question, present)
    return Begun(Attempt(Broadcast(run, step, question), 1, members), False)

  def note(self, attempt: Attempt, revealing: bool) -> None:
    """Notes an attempt, or that its reveals begin, before any site is asked."""
    begun = Begun(attempt, revealing)
    if begun == self._last:
      return
    line = json.dumps({"attempt": attempt.as_note(), "revealing": revealing})
    with explain_os_errors(self._path.parent):
      self._path.parent.mkdir(parents=True, exist_ok=True)
      with open(self._path, "ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    self._take(begun)

  def _take(self, begun: Begun) -> None:
    self._last = begun
    if begun.revealing:
      self._opened[begun.attempt.broadcast.question] = begun.attempt.members
