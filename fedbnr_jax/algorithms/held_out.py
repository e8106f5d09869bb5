"""Exchanges over held-out rows, by which a method sets its error bars after a round.

A client answers them by its validation rows, on which nobody trains, instead of its
training rows.
"""

from typing import Any, NamedTuple

import jax
from flax import struct

from fedbnr_jax.algorithms import last_layer
from fedbnr_jax.federated.exchange import Exchange, Own, Report
from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.state import ServerState
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.kernel_model import ReadyKernel, ready_features, ready_kernel


class PosteriorMessage(NamedTuple):
  """Down: the kernel, and all of the posterior that a prediction needs."""

  source: urk.Source  # From which ω is drawn.
  theta: Any
  fitted: blr.MeanAndNoise
  prior_std: jax.Array  # [] λ
  cholesky: jax.Array  # [M(M + 1)/2] triangle of the factor of B.


class _ReadyPosterior(NamedTuple):
  """What a client makes of a `PosteriorMessage`."""

  kernel: ReadyKernel
  fitted: blr.Posterior


def rescaled_bars(feature_map: urk.FeatureMap) -> tuple[Exchange, ...]:
  """Makes the exchange that scales all error bars to the size of held-out errors."""

  def broadcast(state: ServerState, server_set: ServerSet | None) -> PosteriorMessage:
    del server_set
    return PosteriorMessage(
      last_layer.source_of(state),
      state.params.theta,
      blr.mean_and_noise(state.posterior),
      state.posterior.prior_std,
      blr.pack(state.posterior.cholesky),
    )

  def prepare(down: PosteriorMessage, like: jax.Array) -> _ReadyPosterior:
    kernel = ready_kernel(feature_map, down.source, down.theta, like)
    fitted = blr.Posterior(
      mean=down.fitted.mean,
      # Of which whoever solves with it reads the lower triangle only.
      cholesky=blr.unpack(down.cholesky),
      noise_std=down.fitted.noise_std,
      prior_std=down.prior_std,
      noise_weights=down.fitted.noise_weights,
      noise_offset=down.fitted.noise_offset,
    )
    return _ReadyPosterior(kernel, fitted)

  def client(
    down: _ReadyPosterior, own: Own, rows: Rows
  ) -> tuple[blr.ErrorSums, Own, Report]:
    features = ready_features(feature_map, down.kernel, rows.x)
    return blr.error_sums(features, rows.y, down.fitted, rows.mask), own, {}

  def server(
    state: ServerState, server_set: ServerSet | None, total: blr.ErrorSums
  ) -> ServerState:
    del server_set
    return state.replace(posterior=blr.rescaled(state.posterior, total))

  return (Exchange("held-out errors", broadcast, client, server, prepare=prepare),)


class MomentsMessage(struct.PyTreeNode):
  """Up: what held-out residuals say of the shape of the noise; summable."""

  gram: jax.Array  # [M(M + 1)/2] triangle of ΦᵀΦ.
  count: jax.Array  # [] rows.
  moments: blr.NoiseMoments


class RatioMessage(struct.PyTreeNode):
  """Up: what held-out residuals say of the size of the noise; summable."""

  ratio: jax.Array  # [] Σ r²/σ²(x)
  count: jax.Array  # [] rows.


def held_out_noise(feature_map: urk.FeatureMap) -> tuple[Exchange, ...]:
  """Makes two exchanges that learn noise which varies as held-out residuals do."""
  # Messages down are those of noise that training rows teach.
  of_shape, of_scale = last_layer.learn_noise(feature_map, everybody=True)

  def shape(
    down: last_layer.ReadyResiduals, own: Own, rows: Rows
  ) -> tuple[MomentsMessage, Own, Report]:
    features = ready_features(feature_map, down.kernel, rows.x)
    stats = blr.sufficient_stats(features, rows.y, rows.mask)
    moments = blr.noise_moments(features, rows.y, down.fitted, rows.mask)
    return MomentsMessage(blr.pack(stats.gram), stats.count, moments), own, {}

  def set_shape(
    state: ServerState, server_set: ServerSet | None, total: MomentsMessage
  ) -> ServerState:
    del server_set
    stats = state.stats.replace(gram=blr.unpack(total.gram), count=total.count)
    fitted = blr.fit_noise(state.posterior, stats, total.moments)
    return state.replace(posterior=fitted)

  def scale(
    down: last_layer.ReadyResiduals, own: Own, rows: Rows
  ) -> tuple[RatioMessage, Own, Report]:
    features = ready_features(feature_map, down.kernel, rows.x)
    ratio = blr.noise_ratio(features, rows.y, down.fitted, rows.mask)
    return RatioMessage(ratio, rows.mask.sum().astype(ratio.dtype)), own, {}

  def set_scale(
    state: ServerState, server_set: ServerSet | None, total: RatioMessage
  ) -> ServerState:
    del server_set
    fitted = blr.scale_held_out_noise(state.posterior, total.ratio, total.count)
    return state.replace(posterior=fitted)

  return (
    of_shape._replace(name="held-out shape", client=shape, server=set_shape),
    of_scale._replace(name="held-out scale", client=scale, server=set_scale),
  )
