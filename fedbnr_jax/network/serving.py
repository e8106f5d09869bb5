"""The server of a federation: starts the engine, waits for sites, and follows the run.

The coordinator's program runs inside the engine's job, in a process of its own. If the
engine loses the job, such as by the death of a site's process, it is given another one,
which goes on from the run's checkpoint with the sites that are there.
"""

import csv
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fedbnr_jax import files
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing
from fedbnr_jax.network import agreement as agreements
from fedbnr_jax.network import engine_process, kits, side
from fedbnr_jax.network.agreement import Agreement
from fedbnr_jax.network.kits import Kit
from fedbnr_jax.network.primitives import network_extra
from fedbnr_jax.network.transport import Transport
from fedbnr_jax.run.records import RunFolder

if TYPE_CHECKING:
  from fedbnr_jax.network.engine import Control

Say = Callable[[str], None]
PROGRAM = "fedbnr_jax.network.serving:coordinate"
_START_SECONDS = 120.0  # For the engine to be up.
_END_SECONDS = 20.0  # For a job to end after its program has.
_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 1.0


def serve(
  folder: str | os.PathLike[str],
  federation: str | os.PathLike[str],
  workdir: str | os.PathLike[str],
  *,
  say: Say,
  seconds: float = 600.0,
  wait: float = 3600.0,
  tries: int = 5,
) -> None:
  """Trains over the sites of a federation, or goes on where it was stopped.

  Args:
    folder: The server's kit.
    federation: federation.json, which all sites have approved.
    workdir: The folder of the run.
    say: Is called with lines for people.
    seconds: For which a site may think about one message.
    wait: Seconds for which sites are waited for before a job.
    tries: How many jobs the engine may lose in a row without a round in between.

  Raises:
    InputError: If it cannot begin, or stops; the same call goes on from there.
  """
  kit = kits.opened(folder)
  agreed = agreements.read(federation)
  _require_ours(kit, agreed, str(folder))
  place = pathlib.Path(workdir).absolute()
  arguments = {
    "federation": str(pathlib.Path(federation).absolute()),
    "workdir": str(place),
    "seconds": seconds,
  }
  say(f"federation {agreements.fingerprint(agreed.digest())}")
  if _is_done(place, agreed):
    say("this run is finished, and every site has the model")
    return
  try:
    run(kit, PROGRAM, arguments, agreed, place, say=say, wait=wait, tries=tries)
  except ConnectionError as error:
    raise InputError(
      f"the engine of this server does not answer ({error}); {kit.folder / 'log.txt'} "
      "and engine.txt may say why. The same command goes on from the last round."
    ) from error


def coordinate(
  transport: Transport, federation: str, workdir: str, seconds: float
) -> None:
  """Runs the coordinator inside a job of the engine."""
  from fedbnr_jax.network import coordinator

  agreed = agreements.read(federation)
  # A site that a job has lost is back in the next one, and not before.
  coordinator.run(agreed, transport, workdir, seconds=seconds, pause=_PAUSE_SECONDS)


def results(workdir: str | os.PathLike[str]) -> list[str]:
  """Returns lines on what came out of a finished run."""
  from fedbnr_jax.report import run as report

  folder = RunFolder(workdir)
  return [
    report.summary_text(files.read_object(folder.finished)),
    f"{folder.report} has scores, pictures and settings; each site has the model",
  ]


def run(
  kit: Kit,
  program: str,
  arguments: dict[str, Any],
  agreed: Agreement,
  workdir: pathlib.Path,
  *,
  say: Say,
  wait: float,
  tries: int,
) -> None:
  """Runs a program in jobs of the engine until it ends.

  Args:
    kit: The server's, looked over.
    program, arguments: See `side.write`.
    agreed: Says who must be there.
    workdir: The folder of the run, whose rounds are told.
    say: Is called with lines for people.
    wait: Seconds for which sites are waited for.
    tries: How many jobs in a row may be lost without a round in between.

  Raises:
    InputError: If the program refuses, or the engine loses too many jobs.
  """
  with network_extra():  # Here, because the engine is an extra.
    from fedbnr_jax.network import engine
  side.write(kit.folder, program, arguments)
  rounds = Rounds(workdir)
  lost = 0
  with (
    engine_process.running(kit) as process,
    engine.control(kit, _START_SECONDS) as control,
  ):
    say(f"the server listens at {kit.plan.host}:{kit.plan.port}")
    while True:
      sites = _wait_for_sites(kit, control, agreed, rounds.begun, say, wait)
      side.forget_outcome(kit.folder)
      job = control.submit(sites, min(agreed.min_sites, len(sites)))
      say(f"a run begins, or goes on, with {listing(sites)}")
      before = rounds.told
      ended = _follow(kit, process, control, job, rounds, say)
      if ended is not None:
        _end(control, job)
        if ended["status"] != side.LOST:
          _require_well(ended, workdir)
          return
      lost = 1 if rounds.told > before else lost + 1
      why = (
        "A site's process, or its connection, is gone."
        if ended is None
        else ended["text"]
      )
      trained = RunFolder(workdir).finished.exists()
      if trained and set(agreed.members) - set(control.connected()):
        raise InputError(why)  # Others need not wait for who is to receive the model.
      if lost >= tries:
        raise InputError(f"{why} This was so {lost} times, without a round in between.")
      say(f"{why} A new job takes it up.")


class Rounds:
  """Tells the rounds of a run from its metrics.csv, each once."""

  def __init__(self, workdir: pathlib.Path) -> None:
    self._path = workdir / "metrics.csv"
    self._note = workdir / "network" / "run.json"
    self.told = len(self._rows())

  @property
  def begun(self) -> bool:
    """Whether the run has been begun with all of its sites."""
    return self._note.exists() and '"begun": true' in self._note.read_text()

  def new(self) -> Iterator[str]:
    """Gives a line for each round since the last call."""
    rows = self._rows()
    for row in rows[self.told :]:
      parts = [f"round {row.get('round')}"]
      for name in ("train_nll", "val_rmse", "val_nll"):
        if row.get(name):
          parts.append(f"{name} {float(row[name]):.4g}")
      if row.get("seconds"):
        parts.append(f"{float(row['seconds']):.2f} s")
      yield ", ".join(parts)
    self.told = max(self.told, len(rows))

  def _rows(self) -> list[dict[str, str]]:
    if not self._path.exists():
      return []
    with open(self._path, newline="", encoding="utf-8") as file:
      text = file.read()
    whole = text[: text.rfind("\n") + 1]  # Without a line that is being written.
    return list(csv.DictReader(whole.splitlines()))


def _is_done(workdir: pathlib.Path, agreed: Agreement) -> bool:
  """Tells whether a run is finished, and the model is with every site."""
  note = workdir / "network" / "run.json"
  if not note.exists():
    return False
  content = files.read_object(note)
  same = content.get("federation") == agreed.digest()
  return same and bool(content.get("delivered"))


def _require_ours(kit: Kit, agreed: Agreement, where: str) -> None:
  """Raises InputError unless an agreement is one of this kit's sites."""
  if not kit.plan.serves:
    raise InputError(f"{where} is the kit of a site: name the server's.")
  if set(agreed.members) != set(kit.plan.sites):
    raise InputError(
      f"the federation is of {listing(sorted(agreed.members))}, and this kit is of "
      f"{listing(sorted(kit.plan.sites))}: give the files that belong together."
    )


def _wait_for_sites(
  kit: Kit,
  control: "Control",
  agreed: Agreement,
  begun: bool,
  say: Say,
  wait: float,
) -> tuple[str, ...]:
  """Waits for all members; later, when a run has begun, for as many as were agreed on.

  Raises:
    InputError: If too few come in time.
  """
  end = time.monotonic() + wait
  # Whoever was cut off is given a moment to be back before others go on without it.
  patience = time.monotonic() + min(wait, _START_SECONDS)
  told: tuple[str, ...] | None = None
  while True:
    marks = control.connected()
    there = tuple(name for name in sorted(agreed.members) if name in marks)
    missing = tuple(name for name in sorted(agreed.members) if name not in marks)
    enough = len(there) >= agreed.min_sites and begun
    if not missing or (enough and time.monotonic() > patience):
      side.note_connected(kit.folder, marks)
      return there
    if missing != told:
      say(f"waiting for {listing(missing)}")
      told = missing
    if time.monotonic() > end:
      raise InputError(
        f"sites {listing(missing)} have not come within {wait:g} seconds: let their "
        "people start `join`, and start this command again."
      )
    time.sleep(_LOOK_SECONDS)


def _follow(
  kit: Kit,
  process: engine_process.EngineProcess,
  control: "Control",
  job: str,
  rounds: Rounds,
  say: Say,
) -> dict[str, str] | None:
  """Waits for the program in a job; returns its end, or None if the job is lost."""
  there = side.connected(kit.folder)
  while True:
    ended = side.outcome(kit.folder)
    if not process.alive:
      raise InputError(
        f"the engine has ended; {kit.folder / 'engine.txt'} may say why. The same "
        "command goes on from the last checkpoint."
      )
    marks = control.connected()
    side.note_connected(kit.folder, marks)
    for name in sorted(there.keys() | marks.keys()):
      if there.get(name) and not marks.get(name):
        say(f"{name} is gone")
      elif there.get(name) != marks.get(name):
        say(f"{name} is back, and takes part in the next job")
    there = marks
    for line in rounds.new():
      say(line)
    if ended is not None:
      return ended
    if _over(control.status(job)):
      time.sleep(_LOOK_SECONDS)  # The outcome may have been written just now.
      return side.outcome(kit.folder)
    time.sleep(_LOOK_SECONDS)


def _require_well(ended: dict[str, str], workdir: pathlib.Path) -> None:
  """Raises InputError with what the coordinator's program has said, if it stopped."""
  if ended["status"] == side.REFUSED:
    raise InputError(ended["text"])
  if ended["status"] == side.FAILED:
    path = workdir / "failure.txt"
    workdir.mkdir(parents=True, exist_ok=True)
    path.write_text(ended["text"], encoding="utf-8")
    raise InputError(
      f"the coordinator's program has failed ({ended['text'].splitlines()[0]}): "
      f"{path} has all of it."
    )


def _over(status: str) -> bool:
  return status.startswith(("FINISHED", "FAILED", "ABANDONED"))


def _end(control: "Control", job: str) -> None:
  """Lets the processes of a job end, and ends what does not."""
  end = time.monotonic() + _END_SECONDS
  while not _over(control.status(job)):
    if time.monotonic() > end:
      control.abort(job)
      return
    time.sleep(_LOOK_SECONDS)
