"""Rounds over real sites: the same round function, whose collector asks for sums."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.collectors import Collected
from fedbnr_jax.federated.exchange import Exchange, Message, Own
from fedbnr_jax.federated.state import State
from fedbnr_jax.gp import metrics
from fedbnr_jax.network import vectors
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
  traced: bool = False

  def __call__(
    self, exchange: Exchange, down: Message, own: Own, members: jax.Array | None
  ) -> Collected:
    del members  # Everybody who answers.
    number = self.task.parts.algorithm.exchanges.index(exchange)
    total = ask_exchange(self.task, self.sums, "exchange", number, down)
    return Collected(total, own, {})


def ask_exchange(
  task: NetworkTask, sums: Sums, name: str, number: int, down: Message
) -> Message:
  """Does an exchange with the sites; returns the sum of their messages.

  Args:
    task: Of which training.
    sums: Reaches the sites.
    name: "exchange" over training rows, or "held-out" over validation rows.
    number: Of the exchange.
    down: The message that all sites receive.
  """
  question = Question(name, task.name, number, (), vectors.to_arrays(down))
  return sums.tree(question)


def score_sums(
  task: NetworkTask, sums: Sums, state: State
) -> tuple[metrics.ScoreSums, metrics.ScoreSums]:
  """Asks for the sums by which validation and test rows are scored."""
  found = sums.tree(Question("scores", task.name, 0, (), model_arrays(task, state)))
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
  collector = OverSums(task, sums)

  def init(key: chex.PRNGKey, inputs: Any) -> State:
    return State(parts.init(key, inputs))

  def step(key: chex.PRNGKey, state: State, *placed: Any) -> Stepped:
    del placed
    sums.begin_round(task.name, f"round {int(state.server.num_rounds) + 1}")
    state = jax.tree.map(jnp.asarray, state)
    state, info = algorithm.round_with(collector, key, state, None, task.num_clients)
    for number, exchange in enumerate(algorithm.held_out):
      down = exchange.broadcast(state.server, None)
      total = ask_exchange(task, sums, "held-out", number, down)
      state = state.replace(server=exchange.server(state.server, None, total))
    validation, test = map(_scores, score_sums(task, sums, state))
    answered = np.array([name in sums.present for name in task.client_names])
    return state, info.replace(answered=answered), validation, test

  def predict(state: State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return parts.predict(parts.model(state.server), x)

  return Program(init, step, predict)
