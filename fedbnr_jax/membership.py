"""Rows that join or leave a trained model, exactly and without training.

The posterior is a function of summed statistics, so rows join by adding theirs and
leave by subtracting them. The kernel stays as it was learnt. For that the kernel is
evaluated in float64: a float32 feature may differ in its last digit between two
programs, and then what is subtracted is not quite what was added.

Sums do not show which rows are in them, so the ledger holds a tag of every row, and
rows that are not in are refused. A part of a training's table is held out and never
in: when the whole table is to leave, that part is passed over.
"""

import functools
import math
import pathlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedbnr_jax import files
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.federation import Rows
from fedbnr_jax.federated.state import State
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.blr import SufficientStats
from fedbnr_jax.gp.kernel_model import features_of
from fedbnr_jax.prediction import feature_map, padded_size
from fedbnr_jax.run.checkpoints import digest
from fedbnr_jax.run.experiment import Experiment

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
  tags: np.ndarray  # [n], `row_tags` of the rows that are in; equal rows repeat.
  held_out: np.ndarray  # [m], tags of the rows held out for validation and test.
  changes: tuple[dict[str, Any], ...] = ()


class OwnedRows(NamedTuple):
  """Standardised rows of a table, and whose they are."""

  x: np.ndarray  # [n, D]
  y: np.ndarray  # [n]
  owners: np.ndarray | None = None  # [n] strings; None where there is no such column.

  def where(self, chosen: np.ndarray) -> "OwnedRows":
    """Selects rows by a mask [n] or by indices."""
    owners = None if self.owners is None else self.owners[chosen]
    return OwnedRows(self.x[chosen], self.y[chosen], owners)


def row_tags(rows: OwnedRows) -> np.ndarray:
  """Gives each row a number, [n] uint64: rows that agree in float32 get the same.

  Rows of different owners have different tags: rounded measurements repeat, and when
  one site leaves, the same row of another stays.
  """
  values = np.concatenate([rows.x, rows.y[:, None]], axis=1).astype(np.float32)
  frame = pd.DataFrame(values + np.float32(0))  # −0 becomes 0.
  if rows.owners is not None:
    frame["owner"] = rows.owners
  return pd.util.hash_pandas_object(frame, index=False).to_numpy()


def kernel_digest(state: State) -> str:
  """A digest of the kernel's parameters and draws, by which two kernels compare."""
  return digest((state.server.omega, state.server.params.theta))


def statistics(
  feature_map: urk.FeatureMap,
  state: State,
  batches: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]],
  transform: Transform | None = None,
) -> SufficientStats:
  """Statistics of standardised rows, batch by batch, under the kernel in float64.

  Args:
    feature_map: The kernel.
    state: Its parameters.
    batches: Each is x [n, D], y [n] and mask [n].
    transform: Is applied to the function of one batch, such as `jax.jit`.
  """
  wide = blr.statistics_dtype()
  theta, omega = jax.tree.map(
    lambda leaf: leaf.astype(wide) if _is_floating(leaf) else leaf,
    jax.tree.map(jnp.asarray, (state.server.params.theta, state.server.omega)),
  )
  of_batch = _statistics_of_batch(feature_map, transform)
  total = blr.empty_stats(state.server.stats.moment.shape[0])
  for batch in batches:
    x, y = (jnp.asarray(array, wide) for array in batch[:2])
    total = total + of_batch(theta, omega, x, y, jnp.asarray(batch[2]))
  return jax.device_get(total)


@functools.lru_cache(maxsize=8)
def _statistics_of_batch(
  feature_map: urk.FeatureMap, transform: Transform | None
) -> Callable[..., SufficientStats]:
  """The statistics of a batch of rows; one function for all calls with one kernel."""

  def of_batch(
    theta: Any, omega: Any, x: jax.Array, y: jax.Array, mask: jax.Array
  ) -> SufficientStats:
    x = jnp.where(mask[:, None], x, jnp.zeros_like(x))
    return blr.sufficient_stats(features_of(feature_map, theta, omega, x), y, mask)

  return transform(of_batch) if transform else of_batch


def _is_floating(leaf: jax.Array) -> bool:
  return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def row_batches(rows: OwnedRows) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Yields rows in batches of one size; the last is padded and masked."""
  size = padded_size(len(rows.y), _CHUNK)
  for start in range(0, len(rows.y), size):
    inputs, targets = rows.x[start : start + size], rows.y[start : start + size]
    missing = size - len(targets)
    yield (
      np.pad(inputs, ((0, missing), (0, 0))),
      np.pad(targets, (0, missing)),
      np.arange(size) < len(targets),
    )


def client_batches(
  clients: Rows,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Yields the rows of a federation's clients, a few clients at a time."""
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
  stats: SufficientStats, state: State, tags: np.ndarray, held_out: np.ndarray
) -> Ledger:
  """The ledger of a model that was trained on rows with these statistics and tags."""
  trained, offset = state.server.posterior, None
  if trained.noise_offset is not None:
    # The trained σ need not be the evidence's.
    noise_std, _ = blr.fit_evidence(jax.tree.map(jnp.asarray, stats))
    ratio = float(trained.noise_std) / float(noise_std)
    offset = float(trained.noise_offset) + 2.0 * math.log(ratio)
  return Ledger(stats, kernel_digest(state), offset, tags, held_out)


def of_training(experiment: Experiment, state: State) -> Ledger | None:
  """The ledger of a model that was just trained.

  Returns:
    None for a method that has no last layer of all clients' rows, and where rows of
    some clients are not in the posterior.
  """
  if not isinstance(state.server.stats, SufficientStats):
    return None
  stats = statistics(
    feature_map(experiment.config),
    state,
    client_batches(experiment.federation.clients),
    jax.jit,
  )
  if round(float(stats.count)) != round(float(state.server.stats.count)):
    return None
  tags = dataset_tags(experiment)
  rows_in = np.concatenate(experiment.client_rows)
  held_out = np.concatenate([experiment.split.validation, experiment.split.test])
  return opened(stats, state, tags[rows_in], tags[held_out])


def dataset_tags(experiment: Experiment) -> np.ndarray:
  """The tags [N] of all rows of an experiment's dataset."""
  dataset, preprocessor = experiment.dataset, experiment.preprocessor
  with warnings.catch_warnings(action="ignore"):  # Given when the training started.
    x = preprocessor.transform(dataset.features)
  # Tables that join or leave later name the owner of a row by this column, or not.
  owners = dataset.clients if experiment.config.data.client else None
  return row_tags(OwnedRows(x, preprocessor.standardise(dataset.targets), owners))


def joined(
  ledger: Ledger, stats: SufficientStats, tags: np.ndarray, source: str
) -> Ledger:
  """The ledger with more rows in it."""
  total = jax.tree.map(np.add, ledger.stats, stats)
  ledger = ledger._replace(tags=np.concatenate([ledger.tags, tags]))
  return _changed(ledger, total, "add", source)


def leaving(ledger: Ledger, tags: np.ndarray, source: str) -> np.ndarray:
  """Marks the rows [n] of a table that are in and can leave: all but those held out.

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


def with_posterior(state: State, ledger: Ledger) -> State:
  """The model's state with the posterior of the ledger, σ and λ by exact evidence.

  Where the noise varies, its shape stays as it was learnt.
  """
  dtype = blr.statistics_dtype()
  stats = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), ledger.stats)
  noise_std, prior_std = blr.fit_evidence(stats)
  fitted = blr.posterior(stats, noise_std, prior_std)
  if ledger.noise_offset is not None:
    fitted = fitted.replace(
      noise_weights=state.server.posterior.noise_weights,
      noise_offset=jnp.asarray(ledger.noise_offset, dtype),
    )
  server = state.server.replace(stats=stats, posterior=fitted)
  return state.replace(server=server)


# -------------------------------------------------------------------------- the file


def write(path: pathlib.Path, ledger: Ledger) -> None:
  """Writes a ledger whole or not at all."""
  arrays = vars(ledger.stats) | {"tags": ledger.tags, "held_out": ledger.held_out}
  note = {
    "kernel": ledger.kernel,
    "noise_offset": ledger.noise_offset,
    "changes": ledger.changes,
  }
  files.write_arrays(path, arrays, note)


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
    arrays, note = files.read_arrays(path)
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


def changes(path: pathlib.Path) -> tuple[dict[str, Any], ...]:
  """What has changed since training, by the ledger in a file; () if there is none."""
  return read(path).changes if path.exists() else ()


def require_kernel(ledger: Ledger, state: State, path: pathlib.Path) -> None:
  """Raises InputError unless the ledger is of the model with this state."""
  if ledger.kernel != kernel_digest(state):
    raise InputError(
      f"{path} is of another kernel than the model beside it: remove it and train "
      "again."
    )
