"""One round: every stage's exchanges in order, over whichever collector it is given."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbnr_jax.federated.collectors import Collector
from fedbnr_jax.federated.exchange import Exchange, Stage, num_floats
from fedbnr_jax.federated.federation import ServerSet
from fedbnr_jax.federated.state import State

# (exchange) -> [K] bool, who takes part in it; None for all.
Members = Callable[[Exchange], jax.Array | None]


class Outcome(NamedTuple):
  """What some stages leave behind."""

  state: State
  reports: dict[str, jax.Array]  # [K, ...] the last report of each name.
  floats: jax.Array  # [2] int32, numbers that one client sends, and receives.


def run_stages(
  stages: Sequence[Stage],
  state: State,
  server_set: ServerSet | None,
  collector: Collector,
  members: Members,
) -> Outcome:
  """Runs stages one after another."""
  outcome = Outcome(state, {}, jnp.zeros(2, jnp.int32))
  for stage in stages:
    begun = outcome.state.replace(server=stage.begin(outcome.state.server))
    run = partial(_run_exchanges, stage, server_set, collector, members)
    after = _repeat(run, begun, stage.times, traced=collector.traced)
    outcome = Outcome(
      after.state, outcome.reports | after.reports, outcome.floats + after.floats
    )
  return outcome


def _run_exchanges(
  stage: Stage,
  server_set: ServerSet | None,
  collector: Collector,
  members: Members,
  state: State,
) -> Outcome:
  """Runs the exchanges of a stage once."""
  reports: dict[str, jax.Array] = {}
  up = down = 0
  for exchange in stage.exchanges:
    message = exchange.broadcast(state.server, server_set)
    total, own, report = collector(exchange, message, state.own, members(exchange))
    state = State(exchange.server(state.server, server_set, total), own)
    reports |= report
    # The sum has the shapes of one client's message.
    up, down = up + num_floats(total), down + num_floats(message)
  return Outcome(state, reports, jnp.asarray([up, down], jnp.int32))


def _repeat(
  run: Callable[[State], Outcome], state: State, times: int, *, traced: bool
) -> Outcome:
  """Runs something again and again from the state that it left."""
  if times == 1:
    return run(state)
  if traced:

    def step(state: State, _: None) -> tuple[State, Any]:
      outcome = run(state)
      return outcome.state, outcome[1:]

    state, (reports, floats) = jax.lax.scan(step, state, length=times)
    last = jax.tree.map(lambda leaf: leaf[-1], reports)
    return Outcome(state, last, times * floats[0])
  for _ in range(times):
    outcome = run(state)
    state = outcome.state
  return outcome._replace(floats=times * outcome.floats)


def choose_stages(
  first: jax.Array,
  run: Callable[[tuple[Stage, ...], State], Outcome],
  stages: tuple[tuple[Stage, ...], tuple[Stage, ...]],
  state: State,
  *,
  traced: bool,
) -> Outcome:
  """Runs the first of two lists of stages if `first` [] holds, else the second."""
  if traced:
    branches = [partial(run, some) for some in stages]
    return jax.lax.cond(first, *branches, state)
  return run(stages[0] if bool(first) else stages[1], state)
