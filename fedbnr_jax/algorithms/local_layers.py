"""Ablations with a global kernel and a last layer of each client's own rows.

`avg+local` has the kernel of `fedbnr`, `kd+local` that of `fedbnr-kd`. There is a model
for every client; all models predict the same rows, and their scores are averaged.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import ml_collections
from flax import struct

from fedbnr_jax.algorithms import fedbnr, kernels, last_layer, settings
from fedbnr_jax.algorithms.personal import (
  OwnModelMessage,
  check_everybody,
  note_models,
  own_model_message,
)
from fedbnr_jax.federated.aggregation import Aggregator
from fedbnr_jax.federated.algorithm import FederatedAlgorithm, InitServer
from fedbnr_jax.federated.exchange import Exchange, Report, Stage
from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.federated.state import ServerState, State
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.kernel_model import ModelParams, features_of


class OwnModel(struct.PyTreeNode):
  """What a client keeps; a part that the method does not need is ()."""

  params: Any = ()  # ModelParams, its own kernel, where it has one.
  posterior: Any = ()  # Posterior of its own rows, where it has a last layer.
  seat: Any = ()  # [K] bool, true at its own number; only `local+global` needs it.


def local_layers(
  feature_map: urk.FeatureMap,
  learning: Exchange,
  *,
  initial_noise_std: float = 0.5,
  initial_prior_std: float = 1.0,
  with_noise: bool = True,
  participation: Participation = Participation(),  # noqa: B008  Immutable.
  placement: Placement = Placement(),  # noqa: B008
) -> FederatedAlgorithm:
  """Builds `avg+local` or `kd+local`: a global kernel, and each client's last layer.

  Args:
    feature_map: The kernel.
    learning: `fedbnr.learn_kernel`, by mean or by distillation.
    initial_noise_std: σ at the start, in units of the target's std.
    initial_prior_std: λ at the start.
    with_noise: Whether predicted variances are of y, or of the function alone.
    participation: Who trains in a round; everybody has a last layer.
    placement: On which devices, and how many clients at a time.
  """
  start = last_layer.initial_state(feature_map, initial_noise_std, initial_prior_std)

  def init_client(
    key: chex.PRNGKey,
    number: jax.Array,
    num_clients: int,
    rows: Rows,
    inputs: Any = (),
  ) -> OwnModel:
    del number
    return OwnModel(posterior=start(key, num_clients, rows, inputs).posterior)

  def predict(state: State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    server = state.server
    features = features_of(feature_map, server.params.theta, server.omega, x)
    return jax.vmap(
      lambda fitted: blr.predict(fitted, features, with_noise=with_noise)
    )(state.own.posterior)

  check_own_models(participation, placement, initial_noise_std, initial_prior_std)
  return FederatedAlgorithm(
    init_server=without_layer(start),
    init_client=init_client,
    stages=(Stage((learning, own_layers(feature_map, own_kernels=False))),),
    train_nll=lambda state: state.client_nll,
    predict=predict,
    participation=participation,
    placement=placement,
    one_model_each=True,
    scales=lambda state: mean_scales(state.own.posterior),
  )


class LayerMessage(NamedTuple):
  """Down: the global kernel with σ and λ."""

  source: urk.Source  # From which ω is drawn.
  params: Any  # ModelParams, or () where each client has its own.


def own_layers(feature_map: urk.FeatureMap, *, own_kernels: bool) -> Exchange:
  """Makes an exchange after which each client has the last layer of its own rows."""

  def broadcast(state: ServerState, server_set: ServerSet | None) -> LayerMessage:
    del server_set
    return LayerMessage(
      last_layer.source_of(state), () if own_kernels else state.params
    )

  def client(
    down: LayerMessage, own: OwnModel, rows: Rows
  ) -> tuple[OwnModelMessage, OwnModel, Report]:
    params = own.params if own_kernels else down.params
    omega = urk.draw_omega(feature_map, down.source, rows.x)
    features = features_of(feature_map, params.theta, omega, rows.x)
    stats = blr.sufficient_stats(features, rows.y, rows.mask)
    posterior, nll = conditioned(stats, params)
    return own_model_message(nll), own.replace(posterior=posterior), {}

  return Exchange("own layer", broadcast, client, note_models, everybody=True)


def conditioned(
  stats: blr.SufficientStats, params: ModelParams
) -> tuple[blr.Posterior, jax.Array]:
  """Computes the last layer of some rows, and their negative log evidence per row."""
  dtype = stats.gram.dtype
  fitted = blr.posterior(
    stats, params.noise_std.astype(dtype), params.prior_std.astype(dtype)
  )
  nll = blr.negative_log_marginal_likelihood_from_stats(stats, fitted)
  return fitted, nll / jnp.maximum(stats.count, 1)


def without_layer(start: InitServer) -> InitServer:
  """Starts a server that has a kernel, or only its draws, and no last layer."""

  def init_server(
    key: chex.PRNGKey, num_clients: int, rows: Rows, inputs: Any = ()
  ) -> ServerState:
    state = start(key, num_clients, rows, inputs)
    nll = jnp.zeros_like(state.posterior.noise_std)
    return state.replace(stats=(), posterior=(), client_nll=nll)

  return init_server


def mean_scales(posterior: blr.Posterior) -> tuple[jax.Array, jax.Array]:
  """Averages σ and λ over the clients' posteriors [K, ...]."""
  return posterior.noise_std.mean(), posterior.prior_std.mean()


def check_own_models(
  participation: Participation,
  placement: Placement,
  initial_noise_std: float,
  initial_prior_std: float,
) -> None:
  settings.check(
    participation,
    placement,
    initial_noise_std=initial_noise_std,
    initial_prior_std=initial_prior_std,
  )
  check_everybody(participation)


def average_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `avg+local`, with the kernel of `fedbnr`."""
  return _with_local_layers(config, fedbnr.mean_of(config))


def distilled_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `kd+local`, with the kernel of `fedbnr-kd`."""
  return _with_local_layers(config, fedbnr.distillation_of(config))


def _with_local_layers(
  config: ml_collections.ConfigDict, aggregator: Aggregator
) -> FederatedAlgorithm:
  shared = fedbnr.common_settings(config)
  del shared["min_noise_std"]  # It is in the exchange.
  learning = fedbnr.learning_from_config(config, aggregator)
  return local_layers(kernels.from_config(config), learning, **shared)
