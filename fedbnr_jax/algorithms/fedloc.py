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

from fedbnr_jax import aggregation, experts, fitc
from fedbnr_jax.algorithms import settings
from fedbnr_jax.algorithms.base import (
  Exchange,
  FederatedAlgorithm,
  Floats,
  ServerState,
  Stage,
)
from fedbnr_jax.algorithms.personal import (
  check_everybody,
  check_inducing,
  count_clients,
  no_floats,
  own_process,
)
from fedbnr_jax.clients import keep_above, num_floats, unless_finite
from fedbnr_jax.federation import Clients, Federation, ServerSet
from fedbnr_jax.mapping import Placement
from fedbnr_jax.participation import Participation


class Personal(struct.PyTreeNode):
  """What a client keeps; stacked [K, ...] in the state."""

  multipliers: fitc.KernelParams  # β, like the scales.
  inducing: jax.Array  # [I, D] some of its rows; never sent.
  process: fitc.Sparse
  nll: jax.Array  # [] per row, of its own rows.


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
    num_iterations: Of ADMM in a round.
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

  def init(key: chex.PRNGKey, federation: Federation) -> ServerState:
    clients, count = federation.clients, federation.num_clients
    dtype = clients.x.dtype
    shape = clients.x.shape[2:] if ard else ()
    lengths = jnp.full(shape, initial_length_scale, dtype)
    params = fitc.kernel_params(lengths, 1.0, initial_noise_std, dtype)
    keys = jax.random.split(key, count)
    # All rows are enough: more would only repeat some.
    num_own = min(num_inducing, clients.x.shape[1])

    def own(key: chex.PRNGKey, rows: Clients) -> Personal:
      inducing = fitc.choose_inducing(key, rows.x, rows.mask, num_own)
      nobody = jnp.zeros_like(rows.mask)
      process = fitc.fit(rows.x, rows.y, inducing, params, nobody)
      zeros = jax.tree.map(jnp.zeros_like, params)
      return Personal(zeros, inducing, process, jnp.zeros((), process.weights.dtype))

    personal = jax.vmap(own)(keys, jax.tree.map(lambda leaf: leaf[:count], clients))
    zero = jnp.zeros((), jnp.int32)
    state = ServerState((), params, (), (), zero, zero, personal=personal)
    return placement.replicated(state)

  def predict(state: ServerState, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    means, variances = jax.vmap(fitc.predict, in_axes=(0, None))(
      state.personal.process, x
    )
    scales = jax.tree.map(lambda leaf: leaf.astype(means.dtype), state.params)
    mean, variance = fuse(means, variances, scales.prior_variance)
    return mean, variance + scales.noise_variance if with_noise else variance

  return FederatedAlgorithm(
    init=init,
    stages=(
      Stage((_iterate(rho, proximity, min_noise_std),), num_iterations),
      Stage((_own_processes(),)),
    ),
    train_nll=lambda state: jnp.mean(state.personal.nll),
    predict=predict,
    check=partial(check_inducing, "config.fedloc.num_inducing", num_inducing),
    participation=participation,
    placement=placement,
    scales=lambda state: (state.params.noise_std, state.params.output_std),
    remedy="a larger fedloc.rho",
  )


def _evidence(params: fitc.KernelParams, rows: Clients) -> jax.Array:
  """Negative log evidence of a client's rows: a sum, which ρ is measured against."""
  return fitc.negative_log_marginal_likelihood(
    rows.x, rows.y, rows.memory.inducing, params, rows.mask
  )


def _iterate(rho: float, proximity: float, min_noise_std: float) -> Exchange:
  """One iteration of proximal ADMM."""

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, Any]:
    del server
    consensus, own = state.params, rows.memory
    value, gradient = jax.value_and_grad(_evidence)(consensus, rows)
    local, multipliers = admm_step(
      consensus, gradient, own.multipliers, rho=rho, proximity=proximity
    )
    message = jax.tree.map(lambda a, b: a + b / rho, local, multipliers)
    loss = value / jnp.sum(rows.mask, dtype=value.dtype)
    told = unless_finite(message, loss, rows.y.dtype)
    return aggregation.weighted(message, rows, by_rows=False), (
      told,
      own.replace(multipliers=multipliers),
    )

  def combine(
    state: ServerState, server: ServerSet | None, total: aggregation.Weighted
  ) -> ServerState:
    del server
    return state.replace(params=keep_above(min_noise_std, total.mean))

  def floats(state: ServerState, server: ServerSet | None) -> Floats:
    del server
    return Floats(num_floats(state.params), num_floats(state.params))

  return Exchange(client, combine, floats, keeps=True)


def admm_step(
  consensus: Any, gradient: Any, multipliers: Any, *, rho: float, proximity: float
) -> tuple[Any, Any]:
  """η and the new β of one client, all pytrees like the scales."""
  rate = 1.0 / (rho + proximity * rho)
  local = jax.tree.map(
    lambda z, g, b: z - rate * (g + b), consensus, gradient, multipliers
  )
  renewed = jax.tree.map(
    lambda b, n, z: b + rho * (n - z), multipliers, local, consensus
  )
  return local, renewed


def _own_processes() -> Exchange:
  """Each client's Gaussian process under the scales agreed on."""

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, Any]:
    del server
    process, nll = own_process(rows.x, rows, rows.memory.inducing, state.params)
    own = rows.memory.replace(process=process, nll=nll)
    return jnp.ones((), jnp.int32), (None, own)

  # The last iteration has sent the scales. What a prediction costs, two floats a row
  # and client, is not of the round.
  return Exchange(client, count_clients, no_floats, asks_all=True, keeps=True)


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `fedloc`: fused by the robust committee, the fair one."""
  return _with(config, config.fedloc.rule)


def product_from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `fedloc-poe`: fused by a product, probably as in the paper."""
  return _with(config, "poe")


def _with(config: ml_collections.ConfigDict, rule: str) -> FederatedAlgorithm:
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
