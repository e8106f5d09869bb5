"""Rows under a trained kernel: their statistics, and the posterior of those in it.

The posterior is a function of summed statistics, so rows join or leave a model without
training, and its kernel stays as it was learnt. For that the kernel is evaluated in
float64: a float32 feature may differ in its last digit between two programs, and then
what is subtracted is not quite what was added.
"""

import functools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.federation import Rows
from fedbnr_jax.federated.state import State
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.blr import SufficientStats
from fedbnr_jax.gp.kernel_model import features_of
from fedbnr_jax.ledger import Ledger, make_part
from fedbnr_jax.prediction import feature_map, padded_size
from fedbnr_jax.run.checkpoints import digest
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.tags import OwnedRows, dataset_tags

_CHUNK = 8192  # Rows at a time: bounds the memory, whatever the table.
_SAME = 1e-3  # Relative difference of two numbers that rounding alone may have made.

Transform = Callable[[Any], Any]


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
  trained, offset, scale = state.server.posterior, None, 1.0
  if trained.noise_offset is not None:
    noise_std, prior_std = blr.fit_evidence(jax.tree.map(jnp.asarray, stats))
    params = state.server.params
    scale = (
      _factor(trained, noise_std, prior_std)
      or _factor(trained, params.noise_std, params.prior_std)
      or 1.0
    )
    # The trained σ need not be the evidence's.
    ratio = float(trained.noise_std) / (scale * float(noise_std))
    offset = float(trained.noise_offset) + 2.0 * math.log(ratio)
  training = make_part("", stats, tags)
  ledger = Ledger(training, kernel_digest(state), offset, held_out, held_out[:0])
  return ledger._replace(scale=scale)


def _factor(
  fitted: blr.Posterior, noise_std: jax.Array, prior_std: jax.Array
) -> float | None:
  """Finds the factor that σ and λ of a posterior have both got since they were these.

  Held-out rows scale all error bars so. None if σ and λ differ in another way.
  """
  factor = float(fitted.noise_std) / float(noise_std)
  other = float(fitted.prior_std) / float(prior_std)
  return factor if math.isclose(factor, other, rel_tol=_SAME) else None


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
  split = experiment.split
  held_out = np.concatenate([split.validation, split.test, experiment.calibration_rows])
  ledger = opened(stats, state, tags[rows_in], tags[held_out])
  return ledger._replace(owners=_owners(experiment))


def _owners(experiment: Experiment) -> dict[str, int] | None:
  """Training rows by owner, where clients are values of a column; otherwise None."""
  if not experiment.config.data.client or experiment.dataset.clients is None:
    return None
  if not set(experiment.client_names) <= set(experiment.dataset.clients):
    return None  # Rows were pooled, or dealt out by another rule.
  sizes = map(len, experiment.client_rows)
  return dict(zip(experiment.client_names, sizes, strict=True))


def with_posterior(state: State, ledger: Ledger) -> State:
  """The model's state with the posterior of the ledger, σ and λ by exact evidence.

  Where the noise varies, its shape stays as it was learnt, and so does the factor by
  which held-out rows have scaled all error bars.
  """
  dtype = blr.statistics_dtype()
  stats = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), ledger.stats)
  noise_std, prior_std = blr.fit_evidence(stats)
  fitted = blr.posterior(stats, noise_std, prior_std)
  # The mean depends on their ratio alone.
  fitted = fitted.replace(
    noise_std=ledger.scale * noise_std, prior_std=ledger.scale * prior_std
  )
  if ledger.noise_offset is not None:
    fitted = fitted.replace(
      noise_weights=state.server.posterior.noise_weights,
      noise_offset=jnp.asarray(ledger.noise_offset, dtype),
    )
  server = state.server.replace(stats=stats, posterior=fitted)
  return state.replace(server=server)


def require_kernel(ledger: Ledger, state: State, path: pathlib.Path) -> None:
  """Raises InputError unless the ledger is of the model with this state."""
  require_same_kernel(ledger.kernel, kernel_digest(state), path)


def require_same_kernel(of_ledger: str, of_model: str, path: pathlib.Path) -> None:
  """Raises InputError unless digests say that a ledger is of the model's kernel."""
  if of_ledger != of_model:
    raise InputError(
      f"{path} is of another kernel than the model beside it: restore the run's own, "
      "or remove it and summary.json and start the training again, which writes both "
      "anew."
    )
