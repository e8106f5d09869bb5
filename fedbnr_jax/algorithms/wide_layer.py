"""A last layer of more draws than the kernel was trained with.

A kernel is defined for any number of draws of ω: training takes few of them, because
every step pays for each, and the posterior takes many, because it pays once. What is
trained lives in a server state of its own, inside the one whose last layer predicts.
"""

import dataclasses

import chex
import ml_collections

from fedbnr_jax.algorithms import kernels, last_layer
from fedbnr_jax.algorithms import noise as noise_lib
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.exchange import Exchange, Message, Stage
from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.state import ServerState
from fedbnr_jax.gp import urk


def widened(
  trained: FederatedAlgorithm,
  stages: tuple[Stage, ...],
  feature_map: urk.FeatureMap,
  *,
  scales: last_layer.Scales,
  noise: str = "constant",
  with_noise: bool = True,
  initial_noise_std: float = 0.5,
  initial_prior_std: float = 1.0,
) -> FederatedAlgorithm:
  """Gives a method a last layer under a wider draw of its kernel.

  Args:
    trained: The method; its server state becomes `ServerState.optimizer`.
    stages: Those of its stages that train the kernel.
    feature_map: The kernel of `trained` with more draws of ω.
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
    start = last_layer.initial_state(
      feature_map,
      initial_noise_std,
      initial_prior_std,
      varying_noise=learnt.varies,
    )
    outer = start(key, num_clients, rows, inputs)
    return outer.replace(params=inner.params, optimizer=inner)

  def take_kernel(state: ServerState) -> ServerState:
    return state.replace(params=state.optimizer.params)

  statistics = last_layer.condition(feature_map, everybody=everybody, scales=scales)
  last = Stage((statistics, *learnt.exchanges), begin=take_kernel)
  return dataclasses.replace(
    trained,
    init_server=init_server,
    stages=(*map(_inside, stages), last),
    warm_up=(*map(_inside, trained.warm_up), last) if trained.warm_up else (),
    train_nll=last_layer.train_nll,
    predict=last_layer.prediction(feature_map, with_noise=with_noise),
    calibrate=learnt.calibrate,
  )


def from_config(
  config: ml_collections.ConfigDict,
  trained: FederatedAlgorithm,
  stages: tuple[Stage, ...],
  *,
  scales: last_layer.Scales,
  noise: str,
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
    noise=noise,
    with_noise=config.with_noise,
    initial_noise_std=config.initial_noise_std,
    initial_prior_std=config.initial_prior_std,
  )


def _inside(stage: Stage) -> Stage:
  """Lets a stage work on the server state inside the outer one."""

  def inner_exchange(exchange: Exchange) -> Exchange:
    def broadcast(state: ServerState, server_set: ServerSet | None) -> Message:
      return exchange.broadcast(state.optimizer, server_set)

    def server(
      state: ServerState, server_set: ServerSet | None, total: Message
    ) -> ServerState:
      inner = exchange.server(state.optimizer, server_set, total)
      return state.replace(optimizer=inner)

    return exchange._replace(broadcast=broadcast, server=server)

  def begin(state: ServerState) -> ServerState:
    return state.replace(optimizer=stage.begin(state.optimizer))

  return Stage(tuple(map(inner_exchange, stage.exchanges)), stage.times, begin)
