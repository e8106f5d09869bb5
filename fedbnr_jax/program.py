"""What of a training runs on the device: init, a round with its scores, predict."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from fedbnr_jax import metrics
from fedbnr_jax.algorithms import RoundInfo, ServerState
from fedbnr_jax.experiment import EvaluationSet, Experiment
from fedbnr_jax.federation import Federation
from fedbnr_jax.streaming import StreamedRound, streamed

Scores = dict[str, jax.Array]
# A round and the scores after it, on validation and test rows.
Step = Callable[
  [chex.PRNGKey, ServerState, Federation, EvaluationSet, EvaluationSet],
  tuple[ServerState, RoundInfo, Scores, Scores],
]


class Program(NamedTuple):
  """What runs on the device: pure functions, for the caller to jit."""

  init: Callable[[chex.PRNGKey, Federation], ServerState]
  step: Callable[..., Any]  # A `Step`; of `batched` trainings, with who is active.
  predict: Callable[[ServerState, jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class _StreamedStep:
  """A `Step` over clients in host memory: not one program, but a few."""

  round: StreamedRound
  calibrate: Callable[[ServerState, jax.Array, jax.Array], ServerState]
  score: Callable[[ServerState, EvaluationSet], Scores]

  def jit(self) -> "_StreamedStep":
    return _StreamedStep(self.round.jit(), jax.jit(self.calibrate), jax.jit(self.score))

  def __call__(
    self,
    key: chex.PRNGKey,
    state: ServerState,
    federation: Federation,
    validation: EvaluationSet,
    test: EvaluationSet,
  ) -> tuple[ServerState, RoundInfo, Scores, Scores]:
    state, info = self.round(key, state, federation)
    state = self.calibrate(state, validation.x, validation.y)
    return state, info, self.score(state, validation), self.score(state, test)


def make_program(experiment: Experiment) -> Program:
  """The device side of an experiment, not jitted."""
  algorithm = experiment.algorithm

  def score(state: ServerState, rows: EvaluationSet) -> Scores:
    mean, variance = algorithm.predict(state, rows.x)
    if mean.ndim == 1:
      return metrics.evaluate(mean, variance, rows.y)
    # A model for each client: all are asked about the same rows, and scores averaged.
    scores = jax.lax.map(
      lambda one: metrics.evaluate(one[0], one[1], rows.y),
      (mean, variance),
      batch_size=10,
    )
    return jax.tree.map(lambda score: jnp.mean(score, axis=0), scores)

  def step(
    key: chex.PRNGKey,
    state: ServerState,
    federation: Federation,
    validation: EvaluationSet,
    test: EvaluationSet,
  ) -> tuple[ServerState, RoundInfo, Scores, Scores]:
    state, info = algorithm.round(key, state, federation)
    state = algorithm.calibrate(state, validation.x, validation.y)
    return state, info, score(state, validation), score(state, test)

  chunk_size = experiment.config.stream_clients
  if chunk_size:
    streamed_step = _StreamedStep(
      streamed(algorithm, chunk_size), algorithm.calibrate, score
    )
    return Program(algorithm.init, streamed_step, algorithm.predict)
  return Program(algorithm.init, step, algorithm.predict)


def jit(program: Program) -> Program:
  """The same program compiled; the step takes over the memory of the old state."""
  if isinstance(program.step, _StreamedStep):
    step: Any = program.step.jit()
  else:
    step = jax.jit(program.step, donate_argnums=1)
  return Program(jax.jit(program.init), step, jax.jit(program.predict))


def batched(program: Program) -> Program:
  """The same for several trainings at once, stacked on a leading axis [R, ...].

  The step takes one argument more, [R] bool: trainings that are not active, because
  they are finished, keep their state.
  """

  def step(
    keys: chex.PRNGKey, states: ServerState, *rows: Any
  ) -> tuple[ServerState, RoundInfo, Scores, Scores]:
    *data, active = rows
    new, *rest = jax.vmap(program.step)(keys, states, *data)

    def keep(active: jax.Array, new: Any, old: Any) -> Any:
      return jax.tree.map(lambda a, b: jnp.where(active, a, b), new, old)

    return (jax.vmap(keep)(active, new, states), *rest)

  predict = jax.vmap(program.predict, in_axes=(0, None))
  return Program(jax.vmap(program.init), step, predict)
