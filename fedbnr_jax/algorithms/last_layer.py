"""Phase 2, which kernel methods share: statistics up, σ and λ, one posterior."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from fedbnr_jax import blr, urk
from fedbnr_jax.algorithms.base import Exchange, Floats, ServerState
from fedbnr_jax.clients import ModelParams, features_of, local_stats
from fedbnr_jax.federation import Clients, Federation, ServerSet
from fedbnr_jax.mapping import Placement

# (state, summed statistics) -> σ, λ of the posterior.
Scales = Callable[[ServerState, blr.SufficientStats], tuple[jax.Array, jax.Array]]


def trained_scales(
  state: ServerState, stats: blr.SufficientStats
) -> tuple[jax.Array, jax.Array]:
  """σ and λ as the kernel's training has left them."""
  dtype = stats.gram.dtype
  params = state.params
  return params.noise_std.astype(dtype), params.prior_std.astype(dtype)


def evidence_scales(
  state: ServerState, stats: blr.SufficientStats
) -> tuple[jax.Array, jax.Array]:
  """σ and λ that maximise the evidence of all rows together; σ has no floor."""
  del state
  return blr.fit_evidence(stats)


def improved_scales(
  state: ServerState, stats: blr.SufficientStats
) -> tuple[jax.Array, jax.Array]:
  """σ and λ of a higher evidence than the trained ones, and near them."""
  return blr.improve_evidence(stats, *trained_scales(state, stats))


def initial_state(
  feature_map: urk.FeatureMap,
  initial_noise_std: float,
  initial_prior_std: float,
  placement: Placement,
  *,
  varying_noise: bool = False,
) -> Callable[[chex.PRNGKey, Federation], ServerState]:
  """`init` of a method: a random kernel and the prior."""

  def init(key: chex.PRNGKey, federation: Federation) -> ServerState:
    x = federation.clients.x
    # Only shape and type of the rows matter: one seed, one kernel, whoever has what.
    feature_params = feature_map.init(key, jnp.zeros(x.shape[1:], x.dtype))
    params = ModelParams(
      theta=feature_params.theta,
      log_noise_std=jnp.log(jnp.asarray(initial_noise_std, x.dtype)),
      log_prior_std=jnp.log(jnp.asarray(initial_prior_std, x.dtype)),
    )
    num_features = jax.eval_shape(feature_map.apply, feature_params, x[0]).shape[-1]
    stats, zero = blr.empty_stats(num_features), jnp.zeros((), jnp.int32)
    dtype = stats.gram.dtype
    prior = blr.posterior(
      stats, params.noise_std.astype(dtype), params.prior_std.astype(dtype)
    )
    if varying_noise:
      prior = prior.replace(
        noise_weights=jnp.zeros_like(stats.moment),
        noise_offset=jnp.zeros_like(stats.energy),
      )
    state = ServerState(feature_params.omega, params, stats, prior, zero, zero)
    return placement.replicated(state)

  return init


def condition(
  feature_map: urk.FeatureMap,
  *,
  asks_all: bool,
  scales: Scales = trained_scales,
  feedback: bool = False,
  announces: bool = True,
) -> Exchange:
  """Phase 2, merged: every client's statistics up, one posterior.

  Args:
    feature_map: The kernel.
    asks_all: Whether those who are not in the round send statistics too.
    scales: How σ and λ of the posterior are found.
    feedback: Whether the kernel's training goes on from these σ and λ.
    announces: Whether clients are sent the posterior, to predict with.
  """

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, None]:
    del server
    stats = local_stats(feature_map, state.params, state.omega, rows)
    return (stats, jnp.ones((), jnp.int32)), None

  def combine(state: ServerState, server: ServerSet | None, total: Any) -> ServerState:
    del server
    stats, num_clients = total
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
      # As it was, until `learn_noise` says otherwise.
      noise_weights=state.posterior.noise_weights,
      noise_offset=state.posterior.noise_offset,
    )
    return state.replace(stats=stats, posterior=posterior, num_clients=num_clients)

  def floats(state: ServerState, server: ServerSet | None) -> Floats:
    del server
    statistics = num_floats(state.stats)
    # The kernel goes down for its statistics; the next local steps start from it. ω is
    # a seed.
    own_scales = 0 if scales is trained_scales else 2  # Else they are in the params.
    announced = statistics + own_scales if announces else 0
    return Floats(statistics + 2, state.params.size + announced)

  return Exchange(client, combine, floats, asks_all)


def learn_noise(
  feature_map: urk.FeatureMap, *, asks_all: bool
) -> tuple[Exchange, Exchange]:
  """Noise that varies with the input: its shape, then its scale, from sums.

  To come after `condition` with the same `asks_all`: it uses the Gram matrix of that.
  """

  def asking(question: Callable[..., Any]) -> Callable[..., tuple[Any, None]]:
    """A client's side: what its residuals under the posterior say."""

    def client(
      state: ServerState, server: ServerSet | None, rows: Clients
    ) -> tuple[Any, None]:
      del server
      features = features_of(feature_map, state.params, state.omega, rows.x)
      return question(features, rows.y, state.posterior, rows.mask), None

    return client

  def set_shape(
    state: ServerState, server: ServerSet | None, total: blr.NoiseMoments
  ) -> ServerState:
    del server
    return state.replace(posterior=blr.fit_noise(state.posterior, state.stats, total))

  def set_scale(
    state: ServerState, server: ServerSet | None, total: jax.Array
  ) -> ServerState:
    del server
    fitted = blr.scale_noise(state.posterior, total, state.stats.count)
    return state.replace(posterior=fitted)

  def shape_floats(state: ServerState, server: ServerSet | None) -> Floats:
    del server
    return Floats(2 * state.stats.moment.shape[0] + 2, 0)

  def scale_floats(state: ServerState, server: ServerSet | None) -> Floats:
    del server
    return Floats(1, state.stats.moment.shape[0] + 2)  # The scale comes back.

  return (
    Exchange(asking(blr.noise_moments), set_shape, shape_floats, asks_all),
    Exchange(asking(blr.noise_ratio), set_scale, scale_floats, asks_all),
  )


def held_out_noise(
  feature_map: urk.FeatureMap,
) -> Callable[[ServerState, jax.Array, jax.Array], ServerState]:
  """`calibrate` of a method: noise that varies, by residuals of x [N, D], y [N]."""

  def calibrate(state: ServerState, x: jax.Array, y: jax.Array) -> ServerState:
    features = features_of(feature_map, state.params, state.omega, x)
    return state.replace(posterior=blr.held_out_noise(features, y, state.posterior))

  return calibrate


def train_nll(state: ServerState) -> jax.Array:
  """[] global negative log evidence per row."""
  stats = state.stats
  nll = blr.negative_log_marginal_likelihood_from_stats(stats, state.posterior)
  return nll / jnp.maximum(stats.count, 1)


def prediction(
  feature_map: urk.FeatureMap, *, with_noise: bool = True
) -> Callable[[ServerState, jax.Array], tuple[jax.Array, jax.Array]]:
  """`predict` of a method: x [N, D] -> mean [N], variance [N] of y, or of f."""

  def predict(state: ServerState, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    features = features_of(feature_map, state.params, state.omega, x)
    return blr.predict(state.posterior, features, with_noise=with_noise)

  return predict


def num_floats(stats: blr.SufficientStats) -> int:
  """Floats of a Gram's triangle and a vector: statistics up, or a posterior down."""
  (num_features,) = stats.moment.shape
  return num_features * (num_features + 1) // 2 + num_features
