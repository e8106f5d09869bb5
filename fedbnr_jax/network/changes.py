"""Sites join or leave a trained model, exactly and without training.

Sites that change their place agree on it: in an agreement of their own, with the
config and schema of the run, whose members they are. They are asked for one sum, of
their statistics under the model's kernel, which enters or leaves the posterior. A
group that has joined leaves as a whole without being asked.

At a fixed kernel the difference of two posteriors' statistics is that of whoever
changed. So three or more join or leave together, under masks, and three or more of
those whom they leave remain; or a site's people agree that it is seen, and say so.
"""

import os
import pathlib
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbnr_jax import ledger_file, membership, model, precision
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors, read_object
from fedbnr_jax.gp.blr import SufficientStats
from fedbnr_jax.ledger import Ledger, emptied, is_finite, less, make_part
from fedbnr_jax.lock import alone_in
from fedbnr_jax.names import listing
from fedbnr_jax.network import group_sum, site_model
from fedbnr_jax.network.agreement import Agreement
from fedbnr_jax.network.group_sum import Group
from fedbnr_jax.network.members import SECONDS, Members, stopped
from fedbnr_jax.network.sums import PAUSE
from fedbnr_jax.network.sums_read import ReadSum, SumsRead
from fedbnr_jax.run.records import RunFolder

_READ = "sums_read.json"
_NO_TAGS = np.zeros(0, np.uint64)  # No row of a site is known here.


# Asks a group for the sum of its statistics.
Ask = Callable[[Group], SufficientStats]


class ChangedSites(NamedTuple):
  """What `change_sites` has done.

  Attributes:
    changes: All changes since training, these included: action, sites, rows.
    sites: Names of the sites that are in the posterior now.
    num_rows: Rows in it.
    noise_std: σ, in the target's unit.
    prior_std: λ, in the target's unit.
  """

  changes: Sequence[Mapping[str, Any]]
  sites: tuple[str, ...]
  num_rows: int
  noise_std: float
  prior_std: float


def change_sites(
  agreement: Agreement,
  workdir: str | os.PathLike[str],
  add: Iterable[Group] = (),
  remove: Iterable[Group] = (),
  *,
  seen: Sequence[str] = (),
  seconds: float = SECONDS,
  pause: float = PAUSE,
) -> ChangedSites:
  """Removes and adds sites of the model in a coordinator's folder, all or none.

  Args:
    agreement: That of the run.
    workdir: The folder of the finished run.
    add: Groups that join.
    remove: Groups that leave, before others join.
    seen: Sites whose people agree that the server sees their statistics alone.
    seconds: For which a site is waited for.
    pause: Seconds before a site that must answer is asked again.

  Raises:
    InputError: If a site that leaves is not in, one that joins is, a site would be
      seen that has not agreed to it, or one does not answer. Nothing is changed then.
  """
  model.load(workdir)  # Refuses a folder that holds no run.
  with precision.float64(), explain_os_errors(pathlib.Path(workdir)), alone_in(workdir):
    folder, trained = RunFolder(workdir), model.load(workdir)
    _require_run(folder, trained, agreement)
    ledger = _ledger(folder, trained)
    groups = _groups(agreement, trained, ledger)
    trained_on = tuple(_trained_on(agreement, trained))
    read = SumsRead(folder.network / _READ, ReadSum(trained_on, agreement.masking))

    def ask(group: Group) -> SufficientStats:
      wanted = ReadSum(group.names, group.agreement.masking)
      read.require_hidden(wanted, seen)
      members = group_sum.reached(group, seconds)
      read.note(wanted)
      return group_sum.statistics(members, trained, pause)

    for group in remove:
      ledger = _removed(ledger, groups, group, ask)
      groups = _groups(agreement, trained, ledger)
    for group in add:
      _require_new(groups, group)
      ledger = _added(ledger, group, ask)
      groups = _groups(agreement, trained, ledger)
    fitted = membership.with_posterior(trained.state, ledger).server.posterior
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(fitted)):
      raise InputError("the posterior would not be finite. Nothing is changed.")
    if folder.posterior.exists():
      ledger_file.replace(folder.posterior, ledger)
    else:
      ledger_file.write(folder.posterior, ledger)
  scale = trained.preprocessor.target_std
  return ChangedSites(
    changes=ledger.changes,
    sites=tuple(sorted(name for one in groups.values() for name in one)),
    num_rows=round(float(ledger.stats.count)),
    noise_std=float(fitted.noise_std) * scale,
    prior_std=float(fitted.prior_std) * scale,
  )


def deliver(
  group: Group, workdir: str | os.PathLike[str], seconds: float = SECONDS
) -> None:
  """Sends the model of a folder, as it is now, to all sites of a group.

  They receive the sum of all statistics that are in, and of no group.

  Args:
    group: Who receives it: the run's own agreement, or one of sites that have joined.
    workdir: The folder of the finished run.
    seconds: For which a site is waited for.

  Raises:
    InputError: If a site does not take it.
  """
  folder, trained = RunFolder(workdir), model.load(workdir)
  if group.transport is None:
    raise InputError(f"there is no connection to sites {listing(group.names)}.")
  content = site_model.collect(folder)
  if folder.posterior.exists():
    ledger = ledger_file.read(folder.posterior)
    total = make_part("", ledger.stats, _NO_TAGS)
    with tempfile.TemporaryDirectory() as scratch:
      path = pathlib.Path(scratch) / site_model.POSTERIOR
      ledger_file.write(path, ledger._replace(training=total, joined=()))
      content[site_model.POSTERIOR] = path.read_bytes()
  members = Members(group.agreement, group.transport, secrets.token_hex(32), seconds)
  failed = members.deliver(content)
  if failed:
    name = trained.config.data.target
    raise stopped(failed, f"the model of {name!r} is not there: deliver it again")


# -------------------------------------------------------------------- who is in a model


# Sites whose rows are in a model as one sum: public identities as PEM, by name.
_In = Mapping[str, str]


def _trained_on(agreement: Agreement, trained: model.Model) -> _In:
  """Finds the sites that were in at the model's best round."""
  record = trained.records[int(trained.scores["best_round"]) - 1]
  return {n: pem for n, pem in agreement.members.items() if record[f"in_{n}"]}


def _groups(
  agreement: Agreement, trained: model.Model, ledger: Ledger
) -> dict[str, _In]:
  """Finds who is in a model, by the tables of its ledger."""
  found = {"": _trained_on(agreement, trained)}
  for change in ledger.changes:
    sites, table = change["sites"], change["table"]
    if change["action"] == "add":
      found[table] = sites
    else:
      found[table] = {n: p for n, p in found[table].items() if n not in sites}
  return {table: one for table, one in found.items() if one}


def _table_of(groups: Mapping[str, _In], group: Group) -> str:
  """Finds the table that a leaving group is in.

  Raises:
    InputError: If its sites are not in, or not in one sum.
  """
  for table, one in groups.items():
    if dict(group.agreement.members).items() <= dict(one).items():
      return table
  raise InputError(
    f"sites {listing(group.names)} are not in the model as one group: let those leave "
    "together that came together. Nothing is changed."
  )


def _require_new(groups: Mapping[str, _In], group: Group) -> None:
  """Raises InputError if a site that joins is in already."""
  for one in groups.values():
    for name, pem in group.agreement.members.items():
      if name in one or pem in one.values():
        raise InputError(
          f"site {name!r}, or one of the same identity, is in the model already: a row "
          "counts once. Nothing is changed."
        )


# -------------------------------------------------------------------------- the ledger


def _require_run(folder: RunFolder, trained: model.Model, agreement: Agreement) -> None:
  """Raises InputError unless a folder holds the finished run of an agreement."""
  note = folder.network / "run.json"
  if not note.exists() or read_object(note).get("federation") != agreement.digest():
    raise InputError(f"{folder.path} holds no run of this agreement.")
  if not trained.scores:
    raise InputError(f"the training in {folder.path} is not finished: let it finish.")
  trained.require_global_layer()


def _ledger(folder: RunFolder, trained: model.Model) -> Ledger:
  """Reads the ledger of a run, or opens that of a model as it was trained."""
  if folder.posterior.exists():
    return ledger_file.read(folder.posterior)
  stats = jax.tree.map(np.asarray, trained.state.server.stats)
  return membership.opened(stats, trained.state, _NO_TAGS, _NO_TAGS)


def _removed(
  ledger: Ledger,
  groups: Mapping[str, _In],
  group: Group,
  ask: Ask,
) -> Ledger:
  """Drops a group that leaves as it came, or subtracts what its sites add up to."""
  table = _table_of(groups, group)
  ledger_parts = [ledger.training, *ledger.joined]
  index = [part.table for part in ledger_parts].index(table)
  before = ledger_parts[index]
  if groups[table].keys() == set(group.names):
    after, rows = emptied(before), float(before.sums.count)
  else:
    gone = ask(group)
    who = f"what sites {listing(group.names)} add up to"
    after, rows = less(before, gone, _NO_TAGS, who), float(gone.count)
  ledger_parts[index] = after
  if sum(float(part.sums.count) for part in ledger_parts) < 1:
    raise InputError("no site would be left in the model. Nothing is changed.")
  training, *joined = ledger_parts
  ledger = ledger._replace(
    training=training, joined=tuple(one for one in joined if one.sums.count > 0)
  )
  return _noted(ledger, "remove", table, group, rows)


def _added(ledger: Ledger, group: Group, ask: Ask) -> Ledger:
  """Adds what the sites of a group add up to."""
  stats = ask(group)
  table = f"sites {', '.join(group.names)} ({len(ledger.changes) + 1})"
  part = make_part(table, stats, _NO_TAGS)
  if not is_finite(part):
    raise InputError("what joins is not finite. Nothing is changed.")
  ledger = ledger._replace(joined=(*ledger.joined, part))
  return _noted(ledger, "add", table, group, float(stats.count))


def _noted(
  ledger: Ledger, action: str, table: str, group: Group, rows: float
) -> Ledger:
  change = {
    "action": action,
    "table": table,
    "rows": round(rows),
    "sites": dict(group.agreement.members),
    "masked": group.agreement.masking,
  }
  return ledger._replace(changes=(*ledger.changes, change))
