"""A last layer of more draws than the kernel was trained with.

A kernel is defined for any number of draws of ω: training takes few of them, because
every step pays for each, and the posterior takes many, because it pays once. What is
trained lives in a server state of its own, inside the one whose last layer predicts.
The first round may train with fewer draws still, in yet another state.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import ml_collections
from flax import struct

from fedbnr_jax.algorithms import kernels, last_layer
from fedbnr_jax.algorithms import noise as noise_lib
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.exchange import Exchange, Message, Stage
from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.state import ServerState
from fedbnr_jax.gp import urk


class Training(struct.PyTreeNode):
  """The states in which the kernel is trained; `ServerState.optimizer` of the outer."""

  main: ServerState
  start: Any = ()  # That of a first round of fewer draws, if there is one.


def widened(
  trained: FederatedAlgorithm,
  stages: tuple[Stage, ...],
  feature_map: urk.FeatureMap,
  *,
  start: FederatedAlgorithm | None = None,
  scales: last_layer.Scales,
  noise: str = "constant",
  with_noise: bool = True,
  initial_noise_std: float = 0.5,
  initial_prior_std: float = 1.0,
) -> FederatedAlgorithm:
  """Gives a method a last layer under a wider draw of its kernel.

  Args:
    trained: The method; its server state becomes a part of `ServerState.optimizer`.
    stages: Those of its stages that train the kernel.
    feature_map: The kernel of `trained` with more draws of ω.
    start: The same method with fewer draws, which trains in the first round; in the
      others `trained` goes on from the parameters that it has reached.
    scales: How σ and λ of the last layer are found.
    noise: Of predictions, one of `noise.NOISES`.
    with_noise: Whether predicted variances are of y, or of the function alone.
    initial_noise_std: σ before the first round.
    initial_prior_std: λ before the first round.
  """
  everybody = trained.participation.all_send_statistics
  learnt = noise_lib.learnt(noise, feature_map, everybody=everybody)

  def init_server(
    key: chex.PRNGKey, num_clients: int, rows: Rows, inputs: object = ()
  ) -> ServerState:
    inner = trained.init_server(key, num_clients, rows, inputs)
    initial = last_layer.initial_state(
      feature_map,
      initial_noise_std,
      initial_prior_std,
      varying_noise=learnt.varies,
    )
    outer = initial(key, num_clients, rows, inputs)
    first = start.init_server(key, num_clients, rows, inputs) if start else ()
    return outer.replace(params=inner.params, optimizer=Training(inner, first))

  def take_kernel(state: ServerState) -> ServerState:
    return state.replace(params=state.optimizer.main.params)

  def take_start(state: ServerState) -> ServerState:
    training = state.optimizer
    main = training.main.replace(params=training.start.params)
    return state.replace(optimizer=training.replace(main=main))

  statistics = last_layer.condition(feature_map, everybody=everybody, scales=scales)
  layer = (statistics, *learnt.exchanges)
  warm_up, num_warm_up = _inside("main", trained.warm_up), trained.num_warm_up
  if start:
    warm_up = (*_inside("start", start.stages), Stage((), begin=take_start))
    num_warm_up = 1
  return dataclasses.replace(
    trained,
    init_server=init_server,
    stages=_inside("main", stages),
    warm_up=warm_up,
    num_warm_up=num_warm_up,
    closing=(Stage(layer, begin=take_kernel),),
    train_nll=last_layer.train_nll,
    predict=last_layer.prediction(feature_map, with_noise=with_noise),
    held_out=learnt.held_out,
  )


def from_config(
  config: ml_collections.ConfigDict,
  trained: FederatedAlgorithm,
  stages: tuple[Stage, ...],
  *,
  scales: last_layer.Scales,
  noise: str,
  start: FederatedAlgorithm | None = None,
) -> FederatedAlgorithm:
  """Gives a method the wider last layer that its config asks for, if it does."""
  wide = kernels.wide_from_config(config)
  if wide is None:
    return trained
  return widened(
    trained,
    stages,
    wide,
    scales=scales,
    start=start,
    noise=noise,
    with_noise=config.with_noise,
    initial_noise_std=config.initial_noise_std,
    initial_prior_std=config.initial_prior_std,
  )


def _inside(name: str, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
  """Lets stages work on the server state of this name inside the outer one."""

  def put(state: ServerState, inner: ServerState) -> ServerState:
    return state.replace(optimizer=state.optimizer.replace(**{name: inner}))

  def get(state: ServerState) -> ServerState:
    inner: ServerState = getattr(state.optimizer, name)
    return inner

  return tuple(_through(get, put, stage) for stage in stages)


def _through(
  get: Callable[[ServerState], ServerState],
  put: Callable[[ServerState, ServerState], ServerState],
  stage: Stage,
) -> Stage:
  """Lets a stage read and write a part of the state that it is given."""

  def inner_exchange(exchange: Exchange) -> Exchange:
    def broadcast(state: ServerState, server_set: ServerSet | None) -> Message:
      return exchange.broadcast(get(state), server_set)

    def server(
      state: ServerState, server_set: ServerSet | None, total: Message
    ) -> ServerState:
      return put(state, exchange.server(get(state), server_set, total))

    return exchange._replace(broadcast=broadcast, server=server)

  def begin(state: ServerState) -> ServerState:
    return put(state, stage.begin(get(state)))

  return Stage(tuple(map(inner_exchange, stage.exchanges)), stage.times, begin)
