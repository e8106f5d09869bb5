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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fedbnr_jax import ledger_file, membership, model, precision
from fedbnr_jax.algorithms import last_layer
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors, read_object
from fedbnr_jax.gp.blr import SufficientStats
from fedbnr_jax.ledger import Ledger, emptied, is_finite, less, make_part
from fedbnr_jax.lock import alone_in
from fedbnr_jax.names import listing
from fedbnr_jax.network import parts, site_model, vectors
from fedbnr_jax.network.agreement import Agreement
from fedbnr_jax.network.attempt import FEWEST
from fedbnr_jax.network.members import SECONDS, Members, stopped
from fedbnr_jax.network.question import Question
from fedbnr_jax.network.site import training_digest
from fedbnr_jax.network.sums import PAUSE, Sums
from fedbnr_jax.network.transport import Transport
from fedbnr_jax.run.records import RunFolder, as_json

_NO_TAGS = np.zeros(0, np.uint64)  # No row of a site is known here.


class Group(NamedTuple):
  """Sites that join or leave together.

  Attributes:
    agreement: Of these sites alone, with all of them needed for a sum.
    transport: Reaches them; None where a group that has joined leaves as a whole.
  """

  agreement: Agreement
  transport: Transport | None = None

  @property
  def names(self) -> tuple[str, ...]:
    """Names of its sites, in order."""
    return tuple(sorted(self.agreement.members))


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
    limits = _Limits(seconds, pause)
    for group in remove:
      _require_hidden(groups, group, seen, leaves=True)
      ledger = _removed(ledger, groups, group, trained, limits)
      groups = _groups(agreement, trained, ledger)
    for group in add:
      _require_new(groups, group)
      _require_hidden(groups, group, seen, leaves=False)
      ledger = _added(ledger, group, trained, limits)
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
    sites=tuple(sorted(name for one in groups.values() for name in one.identities)),
    num_rows=round(float(ledger.stats.count)),
    noise_std=float(fitted.noise_std) * scale,
    prior_std=float(fitted.prior_std) * scale,
  )


class _Limits(NamedTuple):
  seconds: float
  pause: float


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


class _In(NamedTuple):
  """Sites whose rows are in a model as one sum."""

  identities: Mapping[str, str]  # By name, the public identity as PEM.
  masked: bool  # Whether nobody has seen their parts.


def _groups(
  agreement: Agreement, trained: model.Model, ledger: Ledger
) -> dict[str, _In]:
  """Finds who is in a model, by the tables of its ledger."""
  record = trained.records[int(trained.scores["best_round"]) - 1]
  there = {n: pem for n, pem in agreement.members.items() if record[f"in_{n}"]}
  found = {"": _In(there, agreement.masking)}
  for change in ledger.changes:
    sites, table = change["sites"], change["table"]
    if change["action"] == "add":
      found[table] = _In(sites, change["masked"])
    else:
      left = {n: p for n, p in found[table].identities.items() if n not in sites}
      found[table] = found[table]._replace(identities=left)
  return {table: one for table, one in found.items() if one.identities}


def _table_of(groups: Mapping[str, _In], group: Group) -> str:
  """Finds the table that a leaving group is in.

  Raises:
    InputError: If its sites are not in, or not in one sum.
  """
  for table, one in groups.items():
    if dict(group.agreement.members).items() <= dict(one.identities).items():
      return table
  raise InputError(
    f"sites {listing(group.names)} are not in the model as one group: let those leave "
    "together that came together. Nothing is changed."
  )


def _require_new(groups: Mapping[str, _In], group: Group) -> None:
  """Raises InputError if a site that joins is in already."""
  for one in groups.values():
    for name, pem in group.agreement.members.items():
      if name in one.identities or pem in one.identities.values():
        raise InputError(
          f"site {name!r}, or one of the same identity, is in the model already: a row "
          "counts once. Nothing is changed."
        )


def _require_hidden(
  groups: Mapping[str, _In], group: Group, seen: Sequence[str], *, leaves: bool
) -> None:
  """Raises InputError if a site would be seen whose people have not agreed to it."""
  federation_masks = any(one.masked for one in groups.values())
  shown: set[str] = set()
  if not group.agreement.masking and federation_masks:
    shown |= set(group.names)
  if leaves:
    one = groups[_table_of(groups, group)]
    if one.identities.keys() == set(group.names):
      return  # Its sum is known, and nobody is asked.
    rest = one.identities.keys() - set(group.names)
    if one.masked and len(rest) < FEWEST:
      shown |= rest
    if not one.masked:
      shown = set()
  if shown - set(seen):
    raise InputError(
      f"the server would see the statistics of {listing(sorted(shown - set(seen)))}, "
      "alone or of two: at a fixed kernel they are the difference of two sums. Let "
      f"{FEWEST} or more sites join or leave together under masks, and {FEWEST} or "
      "more remain; or name those in `seen` whose people agree to it. Nothing is "
      "changed."
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
  trained: model.Model,
  limits: _Limits,
) -> Ledger:
  """Drops a group that leaves as it came, or subtracts what its sites add up to."""
  table = _table_of(groups, group)
  ledger_parts = [ledger.training, *ledger.joined]
  index = [part.table for part in ledger_parts].index(table)
  before = ledger_parts[index]
  if groups[table].identities.keys() == set(group.names):
    after, rows = emptied(before), float(before.sums.count)
  else:
    gone = _statistics(group, trained, limits)
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


def _added(
  ledger: Ledger, group: Group, trained: model.Model, limits: _Limits
) -> Ledger:
  """Adds what the sites of a group add up to."""
  stats = _statistics(group, trained, limits)
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


# ------------------------------------------------------------------------- the one sum


def _statistics(group: Group, trained: model.Model, limits: _Limits) -> SufficientStats:
  """Asks a group for the sum of its sites' statistics under the model's kernel."""
  agreement = group.agreement
  if group.transport is None:
    raise InputError(f"there is no connection to sites {listing(group.names)}.")
  if agreement.min_sites != len(agreement.members):
    raise InputError(
      "where sites join or leave, all of a group's sites are needed for its sum, or "
      "two tries at it would show a part: make the agreement with min_sites "
      f"{len(agreement.members)}. Nothing is changed."
    )
  run = secrets.token_hex(32)
  members = Members(agreement, group.transport, run, limits.seconds)
  cards, failed = members.greet()
  if failed:
    raise stopped(failed, "nothing is changed")
  if agreement.masking:
    members.hand_out_keys(cards)
  config = ml_collections.ConfigDict(trained.config.to_dict())
  config.num_clients = len(agreement.members)
  own, record = as_json(config), trained.preprocessor.to_json()
  training = training_digest(own, record)
  members.begin(training, own, record)
  with tempfile.TemporaryDirectory() as scratch:
    sums = Sums(members, pathlib.Path(scratch), limits.pause)
    sums.named(Question("counts"))
    sums.answers.begin_training(training, config, trained.preprocessor)
    number, down = _kernel_message(config, trained)
    question = Question("exchange", training, number, (), vectors.to_arrays(down))
    total = last_layer.statistics_of(sums.tree(question))
  return jax.tree.map(np.asarray, total)


def _kernel_message(
  config: ml_collections.ConfigDict, trained: model.Model
) -> tuple[int, Any]:
  """Finds the exchange that made the posterior; returns its number and down message."""
  made = parts.of_config(config, config.num_clients, trained.preprocessor.num_inputs)
  server = jax.tree.map(jnp.asarray, trained.state.server)
  wanted = server.stats.moment.shape
  numbers = [
    number
    for number, part in enumerate(made.exchanges)
    if isinstance(part.up_like, last_layer.StatisticsMessage)
    and part.up_like.moment.shape == wanted
  ]
  exchange = made.exchanges[numbers[-1]].exchange
  return numbers[-1], exchange.broadcast(server, None)
