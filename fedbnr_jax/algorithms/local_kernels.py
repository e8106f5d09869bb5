"""Ablations with a kernel for each client, never aggregated.

`local+local` has a last layer of each client's own rows as well, so that nothing is
learnt together. `local+global` has a last layer of all rows under each kernel: every
kernel goes to every client, as its messages show. There is a model for every client;
all models predict the same rows, and their scores are averaged.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax

from fedbnr_jax.algorithms import fedbnr, kernels, last_layer, settings
from fedbnr_jax.algorithms.last_layer import StatisticsMessage
from fedbnr_jax.algorithms.local_layers import (
  OwnModel,
  check_own_models,
  conditioned,
  mean_scales,
  own_layers,
  without_layer,
)
from fedbnr_jax.federated.algorithm import (
  FederatedAlgorithm,
  InitServer,
  own_of_client,
)
from fedbnr_jax.federated.exchange import Exchange, Message, Report, Stage, num_floats
from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.local_steps import loss_report
from fedbnr_jax.federated.optimizers import adam
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.federated.state import ServerState, State
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.kernel_model import ModelParams, features_of, ready_kernel


def local_kernels(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  *,
  num_local_steps: int,
  global_layer: bool,
  initial_noise_std: float = 0.5,
  initial_prior_std: float = 1.0,
  min_noise_std: float = 1e-3,
  with_noise: bool = True,
  participation: Participation = Participation(),  # noqa: B008  Immutable.
  placement: Placement = Placement(),  # noqa: B008
) -> FederatedAlgorithm:
  """Builds `local+local` or `local+global`: a kernel a client, never aggregated.

  Args:
    feature_map: The kernel.
    optimizer: The clients' optimiser; its state starts afresh every round.
    num_local_steps: Full-batch steps of each client in a round.
    global_layer: Whether the last layer is that of all clients' rows under each kernel,
      for which all K kernels go to all K clients; otherwise of own rows.
    initial_noise_std: σ at the start, in units of the target's std.
    initial_prior_std: λ at the start.
    min_noise_std: Floor of σ.
    with_noise: Whether predicted variances are of y, or of the function alone.
    participation: Who trains in a round.
    placement: On which devices, and how many clients at a time.
  """
  settings.check_positive(num_local_steps=num_local_steps, min_noise_std=min_noise_std)
  check_own_models(participation, placement, initial_noise_std, initial_prior_std)
  start = last_layer.initial_state(feature_map, initial_noise_std, initial_prior_std)

  def init_client(
    key: chex.PRNGKey,
    number: jax.Array,
    num_clients: int,
    rows: Rows,
    inputs: Any = (),
  ) -> OwnModel:
    state = start(key, num_clients, rows, inputs)
    if global_layer:
      return OwnModel(
        params=state.params, seat=jnp.arange(num_clients, dtype=number.dtype) == number
      )
    return OwnModel(params=state.params, posterior=state.posterior)

  def predict(state: State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    models = state.server if global_layer else state.own

    def one(model: tuple[Any, blr.Posterior]) -> tuple[jax.Array, jax.Array]:
      theta, fitted = model
      features = features_of(feature_map, theta, state.server.omega, x)
      return blr.predict(fitted, features, with_noise=with_noise)

    return jax.lax.map(one, (models.params.theta, models.posterior))

  learning = _learn_own_kernel(
    feature_map,
    optimizer,
    num_local_steps=num_local_steps,
    min_noise_std=min_noise_std,
    sends=global_layer,
  )
  layers = (
    _statistics_of_all(feature_map)
    if global_layer
    else own_layers(feature_map, own_kernels=True)
  )
  return FederatedAlgorithm(
    init_server=_all_models(start) if global_layer else without_layer(start),
    init_client=init_client,
    stages=(Stage((learning, layers)),),
    train_nll=lambda state: state.client_nll,
    predict=predict,
    participation=participation,
    placement=placement,
    one_model_each=True,
    scales=lambda state: mean_scales(
      (state.server if global_layer else state.own).posterior
    ),
    of_client=_model_of_client if global_layer else own_of_client,
    num_params=lambda state: num_floats(state.own.params) // _num_clients(state),
  )


class OwnKernelMessage(NamedTuple):
  """Up: a client's kernel at its own place among all; the sum holds every kernel."""

  kernels: ModelParams  # [K, ...], zeros but for its own.
  present: jax.Array  # [K] int32, one at its own number.


def _learn_own_kernel(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  *,
  num_local_steps: int,
  min_noise_std: float,
  sends: bool,
) -> Exchange:
  """Makes an exchange in which each client trains the kernel that it keeps.

  With `sends` the server then holds all kernels; otherwise they stay where they are.
  """

  def broadcast(state: ServerState, server_set: ServerSet | None) -> urk.Source:
    del server_set
    return last_layer.source_of(state)

  def client(
    down: urk.Source, own: OwnModel, rows: Rows
  ) -> tuple[Message, OwnModel, Report]:
    omega = urk.draw_omega(feature_map, down, rows.x)
    params, losses = fedbnr.local_evidence_steps(
      feature_map,
      optimizer,
      own.params,
      omega,
      rows,
      num_local_steps=num_local_steps,
      min_noise_std=min_noise_std,
    )
    report = loss_report(losses[-1], params, rows.y.dtype)
    message: Message = ()
    if sends:
      kernels_ = jax.tree.map(lambda leaf: _at_seat(own.seat, leaf), params)
      message = OwnKernelMessage(kernels_, own.seat.astype(jnp.int32))
    return message, own.replace(params=params), report

  def server(
    state: ServerState, server_set: ServerSet | None, total: Message
  ) -> ServerState:
    del server_set
    if not sends:
      return state
    # A client that did not answer is still known by its last kernel.
    params = jax.tree.map(
      lambda old, new: jnp.where(_like(total.present > 0, old), new, old),
      state.params,
      total.kernels,
    )
    return state.replace(params=params)

  return Exchange("own kernel", broadcast, client, server)


def _at_seat(seat: jax.Array, leaf: jax.Array) -> jax.Array:
  """Puts a client's array at its own place of [K, ...], with zeros elsewhere."""
  whole = jnp.broadcast_to(leaf, (*seat.shape, *leaf.shape))
  return jnp.where(_like(seat, whole), whole, jnp.zeros_like(whole))


def _like(flags: jax.Array, leaf: jax.Array) -> jax.Array:
  """Adds axes to flags [K], so that they choose along the first axis of `leaf`."""
  return jnp.broadcast_to(flags.reshape(-1, *[1] * (leaf.ndim - 1)), leaf.shape)


def _statistics_of_all(feature_map: urk.FeatureMap) -> Exchange:
  """Makes an exchange of every client's statistics under every client's kernel."""

  def broadcast(state: ServerState, server_set: ServerSet | None) -> Any:
    del server_set
    return last_layer.KernelMessage(
      last_layer.source_of(state),
      state.params.theta,  # All K kernels.
    )

  def client(
    down: last_layer.KernelMessage, own: OwnModel, rows: Rows
  ) -> tuple[StatisticsMessage, OwnModel, Report]:
    def under(theta: Any) -> StatisticsMessage:
      kernel = ready_kernel(feature_map, down.source, theta, rows.x)
      return last_layer.statistics_message(feature_map, kernel, rows)

    under_each = jax.lax.map(under, down.theta)
    return under_each, own, {}

  def server(
    state: ServerState, server_set: ServerSet | None, total: StatisticsMessage
  ) -> ServerState:
    del server_set
    stats = jax.vmap(last_layer.statistics_of)(total)
    posterior, nll = jax.vmap(conditioned)(stats, state.params)
    return state.replace(
      posterior=posterior, client_nll=jnp.mean(nll), num_clients=total.num_clients[0]
    )

  name = "statistics under all kernels"
  return Exchange(name, broadcast, client, server, everybody=True)


def _all_models(start: InitServer) -> InitServer:
  """Starts a server that holds the model [K, ...] of every client."""

  def init_server(
    key: chex.PRNGKey, num_clients: int, rows: Rows, inputs: Any = ()
  ) -> ServerState:
    state = start(key, num_clients, rows, inputs)
    params, posterior = jax.tree.map(
      lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)),
      (state.params, state.posterior),
    )
    nll = jnp.zeros_like(state.posterior.noise_std)
    return state.replace(params=params, stats=(), posterior=posterior, client_nll=nll)

  return init_server


def _model_of_client(state: State, index: int) -> State:
  """Keeps one client's kernel and posterior, which the server holds."""
  server = state.server
  params, posterior = jax.tree.map(
    lambda leaf: leaf[index : index + 1], (server.params, server.posterior)
  )
  return state.replace(server=server.replace(params=params, posterior=posterior))


def _num_clients(state: State) -> int:
  return state.own.params.log_noise_std.size


def local_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `local+local`."""
  return _with_local_kernels(config, global_layer=False)


def local_global_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `local+global`."""
  return _with_local_kernels(config, global_layer=True)


def _with_local_kernels(
  config: ml_collections.ConfigDict, *, global_layer: bool
) -> FederatedAlgorithm:
  return local_kernels(
    kernels.from_config(config),
    adam(config.learning_rate),
    num_local_steps=config.num_local_steps,
    global_layer=global_layer,
    **fedbnr.common_settings(config),
  )
