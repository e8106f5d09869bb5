"""A site's answers in one run: some may change, and archives of those that cannot.

Once its seed has been revealed, an answer is final. Final answers go into files that
are written once, so that what is written for each sum does not grow with the run.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from fedbnr_jax.network import secret_file
from fedbnr_jax.network.attempt import Broadcast


@dataclasses.dataclass(frozen=True)
class Answer:
  """A site's last answer to a broadcast; the seeds of those before are forgotten."""

  number: int  # Of the attempt.
  members: tuple[str, ...]
  seed: bytes  # Of the site's own mask.
  receipt: str  # Digest of the masked message.
  revealed: str = ""  # Digest of all members' receipts, once the seed has left.


Answers = Mapping[Broadcast, Answer]


@dataclasses.dataclass(frozen=True, eq=False)
class Archive:
  """Final answers, in a file of their own."""

  name: str  # Of the file.
  seal: str  # Digest of its content.
  answers: Answers

  @functools.cached_property
  def by_question(self) -> Mapping[str, tuple[Broadcast, ...]]:
    """The broadcasts of each question."""
    found: dict[str, tuple[Broadcast, ...]] = {}
    for broadcast in self.answers:
      found[broadcast.question] = (*found.get(broadcast.question, ()), broadcast)
    return found

  def of_question(self, question: str) -> Iterator[tuple[Broadcast, Answer]]:
    """Yields the answers to a question, at whatever step."""
    for broadcast in self.by_question.get(question, ()):
      yield broadcast, self.answers[broadcast]


def write_archive(path: pathlib.Path, answers: Answers) -> Archive:
  """Writes final answers into a file."""
  assert all(answer.revealed for answer in answers.values())
  return Archive(path.name, secret_file.write(path, to_json(answers)), dict(answers))


def read_archive(path: pathlib.Path, seal: str, run: str) -> Archive:
  """Reads an archive, or takes it from memory if its file has not been touched since.

  Raises:
    ValueError: If it is not the one that was written.
    Exception: Whatever a damaged file makes json and others raise.
  """
  stat = path.stat()
  return _read_archive(path, seal, run, (stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=256)
def _read_archive(
  path: pathlib.Path, seal: str, run: str, touched: tuple[int, int]
) -> Archive:
  del touched
  content, found = secret_file.read(path)
  if found != seal:
    raise ValueError(f"{path.name} is another file than was written")
  return Archive(path.name, seal, from_json(run, content))


def to_json(answers: Answers) -> dict[str, Any]:
  """Writes answers as JSON can hold them."""
  # Most answers have the same members: their names are written once.
  sets = list(dict.fromkeys(answer.members for answer in answers.values()))
  places = {members: place for place, members in enumerate(sets)}
  return {
    "sets": sets,
    "answers": [
      [
        broadcast.step,
        broadcast.question,
        answer.number,
        places[answer.members],
        answer.seed.hex(),
        answer.receipt,
        answer.revealed,
      ]
      for broadcast, answer in answers.items()
    ],
  }


def from_json(run: str, content: Mapping[str, Any]) -> dict[Broadcast, Answer]:
  """Reads what `to_json` wrote."""
  answers = {}
  sets = [tuple(members) for members in content["sets"]]
  for step, question, number, place, seed, receipt, revealed in content["answers"]:
    answers[Broadcast(run, step, question)] = Answer(
      number, sets[place], bytes.fromhex(seed), receipt, revealed
    )
  return answers
