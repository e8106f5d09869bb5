"""Rows that join or leave a trained model, exactly and without training.

The posterior is a function of summed statistics, so rows join by adding theirs and
leave by subtracting them. The kernel stays as it was learnt. For that the kernel is
evaluated in float64: a float32 feature may differ in its last digit between two
programs, and then what is subtracted is not quite what was added.

Sums do not tell which rows are in them, so the ledger keeps a tag of every row, and
rows that are not in are refused. A part of a training's table is held out and never
in: asked to leave with the others, it is left out.
"""

import json
import math
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedbnr_jax import blr, urk
from fedbnr_jax.algorithms.base import ServerState
from fedbnr_jax.blr import SufficientStats
from fedbnr_jax.checkpoints import digest
from fedbnr_jax.clients import features_of
from fedbnr_jax.errors import InputError
from fedbnr_jax.federation import Clients

_CHUNK = 8192  # Rows at a time: bounds the memory, whatever the table.
# Eigenvalues may be below zero by this much of the largest: rounding of long sums.
_TOLERANCE = {8: 1e-10, 4: 1e-4}  # By bytes of a float.

Transform = Callable[[Any], Any]


class Ledger(NamedTuple):
  """The statistics in a model's posterior, and what has changed since training."""

  stats: SufficientStats  # NumPy arrays, float64 where it was enabled.
  kernel: str  # Digest of the kernel under which they were taken.
  # Where the noise varies, the c of its variance σ² exp(φᵀu + c), for a σ by evidence.
  noise_offset: float | None
  tags: np.ndarray  # [n] of the rows that are in, by `row_tags`; equal ones repeat.
  held_out: np.ndarray  # Of the rows that training kept for validation and test.
  changes: tuple[dict[str, Any], ...] = ()


class Rows(NamedTuple):
  """Standardised rows of a table, and whose they are."""

  x: np.ndarray  # [n, D]
  y: np.ndarray  # [n]
  owners: np.ndarray | None = None  # [n] strings; None where there is no such column.

  def where(self, chosen: np.ndarray) -> "Rows":
    """Those that a mask [n] or indices name."""
    owners = None if self.owners is None else self.owners[chosen]
    return Rows(self.x[chosen], self.y[chosen], owners)


def row_tags(rows: Rows) -> np.ndarray:
  """A number [n], uint64, of each row: equal where rows are, rounded to float32.

  Rows of different owners have different tags: rounded measurements repeat, and when
  one site leaves, the same row of another stays.
  """
  values = np.concatenate([rows.x, rows.y[:, None]], axis=1).astype(np.float32)
  frame = pd.DataFrame(values + np.float32(0))  # −0 becomes 0.
  if rows.owners is not None:
    frame["owner"] = rows.owners
  return pd.util.hash_pandas_object(frame, index=False).to_numpy()


def kernel_digest(state: ServerState) -> str:
  return digest((state.omega, state.params.theta))


def statistics(
  feature_map: urk.FeatureMap,
  state: ServerState,
  batches: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]],
  transform: Transform | None = None,
) -> SufficientStats:
  """Statistics of standardised rows, batch by batch, under the kernel in float64.

  Args:
    feature_map: The kernel.
    state: Its parameters.
    batches: Of x [n, D], y [n] and mask [n].
    transform: Applied to the function of one batch; `jax.jit` pays.
  """
  wide = blr.statistics_dtype()
  params, omega = jax.tree.map(
    lambda leaf: leaf.astype(wide) if _is_floating(leaf) else leaf,
    jax.tree.map(jnp.asarray, (state.params, state.omega)),
  )

  def of_batch(x: jax.Array, y: jax.Array, mask: jax.Array) -> SufficientStats:
    x = jnp.where(mask[:, None], x, jnp.zeros_like(x))
    return blr.sufficient_stats(features_of(feature_map, params, omega, x), y, mask)

  run = transform(of_batch) if transform else of_batch
  total = blr.empty_stats(state.stats.moment.shape[0])
  for x, y, mask in batches:
    total = total + run(jnp.asarray(x, wide), jnp.asarray(y, wide), jnp.asarray(mask))
  return jax.device_get(total)


def _is_floating(leaf: jax.Array) -> bool:
  return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def row_batches(rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Rows in batches of one size, the last filled up."""
  size = min(_CHUNK, len(rows.y))
  for start in range(0, len(rows.y), size):
    inputs, targets = rows.x[start : start + size], rows.y[start : start + size]
    missing = size - len(targets)
    yield (
      np.pad(inputs, ((0, missing), (0, 0))),
      np.pad(targets, (0, missing)),
      np.arange(size) < len(targets),
    )


def client_batches(
  clients: Clients,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """The rows of a federation's clients, a few clients at a time."""
  num_clients, num_rows = clients.y.shape
  size = min(num_clients, max(1, _CHUNK // num_rows))
  for start in range(0, num_clients, size):
    x, y, mask = (
      np.asarray(leaf[start : start + size])
      for leaf in (clients.x, clients.y, clients.mask)
    )
    missing = size - len(y)
    yield (
      np.pad(x, ((0, missing), (0, 0), (0, 0))).reshape(size * num_rows, -1),
      np.pad(y, ((0, missing), (0, 0))).ravel(),
      np.pad(mask, ((0, missing), (0, 0))).ravel(),
    )


def opened(
  stats: SufficientStats, state: ServerState, tags: np.ndarray, held_out: np.ndarray
) -> Ledger:
  """The ledger of a model that was trained on rows with these statistics and tags."""
  trained, offset = state.posterior, None
  if trained.noise_offset is not None:
    # The trained σ need not be the evidence's.
    noise_std, _ = blr.fit_evidence(jax.tree.map(jnp.asarray, stats))
    ratio = float(trained.noise_std) / float(noise_std)
    offset = float(trained.noise_offset) + 2.0 * math.log(ratio)
  return Ledger(stats, kernel_digest(state), offset, tags, held_out)


def joined(
  ledger: Ledger, stats: SufficientStats, tags: np.ndarray, source: str
) -> Ledger:
  """The ledger with more rows in it."""
  total = jax.tree.map(np.add, ledger.stats, stats)
  ledger = ledger._replace(tags=np.concatenate([ledger.tags, tags]))
  return _changed(ledger, total, "add", source)


def leaving(ledger: Ledger, tags: np.ndarray, source: str) -> np.ndarray:
  """Which rows [n] of a table are in and can leave: all but those held out.

  Raises:
    InputError: If one is neither in nor was held out, or none is in.
  """
  there, held_out = Counter(ledger.tags.tolist()), Counter(ledger.held_out.tolist())
  leave = np.zeros(len(tags), bool)
  for row, tag in enumerate(tags.tolist()):
    leave[row] = there[tag] > 0
    known = there if leave[row] else held_out
    known[tag] -= 1
    if known[tag] < 0:
      raise InputError(
        f"row {row + 1} of {source} is not in the posterior: remove tables as they "
        "came in, with all their columns. Nothing is changed."
      )
  if not leave.any():
    raise InputError(
      f"no row of {source} is in the posterior: all were held out for validation or "
      "test. Nothing is changed."
    )
  return leave


def left(
  ledger: Ledger, stats: SufficientStats, tags: np.ndarray, source: str
) -> Ledger:
  """The ledger without these rows, all of which are `leaving`.

  Raises:
    InputError: If nothing would be left, or they cannot have been in after all.
  """
  rest = jax.tree.map(np.subtract, ledger.stats, stats)
  if rest.count < 1:
    raise InputError(
      f"{source} has {stats.count:.0f} rows and the posterior {ledger.stats.count:.0f}:"
      " at least one row must be left."
    )
  largest = np.linalg.eigvalsh(blr.augmented_gram(ledger.stats))[-1]
  smallest = np.linalg.eigvalsh(blr.augmented_gram(rest))[0]
  if smallest < -_TOLERANCE[rest.gram.dtype.itemsize] * largest:
    raise InputError(
      f"{source} holds rows that are not in the posterior: without them its Gram "
      f"matrix would be indefinite (smallest eigenvalue {smallest:.3g}). Nothing is "
      "changed."
    )
  gone, kept = Counter(tags.tolist()), np.ones(len(ledger.tags), bool)
  for index, tag in enumerate(ledger.tags.tolist()):
    kept[index] = gone[tag] <= 0
    gone[tag] -= 1
  ledger = ledger._replace(tags=ledger.tags[kept])
  return _changed(ledger, rest, "remove", source)


def _changed(
  ledger: Ledger, stats: SufficientStats, action: str, source: str
) -> Ledger:
  change = {
    "action": action,
    "table": source,
    "rows": round(abs(float(stats.count - ledger.stats.count))),
  }
  return ledger._replace(stats=stats, changes=(*ledger.changes, change))


def with_posterior(state: ServerState, ledger: Ledger) -> ServerState:
  """The model's state with the posterior of the ledger, σ and λ by exact evidence.

  Where the noise varies, its shape stays as it was learnt.
  """
  dtype = blr.statistics_dtype()
  stats = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), ledger.stats)
  noise_std, prior_std = blr.fit_evidence(stats)
  fitted = blr.posterior(stats, noise_std, prior_std)
  if ledger.noise_offset is not None:
    fitted = fitted.replace(
      noise_weights=state.posterior.noise_weights,
      noise_offset=jnp.asarray(ledger.noise_offset, dtype),
    )
  return state.replace(stats=stats, posterior=fitted)


# -------------------------------------------------------------------------- the file


def write(path: pathlib.Path, ledger: Ledger) -> None:
  """Writes a ledger whole or not at all."""
  part = path.with_suffix(".tmp")
  note = json.dumps(
    {
      "kernel": ledger.kernel,
      "noise_offset": ledger.noise_offset,
      "changes": ledger.changes,
    }
  )
  with open(part, "wb") as file:
    np.savez(
      file,
      gram=ledger.stats.gram,
      moment=ledger.stats.moment,
      energy=ledger.stats.energy,
      count=ledger.stats.count,
      tags=ledger.tags,
      held_out=ledger.held_out,
      note=np.frombuffer(note.encode(), np.uint8),
    )
    file.flush()
    os.fsync(file.fileno())
  os.replace(part, path)


def read(path: pathlib.Path) -> Ledger:
  """The ledger in a file.

  Raises:
    InputError: If there is none, or it is damaged.
  """
  if not path.exists():
    raise InputError(
      f"{path} does not exist: it is written when a training is finished, if all "
      "clients are in its posterior."
    )
  try:
    with open(path, "rb") as file, np.load(file) as content:
      arrays = {name: content[name] for name in content.files}
    note = json.loads(arrays.pop("note").tobytes().decode())
    if "tags" not in arrays:
      raise InputError(
        f"{path} was made by another version: train again, in another workdir."
      )
    tags, held_out = arrays.pop("tags"), arrays.pop("held_out")
    return Ledger(
      SufficientStats(**arrays),
      note["kernel"],
      note["noise_offset"],
      tags,
      held_out,
      tuple(note["changes"]),
    )
  except InputError:
    raise
  except Exception as error:  # Whatever a damaged file makes NumPy raise.
    raise InputError(
      f"{path} is damaged ({error}): restore it, or remove it and train again."
    ) from error


def require_kernel(ledger: Ledger, state: ServerState, path: pathlib.Path) -> None:
  """Raises InputError unless the ledger is of the model with this state."""
  if ledger.kernel != kernel_digest(state):
    raise InputError(
      f"{path} is of another kernel than the model beside it: remove it and train "
      "again."
    )
