"""The one mechanism that maps work over clients: batched, in chunks, over devices."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedbnr_jax.errors import InputError
from fedbnr_jax.federation import Clients, zero_padding

AXIS = "clients"

# (what all clients are told, rows of one client) -> (message, report).
ClientFn = Callable[[Any, Clients], tuple[Any, Any]]
_LocalFn = Callable[[Clients], tuple[Any, Any]]

# Floats of the working set of the clients that are batched together. On a CPU they
# should stay in a core's cache; elsewhere they fill the device.
_CPU_FLOATS = 400_000
_DEVICE_FLOATS = 400_000_000


class Placement(NamedTuple):
  """Where and in what portions clients are computed; no result depends on it."""

  # Clients batched at a time, on each device. By default `map_clients` takes all, and a
  # method as many as `automatic_batch_size` says.
  batch_size: int | None = None
  mesh: Mesh | None = None  # Devices with an axis "clients"; the default one without.

  def replicated(self, tree: Any) -> Any:
    """States inside a traced function that every device is to hold whole."""
    if self.mesh is None:
      return tree
    whole = NamedSharding(self.mesh, PartitionSpec())
    return jax.tree.map(
      lambda leaf: jax.lax.with_sharding_constraint(leaf, whole), tree
    )


def automatic_batch_size(num_params: int, num_rows: int, num_inputs: int) -> int:
  """Clients to batch at a time, by what one of them needs.

  Parameters with their gradient and two moments, and the hidden units of its rows
  forward and backward; their number is estimated by parameters over inputs.
  """
  hidden_units = num_rows * max(1, num_params // (num_inputs + 1))
  floats = 4 * num_params + 2 * hidden_units
  cached = jax.default_backend() == "cpu"
  return max(1, (_CPU_FLOATS if cached else _DEVICE_FLOATS) // floats)


def map_clients(
  fn: ClientFn,
  broadcast: Any,
  clients: Clients,
  placement: Placement = Placement(),  # noqa: B008  Immutable.
  asked: jax.Array | None = None,
) -> tuple[Any, Any]:
  """Runs `fn` for every client, its padding zeroed, and sums the messages.

  Args:
    fn: Maps what all are told and the rows of one client, without the client axis, to
      a message, which is summed over clients, and a report, which is kept for each.
    broadcast: What all clients are told: any pytree of arrays. It is an argument, and
      not closed over, because every device needs it.
    clients: Arrays [K, N, ...].
    placement: In what portions and on which devices.
    asked: [K] bool, the clients to run; all by default. The others cost no time, and
      whatever they hold is not looked at.

  Returns:
    The sum of the messages, and the reports stacked [K, ...]; zeros for clients that
    were not asked.
  """
  chex.assert_equal_shape_prefix((clients.x, clients.y, clients.mask), 2)  # [K, N]
  batch_size, mesh = placement
  if batch_size is not None and batch_size < 1:
    raise InputError(f"the client batch size must be at least 1, got {batch_size}.")
  if asked is not None:
    chex.assert_shape(asked, clients.y.shape[:1])
  if mesh is None:
    return _map_here(partial(fn, broadcast), clients, asked, batch_size)
  return _map_over_mesh(fn, broadcast, clients, asked, batch_size, mesh)


def _map_over_mesh(
  fn: ClientFn,
  broadcast: Any,
  clients: Clients,
  asked: jax.Array | None,
  batch_size: int | None,
  mesh: Mesh,
) -> tuple[Any, Any]:
  """Each device maps its share of the clients; messages are summed over all."""
  num_clients = clients.y.shape[0]
  missing = -num_clients % mesh.shape[AXIS]
  if missing:  # Shares must be equal: empty clients, never asked, make up the rest.
    asked = jnp.ones(num_clients, bool) if asked is None else asked
    clients, asked = jax.tree.map(
      lambda leaf: jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)),
      (clients, asked),
    )

  def share(
    broadcast: Any, clients: Clients, asked: jax.Array | None
  ) -> tuple[Any, Any]:
    total, reports = _map_here(partial(fn, broadcast), clients, asked, batch_size)
    return _sum_over_devices(total), reports

  by_client, whole = PartitionSpec(AXIS), PartitionSpec()
  total, reports = jax.shard_map(
    share,
    mesh=mesh,
    in_specs=(whole, by_client, None if asked is None else by_client),
    out_specs=(whole, by_client),
    check_vma=False,
  )(broadcast, clients, asked)
  reports = Placement(mesh=mesh).replicated(reports)
  return total, jax.tree.map(lambda leaf: leaf[:num_clients], reports)


def _sum_over_devices(tree: Any) -> Any:
  """The sum of the devices' trees, in one message for each type of number.

  Between processes every message costs a millisecond, whatever its length.
  """
  leaves, structure = jax.tree.flatten(tree)
  summed: dict[int, jax.Array] = {}
  for dtype in sorted({leaf.dtype for leaf in leaves}, key=str):
    places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
    flat = jnp.concatenate([leaves[i].ravel() for i in places])
    ends = np.cumsum([leaves[i].size for i in places])[:-1]
    parts = jnp.split(jax.lax.psum(flat, AXIS), ends)
    summed |= {
      i: part.reshape(leaves[i].shape) for i, part in zip(places, parts, strict=True)
    }
  return jax.tree.unflatten(structure, [summed[i] for i in range(len(leaves))])


def _map_here(
  fn: _LocalFn, clients: Clients, asked: jax.Array | None, batch_size: int | None
) -> tuple[Any, Any]:
  """Maps on one device."""
  num_clients = clients.y.shape[0]
  batch_size = min(batch_size or num_clients, num_clients)
  if asked is not None:
    return _map_asked(fn, clients, asked, batch_size)
  if batch_size == num_clients:
    return _run(fn, clients)
  num_chunks, rest = divmod(num_clients, batch_size)
  split = num_chunks * batch_size

  def accumulate(total: Any, start: jax.Array) -> tuple[Any, Any]:
    # Slices of the arrays as they stand: chunks as an axis of theirs would be a copy.
    chunk = jax.tree.map(
      lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, batch_size), clients
    )
    message, reports = _run(fn, chunk)
    return jax.tree.map(jnp.add, total, message), reports

  zero, _ = _zeros(fn, clients, batch_size)
  total, reports = jax.lax.scan(accumulate, zero, jnp.arange(0, split, batch_size))
  reports = jax.tree.map(lambda leaf: leaf.reshape(split, *leaf.shape[2:]), reports)
  if rest:
    message, last = _run(fn, jax.tree.map(lambda leaf: leaf[split:], clients))
    total = jax.tree.map(jnp.add, total, message)
    reports = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), reports, last)
  return total, reports


def _map_asked(
  fn: _LocalFn, clients: Clients, asked: jax.Array, batch_size: int
) -> tuple[Any, Any]:
  """Maps over the asked clients only, in as many chunks as they fill at run time."""
  num_clients = clients.y.shape[0]
  order = jnp.argsort(~asked, stable=True)  # Those asked come first.
  order = jnp.pad(order, (0, -num_clients % batch_size), constant_values=num_clients)
  num_asked = jnp.sum(asked)

  def accumulate(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
    total, reports = carry
    start = index * batch_size
    chosen = jax.lax.dynamic_slice_in_dim(order, start, batch_size)
    valid = start + jnp.arange(batch_size) < num_asked
    rows = jax.tree.map(lambda leaf: leaf.at[chosen].get(mode="clip"), clients)
    message, report = _run(fn, rows, valid)
    # Where not valid, an index beyond the end, which is dropped.
    places = jnp.where(valid, chosen, num_clients)
    reports = jax.tree.map(
      lambda all_, some: all_.at[places].set(some, mode="drop"), reports, report
    )
    return jax.tree.map(jnp.add, total, message), reports

  num_chunks = (num_asked + batch_size - 1) // batch_size
  start = _zeros(fn, clients, batch_size)
  total, reports = jax.lax.fori_loop(0, num_chunks, accumulate, start)
  return total, reports


def _run(
  fn: _LocalFn, chunk: Clients, valid: jax.Array | None = None
) -> tuple[Any, Any]:
  """The summed message and the reports of a few clients; of the valid ones [k]."""

  def admitted(message: Any, valid: jax.Array) -> Any:
    return jax.tree.map(lambda a: jnp.where(valid, a, jnp.zeros_like(a)), message)

  chunk = zero_padding(chunk)
  if chunk.y.shape[0] == 1:
    # Without a batch axis of one, which costs a fifth of the time of wide networks.
    message, report = fn(jax.tree.map(lambda leaf: leaf[0], chunk))
    if valid is not None:
      message = admitted(message, valid[0])
    return message, jax.tree.map(lambda leaf: leaf[None], report)
  messages, reports = jax.vmap(fn)(chunk)
  if valid is not None:
    # Chosen, not multiplied: what an empty client computes may be NaN.
    messages = jax.vmap(admitted)(messages, valid)
  # Of the same type as one message: integers too.
  add_up = partial(jnp.sum, axis=0, promote_integers=False)
  return jax.tree.map(add_up, messages), reports


def _zeros(fn: _LocalFn, clients: Clients, batch_size: int) -> tuple[Any, Any]:
  """An empty sum of messages, and empty reports of all clients."""
  num_clients = clients.y.shape[0]
  chunk = jax.tree.map(lambda leaf: leaf[:batch_size], clients)
  total, reports = jax.eval_shape(partial(_run, fn), chunk)
  total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), total)
  reports = jax.tree.map(
    lambda leaf: jnp.zeros((num_clients, *leaf.shape[1:]), leaf.dtype), reports
  )
  return total, reports


def client_mesh(num_devices: int) -> Mesh | None:
  """A mesh of the first `num_devices` devices; 0: of all, in all processes.

  Returns:
    None where one device does it all; of several processes, each by itself.
  """
  available = jax.devices()
  if num_devices > len(available):
    raise InputError(
      f"config.mesh is {num_devices}, but there are {len(available)} devices "
      f"({available[0].platform}): use at most as many, or 0 for all."
    )
  if 1 < num_devices < len(available) and jax.process_count() > 1:
    raise InputError(
      f"config.mesh is {num_devices}, but {jax.process_count()} processes have "
      f"{len(available)} devices, and all must take part: use 0."
    )
  num_devices = num_devices or len(available)
  if num_devices == 1:
    return None
  return Mesh(np.array(available[:num_devices]), (AXIS,))
