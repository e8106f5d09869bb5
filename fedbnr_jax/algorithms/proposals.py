"""How `fedbnr-exact` comes to new parameters: two exchanges to choose from.

Clients that know w̄ and A⁻¹ pull the gradient of the global evidence back through their
network and the server steps; or they descend by themselves on a bound of it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedbnr_jax.algorithms import last_layer
from fedbnr_jax.algorithms.safeguard import Descent, trace_weight
from fedbnr_jax.federated import aggregation
from fedbnr_jax.federated.exchange import Exchange, Message, Own, Report
from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.local_steps import descend, keep_above, loss_report
from fedbnr_jax.federated.optimizers import adam
from fedbnr_jax.federated.state import ServerState
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.kernel_model import (
  ModelParams,
  ReadyKernel,
  ready_features,
  ready_kernel,
)


class PosteriorMessage(NamedTuple):
  """Down: the kernel, and what of the posterior the bound of the evidence needs."""

  source: urk.Source  # From which ω is drawn.
  theta: Any
  fitted: blr.MeanAndNoise
  covariance: jax.Array  # [M(M + 1)/2] triangle of A⁻¹.
  trace_weight: Any = ()  # [] λ²/2σ², where the trace term is part of the objective.


def _posterior_message(state: ServerState) -> PosteriorMessage:
  fitted = blr.MeanAndNoise(state.posterior.mean, state.posterior.noise_std)
  covariance = blr.pack(state.optimizer.covariance)
  return PosteriorMessage(
    last_layer.source_of(state),
    state.params.theta,
    fitted,
    covariance,
    () if isinstance(state.optimizer.missing, tuple) else trace_weight(state.posterior),
  )


class _ReadyPosterior(NamedTuple):
  """What a client makes of a `PosteriorMessage`."""

  kernel: ReadyKernel
  fitted: blr.MeanAndNoise
  covariance: jax.Array  # [M, M] A⁻¹.
  trace_weight: Any


def _ready(
  feature_map: urk.FeatureMap, down: PosteriorMessage, like: jax.Array
) -> _ReadyPosterior:
  return _ReadyPosterior(
    ready_kernel(feature_map, down.source, down.theta, like),
    down.fitted,
    blr.unpack(down.covariance),
    down.trace_weight,
  )


def _bound(
  feature_map: urk.FeatureMap, down: _ReadyPosterior, kernel: ReadyKernel, rows: Rows
) -> tuple[jax.Array, jax.Array]:
  """Computes the bound [] of a client, in nats, and its squared residuals []."""
  features = ready_features(feature_map, kernel, rows.x)
  value, squares = blr.majoriser(
    features, rows.y, down.fitted, down.covariance, rows.mask
  )
  if not isinstance(down.trace_weight, tuple):
    missing = last_layer.missing_variance(feature_map, kernel, rows)
    value += down.trace_weight * missing
  return value, squares


class GradientMessage(NamedTuple):
  """Up: a client's part of the gradient; summable."""

  # Gradient of the bound in θ, but for what goes by way of what all rows share.
  theta: Any
  squares: jax.Array  # [] its squared residuals.


def follow_gradient(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  *,
  min_noise_std: float,
  safeguard: bool = False,
) -> Exchange:
  """Makes an exchange in which the server takes a step along the exact gradient.

  Args:
    feature_map: The kernel.
    optimizer: The server's optimiser.
    min_noise_std: Floor of σ.
    safeguard: Whether a direction that went too far is stepped again, and shorter.
  """

  def broadcast(state: ServerState, server_set: ServerSet | None) -> PosteriorMessage:
    del server_set
    return _posterior_message(state)

  def client(
    down: _ReadyPosterior, own: Own, rows: Rows
  ) -> tuple[GradientMessage, Own, Report]:
    def bound(theta: Any) -> tuple[jax.Array, jax.Array]:
      return _bound(feature_map, down, down.kernel._replace(theta=theta), rows)

    theta = down.kernel.theta
    (value, squares), gradient = jax.value_and_grad(bound, has_aux=True)(theta)
    loss = value / jnp.sum(rows.mask, dtype=value.dtype)
    report = loss_report(loss, gradient, rows.y.dtype)
    return GradientMessage(gradient, squares), own, report

  def server(
    state: ServerState, server_set: ServerSet | None, total: GradientMessage
  ) -> ServerState:
    del server_set
    descent, params = state.optimizer, state.params
    by_scales = blr.scale_gradient(
      state.stats, state.posterior, descent.covariance, total.squares
    )
    if not isinstance(descent.missing, tuple):
      twice = 2.0 * trace_weight(state.posterior) * descent.missing
      by_scales = (by_scales[0] - twice, by_scales[1] + twice)
    by_theta = total.theta
    if feature_map.shared is not None:
      by_theta = jax.tree.map(jnp.add, by_theta, _by_shared(feature_map, state))
    if feature_map.penalty is not None:
      slope = jax.grad(feature_map.penalty)(params.theta)
      by_theta = jax.tree.map(lambda a, b: a + b.astype(a.dtype), by_theta, slope)
    gradient = jax.tree.map(
      lambda leaf, like: (leaf / state.stats.count.astype(leaf.dtype)).astype(
        like.dtype
      ),
      ModelParams(by_theta, *by_scales),
      params,
    )
    direction, optimizer_state = _direction(optimizer, gradient, descent, params)
    step = jnp.ones_like(descent.step)
    if safeguard:
      direction, optimizer_state = jax.tree.map(
        lambda a, b: jnp.where(descent.failed, a, b),
        (descent.direction, descent.optimizer),
        (direction, optimizer_state),
      )
      step = descent.step
    trial = jax.tree.map(lambda p, d: p + (step * d).astype(p.dtype), params, direction)
    descent = descent.replace(
      optimizer=optimizer_state, kept=params, direction=direction, step=step
    )
    return state.replace(params=keep_above(min_noise_std, trial), optimizer=descent)

  return Exchange(
    "gradient",
    broadcast,
    client,
    server,
    prepare=partial(_ready, feature_map),
    any_length=True,
  )


def _by_shared(feature_map: urk.FeatureMap, state: ServerState) -> Any:
  """Computes the gradient in θ by way of what all rows share; no client is asked.

  Σ c φᵀ over all rows, with c the gradient in a row's features, is known from the
  posterior: where w̄ solves its equations, it is I - (A⁻¹ + w̄w̄ᵀ)/λ².
  """
  assert feature_map.shared is not None
  fitted, descent = state.posterior, state.optimizer
  second = descent.covariance + jnp.outer(fitted.mean, fitted.mean)
  products = jnp.eye(len(second), dtype=second.dtype) - second / fitted.prior_std**2
  if not isinstance(descent.missing, tuple):
    products -= 2.0 * trace_weight(fitted) * state.stats.gram
  params = urk.FeatureParams(state.omega, state.params.theta)
  shared = urk.shared_part(feature_map, params)
  return feature_map.shared.gradient(params, shared, products)


def _direction(
  optimizer: optax.GradientTransformation,
  gradient: ModelParams,
  descent: Descent,
  params: ModelParams,
) -> tuple[Any, Any]:
  """Computes the optimiser's updates, in the parameters' types, and its new state."""
  # Optax raises floats to integer powers, which strict promotion refuses.
  with jax.numpy_dtype_promotion("standard"):
    updates, new = optimizer.update(gradient, descent.optimizer, params)
  cast = jax.tree.map(lambda a, b: a.astype(b.dtype), updates, params)
  return cast, jax.tree.map(lambda a, b: a.astype(b.dtype), new, descent.optimizer)


class BoundMessage(NamedTuple):
  """Down: what local steps on the bound need."""

  posterior: PosteriorMessage
  log_noise_std: jax.Array  # []
  log_prior_std: jax.Array  # []
  step: jax.Array  # [] by which the learning rate is multiplied.


def follow_majoriser(
  feature_map: urk.FeatureMap,
  learning_rate: float,
  *,
  num_local_steps: int,
  min_noise_std: float,
) -> Exchange:
  """Makes an exchange of local steps on the bound, averaged by rows.

  Args:
    feature_map: The kernel.
    learning_rate: Adam's, for the local steps.
    num_local_steps: Steps of each client.
    min_noise_std: Floor of σ.
  """
  aggregator = aggregation.mean(by_rows=True)

  def broadcast(state: ServerState, server_set: ServerSet | None) -> BoundMessage:
    del server_set
    params = state.params
    return BoundMessage(
      _posterior_message(state),
      params.log_noise_std,
      params.log_prior_std,
      state.optimizer.step,
    )

  def client(down: BoundMessage, own: Own, rows: Rows) -> tuple[Message, Own, Report]:
    ready = _ready(feature_map, down.posterior, rows.x)
    omega = ready.kernel.omega

    def bound(theta: Any) -> jax.Array:
      # What rows share moves with θ.
      shared = urk.shared_part(feature_map, urk.FeatureParams(omega, theta))
      kernel = ReadyKernel(theta, omega, shared)
      return _bound(feature_map, ready, kernel, rows)[0]

    count = jnp.sum(rows.mask, dtype=down.posterior.covariance.dtype)
    params = ModelParams(down.posterior.theta, down.log_noise_std, down.log_prior_std)
    local, losses = descend(
      lambda params: bound(params.theta) / count,
      adam(learning_rate * down.step),
      num_local_steps,
      params,
      partial(keep_above, min_noise_std),
    )
    message = aggregator.message(local, (), rows, ())
    return message, own, loss_report(losses[-1], local, rows.y.dtype)

  def server(
    state: ServerState, server_set: ServerSet | None, total: Message
  ) -> ServerState:
    trial = aggregator.combine(state.params, state.omega, total, server_set)
    descent = state.optimizer.replace(kept=state.params)
    return state.replace(params=trial, optimizer=descent)

  return Exchange("local steps on the bound", broadcast, client, server)
