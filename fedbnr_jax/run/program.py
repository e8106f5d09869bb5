"""What of a training runs on the device: init, a round with its scores, predict."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.federation import Federation
from fedbnr_jax.federated.host_chunks import Transform, streamed
from fedbnr_jax.federated.state import RoundInfo, State
from fedbnr_jax.gp import metrics
from fedbnr_jax.run.experiment import EvaluationSet

Scores = dict[str, jax.Array]
# What a step gives: the state after a round, and scores on validation and test rows.
Stepped = tuple[State, RoundInfo, Scores, Scores]


class Program(NamedTuple):
  """The functions of a training."""

  init: Callable[[chex.PRNGKey, Federation], State]
  # (key, state, federation, validation rows, test rows) -> Stepped; the step of a
  # batched program also takes [R] bool, which trainings go on.
  step: Callable[..., Stepped]
  predict: Callable[[State, jax.Array], tuple[jax.Array, jax.Array]]


def make_program(
  algorithm: FederatedAlgorithm,
  *,
  stream_clients: int = 0,
  transform: Transform | None = None,
) -> Program:
  """Makes the program of a training.

  Args:
    algorithm: The method.
    stream_clients: Clients on the devices at a time, the others in host memory; 0 for
      all of them.
    transform: Applied to what runs on the device: `jax.jit` compiles, and lets the step
      take over the memory of the old state. Without it nothing is compiled.
  """
  apply = transform or _unchanged

  def calibrate(state: State, rows: EvaluationSet) -> State:
    return state.replace(server=algorithm.calibrate(state.server, rows.x, rows.y))

  def score(state: State, rows: EvaluationSet) -> Scores:
    mean, variance = algorithm.predict(state, rows.x)
    if mean.ndim == 1:
      return metrics.evaluate(mean, variance, rows.y)
    # There is a model for each client: all predict the same rows, and their scores are
    # averaged.
    scores = jax.lax.map(
      lambda one: metrics.evaluate(one[0], one[1], rows.y),
      (mean, variance),
      batch_size=10,
    )
    return jax.tree.map(lambda score: jnp.mean(score, axis=0), scores)

  init, predict = apply(algorithm.init), apply(algorithm.predict)
  if stream_clients:
    # Not one program, but a few that the host calls in turn.
    one_round: Any = streamed(algorithm, stream_clients, transform)
    step = _step(one_round, apply(calibrate), apply(score))
    return Program(init, step, predict)
  step = _step(algorithm.round, calibrate, score)
  return Program(init, apply(step, donate_argnums=1), predict)


def make_batched_program(
  algorithm: FederatedAlgorithm, *, transform: Transform | None = None
) -> Program:
  """Makes the program of several trainings at once, stacked on an axis [R, ...].

  Trainings that do not go on, because they are finished, keep their state.
  """
  one, apply = make_program(algorithm), transform or _unchanged

  def step(keys: chex.PRNGKey, states: State, *rows: Any) -> Stepped:
    *data, goes_on = rows
    new, *rest = jax.vmap(one.step)(keys, states, *data)

    def keep(goes_on: jax.Array, new: Any, old: Any) -> Any:
      return jax.tree.map(lambda a, b: jnp.where(goes_on, a, b), new, old)

    return (jax.vmap(keep)(goes_on, new, states), *rest)

  predict = jax.vmap(one.predict, in_axes=(0, None))
  return Program(
    apply(jax.vmap(one.init)), apply(step, donate_argnums=1), apply(predict)
  )


def _step(
  one_round: Callable[..., tuple[State, RoundInfo]],
  calibrate: Callable[[State, EvaluationSet], State],
  score: Callable[[State, EvaluationSet], Scores],
) -> Callable[..., Stepped]:
  """Makes a step: a round, what held-out rows show, and the scores."""

  def step(
    key: chex.PRNGKey,
    state: State,
    federation: Federation,
    validation: EvaluationSet,
    test: EvaluationSet,
  ) -> Stepped:
    state, info = one_round(key, state, federation)
    state = calibrate(state, validation)
    return state, info, score(state, validation), score(state, test)

  return step


def _unchanged(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
  del options
  return function
