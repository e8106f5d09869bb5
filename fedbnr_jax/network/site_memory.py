"""A site's memory of one run: its key, and what it has answered and revealed, on disk.

Key and answers are in one file, so that none can be lost without the other: a site that
has forgotten what it revealed has no key to answer with either. The file is secret. One
that is damaged is refused, because a site that starts afresh could be asked twice. An
old copy that is put back in its place is not noticed: never restore it from a backup.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors, replacing
from fedbnr_jax.lock import alone_in
from fedbnr_jax.network import primitives
from fedbnr_jax.network.attempt import Broadcast
from fedbnr_jax.network.framing import digest

_VERSION = 1
_PURPOSE = "fedbnr-jax site memory 1"
_ROLE = "the folder of a site's memory"


@dataclasses.dataclass(frozen=True)
class Answer:
  """A site's last answer to a broadcast; the seeds of those before are forgotten."""

  number: int  # Of the attempt.
  members: tuple[str, ...]
  seed: bytes  # Of the site's own mask.
  receipt: str  # Digest of the masked message.
  revealed: str = ""  # Digest of all members' receipts, once the seed has left.


@dataclasses.dataclass
class Memory:
  """What a site knows of one run beside its rows."""

  run: str  # Digest of the run.
  site: str  # Own name.
  private: bytes  # Own run key.
  public: dict[str, bytes]  # Run keys of all sites; empty until they are known.
  answers: dict[Broadcast, Answer]


def start(path: str | os.PathLike[str], run: str, site: str) -> bytes:
  """Makes a run key, and the memory that keeps it.

  Args:
    path: A file that does not exist.
    run: Digest of the run; no two runs may have the same.
    site: The site's name.

  Returns:
    The public half of the key, for `keys.signed_card`.

  Raises:
    InputError: If the file is there: a site has one memory for a run, and keeps it.
  """
  path = pathlib.Path(path)
  with _alone(path):
    if path.exists():
      raise InputError(f"{path} exists: a site's memory of a run is not made anew.")
    private = primitives.new_private_key()
    write(path, Memory(run, site, private, {}, {}))
  return primitives.public_key(private)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Memory]:
  """Reads a memory, which no other process changes while the block runs.

  Raises:
    InputError: If the file is missing or damaged, or if another process has it open.
  """
  path = pathlib.Path(path)
  with _alone(path):
    yield _read(path)


def write(path: str | os.PathLike[str], memory: Memory) -> None:
  """Writes a memory so that it outlives a power cut from the moment of return."""
  path = pathlib.Path(path)
  content = json.dumps(_to_json(memory))
  header = json.dumps({"version": _VERSION, "digest": digest(_PURPOSE, content)})
  with explain_os_errors(path.parent, _ROLE):
    with replacing(path) as part:
      part.unlink(missing_ok=True)  # Of a process that was killed.
      private = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
      with open(private, "w", encoding="utf-8") as file:
        file.write(f"{header}\n{content}\n")
    _sync_folder(path.parent)


def _read(path: pathlib.Path) -> Memory:
  try:
    text = path.read_bytes()
  except OSError as error:
    raise InputError(
      f"a site's memory cannot be read at {path} ({error.strerror}): put it back; "
      "without it this site cannot go on with the run."
    ) from error
  try:
    first, content, end = text.decode("utf-8").split("\n")
    header = json.loads(first)
    if header["version"] != _VERSION:
      raise ValueError(f"version {header['version']} is not known")
    if header["digest"] != digest(_PURPOSE, content) or end:
      raise ValueError("its digest does not match")
    return _from_json(json.loads(content))
  except Exception as error:  # Whatever a damaged file makes json and others raise.
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise InputError(
      f"a site's memory at {path} is damaged ({reason}): without it this site cannot "
      "know what it has revealed; start a new run."
    ) from error


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
  with alone_in(path.parent, f"{path.name}.lock"):
    yield


def _sync_folder(folder: pathlib.Path) -> None:
  """Makes a new name in a folder last; the file's content already does."""
  if os.name != "posix":  # Elsewhere a folder cannot be opened.
    return
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def _to_json(memory: Memory) -> dict[str, Any]:
  # Most answers have the same members: their names are written once.
  sets = list(dict.fromkeys(answer.members for answer in memory.answers.values()))
  places = {members: place for place, members in enumerate(sets)}
  return {
    "run": memory.run,
    "site": memory.site,
    "private": memory.private.hex(),
    "public": {name: key.hex() for name, key in memory.public.items()},
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
      for broadcast, answer in memory.answers.items()
    ],
  }


def _from_json(content: dict[str, Any]) -> Memory:
  run = content["run"]
  answers = {}
  sets = [tuple(members) for members in content["sets"]]
  for step, question, number, place, seed, receipt, revealed in content["answers"]:
    answers[Broadcast(run, step, question)] = Answer(
      number, sets[place], bytes.fromhex(seed), receipt, revealed
    )
  return Memory(
    run,
    content["site"],
    bytes.fromhex(content["private"]),
    {name: bytes.fromhex(key) for name, key in content["public"].items()},
    answers,
  )
