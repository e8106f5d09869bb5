"""A site of a federation: checks all there is to check, then lets the engine answer.

It answers runs of the one agreement that its people have approved, until it is ended.
"""

import os
import pathlib
import time
from collections.abc import Callable

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import suggestion
from fedbnr_jax.network import agreement as agreements
from fedbnr_jax.network import engine_process, kits, schema, side
from fedbnr_jax.network.agreement import Agreement
from fedbnr_jax.network.kits import Kit
from fedbnr_jax.network.transport import Answer

Say = Callable[[str], None]
PROGRAM = "fedbnr_jax.network.joining:answering"
OWN = "own"  # In a site's kit: its seed, memory, log of what left, and the model.
SENT = "sent.csv"
_APPROVED = "federation.json"
_MODEL = "model"
_LOOK_SECONDS = 1.0
_AGAIN_SECONDS = 5.0  # Before an engine that has ended is started again.


def join(
  folder: str | os.PathLike[str],
  data: str | os.PathLike[str],
  federation: str | os.PathLike[str],
  *,
  say: Say,
  certificate: str | os.PathLike[str] | None = None,
) -> None:
  """Answers runs of an agreement until somebody ends it.

  Args:
    folder: The site's kit.
    data: Its table.
    federation: federation.json; who names it approves it.
    say: Is called with lines for people.
    certificate: What came back for the site's request, at the first time.

  Raises:
    InputError: If the kit was edited, the table does not fit, or the agreement is not
      of this site.
  """
  answer_runs(prepare(folder, data, federation, say=say, certificate=certificate), say)


def prepare(
  folder: str | os.PathLike[str],
  data: str | os.PathLike[str],
  federation: str | os.PathLike[str],
  *,
  say: Say,
  certificate: str | os.PathLike[str] | None = None,
) -> Kit:
  """Checks all there is to check before a site answers; see `join`."""
  if certificate is not None:
    kits.take_certificate(folder, certificate)
  kit = kits.opened(folder)
  agreed = agreements.read(federation)
  _require_ours(kit, agreed, str(folder), str(federation))
  table = schema.read_table(agreed.schema, data)
  say(f"site {kit.plan.name!r}, {len(table.targets):,} rows of {data}")
  say(f"federation {agreements.fingerprint(agreed.digest())}")
  say(
    "It answers runs of this federation and nothing else. Compare these digits with "
    "the other sites' people, not by way of the server."
  )
  if agreed.tell_scores:
    say("In the end your own error over your test rows is told to all, unmasked.")
  own = kit.folder / OWN
  own.mkdir(mode=0o700, exist_ok=True)
  agreements.write(own / _APPROVED, agreed)
  arguments = {
    "folder": str(kit.folder),
    "data": str(pathlib.Path(data).absolute()),
    "digest": agreed.digest(),
  }
  side.write(kit.folder, PROGRAM, arguments)
  return kit


def answering(folder: str, data: str, digest: str) -> Answer:
  """Makes the function that answers, inside a job of the engine.

  Raises:
    InputError: If the agreement is not the one that was approved.
  """
  from fedbnr_jax.network import site

  kit = kits.opened(folder)
  own = kit.folder / OWN
  agreed = agreements.read(own / _APPROVED)
  if agreed.digest() != digest:
    raise InputError(f"{own / _APPROVED} is not what was approved: start `join` again.")
  table = schema.read_table(agreed.schema, data)
  return site.Site(own, kit.plan.name, agreed, table, kit.identity()).answer


def answer_runs(kit: Kit, say: Say) -> None:
  """Keeps the engine of a site running, and tells what it does.

  Raises:
    InputError: If the kit is in use, or the engine is not installed.
  """
  watch = _Watch(kit)
  side.note_state(kit.folder, "")
  with engine_process.running(kit) as process:
    say(f"looking for the server at {kit.plan.host}:{kit.plan.port}; Ctrl-C ends this")
    while True:
      for line in watch.news():
        say(line)
      if not process.alive:
        say(f"the engine has ended ({kit.folder / 'engine.txt'} may say why): again")
        time.sleep(_AGAIN_SECONDS)
        process.start()
      time.sleep(_LOOK_SECONDS)


class _Watch:
  """What has changed in a site's folder since people were last told."""

  def __init__(self, kit: Kit) -> None:
    self._folder, self._own = kit.folder, kit.folder / OWN
    self._state, self._sent, self._model = "", self._count(), self._model_time()

  def news(self) -> list[str]:
    """Returns lines for people."""
    lines = []
    state, sent, model = side.state(self._folder), self._count(), self._model_time()
    if state and state != self._state:
      lines.append(state)
    if sent == self._sent and sent and state == side.IN_A_RUN and model != self._model:
      self._model = model
      lines.append(f"the model has come: {self._own / _MODEL}")
    if sent > self._sent and self._sent == 0:
      lines.append(f"what leaves is noted in {self._own / SENT}")
    self._state, self._sent = state, sent
    return lines

  def _count(self) -> int:
    path = self._own / SENT
    return path.stat().st_size if path.exists() else 0

  def _model_time(self) -> float:
    path = self._own / _MODEL / "summary.json"
    return path.stat().st_mtime if path.exists() else 0.0


def _require_ours(kit: Kit, agreed: Agreement, folder: str, federation: str) -> None:
  """Raises InputError unless an agreement has this site, with the key of this kit."""
  name = kit.plan.name
  if kit.plan.serves:
    raise InputError(f"{folder} is the server's kit: name the site's.")
  if name not in agreed.members:
    raise InputError(
      f"{federation} has no member {name!r}: {suggestion(name, agreed.members)}."
    )
  if agreed.members[name] != kit.identity().public.pem().decode():
    raise InputError(
      f"{federation} has another key for site {name!r} than this kit: somebody may be "
      "in between. Compare fingerprints, and have it made again."
    )
