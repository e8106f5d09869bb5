"""The sums under a model's kernel that have been read: none may show a site alone.

Sums of several sets of sites can be added and subtracted. Sites that are in the same of
these sets cannot be told apart by any of that, and so each such lot must be of three or
more: in every sum that is read, whatever joins and leaves in the course of time.
"""

import os
import pathlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

from fedbnr_jax import files
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing
from fedbnr_jax.network.attempt import FEWEST


class ReadSum(NamedTuple):
  """One sum, and whether its parts have been masked."""

  sites: tuple[str, ...]
  masked: bool


class SumsRead:
  """The sums of one model, in a file of its coordinator."""

  def __init__(self, path: str | os.PathLike[str], training: ReadSum) -> None:
    """Reads the file, if there is one.

    Args:
      path: Of the file.
      training: The sum with which the training ended.
    """
    self._path = pathlib.Path(path)
    noted = files.read_object(self._path)["sums"] if self._path.exists() else []
    self._sums = [training, *(ReadSum(tuple(sites), masked) for sites, masked in noted)]

  def note(self, one: ReadSum) -> None:
    """Notes a sum before it is asked for: it may be read, whatever comes of it."""
    self._sums.append(one)
    files.write_json(self._path, {"sums": [list(read) for read in self._sums[1:]]})

  def require_hidden(self, wanted: ReadSum, seen: Collection[str]) -> None:
    """Raises InputError if a sum would show a site that has not agreed to be seen.

    Args:
      wanted: The sum.
      seen: Sites whose people have agreed.
    """
    shown = exposed([*self._sums, wanted], seen)
    if shown:
      raise InputError(
        f"the server would see what {listing(shown)} adds up to, alone or with one "
        "other: at a fixed kernel the difference of two sums tells it. Let "
        f"{FEWEST} or more sites join or leave together under masks, and {FEWEST} or "
        "more stay of those who came together; or name in `seen` the sites whose "
        "people agree to it. Nothing is changed."
      )


def exposed(sums: Sequence[ReadSum], seen: Collection[str]) -> list[str]:
  """Finds the sites of masked federations that some sums show, and that do not agree.

  Args:
    sums: All that are read under one kernel. Where none is masked, nothing is hidden.
    seen: Sites whose people have agreed.
  """
  if not any(one.masked for one in sums):
    return []
  sent = [name for one in sums if not one.masked for name in one.sites]
  known = {*sent, *seen}
  shown = set(sent) - set(seen)
  lots: dict[tuple[bool, ...], set[str]] = {}
  for name in {name for one in sums for name in one.sites}:
    lots.setdefault(tuple(name in one.sites for one in sums), set()).add(name)
  for lot in lots.values():
    hidden = lot - known
    if len(hidden) < FEWEST:
      shown |= hidden
  return sorted(shown)
