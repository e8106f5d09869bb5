"""A site's memory of one run: its key, and what it has answered and revealed, on disk.

Key and answers are in one file, so that none can be lost without the other: a site that
has forgotten what it revealed has no key to answer with either. The file is secret. One
that is damaged is refused, because a site that starts afresh could be asked twice. An
old copy that is put back in its place is not noticed: never restore it from a backup.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from fedbnr_jax.errors import InputError
from fedbnr_jax.lock import alone_in
from fedbnr_jax.network import primitives, secret_file, site_answers
from fedbnr_jax.network.attempt import Broadcast
from fedbnr_jax.network.site_answers import Answer, Archive

# Final answers that stay in the file that is written anew for each sum.
_MOST_FINAL = 200


@dataclasses.dataclass
class Memory:
  """What a site knows of one run beside its rows."""

  run: str  # Digest of the run.
  site: str  # Own name.
  private: bytes  # Own run key.
  public: dict[str, bytes]  # Run keys of all sites; empty until they are known.
  answers: dict[Broadcast, Answer]  # All that may change, and the last final ones.
  archives: tuple[Archive, ...] = ()  # Older ones, which are final.

  def find(self, broadcast: Broadcast) -> Answer | None:
    """Returns the last answer to a broadcast, if there is one."""
    for answers in (self.answers, *(archive.answers for archive in self.archives)):
      if broadcast in answers:
        return answers[broadcast]
    return None

  def of_question(self, question: str) -> Iterator[tuple[Broadcast, Answer]]:
    """Yields the answers to a question, at whatever step."""
    for broadcast, answer in self.answers.items():
      if broadcast.question == question:
        yield broadcast, answer
    for archive in self.archives:
      yield from archive.of_question(question)


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
  final = {key: answer for key, answer in memory.answers.items() if answer.revealed}
  if len(final) > _MOST_FINAL:
    # Until the memory names it below, nobody reads it; it may be written again.
    name = f"{path.name}.{len(memory.archives) + 1}"
    archive = site_answers.write_archive(path.with_name(name), final)
    memory.archives = (*memory.archives, archive)
    memory.answers = {k: a for k, a in memory.answers.items() if k not in final}
  secret_file.write(path, _to_json(memory))


def _read(path: pathlib.Path) -> Memory:
  try:
    content, _ = secret_file.read(path)
    return _from_json(path, content)
  except OSError as error:
    raise InputError(
      f"a site's memory cannot be read at {path} ({error.strerror}): put it back; "
      "without it this site cannot go on with the run."
    ) from error
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


def _to_json(memory: Memory) -> dict[str, Any]:
  return {
    "run": memory.run,
    "site": memory.site,
    "private": memory.private.hex(),
    "public": {name: key.hex() for name, key in memory.public.items()},
    "archives": [[archive.name, archive.seal] for archive in memory.archives],
    **site_answers.to_json(memory.answers),
  }


def _from_json(path: pathlib.Path, content: dict[str, Any]) -> Memory:
  run = content["run"]
  return Memory(
    run,
    content["site"],
    bytes.fromhex(content["private"]),
    {name: bytes.fromhex(key) for name, key in content["public"].items()},
    site_answers.from_json(run, content),
    tuple(
      site_answers.read_archive(path.with_name(name), seal, run)
      for name, seal in content["archives"]
    ),
  )
