"""A whole run over real sites: greet, train, calibrate, tell of it, return the model.

The coordinator holds no row. What it knows are sums, all of which the agreement names.
"""

import functools
import os
import secrets
from typing import Any

import ml_collections

from fedbnr_jax import auto, files, precision, workflow
from fedbnr_jax.candidates import Choice
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.lock import alone_in
from fedbnr_jax.network import finish, folds, preparation, site_model
from fedbnr_jax.network.agreement import Agreement
from fedbnr_jax.network.members import SECONDS, Members, stopped
from fedbnr_jax.network.rounds import program_of
from fedbnr_jax.network.sums import PAUSE, Sums
from fedbnr_jax.network.transport import Transport
from fedbnr_jax.run import training
from fedbnr_jax.run.config import AUTO, left_open
from fedbnr_jax.run.records import RunFolder
from fedbnr_jax.workflow import Outcome, Progress

_NOTE = "run.json"  # What of a run must outlive a restart, beside sums and checkpoints.


def run(
  agreement: Agreement,
  transport: Transport,
  workdir: str | os.PathLike[str],
  *,
  progress: Progress | None = None,
  seconds: float = SECONDS,
  pause: float = PAUSE,
) -> Outcome:
  """Trains over the sites of an agreement, or takes up what was stopped in a folder.

  Args:
    agreement: What all sites have approved.
    transport: Reaches them.
    workdir: The folder of the run; made if need be.
    progress: Is called as rounds go by.
    seconds: For which a site is waited for.
    pause: Seconds before a site that must answer is asked again.

  Raises:
    InputError: If the folder is another run's, a site refuses or is too late, or fewer
      answer than were agreed on; the same command goes on from there.
    NonFiniteError: If the training diverges.
  """
  folder = RunFolder(workdir)
  config = ml_collections.ConfigDict(agreement.config.to_dict())
  with (
    precision.float64(),
    explain_os_errors(folder.path),
    alone_in(folder.path),
  ):
    done = workflow.is_finished(folder, config)
    note = _Note(folder, agreement)
    members = Members(agreement, transport, note.content["run"], seconds)
    if done and note.content["delivered"]:
      return Outcome(was_finished=True)
    _greet(members, note)
    if done:  # But the model is not with all sites.
      _deliver(members, folder, note)
      return Outcome(was_finished=True)
    sums = Sums(members, folder.network, pause)
    outcome = _train(config, folder, sums, progress)
    _deliver(members, folder, note)
    return outcome


class _Note:
  """The file in a run's folder that says which run it is, and how far it has come."""

  def __init__(self, folder: RunFolder, agreement: Agreement) -> None:
    """Reads it, or begins a run whose number nobody else has drawn.

    Raises:
      InputError: If the folder holds a run of another agreement.
    """
    self._path = folder.network / _NOTE
    self.content: dict[str, Any] = {}
    if self._path.exists():
      self.content = files.read_object(self._path)
      if self.content.get("federation") != agreement.digest():
        raise InputError(
          f"{folder.path} holds a run of another agreement: choose another workdir."
        )
      return
    folder.check(ml_collections.ConfigDict(agreement.config.to_dict()))
    folder.network.mkdir(parents=True)
    self.content = {
      "federation": agreement.digest(),
      "run": secrets.token_hex(32),
      "cards": [],  # Signed keys of the run, where sums are masked.
      "delivered": False,  # Whether every site has the model.
    }
    self.keep()

  def keep(self, **changed: Any) -> None:
    """Writes the file, with some fields changed."""
    self.content |= changed
    files.write_json(self._path, self.content)


def _greet(members: Members, note: _Note) -> None:
  """Sees that sites are there, and that all know the keys of all.

  Raises:
    InputError: If too few are there: all when the run begins, later as many as were
      agreed on.
  """
  cards, failed = members.greet()
  begins = not note.content.get("begun")
  fewest = len(members.names) if begins else members.agreement.min_sites
  if len(members.names) - len(failed) < fewest:
    raise stopped(failed, f"the run does not begin: {fewest} sites are needed for that")
  if begins:
    note.keep(begun=True, cards=cards if members.agreement.masking else [])
  if members.agreement.masking:
    members.hand_out_keys(note.content["cards"])


def _train(
  config: ml_collections.ConfigDict,
  folder: RunFolder,
  sums: Sums,
  progress: Progress | None,
) -> Outcome:
  """Trains, and writes all files of the run."""
  choice = Choice(config)
  if config.method == AUTO:
    on_begin = progress.trying if progress else lambda name: None
    build = functools.partial(preparation.quietly, sums=sums)
    choice = auto.choose_in(
      folder, config, build, lambda task: program_of(task, sums), on_begin
    )
  with left_open(config):
    task = preparation.prepare(choice.config, sums)
  folder.claim_task(task)
  program = program_of(task, sums)
  with workflow.watched(progress, task, len(folder.metrics())) as on_round:
    result = training.train(task, program, folder, on_round, choice.begun)
    on_fold = progress.calibrating if progress else None
    by_folds = folds.calibrate(task, sums, result, folder, on_fold)
  summary = finish.write(task, sums, result, folder, by_folds, choice.trials)
  return Outcome(summaries=[summary], result=result, trials=choice.trials)


def _deliver(members: Members, folder: RunFolder, note: _Note) -> None:
  """Sends the model to every site.

  Raises:
    InputError: If one does not take it; the same command sends it again.
  """
  failed = members.deliver(site_model.collect(folder))
  if failed:
    raise stopped(
      failed,
      f"the model is finished, in {folder.path}, but not there; the same command sends "
      "it again",
    )
  note.keep(delivered=True)
