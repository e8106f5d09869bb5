"""The members of a run as a coordinator reaches them: messages out, answers in.

A member that was restarted has forgotten which trainings there are, and its masks of
the run; it says so, is told again, and then answers.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import protocol, refusal
from fedbnr_jax.network.agreement import Agreement
from fedbnr_jax.network.transport import Failure, Transport

SECONDS = 600.0  # For which a site is waited for, unless somebody says otherwise.
Reply = protocol.Message | Failure
_FORGOTTEN = ("unknown-run", "unknown-training")  # By a site that was restarted.


class Members:
  """All members of one run, named by the run's number."""

  def __init__(
    self,
    agreement: Agreement,
    transport: Transport,
    run: str,
    seconds: float = SECONDS,
  ) -> None:
    """Takes up a run.

    Args:
      agreement: Of the federation.
      transport: Reaches its members.
      run: 64 hexadecimal digits that no other run has.
      seconds: For which a site is waited for.

    Raises:
      InputError: If the transport does not reach every member.
    """
    self.agreement, self.run = agreement, run
    self.names = tuple(sorted(agreement.members))
    self.bytes_up = self.bytes_down = 0
    self._transport, self._seconds = transport, seconds
    self._keys: bytes | None = None
    self._begins: dict[str, bytes] = {}  # By training.
    unknown = [name for name in self.names if name not in transport.sites]
    if unknown:
      raise InputError(f"there is no connection to site {unknown[0]!r}, a member.")

  # -------------------------------------------------------------- how a run starts

  def greet(self) -> tuple[list[list[str]], dict[str, str]]:
    """Asks all members who they are.

    Returns:
      The cards [site, public key, signature] of those that answered, where sums are
      masked; and why others did not answer, by name.

    Raises:
      InputError: If one refuses, or has another version.
    """
    replies = self.ask(dict.fromkeys(self.names, self.message({"kind": "hello"})))
    cards, failed = [], {}
    for name, reply in replies.items():
      if isinstance(reply, Failure):
        if reply.code:
          raise stopped({name: reply.reason}, "the run has not begun")
        failed[name] = reply.reason
        continue
      _require_versions(name, reply.head.get("versions"))
      cards.append([name, str(reply.head.get("public")), str(reply.head.get("signed"))])
    return cards, failed

  def hand_out_keys(self, cards: Sequence[Sequence[str]]) -> None:
    """Tells every member the keys of all, and those that come back again.

    Raises:
      InputError: If a member refuses them.
    """
    head = {"kind": "keys", "cards": [list(card) for card in cards]}
    self._keys = self.message(head)
    self._tell(self._keys, "the run has not begun")

  def begin(
    self, training: str, config: Any, preprocessor: Any, fold: int | None = None
  ) -> None:
    """Tells every member of a training, and those that come back again.

    Args:
      training: Its digest.
      config: The training's.
      preprocessor: The training's.
      fold: The fold of each member's rows that it is without, if it is.

    Raises:
      InputError: If a member refuses it.
    """
    head = {"kind": "begin", "config": config, "preprocessor": preprocessor}
    self._begins[training] = self.message(
      head if fold is None else head | {"fold": fold}
    )
    self._tell(self._begins[training], "the training has not begun")

  def _tell(self, message: bytes, what: str) -> None:
    """Sends a message; members that cannot be reached are told when they are back."""
    replies = self.ask(dict.fromkeys(self.names, message))
    failed = {n: r for n, r in replies.items() if isinstance(r, Failure)}
    refused = {name: r.reason for name, r in failed.items() if r.code}
    if refused:
      raise stopped(refused, what)

  def deliver(self, content: Mapping[str, bytes]) -> dict[str, str]:
    """Sends files of a model to every member; says who does not take it, and why."""
    head = {"kind": "model", "files": list(content)}
    arrays = [np.frombuffer(data, np.uint8) for data in content.values()]
    replies = self.ask(dict.fromkeys(self.names, self.message(head, arrays)))
    return {n: r.reason for n, r in replies.items() if isinstance(r, Failure)}

  # ----------------------------------------------------------------------- messages

  def message(
    self, head: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()
  ) -> bytes:
    """Writes a message of this run."""
    known = {"federation": self.agreement.digest(), "run": self.run}
    return protocol.encode({**known, **head}, arrays)

  def ask(self, messages: Mapping[str, bytes], training: str = "") -> dict[str, Reply]:
    """Sends messages, and again to members that had to be told of run or training."""
    replies = self._sent(messages)
    new = [name for name, reply in replies.items() if _code(reply) in _FORGOTTEN]
    if new:
      # Of both: which of them a site misses first is its own affair.
      for told in (self._keys, self._begins.get(training)):
        if told is not None:
          self._sent(dict.fromkeys(new, told))
      replies |= self._sent({name: messages[name] for name in new})
    return replies

  def _sent(self, messages: Mapping[str, bytes]) -> dict[str, Reply]:
    """Sends messages, and reads what comes back as far as it belongs to them."""
    answers = self._transport.ask(messages, self._seconds) if messages else {}
    self.bytes_down += sum(map(len, messages.values()))
    found: dict[str, Reply] = {}
    # In the order of names, whoever is first.
    for name in sorted(messages):
      answer = answers.get(name, Failure("does not answer"))
      if isinstance(answer, Failure):
        found[name] = answer
        continue
      self.bytes_up += len(answer)
      found[name] = _read(name, messages[name], answer)
    return found


def stopped(reasons: Mapping[str, str], what: str) -> InputError:
  """Makes the error of a run that cannot go on."""
  told = "; ".join(f"site {name!r} {why}" for name, why in reasons.items())
  return InputError(f"{told}. So {what}.")


def versions() -> dict[str, str]:
  """Says what must be alike everywhere: draws of a kernel follow from a seed."""
  # The package, which imports what is above this room.
  own = sys.modules["fedbnr_jax"].__version__
  return {"fedbnr-jax": own, "jax": jax.__version__}


def _require_versions(name: str, theirs: Any) -> None:
  told = theirs if isinstance(theirs, dict) else {}
  for package, mine in versions().items():
    if told.get(package) != mine:
      raise InputError(
        f"site {name!r} has {package} {told.get(package)}, and here is {mine}: install "
        "the same version everywhere."
      )


def _read(name: str, message: bytes, answer: bytes) -> Reply:
  """Reads an answer to a message; a refusal becomes a failure, in the words for it."""
  try:
    read = protocol.decode(answer)
  except InputError as error:
    return Failure(f"sends what cannot be read ({str(error).rstrip('.')})")
  head = read.head
  if head.get("to") != protocol.digest(message) or head.get("site") != name:
    return Failure("answers another message than the one it was sent")
  if head.get("kind") == "refusal":
    code = str(head.get("code"))
    return Failure(refusal.sentence(code), code)
  return read


def _code(reply: Reply) -> str:
  """Returns why a member refused, if it did."""
  return reply.code if isinstance(reply, Failure) else ""
