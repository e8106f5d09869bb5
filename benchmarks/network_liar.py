"""A site that sends wrong messages, beside the program that it should run.

What a site runs stands in its own folder, so that `lie_at` can put another program
there. It answers as it should until it is asked for statistics for the second time; the
lies then begin. When that was is noted, for others to know how long nobody noticed.
"""

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fedbnr_jax.algorithms.last_layer import StatisticsMessage
from fedbnr_jax.gp import blr
from fedbnr_jax.network import agreement, joining, kits, masks, protocol, schema, site
from fedbnr_jax.network.attempt import Attempt
from fedbnr_jax.network.question import Question
from fedbnr_jax.network.transport import Answer

_PROGRAM = "benchmarks.network_liar:answering"
_SIDE = "side.json"
_FIRST = 2  # Of the times that it is asked for statistics, the first that it lies at.


def lie_at(kit: pathlib.Path, how: str, folder: pathlib.Path) -> Callable[[], None]:
  """Lets a site lie from its next job on.

  Args:
    kit: The site's, whose program has been started.
    how: One of `LIES`, or "" to tell the truth and record it.
    folder: Of what is recorded, and of when the first lie was told.

  Returns:
    What puts the site right again.
  """
  path = kit / _SIDE
  folder.mkdir(exist_ok=True)
  right = path.read_text()
  content = json.loads(right)
  content["program"] = _PROGRAM
  content["arguments"] |= {"how": how, "records": str(folder)}
  path.write_text(json.dumps(content))

  def put_right() -> None:
    path.write_text(right)

  return put_right


def lied_at(folder: pathlib.Path) -> float:
  """Returns when the first lie was told, by the clock `time.monotonic` of a machine."""
  assert (folder / "lied").exists(), "no lie was told"
  return float((folder / "lied").read_text())


def answering(folder: str, data: str, digest: str, how: str, records: str) -> Answer:
  """Makes the answers of a site that lies; see `joining.answering`."""
  kit = kits.opened(folder)
  own = kit.folder / joining.OWN
  agreed = agreement.read(own / "federation.json")
  assert agreed.digest() == digest
  table = schema.read_table(agreed.schema, data)
  made = Liar(own, kit.plan.name, agreed, table, kit.identity())
  made.how, made.records = how, pathlib.Path(records)
  return made.answer


class Liar(site.Site):
  """A site that is right in all but what it is told to lie about."""

  how: str = ""
  records: pathlib.Path
  _asked = 0  # How many times for statistics.
  _is_asked = False  # Whether this message asks for them.
  _honest = b"~"  # The masked message in whose place a forged one was sent.

  def answer(self, data: bytes) -> bytes:
    """Answers a message, and changes the answer if that is the lie."""
    self._is_asked = False
    message = protocol.decode(data)
    if message.head.get("kind") == "reveal" and self.how == "forged":
      return self._reveal_forged(data, message)
    answer = super().answer(data)
    if not self._is_asked:
      return answer
    if self._asked < _FIRST or not self.how:
      self._path(self._asked).write_bytes(answer)
    if self._lies and self.how in _ANSWERS:
      self._note()
      return _ANSWERS[self.how](self, data, answer)
    return answer

  def _tree(self, asked: Question) -> tuple[Any, str]:
    tree, what = super()._tree(asked)
    if isinstance(tree, StatisticsMessage):
      self._asked, self._is_asked = self._asked + 1, True
      if self._lies and self.how in _TREES:
        self._note()
        tree = _TREES[self.how](tree)
    return tree, what

  @property
  def _lies(self) -> bool:
    return self._asked >= _FIRST

  def _path(self, number: int, run: str = "") -> pathlib.Path:
    folder = self.records.parent / run if run else self.records
    return folder / f"answer{number}"

  def _note(self) -> None:
    path = self.records / "lied"
    if not path.exists():
      path.write_text(repr(time.monotonic()))

  # ------------------------------------------------------------------ lies of a message

  def not_finite(self, data: bytes, answer: bytes) -> bytes:
    """Sends NaN for all numbers, past its own check."""
    read = protocol.decode(answer)
    return protocol.encode(read.head, [np.full_like(a, np.nan) for a in read.arrays])

  def of_another_run(self, data: bytes, answer: bytes) -> bytes:
    """Sends the bytes by which it answered the same question of another run."""
    masked = self._agreement.masking
    return self._path(_FIRST, recorded(masked)).read_bytes()

  def of_another_message(self, data: bytes, answer: bytes) -> bytes:
    """Sends the bytes by which it answered the round before."""
    return self._path(_FIRST - 1).read_bytes()

  def relabelled(self, data: bytes, answer: bytes) -> bytes:
    """Sends the answer of another run, as one to this message."""
    return _to(data, self.of_another_run(data, answer))

  def earlier_relabelled(self, data: bytes, answer: bytes) -> bytes:
    """Sends the answer of the round before, as one to this message."""
    return _to(data, self.of_another_message(data, answer))

  def forged(self, data: bytes, answer: bytes) -> bytes:
    """Sends masked numbers of another run with all marks of an answer to this one."""
    (own,) = protocol.decode(answer).arrays
    other = protocol.decode(self.of_another_run(data, answer))
    self._honest = own.tobytes()
    size = masks.HEADER_BYTES
    assert len(own) == len(other.arrays[0])
    vector = np.concatenate([own[:size], other.arrays[0][size:]])
    return _to(data, protocol.encode(other.head, [vector]))

  def _reveal_forged(self, data: bytes, message: protocol.Message) -> bytes:
    """Reveals its mask though the server has another answer than it has noted."""
    attempt = Attempt.from_note(message.head["attempt"])
    mark = masks.MaskedMessage(b"", np.zeros((0, 2), np.uint64))
    if self._honest.startswith(mark.to_bytes(attempt, self.name)):
      message.head["receipts"][self.name] = masks.receipt(self._honest)
    changed = protocol.encode(message.head, message.arrays)
    return _to(data, super().answer(changed))


def recorded(masked: bool) -> str:
  """Names the folder in which a run without faults is recorded."""
  return "masked" if masked else "plain"


def _to(data: bytes, answer: bytes) -> bytes:
  """Makes an answer say that it is to a message."""
  read = protocol.decode(answer)
  return protocol.encode({**read.head, "to": protocol.digest(data)}, read.arrays)


def _indefinite(tree: StatisticsMessage) -> StatisticsMessage:
  """Lets two features have more in common than each with itself; the trace stays."""
  gram = np.array(tree.gram)
  trace = float(np.trace(np.asarray(blr.unpack(tree.gram))))
  gram[1] += 10.0 * trace  # Of the second row, the first column.
  return tree.replace(gram=gram)


_TREES: dict[str, Callable[[StatisticsMessage], StatisticsMessage]] = {
  "nan": lambda tree: tree.replace(gram=np.full_like(tree.gram, np.nan)),
  "million": lambda tree: tree.replace(gram=1e6 * np.asarray(tree.gram)),
  "indefinite": _indefinite,
}
_ANSWERS: dict[str, Callable[[Liar, bytes, bytes], bytes]] = {
  "nan sent": Liar.not_finite,
  "another run": Liar.of_another_run,
  "another message": Liar.of_another_message,
  "another run, relabelled": Liar.relabelled,
  "another message, relabelled": Liar.earlier_relabelled,
  "forged": Liar.forged,
}
LIES = (*_TREES, *_ANSWERS)
