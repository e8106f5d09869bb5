"""The host loop: rounds, of one training or several, until validation says enough."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbnr_jax.federated import placement
from fedbnr_jax.run.journal import Journal, NonFiniteError, best_round
from fedbnr_jax.run.program import Program
from fedbnr_jax.run.records import Record, RunFolder
from fedbnr_jax.run.task import Task


@dataclasses.dataclass(frozen=True)
class Result:
  """What a training leaves behind."""

  state: Any  # State of server and clients at the best validation round.
  history: list[Record]  # One record a round, in the target's unit.
  score: str = "val_rmse"  # The column whose lowest value makes a round the best.
  last: Any = None  # State after the last round.

  @property
  def best_round(self) -> int:
    return best_round(self.history, self.score)

  @property
  def best(self) -> Record:
    return self.history[self.best_round - 1]


def train(
  task: Task,
  program: Program,
  folder: RunFolder | None = None,
  on_round: Callable[[Record], None] | None = None,
  begun: Result | None = None,
) -> Result:
  """Runs rounds until `patience` of them bring no better validation score.

  Args:
    task: An experiment from `experiment.build`, or a task whose rows are elsewhere.
    program: From `make_program(task.algorithm, transform=jax.jit)`, or one that
      reaches the rows.
    folder: Where records and checkpoints go, and where a stopped run is taken up
      again, to the same bits as if it had not stopped; in memory only without it.
    on_round: Called with every new record, for a progress display.
    begun: The first rounds of this very training, if they were done in memory before;
      they are taken over unless the folder holds some already.

  Raises:
    NonFiniteError: If a loss or score is not finite.
  """
  (result,) = _train([task], program, [folder], on_round, _ONE, begun)
  if isinstance(result, NonFiniteError):
    raise result
  return result


def train_batch(
  tasks: Sequence[Task],
  program: Program,
  folders: Sequence[RunFolder | None],
  on_round: Callable[[Record], None] | None = None,
) -> list[Result | NonFiniteError]:
  """Trains several experiments of the same shapes at once, as `build_seeds` makes them.

  Args:
    tasks: They differ in their seeds.
    program: From `make_batched_program(tasks[0].algorithm, transform=jax.jit)`.
    folders: One each.
    on_round: Called with every new record of any of them.

  Returns:
    A result each, or, for one that diverged, the error that says so.
  """
  return _train(tasks, program, folders, on_round, _MANY)


class _Axis(NamedTuple):
  """How the arrays of trainings side by side are put together and taken apart."""

  join: Callable[[Sequence[Any]], Any]
  part: Callable[[Any, int], Any]  # On the host.


_ONE = _Axis(lambda trees: trees[0], lambda tree, index: tree)
_MANY = _Axis(
  lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees),
  lambda tree, index: jax.tree.map(lambda leaf: leaf[index], tree),
)


def _train(
  tasks: Sequence[Task],
  program: Program,
  folders: Sequence[RunFolder | None],
  on_round: Callable[[Record], None] | None,
  axis: _Axis,
  begun: Result | None = None,
) -> list[Result | NonFiniteError]:
  on_round = on_round or (lambda _: None)
  journals = [
    Journal(task, folder) for task, folder in zip(tasks, folders, strict=True)
  ]
  _loop(journals, program, on_round, axis, begun)
  return [
    journal.failure
    or Result(journal.best, journal.history, journal.score, journal.last)
    for journal in journals
  ]


def _loop(
  journals: Sequence[Journal],
  program: Program,
  on_round: Callable[[Record], None],
  axis: _Axis,
  begun: Result | None,
) -> None:
  """Runs rounds, for all trainings side by side, until the last is finished."""
  mesh = journals[0].task.algorithm.placement.mesh
  placed = [journal.task.placed() for journal in journals]
  federation, *evaluation = axis.join(placed)
  keys = axis.join([journal.task.key_init for journal in journals])
  state = program.init(placement.replicate_key(keys, mesh), federation)
  states = [
    journal.resume(axis.part(jax.tree.map(np.array, state), index))
    for index, journal in enumerate(journals)
  ]
  if begun is not None and not journals[0].history:
    journals[0].keep(begun.history, begun.last, begun.state, on_round)
    states = [begun.last]
  if any(journal.history for journal in journals):
    state = placement.replicate(axis.join(states), mesh)
  while not all(journal.finished for journal in journals):
    active = [not journal.finished for journal in journals]
    start = time.perf_counter()
    keys = axis.join([journal.key for journal in journals])
    extra = () if axis is _ONE else (jnp.asarray(active),)
    state, *scores = program.step(
      placement.replicate_key(keys, mesh), state, federation, *evaluation, *extra
    )
    scores = jax.device_get(scores)
    seconds = (time.perf_counter() - start) / sum(active)
    # A copy: the step donates, and so overwrites, the state.
    host = jax.tree.map(np.array, state)
    for index, journal in enumerate(journals):
      if active[index]:
        info, validation, test = axis.part(scores, index)
        now = axis.part(host, index)
        journal.note(now, info, validation, test, seconds, on_round)
