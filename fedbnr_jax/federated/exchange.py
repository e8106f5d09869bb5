"""One exchange: a message goes down to clients, and the sum of their answers comes up.

A client function receives the down message, what the client itself has kept, and its
own rows. The server function receives the sum of the up messages. Neither sees more, so
the same two functions serve a simulation, where clients are an axis of an array, and a
deployment, where messages are bytes on a wire.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.state import ServerState

# Any pytree of arrays. A symmetric matrix in a message is its triangle, and the fixed
# draws of a kernel are a seed: see gp/blr/triangle.py and `urk.draw_omega`.
Message = Any
Own = Any  # What one client keeps between exchanges: any pytree of arrays.
Report = dict[str, jax.Array]  # Diagnostics of one client, such as {"loss": []}.


class Broadcast(Protocol):
  """The server's first half: it writes the message that every client receives."""

  def __call__(self, state: ServerState, server_set: ServerSet | None) -> Message: ...


class Prepare(Protocol):
  """A client's first step: all that it computes of the message alone.

  A simulation takes it once for all clients, each of whom would come to the same.
  `like` [1, D] is a row of zeros, which says how many inputs there are, and their type.
  """

  def __call__(self, down: Message, like: jax.Array) -> Any: ...


def as_received(down: Message, like: jax.Array) -> Any:
  """Leaves a message as it is."""
  del like
  return down


class ClientFn(Protocol):
  """A client's work; `down` is what the exchange's `prepare` made of the message.

  It returns the up message, what the client keeps from now on, and a report. The own
  state and the report stay with the client; a simulation looks at reports only to say
  whose loss is not finite.
  """

  def __call__(
    self, down: Message, own: Own, rows: Rows
  ) -> tuple[Message, Own, Report]: ...


class ServerFn(Protocol):
  """The server's second half: it reads the sum of the up messages and nothing else."""

  def __call__(
    self, state: ServerState, server_set: ServerSet | None, total: Message
  ) -> ServerState: ...


class Exchange(NamedTuple):
  """One trip of messages. The functions are pure and written for one client."""

  name: str  # What the exchange is about, for tables and logs.
  broadcast: Broadcast
  client: ClientFn
  server: ServerFn
  # Whether clients that do not train in this round take part in this exchange too.
  everybody: bool = False
  prepare: Prepare = as_received
  # Whether nothing that a client keeps, sends or reports has the length of its rows, so
  # that a simulation may cut their padding.
  any_length: bool = False

  def answer(self, down: Message, own: Own, rows: Rows) -> tuple[Message, Own, Report]:
    """Does all that a client does when a message has arrived."""
    prepared = self.prepare(down, jnp.zeros_like(rows.x[:1]))
    return self.client(prepared, own, rows)


class Stage(NamedTuple):
  """Some exchanges in order, repeated `times` times."""

  exchanges: tuple[Exchange, ...]
  times: int = 1
  # The server does this before the first repetition.
  begin: Callable[[ServerState], ServerState] = lambda state: state


def num_floats(message: Message) -> int:
  """Counts the numbers in a message: a seed is two, a count is one.

  Example:
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax.federated.exchange import num_floats
    >>> num_floats({"gram": jnp.zeros(6), "count": jnp.zeros(())})
    7
  """
  return sum(leaf.size for leaf in jax.tree.leaves(message))
