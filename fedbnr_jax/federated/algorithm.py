"""A federated method: how server and clients start, the stages of a round, predict."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp

from fedbnr_jax.federated.collectors import Collector, OnDevice
from fedbnr_jax.federated.exchange import Exchange, Own, Stage, num_floats
from fedbnr_jax.federated.federation import Federation, Rows, ServerSet
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.federated.round import Outcome, choose_stages, run_stages
from fedbnr_jax.federated.state import RoundInfo, ServerState, State

# Such as jax.jit: (function, **options) -> function.
Transform = Callable[..., Callable[..., Any]]


class InitServer(Protocol):
  """A function that makes the server's state before the first round.

  It may look at the shape and type of one client's rows, at what is publicly known of
  the inputs (`Federation.inputs`), and at nothing else, so that one seed starts one
  kernel, whoever holds which rows.
  """

  def __call__(
    self, key: chex.PRNGKey, num_clients: int, rows: Rows, inputs: Any = ()
  ) -> ServerState: ...


class InitClient(Protocol):
  """A function that makes what a client keeps, from the common key and its own rows.

  `number` [] is the client's place among the `num_clients` of the federation.
  """

  def __call__(
    self,
    key: chex.PRNGKey,
    number: jax.Array,
    num_clients: int,
    rows: Rows,
    inputs: Any = (),
  ) -> Own: ...


class Predict(Protocol):
  """A function from x [N, D] to mean [N] and variance [N] of the standardised target.

  For methods with a model for each client the results are [K, N].
  """

  def __call__(self, state: State, x: jax.Array) -> tuple[jax.Array, jax.Array]: ...


def own_of_client(state: State, index: int) -> State:
  """Keeps one client's own state, so that `predict` gives [1, N]."""
  own = jax.tree.map(lambda leaf: leaf[index : index + 1], state.own)
  return state.replace(own=own)


def keep_nothing(
  key: chex.PRNGKey,
  number: jax.Array,
  num_clients: int,
  rows: Rows,
  inputs: Any = (),
) -> Own:
  """Starts a client of a method in which clients keep nothing."""
  del key, number, num_clients, rows, inputs
  return ()


@dataclasses.dataclass(frozen=True)
class FederatedAlgorithm:
  """A method, as pure functions that the caller jits."""

  init_server: InitServer
  stages: tuple[Stage, ...]  # The stages of one round, in order.
  # [] negative log evidence per row of all training rows; for methods with a model for
  # each client, or experts, the mean over clients.
  train_nll: Callable[[ServerState], jax.Array]
  predict: Predict
  # Who takes part, and on which devices: everyone, on the default one.
  participation: Participation = Participation()  # noqa: RUF009  Immutable.
  placement: Placement = Placement()  # noqa: RUF009
  init_client: InitClient = keep_nothing
  # After each round, over rows that nobody trains on: what only these can show.
  held_out: tuple[Exchange, ...] = ()
  # Selects what of the federation the method sees.
  view: Callable[[Federation], Federation] = lambda federation: federation
  # Raises InputError if the method cannot work with the rows of this federation.
  check: Callable[[Federation], None] = lambda federation: None
  sends: bool = True  # Whether messages leave the machine, and so are counted.
  # Whether there is a model for each client, and `predict` gives [K, N].
  one_model_each: bool = False
  # Keeps the model of one client, given by its number, where there is one for each.
  of_client: Callable[[State, int], State] = own_of_client
  # Gives σ and λ of predictions, for the records.
  scales: Callable[[State], tuple[Any, Any]] = lambda state: (
    state.server.posterior.noise_std,
    state.server.posterior.prior_std,
  )
  # Counts the parameters that one client trains, from which its memory is estimated.
  num_params: Callable[[State], int] = lambda state: num_floats(state.server.params)
  # What an error message advises where a loss is not finite.
  remedy: str = "a smaller learning_rate or a larger min_noise_std"
  # The first `num_warm_up` rounds run these stages instead.
  warm_up: tuple[Stage, ...] = ()
  num_warm_up: int = 0
  # Every round, also of the first ones, ends with these.
  closing: tuple[Stage, ...] = ()

  @property
  def exchanges(self) -> tuple[Exchange, ...]:
    """All exchanges of the method, each once."""
    stages = (*self.warm_up, *self.stages, *self.closing)
    return tuple(dict.fromkeys(e for stage in stages for e in stage.exchanges))

  def init(self, key: chex.PRNGKey, federation: Federation) -> State:
    """Starts the server and every client from one key."""
    federation = self.view(federation)
    num_clients = federation.num_clients
    rows = jax.tree.map(lambda leaf: leaf[:num_clients], federation.clients)
    one = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), rows)
    server = self.init_server(key, num_clients, one, federation.inputs)
    numbers = jnp.arange(num_clients)
    own = jax.vmap(
      lambda number, rows: self.init_client(
        key, number, num_clients, rows, federation.inputs
      )
    )(numbers, rows)
    return self.placement.replicated(State(server, own))

  def round(
    self, key: chex.PRNGKey, state: State, federation: Federation
  ) -> tuple[State, RoundInfo]:
    """Runs a round on a device or a mesh, with the clients that the key draws."""
    federation = self.view(federation)
    placement = self.sized_placement(state, federation)
    collector = OnDevice(federation, placement)
    return self.round_with(
      collector, key, state, federation.server, federation.num_clients
    )

  def sized_placement(self, state: State, federation: Federation) -> Placement:
    """Chooses how many clients of a federation are batched, if that is open."""
    return self.placement.sized(
      self.num_params(state), federation.clients, num_floats(state.server.stats)
    )

  def round_with(
    self,
    collector: Collector,
    key: chex.PRNGKey,
    state: State,
    server_set: ServerSet | None,
    num_clients: int,
  ) -> tuple[State, RoundInfo]:
    """Runs a round over any collector.

    Args:
      collector: How the clients are reached.
      key: Draws the clients that answer.
      state: The state after the round before.
      server_set: The rows of the server, if it has any.
      num_clients: K.
    """
    answered = self.draw(key, num_clients)

    def members(exchange: Exchange) -> jax.Array | None:
      full = exchange.everybody or self.participation.is_full
      return None if full else answered

    def run(stages: tuple[Stage, ...], state: State) -> Any:
      return run_stages(stages, state, server_set, collector, members)

    if self.num_warm_up:
      first = state.server.num_rounds < self.num_warm_up
      both = (self.warm_up, self.stages)
      outcome = choose_stages(first, run, both, state, traced=collector.traced)
    else:
      outcome = run(self.stages, state)
    if self.closing:
      last = run(self.closing, outcome.state)
      reports, floats = outcome.reports | last.reports, outcome.floats + last.floats
      outcome = Outcome(last.state, reports, floats)
    after = outcome.state
    if not self.participation.is_full:
      # Where nobody answered, nothing has changed.
      anybody = jnp.any(answered)
      if collector.traced:
        after = jax.tree.map(partial(jnp.where, anybody), after, state)
      elif not anybody:
        after = state
    server = after.server.replace(num_rounds=state.server.num_rounds + 1)
    floats = outcome.floats if self.sends else jnp.zeros_like(outcome.floats)
    info = RoundInfo(
      answered=answered,
      client_loss=outcome.reports.get("loss", ()),
      train_nll=self.train_nll(server),
      floats_up=floats[0],
      floats_down=floats[1],
    )
    result = State(server, after.own), info
    return self.placement.replicated(result) if collector.traced else result

  def with_server_parts(self, transform: Transform) -> "FederatedAlgorithm":
    """Transforms what the server computes, for collectors that cannot be traced."""

    made: dict[Exchange, Exchange] = {}  # One exchange may be in several stages.

    def transformed(exchange: Exchange) -> Exchange:
      if exchange not in made:
        made[exchange] = exchange._replace(
          broadcast=transform(exchange.broadcast), server=transform(exchange.server)
        )
      return made[exchange]

    def stage_of(stage: Stage) -> Stage:
      exchanges = tuple(map(transformed, stage.exchanges))
      return stage._replace(exchanges=exchanges, begin=transform(stage.begin))

    return dataclasses.replace(
      self,
      stages=tuple(map(stage_of, self.stages)),
      warm_up=tuple(map(stage_of, self.warm_up)),
      closing=tuple(map(stage_of, self.closing)),
      held_out=tuple(map(transformed, self.held_out)),
      train_nll=transform(self.train_nll),
    )

  def calibrate(self, state: ServerState, x: jax.Array, y: jax.Array) -> ServerState:
    """Runs the exchanges over held-out rows, x [N, D] and y [N], as of one client."""
    rows = Rows(x, y, jnp.ones(y.shape, bool))
    for exchange in self.held_out:
      answer, _, _ = exchange.answer(exchange.broadcast(state, None), (), rows)
      state = exchange.server(state, None, answer)
    return state

  def draw(self, key: chex.PRNGKey, num_clients: int) -> jax.Array:
    """Draws the clients [K] bool that answer in the round of this key."""
    if self.participation.is_full:
      return jnp.ones(num_clients, bool)
    return self.participation.draw(key, num_clients)
