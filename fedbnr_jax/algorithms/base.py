"""The interface that every method implements: init, exchanges of a round, predict."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct

from fedbnr_jax.blr import Posterior, SufficientStats
from fedbnr_jax.clients import ModelParams
from fedbnr_jax.federation import Clients, Federation, ServerSet
from fedbnr_jax.mapping import Placement, automatic_batch_size, map_clients
from fedbnr_jax.participation import Participation


class ServerState(struct.PyTreeNode):
  """What the server carries from round to round."""

  omega: Any  # [S, ...] random draws of the kernel; constants.
  params: ModelParams  # Global kernel, σ and λ.
  stats: SufficientStats  # Summed over clients, under `params`.
  posterior: Posterior  # Of the last layer; before the first round, the prior.
  num_clients: jax.Array  # [] int32, whose statistics are in the posterior.
  num_rounds: jax.Array  # [] int32


class RoundInfo(struct.PyTreeNode):
  """Diagnostics of a round; not carried."""

  answered: jax.Array  # [K] bool, the clients that trained in this round.
  client_loss: jax.Array  # [K] theirs before the last local step, nats per row.
  train_nll: jax.Array  # [] global negative log evidence per row.
  floats_up: jax.Array  # [] floats that a client which answers sends in the round.
  floats_down: jax.Array  # [] floats it receives.


class Exchange(NamedTuple):
  """One trip: the state goes out to the clients, the sum of their messages comes back.

  That the server reads nothing but the sum is what lets clients stream by in chunks,
  spread over devices, and be added up under encryption.
  """

  # (state, server's set, rows of one client) -> (message, report).
  client: Callable[[ServerState, ServerSet | None, Clients], tuple[Any, Any]]
  # (state, server's set, summed message) -> state.
  server: Callable[[ServerState, ServerSet | None, Any], ServerState]
  # Whether clients that are not in this round are asked too.
  asks_all: bool = False


@dataclasses.dataclass(frozen=True)
class FederatedAlgorithm:
  """A method: pure functions, which the caller jits."""

  init: Callable[[chex.PRNGKey, Federation], ServerState]
  exchanges: tuple[Exchange, ...]  # Of one round, in order.
  # (state after the round, server's set, reports of each exchange, [K] who answered).
  describe: Callable[[ServerState, ServerSet | None, list[Any], jax.Array], RoundInfo]
  # x [N, D] -> mean [N], variance [N] of the standardised target.
  predict: Callable[[ServerState, jax.Array], tuple[jax.Array, jax.Array]]
  participation: Participation
  placement: Placement
  # What of the federation the method sees.
  view: Callable[[Federation], Federation] = lambda federation: federation

  def round(
    self, key: chex.PRNGKey, state: ServerState, federation: Federation
  ) -> tuple[ServerState, RoundInfo]:
    """All exchanges, with the clients that the key draws."""
    federation = self.view(federation)
    answered = self.draw(key, federation.num_clients)
    before, reports = state, []
    for exchange in self.exchanges:
      asked = self.asked(exchange, answered, federation)
      total, report = self.collect(
        exchange, state, federation.server, federation.clients, asked
      )
      state = exchange.server(state, federation.server, total)
      reports.append(jax.tree.map(lambda a: a[: federation.num_clients], report))
    return self.close(before, state, federation.server, reports, answered)

  # ------------------------------------ the parts of a round, also for streaming it

  def draw(self, key: chex.PRNGKey, num_clients: int) -> jax.Array:
    """[K] bool: who answers in the round of this key."""
    if self.participation.is_full:
      return jnp.ones(num_clients, bool)
    return self.participation.draw(key, num_clients)

  def asked(
    self, exchange: Exchange, answered: jax.Array, federation: Federation
  ) -> jax.Array | None:
    """[K + padding] bool: whom an exchange asks; None for all there are."""
    everybody = exchange.asks_all or self.participation.is_full
    if everybody and not federation.num_padding:
      return None
    asked = jnp.ones_like(answered) if everybody else answered
    return jnp.pad(asked, (0, federation.num_padding))

  def collect(
    self,
    exchange: Exchange,
    state: ServerState,
    server: ServerSet | None,
    clients: Clients,
    asked: jax.Array | None,
  ) -> tuple[Any, Any]:
    """The summed message and the reports [K, ...] of the asked clients."""
    _, num_rows, num_inputs = clients.x.shape
    batch_size = self.placement.batch_size or automatic_batch_size(
      state.params.size, num_rows, num_inputs
    )

    def client(
      broadcast: tuple[ServerState, ServerSet | None], rows: Clients
    ) -> tuple[Any, Any]:
      return exchange.client(*broadcast, rows)

    return map_clients(
      client,
      (state, server),
      clients,
      self.placement._replace(batch_size=batch_size),
      asked,
    )

  def close(
    self,
    before: ServerState,
    after: ServerState,
    server: ServerSet | None,
    reports: list[Any],
    answered: jax.Array,
  ) -> tuple[ServerState, RoundInfo]:
    """The end of a round: where nobody answered, nothing has changed."""
    if not self.participation.is_full:
      anybody = jnp.any(answered)
      after = jax.tree.map(partial(jnp.where, anybody), after, before)
    after = after.replace(num_rounds=before.num_rounds + 1)
    info = self.describe(after, server, reports, answered)
    return self.placement.replicated((after, info))
