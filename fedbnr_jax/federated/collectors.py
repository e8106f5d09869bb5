"""Collectors carry an exchange to the clients and bring back the sum of their answers.

A round is written against `Collector` alone. `OnDevice` batches clients on a device or
spreads them over a mesh; host_chunks.py streams them from host memory; a network asks
real sites.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.exchange import ClientFn, Exchange, Message, Own
from fedbnr_jax.federated.federation import Federation, Rows, zero_padding
from fedbnr_jax.federated.placement import AXIS, Placement, pad_clients, round_up


class Collected(NamedTuple):
  """What comes back from the clients."""

  total: Message  # Sum of the up messages.
  own: Own  # [K, ...] what each client keeps now.
  reports: dict[str, jax.Array]  # [K, ...]; zeros for clients that were not asked.


class Collector(Protocol):
  """A way to reach clients."""

  @property
  def traced(self) -> bool:
    """Whether a call can be traced; otherwise the round is a program on the host."""

  def __call__(
    self, exchange: Exchange, down: Message, own: Own, members: jax.Array | None
  ) -> Collected:
    """Runs the exchange's client function at the members.

    Args:
      exchange: Its `client` is run once for every member.
      down: The message that they all receive.
      own: [K, ...] what each client keeps.
      members: [K] bool, the clients that take part; None for all.
    """


@dataclasses.dataclass(frozen=True)
class OnDevice:
  """Computes all clients inside one traced program, batched or over a mesh."""

  federation: Federation
  placement: Placement
  traced: bool = True

  def __call__(
    self, exchange: Exchange, down: Message, own: Own, members: jax.Array | None
  ) -> Collected:
    rows, num_clients = self.federation.clients, self.federation.num_clients
    # Each device needs as many clients: empty ones, never asked, make up the rest.
    size = round_up(rows.y.shape[0], self.placement.num_devices)
    if size > num_clients:
      members = jnp.ones(num_clients, bool) if members is None else members
      own, rows, members = pad_clients((own, rows, members), size)
    prepared = exchange.prepare(down, jnp.zeros_like(rows.x[0, :1]))
    if self.federation.groups and exchange.any_length and members is None:
      return self._in_groups(exchange.client, prepared, own)
    collected = map_clients(
      exchange.client, prepared, own, rows, self.placement, members
    )
    if size == num_clients:
      return collected
    real = jax.tree.map(lambda leaf: leaf[:num_clients], collected[1:])
    return Collected(collected.total, *real)

  def _in_groups(self, fn: ClientFn, prepared: Any, own: Own) -> Collected:
    """Computes clients of unlike sizes apart, each group with padding of its own."""
    groups, found = self.federation.groups, []
    for group in groups:
      chosen = np.asarray(group.clients)
      rows = jax.tree.map(
        lambda leaf, chosen=chosen, group=group: leaf[chosen, : group.num_rows],
        self.federation.clients,
      )
      mine = jax.tree.map(lambda leaf, chosen=chosen: leaf[chosen], own)
      found.append(map_clients(fn, prepared, mine, rows, self.placement))
    totals = [one.total for one in found]
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *totals)
    places = np.argsort(np.concatenate([group.clients for group in groups]))
    kept = jax.tree.map(
      lambda *leaves: jnp.concatenate(leaves)[places], *(one[1:] for one in found)
    )
    return Collected(total, *kept)


def map_clients(
  fn: ClientFn,
  down: Any,
  own: Own,
  rows: Rows,
  placement: Placement = Placement(),  # noqa: B008  Immutable.
  members: jax.Array | None = None,
) -> Collected:
  """Runs `fn` for every member, its padding zeroed, and sums the up messages.

  Args:
    fn: The client function of an exchange.
    down: What the exchange's `prepare` makes of the message. It is an argument, and not
      closed over, because every device needs it.
    own: [K, ...] what each client keeps.
    rows: [K, N, ...] rows of all clients.
    placement: In what portions and on which devices; K is a multiple of the devices.
    members: [K] bool, the clients to run; all by default. The others cost no time, and
      whatever they hold is not looked at: they keep what they had.
  """
  chex.assert_equal_shape_prefix((rows.x, rows.y, rows.mask), 2)  # [K, N]
  chex.assert_equal_shape_prefix((rows.y, *jax.tree.leaves(own)), 1)  # [K]
  batch_size, mesh = placement
  if batch_size is not None and batch_size < 1:
    raise InputError(f"the client batch size must be at least 1, got {batch_size}.")
  if members is not None:
    chex.assert_shape(members, rows.y.shape[:1])
  if mesh is None:
    return _map_here(partial(fn, down), own, rows, members, batch_size)
  return _map_over_mesh(fn, down, own, rows, members, batch_size, mesh)


def _map_over_mesh(
  fn: ClientFn,
  down: Message,
  own: Own,
  rows: Rows,
  members: jax.Array | None,
  batch_size: int | None,
  mesh: Mesh,
) -> Collected:
  """Lets each device map its share of the clients, and sums messages over devices."""

  def share(
    down: Message, own: Own, rows: Rows, members: jax.Array | None
  ) -> tuple[Any, ...]:
    here = _map_here(partial(fn, down), own, rows, members, batch_size)
    return _sum_over_devices(here.total), *here[1:]

  by_client, whole = PartitionSpec(AXIS), PartitionSpec()
  total, *kept = jax.shard_map(
    share,
    mesh=mesh,
    in_specs=(whole, by_client, by_client, None if members is None else by_client),
    out_specs=(whole, by_client, by_client),
    check_vma=False,
  )(down, own, rows, members)
  own, reports = Placement(mesh=mesh).replicated(kept)
  return Collected(total, own, reports)


def _sum_over_devices(tree: Any) -> Any:
  """Sums the devices' trees in one message for each type of number.

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


class _LocalFn(Protocol):
  """A client function that already has its down message."""

  def __call__(self, own: Own, rows: Rows) -> tuple[Message, Own, Any]: ...


def _map_here(
  fn: _LocalFn,
  own: Own,
  rows: Rows,
  members: jax.Array | None,
  batch_size: int | None,
) -> Collected:
  """Maps over the clients of one device, `batch_size` of them at a time."""
  num_clients = rows.y.shape[0]
  batch_size = min(batch_size or num_clients, num_clients)
  if members is not None:
    return _map_members(fn, own, rows, members, batch_size)
  if batch_size == num_clients:
    return _run(fn, own, rows)
  num_chunks, rest = divmod(num_clients, batch_size)
  split = num_chunks * batch_size

  def accumulate(total: Any, start: jax.Array) -> tuple[Any, Any]:
    # Slices of the arrays as they stand: chunks as an axis of theirs would be a copy.
    chunk = jax.tree.map(
      lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, batch_size), (own, rows)
    )
    some = _run(fn, *chunk)
    return jax.tree.map(jnp.add, total, some.total), some[1:]

  zero = _zeros(fn, own, rows, batch_size).total
  total, kept = jax.lax.scan(accumulate, zero, jnp.arange(0, split, batch_size))
  kept = jax.tree.map(lambda leaf: leaf.reshape(split, *leaf.shape[2:]), kept)
  if rest:
    last = _run(fn, *jax.tree.map(lambda leaf: leaf[split:], (own, rows)))
    total = jax.tree.map(jnp.add, total, last.total)
    kept = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), kept, last[1:])
  return Collected(total, *kept)


def _map_members(
  fn: _LocalFn, own: Own, rows: Rows, members: jax.Array, batch_size: int
) -> Collected:
  """Maps over the members only, in as many chunks as they fill at run time."""
  num_clients = rows.y.shape[0]
  order = jnp.argsort(~members, stable=True)  # Members come first.
  order = jnp.pad(order, (0, -num_clients % batch_size), constant_values=num_clients)
  num_members = jnp.sum(members)

  def accumulate(index: jax.Array, so_far: Collected) -> Collected:
    start = index * batch_size
    chosen = jax.lax.dynamic_slice_in_dim(order, start, batch_size)
    valid = start + jnp.arange(batch_size) < num_members
    chunk = jax.tree.map(lambda leaf: leaf.at[chosen].get(mode="clip"), (own, rows))
    some = _run(fn, chunk[0], chunk[1], valid)
    # Where not valid, an index beyond the end, which is dropped.
    places = jnp.where(valid, chosen, num_clients)
    kept = jax.tree.map(
      lambda all_, new: all_.at[places].set(new, mode="drop"), so_far[1:], some[1:]
    )
    return Collected(jax.tree.map(jnp.add, so_far.total, some.total), *kept)

  num_chunks = (num_members + batch_size - 1) // batch_size
  start = _zeros(fn, own, rows, batch_size)._replace(own=own)
  return jax.lax.fori_loop(0, num_chunks, accumulate, start)


def _run(
  fn: _LocalFn, own: Own, rows: Rows, valid: jax.Array | None = None
) -> Collected:
  """Runs a few clients and sums the messages of the valid ones [k]."""

  def admitted(message: Any, valid: jax.Array) -> Any:
    return jax.tree.map(lambda a: jnp.where(valid, a, jnp.zeros_like(a)), message)

  rows = zero_padding(rows)
  if rows.y.shape[0] == 1:
    # Without a batch axis of one, which costs a fifth of the time of wide networks.
    message, *kept = fn(*jax.tree.map(lambda leaf: leaf[0], (own, rows)))
    if valid is not None:
      message = admitted(message, valid[0])
    kept = jax.tree.map(lambda leaf: leaf[None], kept)
    return Collected(message, *kept)
  messages, *kept = jax.vmap(fn)(own, rows)
  if valid is not None:
    # Chosen, not multiplied: what an empty client computes may be NaN.
    messages = jax.vmap(admitted)(messages, valid)
  # The sum has the type of one message, also where that is an integer.
  add_up = partial(jnp.sum, axis=0, promote_integers=False)
  return Collected(jax.tree.map(add_up, messages), *kept)


def _zeros(fn: _LocalFn, own: Own, rows: Rows, batch_size: int) -> Collected:
  """Makes an empty sum of messages, and empty reports of all clients."""
  num_clients = rows.y.shape[0]
  chunk = jax.tree.map(lambda leaf: leaf[:batch_size], (own, rows))
  shapes = jax.eval_shape(partial(_run, fn), *chunk)
  total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.total)
  kept = jax.tree.map(
    lambda leaf: jnp.zeros((num_clients, *leaf.shape[1:]), leaf.dtype), shapes[1:]
  )
  return Collected(total, *kept)
