"""The interface that every method implements: init, stages of a round, predict."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct

from fedbnr_jax.clients import num_floats
from fedbnr_jax.federation import Clients, Federation, ServerSet
from fedbnr_jax.mapping import Placement, automatic_batch_size, map_clients
from fedbnr_jax.participation import Participation


class ServerState(struct.PyTreeNode):
  """What the server carries from round to round."""

  omega: Any  # [S, ...] random draws of the kernel; constants.
  params: Any  # What is trained; of kernel methods ModelParams: θ, σ and λ.
  # Methods without a global last layer have () for the next two.
  stats: Any  # SufficientStats, summed over clients, under `params`.
  posterior: Any  # Posterior of the last layer; before the first round, the prior.
  num_clients: jax.Array  # [] int32, whose rows are in the prediction.
  num_rounds: jax.Array  # [] int32
  memory: Any = ()  # Of methods whose server optimises: its optimiser's.
  # [K, ...] of methods with a model for each client: what each keeps. In a real
  # federation it stays there; here it is with the rest, for the checkpoint.
  personal: Any = ()


class RoundInfo(struct.PyTreeNode):
  """Diagnostics of a round; not carried."""

  answered: jax.Array  # [K] bool, the clients that trained in this round.
  client_loss: jax.Array  # [K] theirs before the last step, nats per row.
  # [] negative log evidence per row: of all rows; of methods with a model for each
  # client, or experts, the mean over clients.
  train_nll: jax.Array
  floats_up: jax.Array  # [] floats that a client which answers sends in the round.
  floats_down: jax.Array  # [] floats it receives.


class Floats(NamedTuple):
  """Length of a client's messages."""

  up: int
  down: int


class Exchange(NamedTuple):
  """One trip: the state goes out to the clients, the sum of their messages comes back.

  That the server reads nothing but the sum is what lets clients stream by in chunks,
  spread over devices, and be added up under encryption.
  """

  # (state, server's set, rows of one client) -> (message, report). The report is None,
  # or the client's loss []; where it keeps something, (either of them, what it keeps).
  client: Callable[[ServerState, ServerSet | None, Clients], tuple[Any, Any]]
  # (state, server's set, summed message) -> state.
  server: Callable[[ServerState, ServerSet | None, Any], ServerState]
  # (state, server's set) -> what goes over the wire.
  floats: Callable[[ServerState, ServerSet | None], Floats]
  # Whether clients that are not in this round are asked too.
  asks_all: bool = False
  # Whether a client is given what it keeps, as `memory` of its rows, and renews it.
  keeps: bool = False


class Stage(NamedTuple):
  """Exchanges in order, so many times over."""

  exchanges: tuple[Exchange, ...]
  times: int = 1
  # What the server does before the first of them.
  begin: Callable[[ServerState], ServerState] = lambda state: state


def as_it_is(state: ServerState, x: jax.Array, y: jax.Array) -> ServerState:
  """Of methods that learn nothing from rows that nobody trains on."""
  del x, y
  return state


@dataclasses.dataclass(frozen=True)
class FederatedAlgorithm:
  """A method: pure functions, which the caller jits."""

  init: Callable[[chex.PRNGKey, Federation], ServerState]
  stages: tuple[Stage, ...]  # Of one round, in order.
  train_nll: Callable[[ServerState], jax.Array]  # [] per row.
  # x [N, D] -> mean [N], variance [N] of the standardised target; of methods with a
  # model for each client, [K, N].
  predict: Callable[[ServerState, jax.Array], tuple[jax.Array, jax.Array]]
  participation: Participation
  placement: Placement
  # (state, x [N, D], y [N] of rows that nobody trains on) -> state: after each round,
  # what only such rows can tell.
  calibrate: Callable[[ServerState, jax.Array, jax.Array], ServerState] = as_it_is
  # What of the federation the method sees.
  view: Callable[[Federation], Federation] = lambda federation: federation
  # Raises InputError where the method cannot work with what there are of rows.
  check: Callable[[Federation], None] = lambda federation: None
  sends: bool = True  # Whether messages are sent at all, and so counted.
  # Whether there is a model for each client, and `predict` gives [K, N].
  one_model_each: bool = False
  # σ and λ of predictions, for the records.
  scales: Callable[[ServerState], tuple[Any, Any]] = lambda state: (
    state.posterior.noise_std,
    state.posterior.prior_std,
  )
  # What to try where a loss is not finite.
  remedy: str = "a smaller learning_rate or a larger min_noise_std"
  # The first rounds may be of other stages.
  warm_up: tuple[Stage, ...] = ()
  num_warm_up: int = 0

  @property
  def exchanges(self) -> tuple[Exchange, ...]:
    """All there are, each once."""
    stages = (*self.warm_up, *self.stages)
    return tuple(dict.fromkeys(e for stage in stages for e in stage.exchanges))

  def round(
    self, key: chex.PRNGKey, state: ServerState, federation: Federation
  ) -> tuple[ServerState, RoundInfo]:
    """All stages, with the clients that the key draws."""
    federation = self.view(federation)
    answered = self.draw(key, federation.num_clients)

    def run(stages: tuple[Stage, ...], state: ServerState) -> tuple[Any, ...]:
      floats = self.floats(stages, state, federation.server)
      loss: Any = None
      for stage in stages:
        state, told = self._run_stage(stage, state, federation, answered)
        loss = loss if told is None else told
      return state, loss, jnp.asarray(floats)

    if self.num_warm_up:
      warm = state.num_rounds < self.num_warm_up
      result = jax.lax.cond(
        warm, partial(run, self.warm_up), partial(run, self.stages), state
      )
    else:
      result = run(self.stages, state)
    after, loss, floats = result
    return self.close(state, after, loss, floats, answered)

  def _run_stage(
    self, stage: Stage, state: ServerState, federation: Federation, answered: jax.Array
  ) -> tuple[ServerState, jax.Array | None]:
    """The state after a stage, and the clients' last losses [K]."""

    def once(state: ServerState, _: None) -> tuple[ServerState, jax.Array | None]:
      loss = None
      for exchange in stage.exchanges:
        asked = self.asked(exchange, answered, federation)
        clients = federation.clients
        if exchange.keeps:
          kept = _with_padding(state.personal, federation.num_padding)
          clients = clients.replace(memory=kept)
        total, told = self.collect(exchange, state, federation.server, clients, asked)
        told = jax.tree.map(lambda leaf: leaf[: federation.num_clients], told)
        if exchange.keeps:
          told, renewed = told
          state = state.replace(personal=_renewed(state.personal, renewed, asked))
        state = exchange.server(state, federation.server, total)
        loss = loss if told is None else told
      return state, loss

    state = stage.begin(state)
    if stage.times == 1:
      return once(state, None)
    state, losses = jax.lax.scan(once, state, length=stage.times)
    return state, None if losses is None else losses[-1]

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
      num_floats(state.params), num_rows, num_inputs
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

  def floats(
    self, stages: tuple[Stage, ...], state: ServerState, server: ServerSet | None
  ) -> tuple[int, int]:
    """Floats up and down of a client that answers in every exchange of a round."""
    if not self.sends:
      return 0, 0
    lengths = [
      (stage.times, exchange.floats(state, server))
      for stage in stages
      for exchange in stage.exchanges
    ]
    return (
      sum(times * floats.up for times, floats in lengths),
      sum(times * floats.down for times, floats in lengths),
    )

  def close(
    self,
    before: ServerState,
    after: ServerState,
    loss: jax.Array,
    floats: jax.Array,
    answered: jax.Array,
  ) -> tuple[ServerState, RoundInfo]:
    """The end of a round: where nobody answered, nothing has changed."""
    if not self.participation.is_full:
      anybody = jnp.any(answered)
      after = jax.tree.map(partial(jnp.where, anybody), after, before)
    after = after.replace(num_rounds=before.num_rounds + 1)
    info = RoundInfo(answered, loss, self.train_nll(after), floats[0], floats[1])
    return self.placement.replicated((after, info))


def _with_padding(kept: Any, num_padding: int) -> Any:
  """What clients keep [K, ...], with zeros for those that only make shares equal."""
  if not num_padding:
    return kept
  return jax.tree.map(
    lambda leaf: jnp.pad(leaf, [(0, num_padding)] + [(0, 0)] * (leaf.ndim - 1)), kept
  )


def _renewed(kept: Any, renewed: Any, asked: jax.Array | None) -> Any:
  """What clients keep [K, ...] after an exchange; those not asked, what they had."""
  if asked is None:
    return renewed

  def choose(old: jax.Array, new: jax.Array) -> jax.Array:
    mask = asked[: old.shape[0]].reshape(-1, *[1] * (old.ndim - 1))
    return jnp.where(mask, new, old)

  return jax.tree.map(choose, kept, renewed)
