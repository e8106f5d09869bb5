"""An attempt names the sum that is asked for: its broadcast, its number, its members.

An attempt that a masked sum cannot serve, such as one of two members, cannot be made.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing
from fedbnr_jax.network.framing import digest, frame

FEWEST = 3  # Members of a masked sum.
_PURPOSE = "fedbnr-jax masked sum 1"
_LARGEST = 2**63  # Of a step or of an attempt.


@dataclasses.dataclass(frozen=True)
class Broadcast:
  """One message that the server sends down, at one step of a run."""

  run: str  # Digest of the run.
  step: int  # Which exchange of the run this is, counted from 0.
  question: str  # Digest of what is asked: the exchange and its down message.

  @classmethod
  def of(cls, run: str, step: int, exchange: str, down: bytes) -> "Broadcast":
    """Makes the broadcast of an exchange, by its name, and of its down message."""
    return cls(run, step, digest("question", exchange, down))

  def __post_init__(self) -> None:
    if not isinstance(self.run, str) or not isinstance(self.question, str):
      raise InputError("a broadcast's run and question are digests: give strings.")
    _require_number("step", self.step, 0)


@dataclasses.dataclass(frozen=True)
class Attempt:
  """One try at the sum of a broadcast's answers, over members in the order of names."""

  broadcast: Broadcast
  number: int  # 1, 2, ... at this broadcast.
  members: tuple[str, ...]

  def __post_init__(self) -> None:
    _require_number("attempt", self.number, 1)
    if not all(isinstance(name, str) and name for name in self.members):
      raise InputError("a member of a masked sum has no name: give each one.")
    members = tuple(sorted(self.members))
    if len(set(members)) < len(members):
      raise InputError(
        f"a member is named twice among {listing(members)}: name it once."
      )
    require_enough(members)
    object.__setattr__(self, "members", members)

  def context(self) -> bytes:
    """All of the attempt as bytes, which no other attempt has."""
    run, step, question = dataclasses.astuple(self.broadcast)
    return frame(_PURPOSE, run, step, question, self.number, *self.members)

  def as_note(self) -> dict[str, Any]:
    """Writes the attempt as JSON can hold it, for a message or a file."""
    return {
      **dataclasses.asdict(self.broadcast),
      "number": self.number,
      "members": list(self.members),
    }

  @classmethod
  def from_note(cls, note: Mapping[str, Any]) -> "Attempt":
    """Reads what `as_note` wrote.

    Raises:
      InputError: If it is not an attempt, or one that no masked sum can serve.
    """
    try:
      broadcast = Broadcast(note["run"], note["step"], note["question"])
      return cls(broadcast, note["number"], tuple(note["members"]))
    except (KeyError, TypeError) as error:
      raise InputError(f"this does not describe an attempt: {error!r}.") from error

  def __str__(self) -> str:
    return f"attempt {self.number} at step {self.broadcast.step}"


def require_enough(members: tuple[str, ...]) -> None:
  """Raises InputError if a masked sum of these members would not hide them."""
  if len(members) < FEWEST:
    raise InputError(
      f"a masked sum takes {FEWEST} members or more, and here are {len(members)}: of "
      "two, each could subtract its own part and read the other's. Add sites, or agree "
      "to send plain messages."
    )


def _require_number(what: str, value: Any, least: int) -> None:
  number = isinstance(value, int) and not isinstance(value, bool)
  if not (number and least <= value < _LARGEST):
    raise InputError(f"{what} is {value!r}: give a whole number from {least} on.")
