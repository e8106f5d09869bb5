"""FedBNR by exact gradients: the federation takes the pooled model's own steps.

The global evidence is a function of summed statistics. Told w̄ and A⁻¹, clients pull its
gradient back through the network, each for its rows, and the sum is the gradient that
pooling would give. A step is two trips: gradients up, new kernel down; statistics up.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import struct

from fedbnr_jax import aggregation, blr, urk
from fedbnr_jax.algorithms import fedbnr, last_layer
from fedbnr_jax.algorithms.base import (
  Exchange,
  FederatedAlgorithm,
  Floats,
  ServerState,
  Stage,
)
from fedbnr_jax.clients import ModelParams, descend, features_of, keep_above
from fedbnr_jax.errors import InputError
from fedbnr_jax.federation import Clients, Federation, ServerSet
from fedbnr_jax.mapping import Placement
from fedbnr_jax.optimizers import adam
from fedbnr_jax.participation import Participation

_SHRINK, _GROW = 0.25, 2.0  # Of the step, after a trial that failed or succeeded.


class Memory(struct.PyTreeNode):
  """What the server keeps between exchanges."""

  covariance: jax.Array  # [M, M] A⁻¹ under the parameters.
  optimizer: Any  # State of the optimiser.
  # For methods that take no step back:
  kept: ModelParams  # The last parameters that were accepted,
  value: jax.Array  # [] and their negative log evidence per row.
  direction: Any  # Of the last step, like the parameters.
  step: jax.Array  # [] part of the direction that is gone.
  failed: jax.Array  # [] bool, whether the last trial was taken back.


def exact(
  feature_map: urk.FeatureMap,
  step: Exchange,
  optimizer: optax.GradientTransformation,
  *,
  num_steps: int,
  scales: last_layer.Scales = last_layer.trained_scales,
  safeguard: bool = False,
  fresh: bool = True,
  varying_noise: bool = False,
  initial_noise_std: float = 0.5,
  initial_prior_std: float = 1.0,
  min_noise_std: float = 1e-3,
  participation: Participation = Participation(),  # noqa: B008  Immutable.
  placement: Placement = Placement(),  # noqa: B008
  warm_up: tuple[Stage, ...] = (),
  num_warm_up: int = 0,
) -> FederatedAlgorithm:
  """Builds the method from the exchange that proposes new parameters.

  Args:
    feature_map: The kernel.
    step: `follow_gradient` or `follow_majoriser`.
    optimizer: The one of `step`, for its state.
    num_steps: Steps in a round.
    scales: How σ and λ are found after every step: as the optimiser has left them, or
      by the statistics.
    safeguard: Take a step back if the global evidence falls, and try a shorter one.
    fresh: Whether the optimiser's state starts afresh every round.
    varying_noise: Whether the noise of predictions depends on the input.
    initial_noise_std: σ at the start, in units of the target's std.
    initial_prior_std: λ at the start.
    min_noise_std: Floor of σ.
    participation: Who takes part in a round; the steps are those of the evidence of
      their rows.
    placement: On which devices, and how many clients at a time.
    warm_up: Stages of the first rounds instead.
    num_warm_up: How many rounds.
  """
  fedbnr.check_positive(
    num_steps=num_steps,
    initial_noise_std=initial_noise_std,
    initial_prior_std=initial_prior_std,
    min_noise_std=min_noise_std,
    batch_size=1 if placement.batch_size is None else placement.batch_size,
  )
  participation.check()
  start = last_layer.initial_state(
    feature_map,
    initial_noise_std,
    initial_prior_std,
    placement,
    varying_noise=varying_noise,
  )

  def init(key: chex.PRNGKey, federation: Federation) -> ServerState:
    state = start(key, federation)
    wide = state.posterior.noise_std.dtype
    memory = Memory(
      covariance=_covariance(state),
      optimizer=optimizer.init(state.params),
      kept=state.params,
      value=jnp.zeros((), wide),
      direction=jax.tree.map(jnp.zeros_like, state.params),
      step=jnp.ones((), state.params.log_noise_std.dtype),
      failed=jnp.zeros((), bool),
    )
    return placement.replicated(state.replace(memory=memory))

  def begin(state: ServerState) -> ServerState:
    if not fresh:
      return state
    memory = state.memory.replace(optimizer=optimizer.init(state.params))
    return state.replace(memory=memory)

  def statistics(*, announces: bool, guarded: bool, all_too: bool = False) -> Exchange:
    exchange = last_layer.condition(
      feature_map,
      asks_all=all_too,
      scales=scales,
      feedback=True,
      announces=announces,
    )
    # With the same clients as in the round before, the state is as it was left.
    return exchange._replace(server=_judging(exchange, guarded, participation.is_full))

  asks_all = not participation.statistics_too
  # Statistics of those who take part in the steps, then, where it differs, of all.
  full = participation.is_full
  first = statistics(announces=full, guarded=False)
  again = statistics(announces=False, guarded=safeguard)
  stages: tuple[Stage, ...] = (
    Stage((first,), begin=begin),
    Stage((step, again), num_steps),
  )
  if asks_all and not full:
    stages = (
      *stages,
      Stage((statistics(announces=True, guarded=False, all_too=True),)),
    )
  if varying_noise:
    stages = (*stages, Stage(last_layer.learn_noise(feature_map, asks_all=asks_all)))
  return FederatedAlgorithm(
    init=init,
    stages=stages,
    train_nll=last_layer.train_nll,
    predict=last_layer.prediction(feature_map),
    participation=participation,
    placement=placement,
    warm_up=warm_up,
    num_warm_up=num_warm_up,
  )


def _judging(exchange: Exchange, guarded: bool, unchanged: bool) -> Any:
  """The server's side of the statistics: A⁻¹ too, and whether a trial is accepted.

  Args:
    exchange: The statistics.
    guarded: Whether a trial may be taken back.
    unchanged: Otherwise, whether nothing has changed since the last trial was judged.
  """

  def server(
    state: ServerState, server_set: ServerSet | None, total: Any
  ) -> ServerState:
    new = exchange.server(state, server_set, total)
    memory = state.memory
    value = last_layer.train_nll(new)
    accepted = memory.replace(
      covariance=_covariance(new),
      kept=new.params,
      value=value,
      step=jnp.minimum(1.0, _GROW * memory.step).astype(memory.step.dtype),
      failed=jnp.zeros((), bool),
    )
    if not guarded:
      failed = memory.failed if unchanged else accepted.failed
      return new.replace(memory=accepted.replace(step=memory.step, failed=failed))
    rejected = memory.replace(step=_SHRINK * memory.step, failed=jnp.ones((), bool))
    # Statistics and posterior of `state` are still those of what was kept.
    old = state.replace(params=memory.kept, memory=rejected)
    better = value <= memory.value  # False for NaN.
    return jax.tree.map(
      lambda a, b: jnp.where(better, a, b), new.replace(memory=accepted), old
    )

  return server


def _covariance(state: ServerState) -> jax.Array:
  return blr.weight_covariance(state.posterior)


def follow_gradient(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  *,
  min_noise_std: float,
  safeguard: bool = False,
) -> Exchange:
  """w̄ and A⁻¹ down, the pull-back through the network up, an optimiser's step."""

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, jax.Array]:
    del server

    def bound(theta: Any) -> tuple[jax.Array, jax.Array]:
      params = state.params.replace(theta=theta)
      return _majoriser(feature_map, state, params, rows)

    (value, squares), gradient = jax.value_and_grad(bound, has_aux=True)(
      state.params.theta
    )
    loss = value / jnp.sum(rows.mask, dtype=value.dtype)
    return (gradient, squares), fedbnr.unless_finite(gradient, loss, rows.y.dtype)

  def server(
    state: ServerState, server_set: ServerSet | None, total: Any
  ) -> ServerState:
    del server_set
    by_theta, squares = total
    memory, params = state.memory, state.params
    by_scales = blr.scale_gradient(
      state.stats, state.posterior, memory.covariance, squares
    )
    gradient = jax.tree.map(
      lambda leaf, like: (leaf / state.stats.count.astype(leaf.dtype)).astype(
        like.dtype
      ),
      ModelParams(by_theta, *by_scales),
      params,
    )
    direction, optimizer_state = _direction(optimizer, gradient, memory, params)
    step = jnp.ones_like(memory.step)
    if safeguard:  # A direction that went too far is gone again, and shorter.
      direction, optimizer_state = jax.tree.map(
        lambda a, b: jnp.where(memory.failed, a, b),
        (memory.direction, memory.optimizer),
        (direction, optimizer_state),
      )
      step = memory.step
    trial = jax.tree.map(lambda p, d: p + (step * d).astype(p.dtype), params, direction)
    memory = memory.replace(
      optimizer=optimizer_state, kept=params, direction=direction, step=step
    )
    return state.replace(params=keep_above(min_noise_std, trial), memory=memory)

  def floats(state: ServerState, server_set: ServerSet | None) -> Floats:
    del server_set
    num_kernel = state.params.size - 2  # σ and λ are the server's.
    return Floats(num_kernel + 1, last_layer.num_floats(state.stats))

  return Exchange(client, server, floats)


def _direction(
  optimizer: optax.GradientTransformation,
  gradient: ModelParams,
  memory: Memory,
  params: ModelParams,
) -> tuple[Any, Any]:
  """The optimiser's updates, in the parameters' types, and its new state."""
  # Optax raises floats to integer powers, which strict promotion refuses.
  with jax.numpy_dtype_promotion("standard"):
    updates, new = optimizer.update(gradient, memory.optimizer, params)
  cast = jax.tree.map(lambda a, b: a.astype(b.dtype), updates, params)
  return cast, jax.tree.map(lambda a, b: a.astype(b.dtype), new, memory.optimizer)


def follow_majoriser(
  feature_map: urk.FeatureMap,
  learning_rate: float,
  *,
  num_local_steps: int,
  min_noise_std: float,
) -> Exchange:
  """w̄ and A⁻¹ down, local steps on the bound, parameters up, their mean by rows."""
  aggregator = aggregation.mean(by_rows=True)

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, jax.Array]:
    count = jnp.sum(rows.mask, dtype=state.memory.value.dtype)

    def bound(params: ModelParams) -> jax.Array:
      return _majoriser(feature_map, state, params, rows)[0] / count

    local, losses = descend(
      bound,
      adam(learning_rate * state.memory.step),
      num_local_steps,
      min_noise_std,
      state.params,
    )
    message = aggregator.message(local, state.omega, rows, server)
    return message, fedbnr.unless_finite(local, losses[-1], rows.y.dtype)

  def server(
    state: ServerState, server_set: ServerSet | None, total: Any
  ) -> ServerState:
    trial = aggregator.combine(state.params, state.omega, total, server_set)
    memory = state.memory.replace(kept=state.params)
    return state.replace(params=trial, memory=memory)

  def floats(state: ServerState, server_set: ServerSet | None) -> Floats:
    return Floats(
      aggregator.floats(state.params, server_set), last_layer.num_floats(state.stats)
    )

  return Exchange(client, server, floats)


def _majoriser(
  feature_map: urk.FeatureMap, state: ServerState, params: ModelParams, rows: Clients
) -> tuple[jax.Array, jax.Array]:
  features = features_of(feature_map, params, state.omega, rows.x)
  return blr.majoriser(
    features, rows.y, state.posterior, state.memory.covariance, rows.mask
  )


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `fedbnr-exact`; what is not as `central` has it stands in config.exact."""
  feature_map, options = urk.from_config(config), config.exact
  settings = fedbnr.common_settings(config)
  learning_rate = config.central.learning_rate or config.learning_rate
  floor = config.min_noise_std
  # Anything but the plain method takes no step back.
  economical = options.optimizer != "adam" or options.local_steps > 0
  scales = last_layer.trained_scales
  optimizer = _OPTIMIZERS[options.optimizer](learning_rate)
  if options.local_steps:
    if options.optimizer != "adam":
      raise InputError(
        "config.exact.local_steps are Adam's: leave config.exact.optimizer at 'adam'."
      )
    scales = last_layer.improved_scales  # They are no part of the local steps.
    step = follow_majoriser(
      feature_map,
      learning_rate,
      num_local_steps=options.local_steps,
      min_noise_std=floor,
    )
  else:
    step = follow_gradient(
      feature_map,
      optimizer,
      min_noise_std=floor,
      safeguard=economical,
    )
  num_warm_up = options.warm_start_rounds
  return exact(
    feature_map,
    step,
    optimizer,
    num_steps=config.central.num_steps or config.num_local_steps,
    scales=scales,
    safeguard=economical,
    # Gradients of other clients' rows tell nothing of curvature.
    fresh=options.optimizer == "adam" or not settings["participation"].is_full,
    varying_noise=options.noise == "varying",
    warm_up=fedbnr.from_config(config).stages if num_warm_up else (),
    num_warm_up=num_warm_up,
    **settings,
  )


def _lbfgs(learning_rate: float) -> optax.GradientTransformation:
  del learning_rate  # Its steps have a length of their own.
  return optax.chain(optax.scale_by_lbfgs(memory_size=10), optax.scale(-1.0))


_OPTIMIZERS = {"adam": adam, "lbfgs": _lbfgs}
