"""A transport within a process that loses, delays, repeats and damages messages.

What goes wrong is said by rules, each for one site and some of its messages. Sites can
be killed, and started again from their disk. All that has reached the server is kept,
as a curious server would keep it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import protocol
from fedbnr_jax.network.transport import Answer, Failure
from tests.runs import StopError

# A fault is one of these, or a function that changes the answer of a site.
FAULTS = (
  "lose",  # The message does not arrive.
  "lose_answer",
  "delay",  # The message arrives before the site's next one; its answer is late.
  "repeat",  # The message arrives twice; the second answer counts.
  "corrupt",
  "corrupt_answer",
  "replay_answer",  # The site's answer before the last is given again.
  "restart",  # The site is started again from its disk, then answers.
  "kill",  # The site is gone before the message arrives, until it is started again.
  "kill_after",  # It has answered, and is gone before the answer has left.
)
Change = Callable[[protocol.Message], protocol.Message]


@dataclasses.dataclass
class Rule:
  """One fault: whom, when, and what.

  Attributes:
    site: Its name.
    fault: One of `FAULTS`, or a change of the answer.
    kind: Of messages that it befalls, such as "ask"; "" for any.
    question: Which question they ask; "" for any.
    number: Which exchange; None for any.
    round: In which round of a training; 0 for any.
    times: How many messages it befalls.
  """

  site: str
  fault: str | Change
  kind: str = "ask"
  question: str = ""
  number: int | None = None
  round: int = 0
  times: int = 1

  def befalls(self, site: str, head: Mapping[str, object], round_: int) -> bool:
    """Whether it is time; counts how often it was."""
    fits = site == self.site and self.kind in ("", head.get("kind"))
    fits = fits and self.question in ("", head.get("question"))
    fits = fits and self.number in (None, head.get("number"))
    if not fits or self.round not in (0, round_) or not self.times:
      return False
    self.times -= 1
    return True


class FaultyTransport:
  """Reaches sites one after the other, with faults."""

  def __init__(
    self, start: Mapping[str, Callable[[], Answer]], rules: Sequence[Rule] = ()
  ) -> None:
    """Starts all sites.

    Args:
      start: By name, a function that starts a site from its disk.
      rules: What goes wrong; of several that fit, the first counts.
    """
    self._start = dict(start)
    self.rules = list(rules)
    self.round = 0  # As `update` is told.
    self.deadly = False  # Whether the server is killed at each message that is new.
    self._known: set[bytes] = set()
    self.running: dict[str, Answer] = {}
    self.late: dict[str, list[bytes]] = {name: [] for name in start}
    # All that the server could have kept: (site, message, answer), in order.
    self.seen: list[tuple[str, bytes, bytes]] = []
    for name in start:
      self.restart(name)

  @property
  def sites(self) -> tuple[str, ...]:
    return tuple(self._start)

  # A coordinator's progress, by which rounds are known.

  def trying(self, name: str) -> None:
    del name

  def start(self, task: object, rounds_done: int, num_runs: int) -> None:
    del task, num_runs
    self.round = rounds_done + 1

  def update(self, record: Mapping[str, object]) -> None:
    self.round = int(record["round"]) + 1

  def calibrating(self, fold: int, num_folds: int) -> None:
    del fold, num_folds

  def close(self) -> None:
    self.round = 0

  def restart(self, *names: str) -> None:
    """Starts sites from their disks; what they had in memory is gone."""
    for name in names:
      self.running[name] = self._start[name]()

  def restart_dead(self) -> None:
    self.restart(*(name for name in self._start if name not in self.running))

  def kill(self, *names: str) -> None:
    for name in names:
      self.running.pop(name, None)

  def ask(
    self, messages: Mapping[str, bytes], seconds: float
  ) -> dict[str, bytes | Failure]:
    del seconds
    new = set(messages.values()) - self._known
    self._known |= new
    if not (self.deadly and new):
      return {name: self._ask(name, data) for name, data in messages.items()}
    # Every other time when all sites have answered, else half of them.
    reached = list(messages)[len(self._known) % 2 * len(messages) // 2 :]
    for name in reached:
      self._ask(name, messages[name])
    raise StopError

  def _ask(self, name: str, data: bytes) -> bytes | Failure:
    head = protocol.decode(data).head
    befall = (r.fault for r in self.rules if r.befalls(name, head, self.round))
    fault = next(befall, None)
    if fault == "restart":
      self.restart(name)
    if fault == "kill":
      self.kill(name)
    if name not in self.running:
      return Failure("cannot be reached")
    if fault == "lose":
      return Failure("does not answer")
    if fault == "delay":
      self.late[name].append(data)
      return Failure("does not answer")
    for message in self._take_late(name):
      self._deliver(name, message)  # The server sees it, and has gone on since.
    if fault == "corrupt":
      data = _damaged(data)
    answer = self._deliver(name, data, lost=fault == "lose_answer")
    if fault == "repeat":
      answer = self._deliver(name, data)
    if fault == "kill_after":
      self.kill(name)
    if fault in ("lose_answer", "kill_after"):
      return Failure("does not answer")
    if fault == "corrupt_answer":
      return _damaged(answer)
    if fault == "replay_answer":
      return self._before(name)
    if callable(fault):
      changed = fault(protocol.decode(answer))
      return protocol.encode(changed.head, changed.arrays)
    return answer

  def _deliver(self, name: str, data: bytes, lost: bool = False) -> bytes:
    answer = self.running[name](data)
    if not lost:
      self.seen.append((name, data, answer))
    return answer

  def _take_late(self, name: str) -> list[bytes]:
    late, self.late[name] = self.late[name], []
    return late

  def _before(self, name: str) -> bytes:
    answers = [answer for site, _, answer in self.seen if site == name]
    return answers[max(0, len(answers) - 2)]


def _damaged(data: bytes) -> bytes:
  """Flips a bit in the middle."""
  damaged = bytearray(data)
  damaged[len(damaged) // 2] ^= 4
  return bytes(damaged)


def vector_changed(change: Callable[[np.ndarray], np.ndarray]) -> Change:
  """Makes a fault that changes the first array of an answer."""

  def changed(message: protocol.Message) -> protocol.Message:
    if message.head.get("kind") == "refusal":
      raise InputError("a refusal has no vector: the fault comes too early.")
    return message._replace(arrays=(change(message.arrays[0]), *message.arrays[1:]))

  return changed
