"""The rows of all clients as arrays [K, N, ...] with a mask, and the server's set."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fedbnr_jax.errors import InputError


class Rows(struct.PyTreeNode):
  """One client's rows; those of all clients have a leading axis K on every field."""

  x: jax.Array  # [N, D], or [K, N, D] for all clients.
  y: jax.Array  # [N]
  mask: jax.Array  # [N] bool, false for padding up to the largest client.


_FILES = ("x", "y", "mask")
# Clients of unlike sizes are divided into groups if that saves so many rows of padding,
# and such a share of all; the seconds that another group takes to compile are then
# worth it. More clients than this make too long a list.
_SAVED_ROWS, _SAVED_SHARE, _MOST_GROUPED = 1000, 0.3, 1000


class ServerSet(struct.PyTreeNode):
  """The small distillation set that the server holds."""

  x: jax.Array  # [Q, D]
  y: jax.Array  # [Q]


class Group(NamedTuple):
  """Clients of similar size, whose rows end before the padding of larger ones does."""

  num_rows: int  # The rows of the largest of them.
  clients: tuple[int, ...]  # Their numbers.


class Federation(struct.PyTreeNode):
  """The data of a simulated federation: all clients' rows, and the server's."""

  clients: Rows  # [K, N, ...]
  server: ServerSet | None = None
  # What is publicly known of the inputs, from sums over all clients: an
  # `urk.InputSummary`, for kernels whose draws resemble them; else ().
  inputs: Any = ()
  # Empty clients at the end of the axis K, which give every device as many.
  num_padding: int = struct.field(pytree_node=False, default=0)
  # Large and small clients, where padding all to the largest would be mostly padding;
  # else (), and all are computed alike.
  groups: tuple[Group, ...] = struct.field(pytree_node=False, default=())

  @property
  def num_clients(self) -> int:
    """K without padding."""
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

  Example:
    >>> import numpy as np
    >>> from fedbnr_jax import federation
    >>> x, y = np.zeros((4, 2)), np.zeros(4)
    >>> built = federation.build(x, y, [np.array([0, 1, 2]), np.array([3])])
    >>> built.num_clients, built.clients.x.shape, built.clients.mask.tolist()
    (2, (2, 3, 2), [[True, True, True], [True, False, False]])
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
  return Federation(Rows(*arrays), groups=groups_of([len(part) for part in parts]))


def groups_of(sizes: Sequence[int]) -> tuple[Group, ...]:
  """Divides clients into large and small ones, if that saves enough padding.

  Two groups, because what clients do is compiled for each.

  Args:
    sizes: [K] rows of each client.

  Returns:
    Two groups that have all clients, or ().
  """
  num_clients = len(sizes)
  if not 2 <= num_clients <= _MOST_GROUPED:
    return ()
  order = np.argsort(np.negative(sizes), kind="stable")
  falling = np.asarray(sizes)[order]
  # With the k largest in one group, the other's largest is the next.
  large = np.arange(1, num_clients)
  padded = large * falling[0] + (num_clients - large) * falling[1:]
  best, whole = int(np.argmin(padded)), num_clients * int(falling[0])
  if whole - padded[best] < max(_SAVED_ROWS, _SAVED_SHARE * whole):
    return ()
  ends = ((0, best + 1), (best + 1, num_clients))
  return tuple(
    Group(int(falling[first]), tuple(int(k) for k in np.sort(order[first:end])))
    for first, end in ends
  )


def save_clients(clients: Rows, folder: str | os.PathLike[str]) -> None:
  """Writes x.npy, y.npy and mask.npy, for `map_from_disk`."""
  os.makedirs(folder, exist_ok=True)
  for name in _FILES:
    np.save(os.path.join(folder, f"{name}.npy"), np.asarray(getattr(clients, name)))


def map_from_disk(folder: str | os.PathLike[str]) -> Federation:
  """Opens a federation larger than memory: rows are read when they are used."""
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
  return Federation(Rows(x, y, mask))


def zero_padding(clients: Rows) -> Rows:
  """Replaces padding, whatever it held, by zeros.

  Masking the features is not enough: a NaN in a padded input would reach the
  gradient of the first layer as 0·NaN.
  """
  return clients.replace(
    x=jnp.where(clients.mask[..., None], clients.x, jnp.zeros_like(clients.x)),
    y=jnp.where(clients.mask, clients.y, jnp.zeros_like(clients.y)),
  )


def with_rows(federation: Federation, num_rows: int) -> Federation:
  """Pads N up to `num_rows`; the arrays are NumPy's."""
  missing = num_rows - federation.clients.y.shape[1]
  clients = jax.tree.map(
    lambda a: np.pad(a, [(0, 0), (0, missing)] + [(0, 0)] * (a.ndim - 2)),
    federation.clients,
  )
  # Federations that are padded alike are computed alike.
  return federation.replace(clients=clients, groups=())


def pooled(federation: Federation) -> Federation:
  """Gives all rows to one client."""
  one = jax.tree.map(lambda a: a.reshape(1, -1, *a.shape[2:]), federation.clients)
  return federation.replace(clients=one, num_padding=0, groups=())


def single_client(federation: Federation, index: int) -> Federation:
  """Keeps one of the clients and leaves the others out."""
  one = jax.tree.map(lambda a: a[index : index + 1], federation.clients)
  return federation.replace(clients=one, num_padding=0, groups=())
