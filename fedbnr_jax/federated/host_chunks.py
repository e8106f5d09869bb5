"""A collector whose clients stay in host memory and pass the device in chunks.

An exchange needs sums only, so the device holds one chunk of clients, the down message
and the running sum. The next chunk is fetched while the last is computed.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated import placement as placement_lib
from fedbnr_jax.federated.algorithm import FederatedAlgorithm, Transform
from fedbnr_jax.federated.collectors import Collected, map_clients
from fedbnr_jax.federated.exchange import Exchange, Message, Own
from fedbnr_jax.federated.federation import Federation, Rows
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.federated.state import RoundInfo, State


@dataclasses.dataclass(frozen=True)
class HostChunks:
  """Carries rows [K, ...] of NumPy arrays or memory maps to the device in chunks."""

  rows: Rows  # [K, N, ...] on the host.
  chunk_size: int  # Clients on the devices at a time; a multiple of the devices.
  most_members: int  # At most so many take part in an exchange that is not for all.
  placement: Placement
  compiled: "Compiled"
  traced: bool = False

  def __call__(
    self, exchange: Exchange, down: Message, own: Own, members: jax.Array | None
  ) -> Collected:
    num_clients = self.rows.y.shape[0]
    asked = np.ones(num_clients, bool) if members is None else np.asarray(members)
    own = jax.tree.map(np.array, own)  # A copy: chunks are written back into it.
    reports: Any = None
    # No more than may take part: what a chunk lacks is filled up with copies. How many
    # do take part must not matter, or every number would be compiled anew.
    most = num_clients if members is None else self.most_members
    size = placement_lib.round_up(most, self.placement.num_devices)
    size = min(self.chunk_size, size)
    total: Any = None
    waiting: Any = None  # The last chunk, whose results are not fetched yet.
    for chosen, *chunk in _chunks(own, self.rows, asked, size):
      mesh = self.placement.mesh
      arguments = (down, *placement_lib.share(tuple(chunk), mesh))
      if total is None:
        shapes = jax.eval_shape(self.compiled.first(exchange), *arguments)
        total = placement_lib.replicate(_zeros(shapes.total), mesh)
        reports = jax.tree.map(
          lambda leaf: np.zeros((num_clients, *leaf.shape[1:]), leaf.dtype),
          shapes.reports,
        )
      if waiting is not None:
        # At most two chunks are there: the one that is computed, and this one.
        _write_back((own, reports), *waiting)
      some = self.compiled.add(exchange)(total, *arguments)
      total, waiting = some.total, (chosen, some[1:])
    _write_back((own, reports), *waiting)
    return Collected(total, own, reports)


class Compiled:
  """The programs of a streamed round, made when they are first needed and kept."""

  def __init__(self, placement: Placement, transform: Transform | None) -> None:
    self._placement = placement
    self._transform = transform
    self._first: dict[Exchange, Callable[..., Collected]] = {}
    self._add: dict[Exchange, Callable[..., Collected]] = {}

  def first(self, exchange: Exchange) -> Callable[..., Collected]:
    """Returns the function of one chunk: (down, own, rows, valid) -> collected.

    It is the same function at every call, so that its shapes are found by one trace.
    """
    if exchange not in self._first:

      def collect(down: Message, own: Own, rows: Rows, valid: jax.Array) -> Collected:
        prepared = exchange.prepare(down, jnp.zeros_like(rows.x[0, :1]))
        return map_clients(exchange.client, prepared, own, rows, self._placement, valid)

      self._first[exchange] = collect
    return self._first[exchange]

  def add(self, exchange: Exchange) -> Callable[..., Collected]:
    """Returns the function that also adds to a running total, its first argument."""
    if exchange not in self._add:
      collect = self.first(exchange)

      def add(total: Message, *arguments: Any) -> Collected:
        some = collect(*arguments)
        return some._replace(total=jax.tree.map(jnp.add, total, some.total))

      transform = self._transform
      # The total is updated in place.
      self._add[exchange] = transform(add, donate_argnums=0) if transform else add
    return self._add[exchange]


@dataclasses.dataclass(frozen=True)
class StreamedRound:
  """Runs `FederatedAlgorithm.round` for a federation in host memory.

  The same clients answer and the same result comes out, but for the order of sums.
  """

  algorithm: FederatedAlgorithm
  chunk_size: int
  transform: Transform | None
  _compiled: dict[Placement, Compiled] = dataclasses.field(default_factory=dict)

  def __call__(
    self, key: chex.PRNGKey, state: State, federation: Federation
  ) -> tuple[State, RoundInfo]:
    algorithm = self.algorithm
    federation = algorithm.view(federation)
    placement = algorithm.sized_placement(state, federation)
    compiled = self._compiled.setdefault(placement, Compiled(placement, self.transform))
    num_clients = federation.num_clients
    collector = HostChunks(
      rows=federation.clients,
      chunk_size=self.chunk_size,
      most_members=algorithm.participation.num_sampled(num_clients),
      placement=placement,
      compiled=compiled,
    )
    return algorithm.round_with(collector, key, state, federation.server, num_clients)


def streamed(
  algorithm: FederatedAlgorithm, chunk_size: int, transform: Transform | None = None
) -> StreamedRound:
  """Makes the round of a method in chunks of clients.

  Args:
    algorithm: The method.
    chunk_size: Clients on the devices at a time, rounded up to as many for each.
    transform: Applied to every part that runs on the device, such as `jax.jit`.
  """
  if chunk_size < 1:
    raise InputError(f"the chunk size must be at least 1, got {chunk_size}.")
  chunk_size = placement_lib.round_up(chunk_size, algorithm.placement.num_devices)
  if transform is not None:
    algorithm = algorithm.with_server_parts(transform)
  return StreamedRound(algorithm, chunk_size, transform)


def _chunks(
  own: Own, rows: Rows, asked: np.ndarray, size: int
) -> Iterator[tuple[np.ndarray, Own, Rows, np.ndarray]]:
  """Cuts the asked clients into chunks.

  There is at least one chunk, if only of nobody: sums have a shape.

  Yields:
    Numbers of the clients [n], what they keep [size, ...], their rows [size, ...], and
    [size] bool, which of these are real.
  """
  numbers = np.flatnonzero(asked)
  for start in range(0, max(len(numbers), 1), size):
    chosen = numbers[start : start + size]
    valid = np.arange(size) < len(chosen)
    filled = np.concatenate([chosen, np.zeros(size - len(chosen), numbers.dtype)])
    take = partial(_take, filled)
    yield chosen, jax.tree.map(take, own), jax.tree.map(take, rows), valid


def _take(numbers: np.ndarray, leaf: np.ndarray) -> np.ndarray:
  return leaf[numbers]


def _zeros(shapes: Any) -> Any:
  return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def _write_back(whole: Any, chosen: np.ndarray, parts: Any) -> None:
  """Puts a chunk's own states and reports where their clients stand in [K, ...]."""

  def write(whole: np.ndarray, part: jax.Array) -> None:
    whole[chosen] = np.asarray(part)[: len(chosen)]

  jax.tree.map(write, whole, tuple(parts))
