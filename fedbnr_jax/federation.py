"""Rows dealt out to clients: partitioners, and arrays [K, N, ...] with a row mask."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fedbnr_jax.errors import InputError

# (rng, inputs [n, D], targets [n], num_clients) -> K index arrays.
Partitioner = Callable[
  [np.random.Generator, np.ndarray, np.ndarray, int], list[np.ndarray]
]


class Clients(struct.PyTreeNode):
  """Rows by client; clients of fewer rows than N are padded."""

  x: jax.Array  # [K, N, D]
  y: jax.Array  # [K, N]
  mask: jax.Array  # [K, N] bool, false for padding.
  memory: Any = ()  # [K, ...] what each has kept, where a method lets it.


_FILES = ("x", "y", "mask")


class ServerSet(struct.PyTreeNode):
  """The small distillation set that the server holds."""

  x: jax.Array  # [Q, D]
  y: jax.Array  # [Q]


class Federation(struct.PyTreeNode):
  """All that a simulated round reads."""

  clients: Clients
  server: ServerSet | None = None
  # Clients without rows at the end, so that every device gets as many.
  num_padding: int = struct.field(pytree_node=False, default=0)

  @property
  def num_clients(self) -> int:
    return self.clients.y.shape[0] - self.num_padding


def build(
  inputs: np.ndarray,
  targets: np.ndarray,
  parts: Sequence[np.ndarray],
  *,
  names: Sequence[str] | None = None,
  num_padded_rows: int | None = None,
  dtype: chex.ArrayDType = jnp.float32,
  on_host: bool = False,
) -> Federation:
  """Stacks the rows that `parts` names, one part a client.

  Args:
    inputs: [n, D] standardised inputs.
    targets: [n] standardised targets.
    parts: Row indices of each client.
    names: Names of the clients, for messages.
    num_padded_rows: N; the largest client by default.
    dtype: Of the arrays.
    on_host: Leave the arrays in NumPy, to be streamed or shared out.

  Returns:
    A federation without a server set. Padding holds zeros.
  """
  if not parts:
    raise InputError("a federation needs at least one client.")
  for index, part in enumerate(parts):
    if len(part) == 0:
      name = names[index] if names is not None else f"number {index}"
      raise InputError(
        f"client {name} has no training rows: leave it out or give it more rows."
      )
  largest = max(len(part) for part in parts)
  num_rows = largest if num_padded_rows is None else num_padded_rows
  if num_rows < largest:
    raise ValueError(
      f"num_padded_rows {num_rows} is below the largest client, {largest}."
    )
  shape = (len(parts), num_rows)
  x = np.zeros((*shape, inputs.shape[1]), dtype)
  y = np.zeros(shape, dtype)
  mask = np.zeros(shape, bool)
  for index, part in enumerate(parts):
    x[index, : len(part)] = inputs[part]
    y[index, : len(part)] = targets[part]
    mask[index, : len(part)] = True
  arrays: Any = (x, y, mask) if on_host else (jnp.asarray(a) for a in (x, y, mask))
  return Federation(Clients(*arrays))


def save_clients(clients: Clients, folder: str | os.PathLike[str]) -> None:
  """Writes x.npy, y.npy and mask.npy, for `map_from_disk`."""
  os.makedirs(folder, exist_ok=True)
  for name in _FILES:
    np.save(os.path.join(folder, f"{name}.npy"), np.asarray(getattr(clients, name)))


def map_from_disk(folder: str | os.PathLike[str]) -> Federation:
  """A federation larger than memory: rows are read from the files as they are used."""
  arrays: list[Any] = []
  for name in _FILES:
    path = os.path.join(folder, f"{name}.npy")
    try:
      arrays.append(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError) as error:
      raise InputError(
        f"{path} cannot be mapped ({error}): a federation on disk is x.npy [K, N, D], "
        "y.npy [K, N] and mask.npy [K, N], as save_clients writes them."
      ) from error
  x, y, mask = arrays
  if x.ndim != 3 or not x.shape[:2] == y.shape == mask.shape or mask.dtype != bool:
    raise InputError(
      f"{folder}: x.npy {x.shape}, y.npy {y.shape} and mask.npy {mask.shape} "
      f"({mask.dtype}) are not [K, N, D], [K, N] and bool [K, N]."
    )
  return Federation(Clients(x, y, mask))


def zero_padding(clients: Clients) -> Clients:
  """The same rows with zeros for padding, whatever it held.

  Masking the features is not enough: a NaN in a padded input would reach the
  gradient of the first layer as 0·NaN.
  """
  return clients.replace(
    x=jnp.where(clients.mask[..., None], clients.x, jnp.zeros_like(clients.x)),
    y=jnp.where(clients.mask, clients.y, jnp.zeros_like(clients.y)),
  )


def with_rows(federation: Federation, num_rows: int) -> Federation:
  """The same federation, on the host, with N padded up to `num_rows`."""
  missing = num_rows - federation.clients.y.shape[1]
  clients = jax.tree.map(
    lambda a: np.pad(a, [(0, 0), (0, missing)] + [(0, 0)] * (a.ndim - 2)),
    federation.clients,
  )
  return federation.replace(clients=clients)


def pooled(federation: Federation) -> Federation:
  """The same rows, held by one client."""
  one = jax.tree.map(lambda a: a.reshape(1, -1, *a.shape[2:]), federation.clients)
  return federation.replace(clients=one, num_padding=0)


def single_client(federation: Federation, index: int) -> Federation:
  """A federation of one of the clients alone."""
  one = jax.tree.map(lambda a: a[index : index + 1], federation.clients)
  return federation.replace(clients=one, num_padding=0)


# ----------------------------------------------------------------- partitioners


def sorted_chunks(
  rng: np.random.Generator, inputs: np.ndarray, targets: np.ndarray, num_clients: int
) -> list[np.ndarray]:
  """The paper's: rows sorted by the most correlated input, 2K chunks, two each."""
  column = most_correlated(inputs, targets)
  order = np.argsort(inputs[:, column], kind="stable")
  chunks = np.array_split(order, 2 * num_clients)
  dealt = rng.permutation(2 * num_clients)
  return [
    np.concatenate([chunks[first], chunks[second]])
    for first, second in dealt.reshape(num_clients, 2)
  ]


def iid(
  rng: np.random.Generator, inputs: np.ndarray, targets: np.ndarray, num_clients: int
) -> list[np.ndarray]:
  """Shuffled rows in equal parts."""
  del targets
  return np.array_split(rng.permutation(len(inputs)), num_clients)


def target_quantile(
  rng: np.random.Generator, inputs: np.ndarray, targets: np.ndarray, num_clients: int
) -> list[np.ndarray]:
  """Each client holds one quantile range of the target: the hardest skew."""
  del inputs
  parts = np.array_split(np.argsort(targets, kind="stable"), num_clients)
  return [parts[index] for index in rng.permutation(num_clients)]


PARTITIONERS: dict[str, Partitioner] = {
  "sorted": sorted_chunks,
  "iid": iid,
  "target": target_quantile,
}


def partition(
  name: str,
  rng: np.random.Generator,
  inputs: np.ndarray,
  targets: np.ndarray,
  num_clients: int,
) -> list[np.ndarray]:
  """Deals the training rows to `num_clients` clients by a named rule."""
  if name not in PARTITIONERS:
    raise InputError(
      f"partition is {name!r}, not one of {', '.join(PARTITIONERS)} (or, with a client "
      "column, 'column')."
    )
  num_rows = len(targets)
  if not 1 <= num_clients <= num_rows // 2:
    raise InputError(
      f"num_clients must be between 1 and half of the {num_rows} training rows "
      f"({num_rows // 2}), got {num_clients}."
    )
  return PARTITIONERS[name](rng, inputs, targets, num_clients)


def by_column(
  labels: np.ndarray, train: np.ndarray
) -> tuple[list[np.ndarray], list[str]]:
  """One client a label; labels [n] of all rows, `train` [n_train] indices.

  Returns:
    For each label, positions within `train`; and the labels, sorted.
  """
  names = np.unique(labels)
  owners = labels[train]
  return [np.flatnonzero(owners == name) for name in names], [str(n) for n in names]


def most_correlated(inputs: np.ndarray, targets: np.ndarray) -> int:
  """The column of inputs [n, D] with the largest |correlation| with targets [n]."""
  centred = inputs - inputs.mean(axis=0)
  spread = np.sqrt(np.sum(centred**2, axis=0))
  products = np.abs(centred.T @ (targets - targets.mean()))
  return int(np.argmax(products / np.where(spread > 0, spread, np.inf)))
