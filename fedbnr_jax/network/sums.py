"""Sums over sites: a question goes to the members, the sum of their answers comes back.

What is asked before the rounds, of columns, is of all members. A round goes on without
members that do not answer, if the agreement allows that; they are back in the next one.
With masks nobody sees a part of a sum.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import masked_sum, vectors
from fedbnr_jax.network.attempt import Attempt
from fedbnr_jax.network.attempt_log import AttemptLog
from fedbnr_jax.network.kept_sums import KeptSums, Summed
from fedbnr_jax.network.members import Members, stopped
from fedbnr_jax.network.protocol import Message
from fedbnr_jax.network.question import Question, is_named
from fedbnr_jax.network.site_run import run_digest
from fedbnr_jax.network.transport import Failure
from fedbnr_jax.run.journal import NonFiniteError

# Called with a site's name, its vector [n] and the question; raises InputError where
# the vector cannot be right. Under masks it is called once, with the sum, and no name.
Check = Callable[[str, np.ndarray, Question], None]


class Sums:
  """All sums that a coordinator can ask the members of a run for."""

  def __init__(
    self,
    members: Members,
    folder: pathlib.Path,
    check: Check = lambda site, vector, question: None,
  ) -> None:
    """Takes up a run.

    Args:
      members: Of the run.
      folder: Where the coordinator keeps sums, and which it has begun.
      check: Looks at what comes.
    """
    self.members = members
    self.left_out: dict[str, str] = {}  # Why, by name, since the round began.
    self._kept = KeptSums(folder / "sums")
    self._attempts = AttemptLog(folder / "attempts.jsonl")
    self._check = check
    self._masking = members.agreement.masking

  @property
  def present(self) -> tuple[str, ...]:
    """Members that have not been left out since the round began."""
    return tuple(name for name in self.members.names if name not in self.left_out)

  def begin_round(self, phase: str) -> None:
    """Begins a round of a training; members that were left out take part again."""
    self.left_out = {}
    self._kept.begin(phase)

  def named(self, question: Question) -> dict[str, np.ndarray]:
    """Asks all members for arrays by name; returns their sums."""
    self.left_out = {}
    summed = self._summed(question)
    like = {name: np.zeros(shape) for name, shape in summed.shapes}
    return vectors.from_vector(summed.vector, like)

  def tree(self, question: Question, like: Any) -> Any:
    """Asks for a tree of arrays with the shapes and types of `like`.

    Raises:
      InputError: If fewer members answer than was agreed on.
      NonFiniteError: If the loss of a member is not finite.
    """
    return vectors.from_vector(self._summed(question).vector, like)

  def _summed(self, question: Question) -> Summed:
    """Asks for a vector [n], unless it is known from before the run was stopped."""
    stays = is_named(question)
    known = self._kept.read(question, stays=stays)
    if known is not None:
      if not stays:
        for name in self.present:
          if name not in known.members:
            self.left_out[name] = "did not answer before the run was stopped"
      return known
    summed = self._masked(question) if self._masking else self._plain(question)
    if stays or self._masking:  # A plain question can be asked again.
      self._kept.write(question, summed, stays=stays)
    return summed

  # ---------------------------------------------------------------------------- plain

  def _plain(self, question: Question) -> Summed:
    parts: dict[str, np.ndarray] = {}
    found: dict[str, Any] = {}
    head = {"kind": "ask", **question.head()}
    for name, reply in self._answers(self.present, head, question).items():
      try:
        (part,) = reply.arrays
        _require_vector(part)
        _require_alike(reply.head, question, found)
        if parts and len(part) != len(next(iter(parts.values()))):
          raise InputError("answers with a vector of another length than others")
        self._check(name, part, question)
        parts[name] = part
      except (InputError, ValueError) as error:
        self._leave_out(name, str(error).rstrip("."), question)
    self._require_enough(tuple(parts), question)
    # In the order of names: the same bits, whoever is first.
    total = np.sum([parts[name] for name in sorted(parts)], axis=0)
    return Summed(total, tuple(sorted(parts)), found.get("shapes"))

  # --------------------------------------------------------------------------- masked

  def _masked(self, question: Question) -> Summed:
    """Asks for a masked sum; what is noted on disk comes before what is asked."""
    found: dict[str, Any] = {}
    run = run_digest(self.members.agreement.digest(), self.members.run)
    self._require_enough(self.present, question)
    begun = self._attempts.begin(run, question.digest(), self.present)

    def ask_masks(attempt: Attempt, missing: Sequence[str]) -> dict[str, bytes]:
      self._require_enough(attempt.members, question)
      head = {"kind": "ask", "attempt": attempt.as_note(), **question.head()}
      answers = {}
      final = begun.revealing  # Then nobody can be left out any more.
      for name, reply in self._answers(missing, head, question, final).items():
        try:
          _require_alike(reply.head, question, found)
          answers[name] = reply.arrays[0].tobytes()
        except (InputError, IndexError) as error:
          self._leave_out(name, str(error).rstrip("."), question)
      return answers

    def ask_reveals(
      attempt: Attempt, receipts: Mapping[str, str], missing: Sequence[str]
    ) -> dict[str, bytes]:
      known = {"attempt": attempt.as_note(), "receipts": dict(receipts)}
      message = self.members.message({"kind": "reveal", **known})
      replies = self.members.ask(dict.fromkeys(missing, message))
      return {
        name: reply.arrays[0].tobytes()
        for name, reply in replies.items()
        if isinstance(reply, Message) and len(reply.arrays) == 1
      }

    self._attempts.note(*begun)
    given = [ask_masks(begun.attempt, begun.attempt.members)]
    size = max(map(masked_sum.size_of, given[0].values()), default=0)
    vector, total = masked_sum.collect(
      masked_sum.MaskedSum(begun.attempt, size, begun.revealing),
      lambda *asked: given.pop() if given else ask_masks(*asked),
      ask_reveals,
      self._attempts.note,
    )
    self._check("", vector, question)
    for name in set(self.present) - set(total.attempt.members):
      self.left_out[name] = "did not answer before others had revealed"
    return Summed(vector, total.attempt.members, found.get("shapes"))

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

  def _leave_out(self, name: str, reason: str, question: Question) -> None:
    self.left_out[name] = reason
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


def _require_vector(part: np.ndarray) -> None:
  """Raises InputError unless an answer is a vector of finite numbers."""
  if part.ndim != 1 or part.dtype != np.float64:
    raise InputError("sends something else than a vector of numbers")
  if not np.isfinite(part).all():
    raise InputError("sends numbers that are not finite")


def _require_alike(
  head: Mapping[str, Any], question: Question, found: dict[str, Any]
) -> None:
  """Raises InputError unless an answer has the arrays that the others have."""
  if not is_named(question):
    return
  shapes = head.get("shapes")
  if json.dumps(found.setdefault("shapes", shapes)) != json.dumps(shapes):
    raise InputError("answers with other columns than the sites before it")
