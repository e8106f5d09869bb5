"""A site's part of a masked sum: it answers, and reveals its own mask at most once.

Two rules protect the sites, and hold after a restart, because what is noted on disk
comes before what leaves:

- Once a site has revealed, it answers no other attempt at the same broadcast, and asked
  the same question at another step it answers the same members only.
- Once it has answered a later attempt, it reveals nothing for an earlier one: the seed
  is no longer on its disk.

So of all attempts at one question a site opens one set of members. A sum can be read
only if all its members have opened it. Two sums that can be read then have the same
members or none in common, and no difference of two is a part.

The server is not trusted to tell the truth about who has answered. If it lies, members
reveal early, and what it gains are messages that still hold the pair masks with whoever
has not answered; when that site answers, its own mask covers its message. The lie costs
the broadcast, because nobody who has revealed goes on to another attempt.

What remains: the sum itself, and what several sums over rounds tell. Members who
collude with the server can subtract their parts; if all but one do, they read that one.
A server that alters its down message a little asks, for all a site can tell, another
question, and may ask it of other members. Two runs are not compared. And a server can
always stop the run, or say a wrong sum.
"""

import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing
from fedbnr_jax.network import fixed_point, masks, primitives, site_memory
from fedbnr_jax.network.attempt import Attempt, require_enough
from fedbnr_jax.network.framing import digest
from fedbnr_jax.network.keys import RunKeys
from fedbnr_jax.network.site_answers import Answer
from fedbnr_jax.network.site_memory import Memory


class MaskedSite:
  """One site in one run. What it must not forget is on disk, not in this object."""

  def __init__(self, path: str | os.PathLike[str], keys: RunKeys) -> None:
    """Takes up a site's memory, for the first time or after a restart.

    Args:
      path: The memory, made by `site_memory.start`.
      keys: All sites' run keys, verified. They are noted, and are final for the run.

    Raises:
      InputError: If the memory is missing, damaged or of another run, or if a key is
        not the one that was noted.
    """
    self._path = path
    self._keys = keys
    self._threads = threading.Lock()  # Threads wait; other processes are refused.
    with self._threads, site_memory.opened(path) as memory:
      self.name = memory.site
      _require_own(memory, keys)
      self._secrets = {
        other: primitives.agreed_secret(memory.private, public)
        for other, public in keys.public.items()
        if other != self.name
      }
      if not memory.public:
        memory.public = dict(keys.public)
        site_memory.write(path, memory)

  def mask(self, attempt: Attempt, vector: np.ndarray) -> bytes:
    """Answers an attempt with a masked vector; the same again gives the same bytes.

    Args:
      attempt: What the server asks for.
      vector: [n] numbers. A one is put behind them, which counts the members.

    Returns:
      The message for the server: 16 bytes a number, and a header.

    Raises:
      InputError: If a rule forbids it, or a number does not fit; nothing may leave.
    """
    self._require_member(attempt)
    num_members = len(attempt.members)
    one = fixed_point.encode(np.ones(1), num_members)
    limbs = np.concatenate([fixed_point.encode(vector, num_members), one])
    with self._memory() as memory:
      known = memory.find(attempt.broadcast)
      _require_may_answer(memory, known, attempt)
      again = known is not None and known.number == attempt.number
      seed = known.seed if known and again else primitives.new_seed()
      message = self._masked(limbs, seed, attempt)
      answer = Answer(attempt.number, attempt.members, seed, masks.receipt(message))
      if known and again:
        if known.receipt != answer.receipt:
          raise InputError(
            f"{attempt} was answered with other numbers: the same attempt is not "
            "answered with two vectors, whose difference would show."
          )
        return message  # It has left before, so nothing is to be noted.
      memory.answers[attempt.broadcast] = answer
      site_memory.write(self._path, memory)
    return message

  def reveal(self, attempt: Attempt, receipts: Mapping[str, str]) -> bytes:
    """Gives the seed of the site's own mask, if all members have answered.

    Args:
      attempt: The attempt that this site has answered last at its broadcast.
      receipts: Digest of each member's masked message, by name; `masks.receipt`. Sites
        that compare what they have noted know whether they were told the same.

    Returns:
      32 bytes for the server; the same again if asked again.

    Raises:
      InputError: If a rule forbids it.
    """
    self._require_member(attempt)
    with self._memory() as memory:
      known = memory.find(attempt.broadcast)
      if known is None or known.number < attempt.number:
        raise InputError(
          f"{attempt} was not answered here: there is nothing to reveal."
        )
      if known.number > attempt.number:
        raise InputError(
          f"attempt {known.number} at step {attempt.broadcast.step} was answered after "
          f"attempt {attempt.number}, whose mask stays hidden from now on."
        )
      _require_may_answer(memory, known, attempt)
      _require_all_answered(attempt, receipts)
      if receipts[self.name] != known.receipt:
        raise InputError(
          f"the server has another answer of {self.name!r} to {attempt} than this site "
          "gave: nothing is revealed."
        )
      revealed = transcript(attempt, receipts)
      if known.revealed not in ("", revealed):
        raise InputError(
          f"the mask of {attempt} was revealed for other messages of its members: it "
          "is not revealed again."
        )
      if not known.revealed:
        noted = dataclasses.replace(known, revealed=revealed)
        memory.answers[attempt.broadcast] = noted
        site_memory.write(self._path, memory)
      return known.seed

  @contextmanager
  def _memory(self) -> Iterator[Memory]:
    with self._threads, site_memory.opened(self._path) as memory:
      _require_own(memory, self._keys)
      yield memory

  def _masked(self, limbs: np.ndarray, seed: bytes, attempt: Attempt) -> bytes:
    """Puts both kinds of masks on `limbs`, in place, and writes the message."""
    masks.add_own_mask(limbs, seed, attempt, self.name)
    masks.add_pair_masks(limbs, self._secrets, self._keys.public, attempt, self.name)
    commitment = masks.commitment(seed, attempt, self.name)
    return masks.MaskedMessage(commitment, limbs).to_bytes(attempt, self.name)

  def _require_member(self, attempt: Attempt) -> None:
    if attempt.broadcast.run != self._keys.run:
      raise InputError(
        f"{attempt} is of another run than this site is in: not answered."
      )
    strangers = set(attempt.members) - set(self._keys.public)
    if strangers:
      raise InputError(
        f"{attempt} has members that are no sites of this run: "
        f"{listing(sorted(strangers))}."
      )
    if self.name not in attempt.members:
      raise InputError(f"{self.name!r} is no member of {attempt}: not answered.")


def transcript(attempt: Attempt, receipts: Mapping[str, str]) -> str:
  """Returns one digest of all members' messages to an attempt, for sites to compare."""
  named = [part for name in attempt.members for part in (name, receipts[name])]
  return digest("transcript", attempt.context(), *named)


def _require_own(memory: Memory, keys: RunKeys) -> None:
  """Raises InputError unless the keys are those of this memory's run and site."""
  if memory.run != keys.run:
    raise InputError("the run keys are of another run than this site's memory.")
  if keys.public.get(memory.site) != primitives.public_key(memory.private):
    raise InputError(
      f"the run key that is told of {memory.site!r} is not the one in its memory: "
      "somebody may be in between; nothing is sent."
    )
  if memory.public and memory.public != dict(keys.public):
    changed = sorted(
      name
      for name in memory.public.keys() | keys.public.keys()
      if memory.public.get(name) != keys.public.get(name)
    )
    raise InputError(
      f"the run keys of {listing(changed)} are not those of before: keys are final for "
      "a run; start a new one."
    )
  require_enough(tuple(keys.public))


def _require_may_answer(memory: Memory, known: Answer | None, attempt: Attempt) -> None:
  """Raises InputError if an attempt may not be answered after what was before it."""
  if known and known.number == attempt.number and known.members != attempt.members:
    raise InputError(
      f"{attempt} was answered for other members ({listing(known.members)}): another "
      "set of members is another attempt."
    )
  if known and known.revealed and known.number != attempt.number:
    raise InputError(
      f"attempt {known.number} at step {attempt.broadcast.step} is revealed: only its "
      f"members can finish it ({listing(known.members)}), or the run stops."
    )
  if known and known.number > attempt.number:
    raise InputError(
      f"attempt {known.number} at step {attempt.broadcast.step} was answered already: "
      f"attempt {attempt.number}, an earlier one, is not."
    )
  for broadcast, answer in memory.of_question(attempt.broadcast.question):
    if answer.revealed and answer.members != attempt.members:
      raise InputError(
        f"the question of {attempt} was answered at step {broadcast.step} with other "
        f"members ({listing(answer.members)}): the sums would differ by single sites."
      )


def _require_all_answered(attempt: Attempt, receipts: Mapping[str, str]) -> None:
  """Raises InputError unless there is a receipt of each member, and of no other."""
  missing = [name for name in attempt.members if name not in receipts]
  if missing:
    raise InputError(
      f"{listing(missing)} did not answer {attempt}: until then nothing is revealed."
    )
  if len(receipts) > len(attempt.members):
    raise InputError(f"{attempt} has answers of sites that are no members of it.")
