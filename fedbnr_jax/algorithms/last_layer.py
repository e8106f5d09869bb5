"""Phase 2, which kernel methods share: statistics up, σ and λ, one posterior."""

from functools import partial
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
from flax import struct

from fedbnr_jax.federated.algorithm import InitServer, Predict
from fedbnr_jax.federated.exchange import Exchange, Message, Own, Report
from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.state import ServerState, State
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.kernel_model import (
  ReadyKernel,
  features_of,
  model_params,
  ready_features,
  ready_kernel,
)


class Scales(Protocol):
  """A rule that finds σ [] and λ [] of the posterior from the summed statistics."""

  def __call__(
    self, state: ServerState, stats: blr.SufficientStats
  ) -> tuple[jax.Array, jax.Array]: ...


def trained_scales(
  state: ServerState, stats: blr.SufficientStats
) -> tuple[jax.Array, jax.Array]:
  """Takes σ and λ as the kernel's training has left them."""
  dtype = stats.gram.dtype
  params = state.params
  return params.noise_std.astype(dtype), params.prior_std.astype(dtype)


def evidence_scales(
  state: ServerState, stats: blr.SufficientStats
) -> tuple[jax.Array, jax.Array]:
  """Maximises the evidence of all rows together over σ and λ; σ has no floor."""
  del state
  return blr.fit_evidence(stats)


def improved_scales(
  state: ServerState, stats: blr.SufficientStats
) -> tuple[jax.Array, jax.Array]:
  """Finds σ and λ near the trained ones whose evidence is higher."""
  return blr.improve_evidence(stats, *trained_scales(state, stats))


def initial_state(
  feature_map: urk.FeatureMap,
  initial_noise_std: float,
  initial_prior_std: float,
  *,
  varying_noise: bool = False,
) -> InitServer:
  """Makes `init_server` of a method: a random kernel and the prior."""

  def init_server(
    key: chex.PRNGKey, num_clients: int, rows: Rows, inputs: Any = ()
  ) -> ServerState:
    del num_clients
    dtype = rows.x.dtype
    inputs = inputs if feature_map.needs_inputs else ()
    start = feature_map.init(key, rows.x, inputs)
    params = model_params(start.theta, initial_noise_std, initial_prior_std, dtype)
    stats = blr.empty_stats(urk.num_features(feature_map, rows.x, inputs))
    wide = stats.gram.dtype
    prior = blr.posterior(
      stats, params.noise_std.astype(wide), params.prior_std.astype(wide)
    )
    if varying_noise:
      prior = prior.replace(
        noise_weights=jnp.zeros_like(stats.moment),
        noise_offset=jnp.zeros_like(stats.energy),
      )
    zero = jnp.zeros((), jnp.int32)
    return ServerState(
      num_rounds=zero,
      num_clients=zero,
      params=params,
      omega=start.omega,
      seed=jax.random.key_data(key),
      inputs=inputs,
      stats=stats,
      posterior=prior,
    )

  return init_server


def source_of(state: ServerState) -> urk.Source:
  """Returns what a client needs to draw the server's ω."""
  return urk.Source(state.seed, state.inputs)


# --------------------------------------------------------------------- statistics


class KernelMessage(NamedTuple):
  """Down: the kernel under which statistics are wanted."""

  source: urk.Source  # From which ω is drawn.
  theta: Any


class StatisticsMessage(struct.PyTreeNode):
  """Up: what a client's rows say about the last layer; summable."""

  gram: jax.Array  # [M(M + 1)/2] triangle of ΦᵀΦ.
  moment: jax.Array  # [M] Φᵀy.
  energy: jax.Array  # [] yᵀy.
  count: jax.Array  # [] rows.
  num_clients: jax.Array  # [] int32, one.
  missing: Any = ()  # [] what the features lose of the kernel's variance, if asked for.


def missing_variance(
  feature_map: urk.FeatureMap, kernel: ReadyKernel, rows: Rows
) -> jax.Array:
  """Sums over a client's rows what features lose of the kernel's variance []."""
  if feature_map.missing is None:
    return jnp.zeros((), blr.statistics_dtype())
  params = urk.FeatureParams(kernel.omega, kernel.theta)
  lost = feature_map.missing(params, rows.x, kernel.shared)
  return jnp.sum(jnp.where(rows.mask, lost, 0.0)).astype(blr.statistics_dtype())


def statistics_message(
  feature_map: urk.FeatureMap,
  kernel: ReadyKernel,
  rows: Rows,
  *,
  with_missing: bool = False,
) -> StatisticsMessage:
  """Sums a client's rows under a kernel."""
  features = ready_features(feature_map, kernel, rows.x)
  stats = blr.sufficient_stats(features, rows.y, rows.mask)
  return StatisticsMessage(
    blr.pack(stats.gram),
    stats.moment,
    stats.energy,
    stats.count,
    jnp.ones((), jnp.int32),
    missing_variance(feature_map, kernel, rows) if with_missing else (),
  )


def statistics_of(message: StatisticsMessage) -> blr.SufficientStats:
  """Reads the statistics in a message, or in a sum of messages."""
  return blr.SufficientStats(
    blr.unpack(message.gram), message.moment, message.energy, message.count
  )


def condition(
  feature_map: urk.FeatureMap,
  *,
  everybody: bool,
  scales: Scales = trained_scales,
  feedback: bool = False,
  with_missing: bool = False,
) -> Exchange:
  """Makes phase 2: the kernel down, statistics up, one posterior.

  Args:
    feature_map: The kernel.
    everybody: Whether clients that do not train in the round send statistics too.
    scales: How σ and λ of the posterior are found.
    feedback: Whether the kernel's training goes on from these σ and λ.
    with_missing: Whether clients also send how much of the kernel's variance its
      features lose.
  """

  def broadcast(state: ServerState, server_set: ServerSet | None) -> KernelMessage:
    del server_set
    return KernelMessage(source_of(state), state.params.theta)

  def prepare(down: KernelMessage, like: jax.Array) -> ReadyKernel:
    return ready_kernel(feature_map, down.source, down.theta, like)

  def client(
    down: ReadyKernel, own: Own, rows: Rows
  ) -> tuple[StatisticsMessage, Own, Report]:
    message = statistics_message(feature_map, down, rows, with_missing=with_missing)
    return message, own, {}

  def server(
    state: ServerState, server_set: ServerSet | None, total: StatisticsMessage
  ) -> ServerState:
    del server_set
    stats = statistics_of(total)
    noise_std, prior_std = scales(state, stats)
    if feedback:
      dtype = state.params.log_noise_std.dtype
      state = state.replace(
        params=state.params.replace(
          log_noise_std=jnp.log(noise_std).astype(dtype),
          log_prior_std=jnp.log(prior_std).astype(dtype),
        )
      )
    posterior = blr.posterior(stats, noise_std, prior_std).replace(
      # Noise that varies stays as it was until `learn_noise` renews it.
      noise_weights=state.posterior.noise_weights,
      noise_offset=state.posterior.noise_offset,
    )
    return state.replace(
      stats=stats, posterior=posterior, num_clients=total.num_clients
    )

  return Exchange(
    "statistics", broadcast, client, server, everybody, prepare, any_length=True
  )


# ------------------------------------------------------------ noise that varies


class ResidualMessage(NamedTuple):
  """Down: what a client needs to compute its residuals."""

  source: urk.Source  # From which ω is drawn.
  theta: Any
  fitted: blr.MeanAndNoise


class ReadyResiduals(NamedTuple):
  """What a client makes of a `ResidualMessage`."""

  kernel: ReadyKernel
  fitted: blr.MeanAndNoise


def learn_noise(
  feature_map: urk.FeatureMap, *, everybody: bool
) -> tuple[Exchange, Exchange]:
  """Makes two exchanges that learn noise which varies with the input.

  The first fits its shape and the second its scale, both from sums of residuals. They
  follow `condition` with the same `everybody`, because they use its Gram matrix.
  """

  def first_down(state: ServerState, server_set: ServerSet | None) -> ResidualMessage:
    del server_set
    fitted = blr.MeanAndNoise(state.posterior.mean, state.posterior.noise_std)
    return ResidualMessage(source_of(state), state.params.theta, fitted)

  def second_down(state: ServerState, server_set: ServerSet | None) -> ResidualMessage:
    del server_set
    fitted = blr.mean_and_noise(state.posterior)
    return ResidualMessage(source_of(state), state.params.theta, fitted)

  def prepare(down: ResidualMessage, like: jax.Array) -> ReadyResiduals:
    kernel = ready_kernel(feature_map, down.source, down.theta, like)
    return ReadyResiduals(kernel, down.fitted)

  def summing(summary: Any) -> Any:
    """Makes the client's side from a function that sums over its residuals."""

    def client(
      down: ReadyResiduals, own: Own, rows: Rows
    ) -> tuple[Message, Own, Report]:
      features = ready_features(feature_map, down.kernel, rows.x)
      return summary(features, rows.y, down.fitted, rows.mask), own, {}

    return client

  def set_shape(
    state: ServerState, server_set: ServerSet | None, total: blr.NoiseMoments
  ) -> ServerState:
    del server_set
    return state.replace(posterior=blr.fit_noise(state.posterior, state.stats, total))

  def set_scale(
    state: ServerState, server_set: ServerSet | None, total: jax.Array
  ) -> ServerState:
    del server_set
    fitted = blr.scale_noise(state.posterior, total, state.stats.count)
    return state.replace(posterior=fitted)

  shape, scale = summing(blr.noise_moments), summing(blr.noise_ratio)
  exchange = partial(Exchange, everybody=everybody, prepare=prepare, any_length=True)
  return (
    exchange("noise shape", first_down, shape, set_shape),
    exchange("noise scale", second_down, scale, set_scale),
  )


# ---------------------------------------------------------------- what comes of it


def train_nll(state: ServerState) -> jax.Array:
  """Computes the global negative log evidence [] per row."""
  stats = state.stats
  nll = blr.negative_log_marginal_likelihood_from_stats(stats, state.posterior)
  return nll / jnp.maximum(stats.count, 1)


def prediction(feature_map: urk.FeatureMap, *, with_noise: bool = True) -> Predict:
  """Makes `predict` of a method; variances are of y, or of the function alone."""

  def predict(state: State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    server = state.server
    features = features_of(feature_map, server.params.theta, server.omega, x)
    return blr.predict(server.posterior, features, with_noise=with_noise)

  return predict
