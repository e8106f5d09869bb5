"""A round over clients that stay in host memory and pass the device in chunks.

The exchanges of a method need sums only, so the device holds one chunk of clients, the
state and the running sum. The next chunk is fetched while the last is computed.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedbnr_jax import devices
from fedbnr_jax.algorithms import (
  Exchange,
  FederatedAlgorithm,
  RoundInfo,
  ServerState,
)
from fedbnr_jax.errors import InputError
from fedbnr_jax.federation import Clients, Federation, ServerSet

# (running total, state, server's set, rows, [k] who is asked) -> (total, reports).
_Add = Callable[..., tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class StreamedRound:
  """`FederatedAlgorithm.round` for a federation of NumPy arrays or memory maps.

  The same clients answer and the same result comes out, but for the order of sums.
  """

  algorithm: FederatedAlgorithm
  chunk_size: int  # Clients on the device at a time.
  draw: Callable[[chex.PRNGKey, int], jax.Array]
  add: dict[Exchange, _Add]
  combine: dict[Exchange, Callable[..., ServerState]]
  close: Callable[..., tuple[ServerState, RoundInfo]]

  def jit(self) -> "StreamedRound":
    """The same with every part compiled; sums are updated in place."""
    return dataclasses.replace(
      self,
      draw=jax.jit(self.draw, static_argnums=1),
      add={key: jax.jit(add, donate_argnums=0) for key, add in self.add.items()},
      combine={key: jax.jit(combine) for key, combine in self.combine.items()},
      close=jax.jit(self.close),
    )

  def __call__(
    self, key: chex.PRNGKey, state: ServerState, federation: Federation
  ) -> tuple[ServerState, RoundInfo]:
    algorithm = self.algorithm
    federation = algorithm.view(federation)
    answered = self.draw(key, federation.num_clients)
    warm = int(state.num_rounds) < algorithm.num_warm_up
    stages = algorithm.warm_up if warm else algorithm.stages
    floats = algorithm.floats(stages, state, federation.server)
    before, loss = state, None
    for stage in stages:
      state = stage.begin(state)
      for exchange in stage.exchanges * stage.times:
        asked = np.ones(federation.num_clients, bool)
        if not exchange.asks_all:
          asked = np.asarray(answered)
        total, told = self._collect(exchange, state, federation, asked)
        state = self.combine[exchange](state, federation.server, total)
        loss = loss if told is None else told
    return self.close(before, state, loss, np.asarray(floats), answered)

  def _collect(
    self,
    exchange: Exchange,
    state: ServerState,
    federation: Federation,
    asked: np.ndarray,
  ) -> tuple[Any, Any]:
    """The summed message, and the reports [K, ...], zeros for those not asked."""
    mesh = self.algorithm.placement.mesh
    num_devices = 1 if mesh is None else mesh.size
    # No more than may be asked: what a chunk lacks is filled up with copies.
    most = len(asked)
    if not exchange.asks_all:
      most = self.algorithm.participation.num_sampled(most)
    size = min(self.chunk_size, -(-most // num_devices) * num_devices)
    add, total = self.add[exchange], None
    parts: list[tuple[np.ndarray, Any]] = []
    for chosen, chunk, valid in _chunks(federation.clients, asked, size):
      arguments = (
        state,
        federation.server,
        *devices.share((chunk, valid), mesh),
      )
      if total is None:
        shape, _ = jax.eval_shape(partial(add, None), *arguments)
        total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
        total = devices.replicate(total, mesh)
      # At most two chunks are there: the one that is computed, and this one.
      jax.block_until_ready(total)
      total, report = add(total, *arguments)
      parts.append((chosen, report))
    return total, _gathered(parts, len(asked))


def streamed(algorithm: FederatedAlgorithm, chunk_size: int) -> StreamedRound:
  """The round of a method in chunks of clients, not jitted."""
  if chunk_size < 1:
    raise InputError(f"the chunk size must be at least 1, got {chunk_size}.")
  if any(exchange.keeps for exchange in algorithm.exchanges):
    raise InputError(
      "a method with a model for each client cannot stream them: leave "
      "config.stream_clients at 0."
    )
  mesh = algorithm.placement.mesh
  num_devices = 1 if mesh is None else mesh.size

  def add(
    exchange: Exchange,
    total: Any,
    state: ServerState,
    server: ServerSet | None,
    rows: Clients,
    asked: jax.Array,
  ) -> tuple[Any, Any]:
    message, reports = algorithm.collect(exchange, state, server, rows, asked)
    if total is None:
      return message, reports
    return jax.tree.map(jnp.add, total, message), reports

  exchanges = algorithm.exchanges
  return StreamedRound(
    algorithm=algorithm,
    # As many clients for each device.
    chunk_size=-(-chunk_size // num_devices) * num_devices,
    draw=algorithm.draw,
    add={exchange: partial(add, exchange) for exchange in exchanges},
    combine={exchange: exchange.server for exchange in exchanges},
    close=algorithm.close,
  )


def _chunks(
  clients: Clients, asked: np.ndarray, size: int
) -> Iterator[tuple[np.ndarray, Clients, np.ndarray]]:
  """Of the asked clients: their numbers, their rows [size, ...], [size] which are real.

  There is at least one chunk, if only of nobody: sums have a shape.
  """
  numbers = np.flatnonzero(asked)
  for start in range(0, max(len(numbers), 1), size):
    chosen = numbers[start : start + size]
    valid = np.arange(size) < len(chosen)
    filled = np.concatenate([chosen, np.zeros(size - len(chosen), numbers.dtype)])
    yield chosen, jax.tree.map(lambda leaf: leaf[filled], clients), valid  # noqa: B023


def _gathered(parts: list[tuple[np.ndarray, Any]], num_clients: int) -> Any:
  """Reports of chunks, put back to where their clients stand [K, ...]."""

  def gather(*leaves: Any) -> np.ndarray:
    first = np.asarray(leaves[0])
    whole = np.zeros((num_clients, *first.shape[1:]), first.dtype)
    for (chosen, _), leaf in zip(parts, leaves, strict=True):
      whole[chosen] = np.asarray(leaf)[: len(chosen)]
    return whole

  return jax.tree.map(gather, *(report for _, report in parts))
