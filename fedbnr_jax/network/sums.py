"""Sums over sites: a question goes to the members, the sum of their answers comes back.

What is asked before the rounds, of columns, is of all members. A round goes on without
members that do not answer, or answer what cannot be right, if the agreement allows
that; they are back in the next one. With masks nobody sees a part of a sum, and what
cannot be right is seen in the sum alone.
"""

import functools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing
from fedbnr_jax.network import masked_sum, masks, vectors
from fedbnr_jax.network.attempt import Attempt
from fedbnr_jax.network.attempt_log import AttemptLog
from fedbnr_jax.network.expected import Answers
from fedbnr_jax.network.kept_sums import KeptSums, Summed
from fedbnr_jax.network.left_out import LeftOutLog
from fedbnr_jax.network.members import Members, stopped
from fedbnr_jax.network.protocol import Message
from fedbnr_jax.network.question import Question, is_named
from fedbnr_jax.network.site_run import run_digest
from fedbnr_jax.network.transport import Failure
from fedbnr_jax.run.journal import NonFiniteError

PAUSE = 5.0  # Seconds before members that must answer are asked again.
_TRIES = 3  # At members that must answer.
END = "end"  # The phase after all rounds.


class Sums:
  """All sums that a coordinator can ask the members of a run for."""

  def __init__(
    self, members: Members, folder: pathlib.Path, pause: float = PAUSE
  ) -> None:
    """Takes up a run.

    Args:
      members: Of the run.
      folder: Where the coordinator keeps sums, and which it has begun.
      pause: Seconds before members that must answer are asked again.
    """
    self.members = members
    self.answers = Answers(members.agreement.schema, members.names)
    self.left_out: dict[str, str] = {}  # Why, by name, since the round began.
    self._phase, self._pause = "", pause
    self._kept = KeptSums(folder / "sums")
    self._attempts = AttemptLog(folder / "attempts.jsonl")
    self._log = LeftOutLog(folder / "left_out.csv")
    self._masking = members.agreement.masking

  @property
  def present(self) -> tuple[str, ...]:
    """Members that have not been left out since the round began."""
    return tuple(name for name in self.members.names if name not in self.left_out)

  def begin_round(self, training: str, phase: str) -> None:
    """Begins a round of a training; members that were left out take part again.

    Args:
      training: Digest of the training.
      phase: What the round is called, other than those before it; or `END`.
    """
    self.left_out, self._phase = {}, phase
    self._kept.begin(f"{training} {phase}")

  def named(self, question: Question) -> dict[str, np.ndarray]:
    """Asks all members for arrays by name; returns their sums."""
    self.left_out = {}
    sums: dict[str, np.ndarray] = self.tree(question)
    return sums

  def tree(self, question: Question) -> Any:
    """Asks for a tree of arrays; returns the sum of the members' trees.

    Raises:
      InputError: If fewer members answer than was agreed on, or what they send cannot
        be right.
      NonFiniteError: If the loss of a member is not finite.
    """
    return vectors.from_vector(self._summed(question), self.answers.like(question))

  def each(self, question: Question) -> dict[str, Any]:
    """Asks the members for a tree of their own each, unmasked.

    What cannot be had of a member is missing, and noted in the log: no model depends on
    it.
    """
    message = self.members.message({"kind": "ask", **question.head()}, question.arrays)
    told = dict.fromkeys(self.present, message)
    found = {}
    for name, reply in self.members.ask(told, question.training).items():
      try:
        if isinstance(reply, Failure):
          raise InputError(reply.reason)
        vector = self._checked(name, reply, question)
        found[name] = vectors.from_vector(vector, self.answers.like(question))
      except InputError as error:
        self._log.note(self._phase, name, self.answers.what(question), str(error))
    return found

  def _summed(self, question: Question) -> np.ndarray:
    """Asks for a vector [n], unless it is known from before the run was stopped."""
    # Of scores, those of the best round are wanted again in the end.
    stays = is_named(question) or question.name == "scores"
    known = self._kept.read(question, stays=stays)
    if known is not None:
      self._take_up(known, question)
      return known.vector
    summed = self._masked(question) if self._masking else self._plain(question)
    if stays or self._masking:  # A plain question can be asked again.
      self._kept.write(question, summed, stays=stays)
    return summed.vector

  def _take_up(self, known: Summed, question: Question) -> None:
    """Learns of a sum what was learnt of it when it came."""
    if is_named(question):
      for name, part in known.parts.items():
        self.answers((name,), part, question)
      self.answers(known.members, known.vector, question)
    elif self._phase != END:
      for name in set(self.present) - set(known.members):
        self.left_out[name] = "did not answer before the run was stopped"

  # ---------------------------------------------------------------------------- plain

  def _plain(self, question: Question) -> Summed:
    parts: dict[str, np.ndarray] = {}
    head = {"kind": "ask", **question.head()}
    for name, reply in self._answers(self.present, head, question).items():
      try:
        parts[name] = self._checked(name, reply, question)
      except InputError as error:
        self._leave_out(name, self._wrong(question, error), question)
    self._require_enough(tuple(parts), question)
    # In the order of names: the same bits, whoever is first.
    total = np.sum([parts[name] for name in sorted(parts)], axis=0)
    kept = parts if question.name == "counts" else {}  # Others are checked by these.
    return Summed(total, tuple(sorted(parts)), kept)

  def _checked(self, name: str, reply: Message, question: Question) -> np.ndarray:
    """Returns a member's vector [n].

    Raises:
      InputError: If it cannot be right.
    """
    arrays = reply.arrays
    if len(arrays) != 1 or arrays[0].ndim != 1 or arrays[0].dtype != np.float64:
      raise InputError("has something else than a vector of numbers")
    self.answers((name,), arrays[0], question)
    return arrays[0]

  # --------------------------------------------------------------------------- masked

  def _masked(self, question: Question) -> Summed:
    """Asks for a masked sum; what is noted on disk comes before what is asked."""
    run = run_digest(self.members.agreement.digest(), self.members.run)
    self._require_enough(self.present, question)
    begun = self._attempts.begin(run, question.digest(), self.present)
    size = self.answers.size(question)
    why: dict[str, str] = {}  # Members have not revealed, by name.
    try:
      vector, total = masked_sum.collect(
        masked_sum.MaskedSum(begun.attempt, size, begun.revealing),
        functools.partial(self._ask_masks, question, begun.revealing),
        functools.partial(self._ask_reveals, why),
        self._attempts.note,
        _TRIES,
      )
    except InputError as error:
      if not why:
        raise
      raise stopped(why, str(error).rstrip(".")) from error
    members = total.attempt.members
    try:
      self.answers(members, vector, question)
    except InputError as error:
      raise InputError(
        f"the sum of sites {listing(members)} cannot be right: asked for "
        f"{self.answers.what(question)!r}, it {error}. Masks hide whose part is wrong: "
        "let the sites' people look at their tables and versions, then start a new run "
        "in another folder."
      ) from error
    for name in set(self.present) - set(members):
      self._leave_out(name, "did not answer before others had revealed", question)
    return Summed(vector, members)

  def _ask_masks(
    self, question: Question, final: bool, attempt: Attempt, missing: Sequence[str]
  ) -> dict[str, bytes]:
    """Asks for masked messages; `final` says that nobody can be left out any more."""
    self._require_enough(attempt.members, question)
    head = {"kind": "ask", "attempt": attempt.as_note(), **question.head()}
    size, answers = self.answers.size(question), {}
    for name, reply in self._answers(missing, head, question, final).items():
      try:
        answers[name] = _masked_bytes(name, reply, attempt, size)
      except InputError as error:
        if final:
          raise stopped({name: self._wrong(question, error)}, _FINAL) from error
        self._leave_out(name, self._wrong(question, error), question)
    return answers

  def _ask_reveals(
    self,
    why: dict[str, str],
    attempt: Attempt,
    receipts: Mapping[str, str],
    missing: Sequence[str],
  ) -> dict[str, bytes]:
    """Asks for the seeds of own masks; `why` is told which do not come."""
    time.sleep(self._pause if why else 0.0)
    known = {"attempt": attempt.as_note(), "receipts": dict(receipts)}
    message = self.members.message({"kind": "reveal", **known})
    seeds = {}
    for name, reply in self.members.ask(dict.fromkeys(missing, message)).items():
      if isinstance(reply, Failure):
        why[name] = reply.reason
      elif len(reply.arrays) == 1:
        seeds[name] = reply.arrays[0].tobytes()
        why.pop(name, None)
    return seeds

  # -------------------------------------------------------------------- who is in it

  def _answers(
    self,
    names: Sequence[str],
    head: Mapping[str, Any],
    question: Question,
    final: bool = False,
  ) -> dict[str, Message]:
    """Asks members; those that do not answer are left out, unless they are final."""
    message = self.members.message(head, question.arrays)
    replies = self.members.ask(dict.fromkeys(names, message), question.training)
    answers = {}
    for name, reply in replies.items():
      if not isinstance(reply, Failure):
        answers[name] = reply
      elif reply.code == "not-finite":
        raise NonFiniteError(f"site {name!r} {reply.reason}")
      elif not final:
        self._leave_out(name, reply.reason, question)
    return answers

  def _wrong(self, question: Question, error: InputError) -> str:
    """Says of a site, whose name comes before it, that its answer cannot be right."""
    what = self.answers.what(question)
    return f"sends for {what!r} what cannot be right: it {error}"

  def _leave_out(self, name: str, reason: str, question: Question) -> None:
    """Goes on without a member, if that is allowed."""
    self.left_out[name] = reason
    self._log.note(self._phase, name, self.answers.what(question), reason)
    self._require_enough(self.present, question)

  def _require_enough(self, names: Sequence[str], question: Question) -> None:
    """Raises InputError if the sum of some members is not to be used."""
    members = self.members
    fewest = members.agreement.min_sites
    if is_named(question):
      fewest = len(members.names)
    if len(names) < fewest:
      raise stopped(
        self.left_out,
        f"{len(names)} sites are left of {len(members.names)}, where {fewest} are "
        "needed: the run stops with its last checkpoint, and the same command goes on "
        "from there",
      )


_FINAL = "the run stops: others have revealed, and go on with the same members only"


def _masked_bytes(name: str, reply: Message, attempt: Attempt, size: int) -> bytes:
  """Returns a member's masked message.

  Raises:
    InputError: If it is no answer to this attempt, or of another size.
  """
  if len(reply.arrays) != 1:
    raise InputError("has something else than a masked vector")
  data = reply.arrays[0].tobytes()
  try:
    message = masks.MaskedMessage.from_bytes(data, attempt, name)
  except InputError as error:
    raise InputError("is no answer to this question at this attempt") from error
  if len(message.limbs) != size + 1:  # The last one counts the members.
    raise InputError(f"has {len(message.limbs) - 1} numbers instead of {size}")
  return data
