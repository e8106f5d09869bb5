"""Every method at a small size, and a federation of five clients to run it on.

Most of a test's time is compilation. Tests that look at a round take it from here, so
that each method is compiled once in a test process, and read from the compilation
cache in the others.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import pandas as pd

from fedbnr_jax import algorithms
from fedbnr_jax.data import Preprocessor
from fedbnr_jax.federated import federation
from fedbnr_jax.federated.federation import Federation, Rows, ServerSet
from fedbnr_jax.gp import urk
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import input_summary, training
from fedbnr_jax.run.program import make_program
from tests.runs import tiny

KEY = jax.random.key(0)
SIZES = (3, 11, 7, 12, 7)  # Rows of each client.
NUM_CLIENTS, NUM_ROWS = len(SIZES), sum(SIZES)


# A training in which at most two of five clients answer, and in one round nobody, whose
# rows alone are in the posterior. Fields of `runs.tiny`.
SOME_ROUNDS = {
  "num_clients": 5,
  "num_samples": 2,
  "kernel": "gaussian",
  "dtype": "float64",
  "num_rounds": 4,
  "patience": 9,
  "participation": 0.4,
  "dropout": 0.6,
  "statistics_from": "answering",
  "seed": 3,
  "mesh": 1,
}


def table() -> tuple[np.ndarray, np.ndarray]:
  """Inputs [40, 2] and targets [40] of a noisy wave."""
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(NUM_ROWS, 2))
  return inputs, np.sin(2 * inputs.sum(1)) + 0.1 * rng.normal(size=NUM_ROWS)


def deal() -> list[np.ndarray]:
  """Row numbers of each client."""
  order = np.random.default_rng(1).permutation(NUM_ROWS)
  return np.split(order, np.cumsum(SIZES)[:-1])


def small(parts=None, dtype: Any = np.float64, num_padded_rows=None) -> Federation:
  """Five clients [5, 12, 2] and a server with six rows, in NumPy arrays."""
  built = federation.build(
    *table(),
    deal() if parts is None else parts,
    dtype=dtype,
    num_padded_rows=num_padded_rows,
    on_host=True,
  )
  rng = np.random.default_rng(2)
  x, y = rng.normal(size=(6, 2)).astype(dtype), rng.normal(size=6).astype(dtype)
  return built.replace(server=ServerSet(x, y), inputs=inputs_summary())


@functools.cache
def inputs_summary() -> urk.InputSummary:
  """What sums say of the inputs of `table`, for kernels that draw inputs."""
  x, y = table()
  frame = pd.DataFrame(x, columns=["a", "b"])
  return input_summary.summarise(x, Preprocessor.fit(frame, y, "y"))


def rows_of(data: Federation, k: int) -> Rows:
  """The rows of one client, with its padding."""
  return jax.tree.map(lambda leaf: leaf[k], data.clients)


def config(method: str, **fields: object) -> ml_collections.ConfigDict:
  """A config of two local steps, with a kernel without a network where there is one."""
  random_features = algorithms.METHODS[method].random_features
  common = {
    "method": method,
    "kernel": "gaussian" if random_features else "deep",
    "dtype": "float64",
    "num_samples": 3,
    "hidden_size": 5,
    "latent_size": 2,
    "length_scale": 1.0,
    "learning_rate": 0.05,
    "kd__num_steps": 2,
    "pfedgp__num_inducing": 3,
    "fedloc__num_inducing": 3,
    "fedloc__num_iterations": 2,
    "fedloc__rho": 50.0,
    "sparse__kernel": "matern32+linear",
    "sparse__start_samples": 2,
    "sparse__start_steps": 2,
    "sparse__num_samples": 3,
    "sparse__posterior_samples": 5,
    "sparse__num_steps": 2,
    "ridge__num_samples": 3,
    "mesh": 1,
  }
  return tiny(**(common | fields))


@functools.cache
def built(method: str, **fields: object) -> algorithms.FederatedAlgorithm:
  return algorithms.method(method).build(config(method, **fields))


class Compiled(NamedTuple):
  """The jitted functions of a method."""

  algorithm: algorithms.FederatedAlgorithm
  init: Callable[..., Any]
  round: Callable[..., Any]
  predict: Callable[..., Any]
  traces: list[str]  # Shapes and types of the arguments in every trace of the round.


def compile_method(algorithm: algorithms.FederatedAlgorithm) -> Compiled:
  traces: list[str] = []

  def round_(*arguments):
    traces.append(
      str([(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments)])
    )
    return algorithm.round(*arguments)

  jitted = map(jax.jit, (algorithm.init, round_, algorithm.predict))
  return Compiled(algorithm, *jitted, traces)


@functools.cache
def compiled(method: str, **fields: object) -> Compiled:
  return compile_method(built(method, **fields))


class Rounds(NamedTuple):
  """What some rounds leave behind, on the host."""

  states: list[Any]  # One more than rounds: the first is the start.
  infos: list[Any]

  @property
  def last(self) -> Any:
    return self.states[-1]


def run(program: Compiled, data: Federation, num_rounds: int = 2, start=None) -> Rounds:
  """Runs rounds with the keys 0, 1, ... from `start`, or from the beginning."""
  state = program.init(KEY, data) if start is None else start
  states, infos = [state], []
  for number in range(num_rounds):
    state, info = program.round(jax.random.key(number), state, data)
    states.append(state)
    infos.append(info)
  return jax.device_get(Rounds(states, infos))


@functools.cache
def two_rounds(method: str, **fields: object) -> Rounds:
  """Two rounds of `small()`."""
  return run(compiled(method, **fields), small())


@functools.cache
def some_rounds() -> tuple[Any, Any, Any]:
  """A training by SOME_ROUNDS: experiment, compiled program and result."""
  experiment = experiment_lib.build(tiny(**SOME_ROUNDS))
  program = make_program(experiment.algorithm, transform=jax.jit)
  return experiment, program, training.train(experiment, program)
