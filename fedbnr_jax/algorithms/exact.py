"""FedBNR by exact gradients: the federation takes the pooled model's own steps.

The global evidence is a function of summed statistics. Clients that know w̄ and A⁻¹ pull
its gradient back through the network, each for its own rows, and the sum is the
gradient that pooling would give. A step is two exchanges: one sums gradients, the next
sums statistics under the new kernel.
"""

from typing import Any

import chex
import ml_collections
import optax

from fedbnr_jax.algorithms import fedbnr, kernels, last_layer, settings, wide_layer
from fedbnr_jax.algorithms import noise as noise_lib
from fedbnr_jax.algorithms.proposals import follow_gradient, follow_majoriser
from fedbnr_jax.algorithms.safeguard import accept_or_return, first_descent
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.exchange import Exchange, Stage
from fedbnr_jax.federated.federation import Rows
from fedbnr_jax.federated.optimizers import adam, lbfgs
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.federated.state import ServerState
from fedbnr_jax.gp import urk


def exact(
  feature_map: urk.FeatureMap,
  step: Exchange,
  optimizer: optax.GradientTransformation,
  *,
  num_steps: int,
  scales: last_layer.Scales = last_layer.trained_scales,
  safeguard: bool = False,
  fresh: bool = True,
  trace: bool = False,
  noise: str = "constant",
  with_noise: bool = True,
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
    trace: Whether the objective is the evidence with the trace term of Titsias (2009),
      which charges for what inducing features lose of the kernel's variance.
    noise: Of predictions, one of `noise.NOISES`.
    with_noise: Whether predicted variances are of y, or of the function alone.
    initial_noise_std: σ at the start, in units of the target's std.
    initial_prior_std: λ at the start.
    min_noise_std: Floor of σ.
    participation: Who takes part in a round; the steps are those of the evidence of
      their rows.
    placement: On which devices, and how many clients at a time.
    warm_up: Stages of the first rounds instead.
    num_warm_up: How many rounds.
  """
  settings.check(
    participation,
    placement,
    num_steps=num_steps,
    initial_noise_std=initial_noise_std,
    initial_prior_std=initial_prior_std,
    min_noise_std=min_noise_std,
  )
  everybody = participation.all_send_statistics
  learnt = noise_lib.learnt(noise, feature_map, everybody=everybody)
  start = last_layer.initial_state(
    feature_map,
    initial_noise_std,
    initial_prior_std,
    varying_noise=learnt.varies,
  )

  def init_server(
    key: chex.PRNGKey, num_clients: int, rows: Rows, inputs: Any = ()
  ) -> ServerState:
    state = start(key, num_clients, rows, inputs)
    descent = first_descent(state, optimizer.init(state.params), trace=trace)
    return state.replace(optimizer=descent)

  def begin(state: ServerState) -> ServerState:
    if not fresh:
      return state
    descent = state.optimizer.replace(optimizer=optimizer.init(state.params))
    return state.replace(optimizer=descent)

  first, again, from_all = _statistics(
    feature_map, scales, safeguard, participation, trace
  )
  stages: tuple[Stage, ...] = (
    Stage((first,), begin=begin),
    Stage((step, again), num_steps),
  )
  # The steps follow those who take part; the posterior may be of all clients' rows.
  if everybody and not participation.is_full:
    stages = (*stages, Stage((from_all,)))
  if learnt.exchanges:
    stages = (*stages, Stage(learnt.exchanges))
  return FederatedAlgorithm(
    init_server=init_server,
    stages=stages,
    train_nll=last_layer.train_nll,
    predict=last_layer.prediction(feature_map, with_noise=with_noise),
    held_out=learnt.held_out,
    participation=participation,
    placement=placement,
    warm_up=warm_up,
    num_warm_up=num_warm_up,
    remedy="a smaller central.learning_rate (0: as learning_rate)",
  )


def _statistics(
  feature_map: urk.FeatureMap,
  scales: last_layer.Scales,
  safeguard: bool,
  participation: Participation,
  trace: bool,
) -> tuple[Exchange, Exchange, Exchange]:
  """Makes the exchanges of statistics: before a step, after each, at the end."""
  full = participation.is_full

  def statistics(*, guarded: bool, everybody: bool = False) -> Exchange:
    exchange = last_layer.condition(
      feature_map,
      everybody=everybody,
      scales=scales,
      # Where σ and λ are the optimiser's, they are in the parameters already.
      feedback=scales is not last_layer.trained_scales,
      with_missing=trace,
    )
    # With the same clients as in the round before, the state is as it was left.
    return accept_or_return(
      exchange, guarded=guarded, unchanged=full, penalty=feature_map.penalty
    )

  return (
    statistics(guarded=False),
    statistics(guarded=safeguard),
    statistics(guarded=False, everybody=True),
  )


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `fedbnr-exact`; config.exact says how it departs from `central`."""
  feature_map, options = kernels.from_config(config), config.exact
  shared = fedbnr.common_settings(config, local_kernels=False)
  learning_rate = config.central.learning_rate or config.learning_rate
  floor = config.min_noise_std
  # Steps of anything but the plain method are trials, which may be taken back.
  economical = options.optimizer != "adam" or options.local_steps > 0
  scales = last_layer.trained_scales
  optimizer = OPTIMIZERS[options.optimizer](learning_rate)
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
  wide = kernels.wide_from_config(config)
  warm_up = fedbnr.narrow_from_config(config, fedbnr.mean_of(config))
  algorithm = exact(
    feature_map,
    step,
    optimizer,
    num_steps=config.central.num_steps or config.num_local_steps,
    scales=scales,
    safeguard=economical,
    # Gradients of other clients' rows tell nothing of curvature.
    fresh=options.optimizer == "adam" or not shared["participation"].is_full,
    trace=options.trace,
    noise="constant" if wide else options.noise,
    warm_up=warm_up.stages if num_warm_up else (),
    num_warm_up=num_warm_up,
    **shared,
  )
  return wide_layer.from_config(
    config,
    algorithm,
    algorithm.stages,
    scales=last_layer.evidence_scales,
    noise=options.noise,
  )


def _lbfgs(learning_rate: float) -> optax.GradientTransformation:
  del learning_rate  # Its steps have a length of their own.
  return lbfgs()


OPTIMIZERS = {"adam": adam, "lbfgs": _lbfgs}
