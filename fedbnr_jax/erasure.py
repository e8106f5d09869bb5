"""What a run's folder still holds of rows that have left: rewritten, deleted or named.

Taking rows out of the posterior leaves the files of the training as they were, and from
them the sums of the rows that left are one subtraction away. What follows from the rows
that are in is written anew here, and what would show the others is deleted. What was
learnt from them stays, and is named.
"""

import pathlib
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbnr_jax import ledger_file
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.state import State
from fedbnr_jax.files import PARTIAL
from fedbnr_jax.ledger import Ledger
from fedbnr_jax.names import listing
from fedbnr_jax.run import seal
from fedbnr_jax.run.checkpoints import Checkpoints
from fedbnr_jax.run.records import RunFolder
from fedbnr_jax.tags import without

_NAMES = "clients.json"
_TABLE, _CLIENT = "an erased table", "erased {}"  # Stand for names.


class Traces(NamedTuple):
  """What still holds the influence of rows that left, each in a line.

  Attributes:
    erasable: What `erase` can take out, without training.
    lasting: What only another training can change, or the owner of other copies.
  """

  erasable: tuple[str, ...] = ()
  lasting: tuple[str, ...] = ()


def traces(folder: RunFolder, ledger: Ledger) -> Traces:
  """Lists what is left of rows that have left; nothing if none have."""
  gone = ledger.departures
  if not gone:
    return Traces()
  # Rows that joined a trained model and left it again never were in its training.
  trained = any(change.get("of_training", 1) for change in gone)
  lasting = _of_training(folder) if trained else []
  if ledger.owners is None and folder.config().data.client:
    lasting.append("clients.json: the names of all clients of the training")
  if folder.path.resolve().name.startswith("seed_"):
    lasting.append("the folders of other seeds, beside this one")
  lasting.append("copies and backups of this folder, and the tables themselves")
  return Traces(() if ledger.erased else _erasable(folder, ledger), tuple(lasting))


def _erasable(folder: RunFolder, ledger: Ledger) -> tuple[str, ...]:
  """What `erase` would rewrite or delete."""
  name, before = folder.posterior.name, ledger_file.previous(folder.posterior)
  lines = [
    f"{folder.checkpoints.name}/: sums and posteriors of earlier states; less those in "
    f"{name}, they are the sums of the rows that left",
    f"{name}: names of tables that left, and tags of rows that were held out",
  ]
  if before.exists():
    lines.append(f"{before.name}: the ledger before the last change, with its tags")
  if folder.calibration.exists():
    lines.append(f"{folder.calibration.name}: counts of how far rows were off")
  clients = _clients_gone(folder, ledger)
  if clients:
    lines.append(f"clients.json: the names {listing(clients)}")
  for path, shown in (
    (folder.figures, f"{folder.figures.name}/"),
    (folder.report, folder.report.name),
  ):
    if path.is_file() or any(path.glob("*.png")):
      lines.append(f"{shown}: rows of the table and predictions of them")
  return tuple(lines)


def _of_training(folder: RunFolder) -> list[str]:
  """What was learnt from rows of the training, and stays."""
  lines = [
    f"the kernel and how its noise varies (in {folder.checkpoints.name}/): learnt from "
    "them too",
    "preprocessing.json: means, deviations, quantiles and categories of all rows",
    "metrics.csv, summary.json: scores and numbers of rows of the training",
    "data.json: a digest of the whole table, for whoever has it to compare with",
  ]
  if folder.candidates.exists():
    lines.append(f"{folder.candidates.name}: scores of what was tried, and sizes")
  if folder.released.exists():
    lines.append(f"{folder.released.name}/: the private release of all training rows")
  if (folder.path / "privacy").exists():
    lines.append("privacy/: scores of private releases of all training rows")
  return lines


def _clients_gone(folder: RunFolder, ledger: Ledger) -> list[str]:
  """Names of clients none of whose rows are in."""
  if ledger.owners is None:
    return []
  names, _ = folder.clients()
  return [name for name in names if name not in ledger.owners]


def erase(folder: RunFolder, ledger: Ledger, state: State) -> Ledger:
  """Rewrites or deletes all in a finished run's folder that shows rows which left.

  It can be repeated, and so completed where it was interrupted. The run loads and
  predicts at every moment of it.

  Args:
    folder: Of the run.
    ledger: Of the rows that are in.
    state: The model's, with the posterior of those rows.

  Returns:
    The ledger as it is written.
  """
  # The ledger first: from here on it says what is in, whatever else is interrupted.
  ledger = _forgotten(ledger)
  ledger_file.write(folder.posterior, ledger)
  ledger_file.previous(folder.posterior).unlink(missing_ok=True)
  folder.calibration.unlink(missing_ok=True)  # Whoever can makes it anew.
  state = _without_memory(state)
  Checkpoints(folder.checkpoints).replace_all(state, partial(_seal, folder))
  gone = _clients_gone(folder, ledger)
  names, num_rows = folder.clients()
  if gone:
    nameless = [
      _CLIENT.format(number) if name in gone else name
      for number, name in enumerate(names, 1)
    ]
    folder.write_clients(nameless, num_rows)
  folder.report.unlink(missing_ok=True)
  for path in (*folder.figures.glob("*.png"), *_partial_files(folder.path)):
    path.unlink()
  ledger = ledger._replace(erased=True)
  ledger_file.write(folder.posterior, ledger)
  return ledger


def _seal(folder: RunFolder, number: int) -> seal.Seal:
  """Seals a checkpoint with its folder, but for clients' names, which may change."""
  made = seal.of_folder(folder, number)
  files = {name: d for name, d in made.files.items() if name != _NAMES}
  return made._replace(files=files)


def require_departures(folder: RunFolder, ledger: Ledger) -> None:
  """Raises InputError if no rows have left, so that there is nothing to erase."""
  if not ledger.departures:
    raise InputError(
      f"no rows have left the model in {folder.path}, so there is nothing to erase: "
      "name the tables that leave (--remove)."
    )


def _forgotten(ledger: Ledger) -> Ledger:
  """The ledger without names of tables that left, and tags of their held-out rows."""
  names = {change["table"] for change in ledger.departures}
  changes: tuple[dict[str, Any], ...] = tuple(
    change | {"table": _TABLE} if change["table"] in names else change
    for change in ledger.changes
  )
  held_out = without(ledger.held_out, ledger.departed)
  departed = ledger.departed[:0]
  return ledger._replace(changes=changes, held_out=held_out, departed=departed)


def _without_memory(state: State) -> State:
  """The state without what only further training would need.

  An optimiser remembers gradients of all rows, and that of `fedbnr-exact` their
  covariance, which is the Gram matrix in another form. A summary of the inputs served
  to draw ω, which is drawn.
  """
  server, own = state.server, state.own
  optimizer, inputs, own = jax.tree.map(
    np.zeros_like, (server.optimizer, server.inputs, own)
  )
  server = server.replace(optimizer=optimizer, inputs=inputs)
  return jax.device_get(state.replace(server=server, own=own))


def _partial_files(path: pathlib.Path) -> list[pathlib.Path]:
  """Files that a kill left half written, or whole but not yet in their place."""
  return list(path.rglob(f"*{PARTIAL}"))
