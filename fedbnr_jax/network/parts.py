"""A method taken apart into what sites and coordinator compute, compiled once for all.

Both sides make it from the same config, so they agree on the exchanges, their numbers,
and the shapes of every message.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections

from fedbnr_jax import algorithms, prediction
from fedbnr_jax.federated import wire
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.exchange import Exchange
from fedbnr_jax.federated.federation import Rows
from fedbnr_jax.federated.state import ServerState, State
from fedbnr_jax.gp import blr, metrics, urk
from fedbnr_jax.run import input_summary


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
  """One exchange: its messages' shapes, and a client's side of it."""

  exchange: Exchange
  down_like: Any  # Shapes and types of the down message.
  own_like: Any  # Those of what one client keeps.
  rows_like: Any  # Those of one row of padding.

  @property
  def name(self) -> str:
    return self.exchange.name

  @functools.cached_property
  def up_like(self) -> Any:
    """Shapes and types of the up message, and of the sum of all sites'."""
    up, _, _ = jax.eval_shape(
      self.exchange.answer, self.down_like, self.own_like, self.rows_like
    )
    return up

  @functools.cached_property
  def answer(self) -> Callable[..., Any]:
    """Does all that a client does when a message has arrived."""
    return jax.jit(self.exchange.answer)


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
  """All that is computed in a training.

  Attributes:
    exchanges: Of the rounds, each once.
    held_out: Of the validation rows, after each round.
    model_like: Shapes and types of what `model_of` leaves of a server's state.
    algorithm: The method; what the server computes is compiled.
    init: Makes the server's state, from the key and what is known of the inputs.
    start: Makes what one client keeps, from the key, its number and its rows.
    keeps: Whether clients keep anything, and so have models of their own.
    model: `model_of`.
    predict: Mean and variance [N] of x [N, D] under a message that holds a model, and
      what the client keeps.
    draw: The last layer's ω, from the seed and what is known of the inputs; None for a
      method without.
    score: Sums by which mean, variance and targets [N] are scored.
  """

  exchanges: tuple[Part, ...]
  held_out: tuple[Part, ...]
  model_like: ServerState
  algorithm: FederatedAlgorithm
  init: Callable[[chex.PRNGKey, Any], ServerState]
  start: Callable[[chex.PRNGKey, jax.Array, Rows], Any]
  keeps: bool
  model: Callable[[ServerState], ServerState]
  predict: Callable[..., Any]
  draw: Callable[[urk.Source], Any] | None
  score: Callable[..., metrics.ScoreSums]


def of_config(
  config: ml_collections.ConfigDict, num_clients: int, num_inputs: int
) -> Parts:
  """Takes the method of a config apart; configs of one `method_key` share the parts.

  Args:
    config: Of a training.
    num_clients: K, the members of the federation.
    num_inputs: D.
  """
  return _of_key(key_of(config), num_clients, num_inputs)


def key_of(config: ml_collections.ConfigDict) -> str:
  """Returns a text that is equal for configs of the same method."""
  return prediction.method_key(config)


@functools.cache
def algorithm_of(key: str) -> FederatedAlgorithm:
  """Builds the method that a `method_key` stands for, on one device."""
  config = ml_collections.ConfigDict(json.loads(key))
  config.mesh = 1
  return algorithms.method(config.method).build(config)


def model_of(state: ServerState) -> ServerState:
  """Leaves of a server's state what predictions need, matrices as triangles."""
  posterior = state.posterior
  if isinstance(posterior, blr.Posterior):
    posterior = posterior.replace(cholesky=blr.pack(posterior.cholesky))
  return state.replace(stats=(), optimizer=(), client_nll=(), posterior=posterior)


def of_model(model: ServerState) -> ServerState:
  """Makes a state to predict with of what `model_of` left."""
  posterior = model.posterior
  if not isinstance(posterior, blr.Posterior):
    return model
  # Whoever solves with it reads the lower triangle only.
  return model.replace(
    posterior=posterior.replace(cholesky=blr.unpack(posterior.cholesky))
  )


def inputs_like(config: ml_collections.ConfigDict, num_inputs: int) -> Any:
  """Makes an empty summary of the inputs, where the method's kernel needs one."""
  needed = prediction.needs_inputs(config)
  return input_summary.empty(num_inputs) if needed else ()


@functools.lru_cache(maxsize=8)
def _of_key(key: str, num_clients: int, num_inputs: int) -> Parts:
  config = ml_collections.ConfigDict(json.loads(key))
  plain = algorithm_of(key)
  rows = wire.empty_rows(num_inputs, config.dtype)
  inputs = inputs_like(config, num_inputs)

  def init(key: chex.PRNGKey, inputs: Any) -> ServerState:
    return plain.init_server(key, num_clients, rows, inputs)

  def start(key: chex.PRNGKey, number: jax.Array, rows: Rows) -> Any:
    return plain.init_client(key, number, num_clients, rows, inputs)

  state = jax.eval_shape(init, jax.random.key(0), inputs)
  number = jnp.zeros((), jnp.int32)
  own_like = jax.eval_shape(start, jax.random.key(0), number, rows)

  # Rows to score by have targets in the type of the statistics.
  scored = rows.replace(y=rows.y.astype(blr.statistics_dtype()))

  def part(exchange: Exchange, rows: Rows) -> Part:
    down = jax.eval_shape(lambda state: exchange.broadcast(state, None), state)
    return Part(exchange, down, own_like, rows)

  def predict(model: ServerState, own: Any, x: jax.Array) -> Any:
    # As of a federation of this client alone.
    state = State(of_model(model), jax.tree.map(lambda leaf: leaf[None], own))
    mean, variance = plain.predict(state, x)
    return mean.reshape(len(x)), variance.reshape(len(x))

  draw = None
  if algorithms.method(config.method).random_features:
    kernel = prediction.feature_map(config)
    draw = jax.jit(lambda source: urk.draw_omega(kernel, source, rows.x))
  return Parts(
    tuple(part(exchange, rows) for exchange in plain.exchanges),
    tuple(part(exchange, scored) for exchange in plain.held_out),
    jax.eval_shape(model_of, state),
    plain.with_server_parts(jax.jit),
    jax.jit(init),
    jax.jit(start),
    bool(jax.tree.leaves(own_like)),
    jax.jit(model_of),
    jax.jit(predict),
    draw,
    jax.jit(metrics.score_sums),
  )
