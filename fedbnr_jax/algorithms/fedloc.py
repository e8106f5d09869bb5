"""FedLoc: kernel scales agreed on by proximal ADMM, predictions fused from experts.

There is no network: the kernel is squared exponential on the inputs. In an iteration a
client steps from the consensus z, η = z − (g + β)/(ρ + L), with g the gradient of its
own evidence at z, renews its multipliers, β += ρ (η − z), and sends η + β/ρ, of which
the mean is the next z. Each client's Gaussian process is of its own rows, and theirs
are fused into one prediction.
"""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections
from flax import struct

from fedbnr_jax.algorithms import settings
from fedbnr_jax.algorithms.personal import (
  OwnModelMessage,
  check_everybody,
  check_inducing,
  note_models,
  own_model_message,
  own_process,
)
from fedbnr_jax.federated import aggregation
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.exchange import Exchange, Report, Stage
from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.local_steps import keep_above, loss_report
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.federated.state import ServerState, State
from fedbnr_jax.gp import blr, experts, fitc


class Expert(struct.PyTreeNode):
  """What a client keeps; none of it is ever sent."""

  multipliers: fitc.KernelParams  # β, like the scales.
  inducing: jax.Array  # [I, D] some of its rows.
  process: fitc.Sparse  # The Gaussian process of its own rows.


def fedloc(
  *,
  rho: float,
  proximity: float,
  num_iterations: int,
  num_inducing: int,
  rule: str,
  ard: bool = True,
  with_noise: bool = True,
  initial_length_scale: float = 1.0,
  initial_noise_std: float = 0.5,
  min_noise_std: float = 1e-3,
  participation: Participation = Participation(),  # noqa: B008  Immutable.
  placement: Placement = Placement(),  # noqa: B008
) -> FederatedAlgorithm:
  """Builds the method.

  Args:
    rho: ρ of ADMM, against gradients of summed, not mean, evidence.
    proximity: L/ρ.
    num_iterations: Iterations of ADMM in a round.
    num_inducing: I, inducing inputs of each client; with no more rows than these its
      process is exact.
    rule: How predictions are fused; see experts.py.
    ard: A length-scale for each input, or one for all.
    with_noise: Whether variances are of y, or of the function alone.
    initial_length_scale: At the start, in standard deviations of an input.
    initial_noise_std: σ at the start, in units of the target's std.
    min_noise_std: Floor of σ.
    participation: Who takes part in a round; everybody is an expert.
    placement: On which devices, and how many clients at a time.
  """
  settings.check(
    participation,
    placement,
    rho=rho,
    proximity=proximity,
    num_iterations=num_iterations,
    num_inducing=num_inducing,
    initial_length_scale=initial_length_scale,
    initial_noise_std=initial_noise_std,
    min_noise_std=min_noise_std,
  )
  check_everybody(participation)
  fuse = experts.fusion(rule)

  def scales_at_start(rows: Rows) -> fitc.KernelParams:
    dtype = rows.x.dtype
    lengths = jnp.full(rows.x.shape[1:] if ard else (), initial_length_scale, dtype)
    return fitc.kernel_params(lengths, 1.0, initial_noise_std, dtype)

  def init_server(
    key: chex.PRNGKey, num_clients: int, rows: Rows, inputs: Any = ()
  ) -> ServerState:
    del key, num_clients, inputs
    zero = jnp.zeros((), jnp.int32)
    return ServerState(
      num_rounds=zero,
      num_clients=zero,
      params=scales_at_start(rows),
      client_nll=jnp.zeros((), blr.statistics_dtype()),
    )

  def init_client(
    key: chex.PRNGKey,
    number: jax.Array,
    num_clients: int,
    rows: Rows,
    inputs: Any = (),
  ) -> Expert:
    del num_clients, inputs
    params = scales_at_start(rows)
    # All rows are enough: more would only repeat some.
    num_own = min(num_inducing, rows.x.shape[0])
    key = jax.random.fold_in(key, number)
    inducing = fitc.choose_inducing(key, rows.x, rows.mask, num_own)
    nobody = jnp.zeros_like(rows.mask)
    process = fitc.fit(rows.x, rows.y, inducing, params, nobody)
    return Expert(jax.tree.map(jnp.zeros_like, params), inducing, process)

  def predict(state: State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    means, variances = jax.vmap(fitc.predict, in_axes=(0, None))(state.own.process, x)
    scales = jax.tree.map(lambda leaf: leaf.astype(means.dtype), state.server.params)
    mean, variance = fuse(means, variances, scales.prior_variance)
    return mean, variance + scales.noise_variance if with_noise else variance

  return FederatedAlgorithm(
    init_server=init_server,
    init_client=init_client,
    stages=(
      Stage((_iterate(rho, proximity, min_noise_std),), num_iterations),
      Stage((_own_processes(),)),
    ),
    train_nll=lambda state: state.client_nll,
    predict=predict,
    check=partial(check_inducing, "config.fedloc.num_inducing", num_inducing),
    participation=participation,
    placement=placement,
    scales=_scales,
    remedy="a larger fedloc.rho",
  )


def _scales(state: State) -> tuple[jax.Array, jax.Array]:
  return state.server.params.noise_std, state.server.params.output_std


def _iterate(rho: float, proximity: float, min_noise_std: float) -> Exchange:
  """Makes one iteration of proximal ADMM: consensus down, η + β/ρ up."""

  def broadcast(state: ServerState, server_set: ServerSet | None) -> fitc.KernelParams:
    del server_set
    return state.params

  def client(
    down: fitc.KernelParams, own: Expert, rows: Rows
  ) -> tuple[aggregation.Weighted, Expert, Report]:
    def evidence(params: fitc.KernelParams) -> jax.Array:
      # The sum over rows, not the mean: ρ is measured against it.
      return fitc.negative_log_marginal_likelihood(
        rows.x, rows.y, own.inducing, params, rows.mask
      )

    value, gradient = jax.value_and_grad(evidence)(down)
    local, multipliers = admm_step(
      down, gradient, own.multipliers, rho=rho, proximity=proximity
    )
    message = jax.tree.map(lambda a, b: a + b / rho, local, multipliers)
    loss = value / jnp.sum(rows.mask, dtype=value.dtype)
    report = loss_report(loss, message, rows.y.dtype)
    own = own.replace(multipliers=multipliers)
    return aggregation.weighted(message, rows, by_rows=False), own, report

  def server(
    state: ServerState, server_set: ServerSet | None, total: aggregation.Weighted
  ) -> ServerState:
    del server_set
    return state.replace(params=keep_above(min_noise_std, total.mean))

  return Exchange("scales", broadcast, client, server)


def admm_step(
  consensus: Any, gradient: Any, multipliers: Any, *, rho: float, proximity: float
) -> tuple[Any, Any]:
  """Steps one client: returns η and the new β, trees like the scales."""
  rate = 1.0 / (rho + proximity * rho)
  local = jax.tree.map(
    lambda z, g, b: z - rate * (g + b), consensus, gradient, multipliers
  )
  renewed = jax.tree.map(
    lambda b, n, z: b + rho * (n - z), multipliers, local, consensus
  )
  return local, renewed


def _own_processes() -> Exchange:
  """Makes an exchange after which each client has its process under the scales.

  What a prediction costs, two floats a row and client, is no part of the round.
  """

  def broadcast(state: ServerState, server_set: ServerSet | None) -> fitc.KernelParams:
    del server_set
    return state.params

  def client(
    down: fitc.KernelParams, own: Expert, rows: Rows
  ) -> tuple[OwnModelMessage, Expert, Report]:
    process, nll = own_process(rows.x, rows, own.inducing, down)
    return own_model_message(nll), own.replace(process=process), {}

  return Exchange("own process", broadcast, client, note_models, everybody=True)


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `fedloc`, fused by the robust committee, the fair one."""
  return _build(config, config.fedloc.rule)


def product_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `fedloc-poe`, fused by a product, probably as in the paper."""
  return _build(config, "poe")


def _build(config: ml_collections.ConfigDict, rule: str) -> FederatedAlgorithm:
  options = config.fedloc
  return fedloc(
    rho=options.rho,
    proximity=options.proximity,
    num_iterations=options.num_iterations,
    num_inducing=options.num_inducing,
    rule=rule,
    ard=options.ard,
    with_noise=config.with_noise,
    initial_length_scale=options.length_scale,
    initial_noise_std=config.initial_noise_std,
    min_noise_std=config.min_noise_std,
    **settings.from_config(config),
  )
