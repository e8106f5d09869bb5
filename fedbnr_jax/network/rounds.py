"""Rounds over real sites: the same round function, whose collector asks for sums."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.collectors import Collected
from fedbnr_jax.federated.exchange import Exchange, Message, Own
from fedbnr_jax.federated.state import State
from fedbnr_jax.gp import metrics
from fedbnr_jax.network import vectors
from fedbnr_jax.network.own_states import Place
from fedbnr_jax.network.preparation import NetworkTask
from fedbnr_jax.network.question import Question
from fedbnr_jax.network.sums import Sums
from fedbnr_jax.run.program import Program, Stepped

_scores = jax.jit(metrics.scores)


@dataclasses.dataclass(frozen=True)
class OverSums:
  """Collects sums of real sites; their reports, and what they keep, stay with them."""

  task: NetworkTask
  sums: Sums
  number: int  # Of the round, from 1 on.
  steps: Iterator[int] = dataclasses.field(default_factory=itertools.count)
  traced: bool = False

  def __call__(
    self, exchange: Exchange, down: Message, own: Own, members: jax.Array | None
  ) -> Collected:
    del members  # Everybody who answers.
    number = self.task.parts.algorithm.exchanges.index(exchange)
    place = place_of(self.task, self.number, next(self.steps))
    total = ask_exchange(self.task, self.sums, "exchange", number, down, place)
    return Collected(total, own, {})


def ask_exchange(
  task: NetworkTask,
  sums: Sums,
  name: str,
  number: int,
  down: Message,
  place: Place = Place(),  # noqa: B008  Immutable.
) -> Message:
  """Does an exchange with the sites; returns the sum of their messages.

  Args:
    task: Of which training.
    sums: Reaches the sites.
    name: "exchange" over training rows, or "held-out" over validation rows.
    number: Of the exchange.
    down: The message that all sites receive.
    place: Where in the training.
  """
  question = Question(name, task.name, number, (), vectors.to_arrays(down), place)
  return sums.tree(question)


def place_of(task: NetworkTask, number: int, step: int = 0) -> Place:
  """Says where in a training something is asked, if sites need to know it."""
  return Place(number, step) if task.parts.keeps else Place()


def score_sums(
  task: NetworkTask, sums: Sums, state: State, number: int
) -> tuple[metrics.ScoreSums, metrics.ScoreSums]:
  """Asks for the sums by which validation and test rows are scored after a round."""
  model, place = model_arrays(task, state), place_of(task, number)
  found = sums.tree(Question("scores", task.name, 0, (), model, place))
  return found["validation"], found["test"]


def model_arrays(task: NetworkTask, state: State) -> tuple[np.ndarray, ...]:
  """Lists what of a state sites need to predict with it."""
  return vectors.to_arrays(task.parts.model(jax.tree.map(jnp.asarray, state.server)))


def program_of(task: NetworkTask, sums: Sums) -> Program:
  """Makes the program of a training whose rows are at sites.

  Its step asks for sums, and so is no function of its arguments alone.
  """
  parts = task.parts
  algorithm: FederatedAlgorithm = parts.algorithm

  def init(key: chex.PRNGKey, inputs: Any) -> State:
    return State(parts.init(key, inputs))

  def step(key: chex.PRNGKey, state: State, *placed: Any) -> Stepped:
    del placed
    number = int(state.server.num_rounds) + 1
    of = f"without {task.without}, " if task.without else ""
    sums.begin_round(task.name, f"{of}round {number}")
    state = jax.tree.map(jnp.asarray, state)
    collector = OverSums(task, sums, number)
    state, info = algorithm.round_with(collector, key, state, None, task.num_clients)
    for which, exchange in enumerate(algorithm.held_out):
      down = exchange.broadcast(state.server, None)
      total = ask_exchange(task, sums, "held-out", which, down)
      state = state.replace(server=exchange.server(state.server, None, total))
    validation, test = map(_scores, score_sums(task, sums, state, number))
    answered = np.array([name in sums.present for name in task.client_names])
    return state, info.replace(answered=answered), validation, test

  def predict(state: State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    if parts.keeps:
      raise InputError("each site has a model of its own, and predicts with it there.")
    return parts.predict(parts.model(state.server), (), x)

  return Program(init, step, predict)
