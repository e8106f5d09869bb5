"""Messages as bytes: a site that answers them, and a collector that reaches sites.

Nothing but bytes passes between server and sites here, so what a message does not hold
cannot be used. How the bytes travel is not said: `ask` is any function that carries a
message to the sites and brings their answers back.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.collectors import Collected
from fedbnr_jax.federated.exchange import Exchange, Message, Own, Report
from fedbnr_jax.federated.federation import Rows, ServerSet, zero_padding

# (number of the exchange, down message, [K] bool or None) -> answers of the members.
Ask = Callable[[int, bytes, np.ndarray | None], Sequence[bytes]]


def encode(message: Message) -> bytes:
  """Writes a message as MessagePack: arrays with their names, types and shapes."""
  return serialization.to_bytes(jax.device_get(message))


def decode(data: bytes, like: Message) -> Message:
  """Reads a message that has the same tree as `like`; shapes are those written."""
  return jax.tree.map(jnp.asarray, serialization.from_bytes(like, data))


class Site:
  """One client: its rows and what it keeps, which never leave this object."""

  def __init__(
    self,
    algorithm: FederatedAlgorithm,
    key: chex.PRNGKey,
    number: int,
    num_clients: int,
    rows: Rows,
    inputs: Any = (),
    transform: Callable[..., Any] = jax.jit,
  ) -> None:
    """Starts a client.

    Args:
      algorithm: The method; every site and the server build it from the same config.
      key: The common key from which the server starts too.
      number: The client's place among all.
      num_clients: K.
      rows: [N, ...] the client's own rows.
      inputs: What is publicly known of the inputs; see `Federation.inputs`.
      transform: Applied to client functions, such as `jax.jit`.
    """
    self.report: Report = {}  # The site's own diagnostics of the last exchange.
    self._rows = zero_padding(rows)
    start = transform(
      lambda rows: algorithm.init_client(
        key, jnp.asarray(number), num_clients, rows, inputs
      )
    )
    self._own = start(self._rows)
    self._like = [
      down_like(algorithm, exchange, num_clients, self._rows, inputs)
      for exchange in algorithm.exchanges
    ]
    self._clients = [transform(exchange.answer) for exchange in algorithm.exchanges]

  def answer(self, exchange: int, down: bytes) -> bytes:
    """Does the client's part of an exchange, given by its number, and keeps its own."""
    message = decode(down, self._like[exchange])
    up, self._own, self.report = self._clients[exchange](message, self._own, self._rows)
    return encode(up)


@dataclasses.dataclass(frozen=True)
class OverBytes:
  """Collects from sites that are reached through `ask`.

  What clients keep, and their reports, stay with them: both come back empty.
  """

  algorithm: FederatedAlgorithm
  num_clients: int
  num_inputs: int
  dtype: Any
  ask: Ask
  inputs: Any = ()
  traced: bool = False

  def __call__(
    self, exchange: Exchange, down: Message, own: Own, members: jax.Array | None
  ) -> Collected:
    rows = empty_rows(self.num_inputs, self.dtype)
    kept = _own_like(self.algorithm, self.num_clients, rows, self.inputs)
    like, _, _ = jax.eval_shape(exchange.answer, down, kept, rows)
    chosen = None if members is None else np.asarray(members)
    number = self.algorithm.exchanges.index(exchange)
    answers = self.ask(number, encode(down), chosen)
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    for answer in answers:
      total = jax.tree.map(jnp.add, total, decode(answer, like))
    return Collected(total, own, {})


def empty_rows(num_inputs: int, dtype: Any) -> Rows:
  """Makes a single row of padding: shapes and types to trace a client with."""
  x = jnp.zeros((1, num_inputs), dtype)
  return Rows(x, x[:, 0], jnp.zeros(1, bool))


def down_like(
  algorithm: FederatedAlgorithm,
  exchange: Exchange,
  num_clients: int,
  rows: Rows,
  inputs: Any = (),
) -> Message:
  """Finds the tree of an exchange's down message without any server."""
  # The number of the server's rows is the server's to know; the tree is the same.
  server_set = ServerSet(rows.x, rows.y)
  state = jax.eval_shape(
    lambda rows: algorithm.init_server(jax.random.key(0), num_clients, rows, inputs),
    rows,
  )
  return jax.eval_shape(exchange.broadcast, state, server_set)


def _own_like(
  algorithm: FederatedAlgorithm, num_clients: int, rows: Rows, inputs: Any
) -> Own:
  number = jnp.zeros((), jnp.int32)
  return jax.eval_shape(
    lambda rows: algorithm.init_client(
      jax.random.key(0), number, num_clients, rows, inputs
    ),
    rows,
  )
