"""pFedGP for regression: a deep kernel that is shared, a Gaussian process each.

Clients train network, inducing inputs in its latent space and kernel scales together,
on the FITC evidence of their own rows, or on the likelihood of one half of them given
the other, and all of these are averaged. Each client then rebuilds the Gaussian process
of its own rows.
"""

from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import linen as nn
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
from fedbnr_jax.federated.exchange import Exchange, Own, Report, Stage
from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.local_steps import descend, keep_above, loss_report
from fedbnr_jax.federated.optimizers import adam
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.federated.state import ServerState, State
from fedbnr_jax.gp import blr, fitc, networks

OBJECTIVES = ("evidence", "predictive")


class DeepKernel(struct.PyTreeNode):
  """What is trained and averaged."""

  network: Any
  inducing: jax.Array  # [I, E] in the latent space.
  scales: fitc.KernelParams


class KernelMessage(NamedTuple):
  """Down: where local steps start, and what halves of the rows are drawn from."""

  params: DeepKernel
  # For the predictive objective, otherwise ():
  seed: Any  # [2] uint32.
  round: Any  # [] int32, rounds that are done.


def pfedgp(
  network: nn.Module,
  optimizer: optax.GradientTransformation,
  *,
  num_local_steps: int,
  num_inducing: int,
  latent_size: int,
  normalise: bool = True,
  train_scales: bool = True,
  predictive: bool = False,
  by_rows: bool = False,
  with_noise: bool = True,
  initial_noise_std: float = 0.5,
  min_noise_std: float = 1e-3,
  participation: Participation = Participation(),  # noqa: B008  Immutable.
  placement: Placement = Placement(),  # noqa: B008
) -> FederatedAlgorithm:
  """Builds the method.

  Args:
    network: Maps x [N, D] to the latent space [N, E].
    optimizer: The clients' optimiser; its state starts afresh every round.
    num_local_steps: Full-batch steps of each client in a round.
    num_inducing: I, inducing inputs that all clients share.
    latent_size: E.
    normalise: Whether latent vectors are brought to norm one, as the authors' code
      does.
    train_scales: Whether length-scale, output scale and σ are trained too; the authors'
      code, for classification, keeps them fixed.
    predictive: Whether local steps raise the likelihood of a random half of the rows,
      drawn anew each round, given the other half, as the authors' code does; otherwise
      the evidence of all rows.
    by_rows: Whether each client weighs as much as it has rows; plain mean otherwise.
    with_noise: Whether variances are of y, or of the function alone.
    initial_noise_std: σ at the start, in units of the target's std.
    min_noise_std: Floor of σ.
    participation: Who takes part in a round; everybody has a Gaussian process.
    placement: On which devices, and how many clients at a time.
  """
  settings.check(
    participation,
    placement,
    num_local_steps=num_local_steps,
    num_inducing=num_inducing,
    initial_noise_std=initial_noise_std,
    min_noise_std=min_noise_std,
  )
  check_everybody(participation)
  embed = partial(embedding, network, normalise=normalise)

  def init_server(
    key: chex.PRNGKey, num_clients: int, rows: Rows, inputs: Any = ()
  ) -> ServerState:
    del num_clients, inputs
    dtype, zero = rows.x.dtype, jnp.zeros((), jnp.int32)
    key_network, key_inducing = jax.random.split(key)
    theta = network.init(key_network, rows.x)
    # Near the latent vectors, whose norm is one.
    inducing = jax.random.normal(key_inducing, (num_inducing, latent_size), dtype)
    scales = fitc.kernel_params(1.0, 1.0, initial_noise_std, dtype)
    return ServerState(
      num_rounds=zero,
      num_clients=zero,
      params=DeepKernel(theta, inducing / latent_size**0.5, scales),
      seed=jax.random.key_data(jax.random.fold_in(key, 1)) if predictive else (),
      client_nll=jnp.zeros((), blr.statistics_dtype()),
    )

  def init_client(
    key: chex.PRNGKey,
    number: jax.Array,
    num_clients: int,
    rows: Rows,
    inputs: Any = (),
  ) -> fitc.Sparse:
    del number
    params = init_server(key, num_clients, rows, inputs).params
    nothing = jnp.zeros((1, latent_size), rows.x.dtype)
    nobody = jnp.zeros(1, bool)
    return fitc.fit(nothing, nothing[:, 0], params.inducing, params.scales, nobody)

  def predict(state: State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    latent = embed(state.server.params.network, x)
    mean, variance = jax.vmap(fitc.predict, in_axes=(0, None))(state.own, latent)
    if with_noise:
      variance = variance + state.own.params.noise_variance[:, None]
    return mean, variance

  def scales(state: State) -> tuple[Any, Any]:
    trained = state.server.params.scales
    return trained.noise_std, trained.output_std

  floor = partial(_project, min_noise_std)
  loss = partial(_loss, embed, train_scales=train_scales, predictive=predictive)
  learning = _learn_kernel(
    loss, optimizer, num_local_steps, floor, by_rows=by_rows, predictive=predictive
  )
  return FederatedAlgorithm(
    init_server=init_server,
    init_client=init_client,
    stages=(Stage((learning, _own_processes(embed))),),
    train_nll=lambda state: state.client_nll,
    predict=predict,
    check=partial(check_inducing, "config.pfedgp.num_inducing", num_inducing),
    participation=participation,
    placement=placement,
    one_model_each=True,
    scales=scales,
    remedy="a smaller pfedgp.learning_rate (0: as learning_rate)",
  )


def embedding(
  network: nn.Module, theta: Any, x: jax.Array, *, normalise: bool
) -> jax.Array:
  """Computes latent vectors [N, E] of rows x [N, D]."""
  latent: Any = network.apply(theta, x)
  if not normalise:
    return jnp.asarray(latent)
  # The square root has no gradient at zero, where padding may be.
  squares = jnp.sum(latent**2, axis=1, keepdims=True)
  return latent / jnp.sqrt(squares + 1e-12)


def _project(min_noise_std: float, params: DeepKernel) -> DeepKernel:
  return params.replace(scales=keep_above(min_noise_std, params.scales))


def _loss(
  embed: Any,
  down: KernelMessage,
  rows: Rows,
  *,
  train_scales: bool,
  predictive: bool,
) -> Any:
  """Makes the function of a DeepKernel that a client descends, [] per row."""
  given = rows.mask
  if predictive:  # Drawn here, once, and not in every step.
    key = jax.random.fold_in(jax.random.wrap_key_data(down.seed), down.round)
    given = random_half(key, rows.mask)

  def loss(params: DeepKernel) -> jax.Array:
    scales = params.scales
    if not train_scales:
      scales = jax.lax.stop_gradient(scales)
    latent = embed(params.network, rows.x)
    if predictive:
      return _half_given_the_other(latent, rows, given, params.inducing, scales)
    nll = fitc.negative_log_marginal_likelihood(
      latent, rows.y, params.inducing, scales, rows.mask
    )
    return nll / jnp.sum(rows.mask, dtype=nll.dtype)

  return loss


def random_half(key: chex.PRNGKey, mask: jax.Array) -> jax.Array:
  """Marks [N] a half, or one more, of the rows that `mask` [N] admits."""
  score = jnp.where(mask, jax.random.uniform(key, mask.shape, jnp.float32), 2.0)
  rank = jnp.argsort(jnp.argsort(score))  # Padding last.
  return mask & (2 * rank < jnp.sum(mask))


def _half_given_the_other(
  latent: jax.Array,
  rows: Rows,
  given: jax.Array,
  inducing: jax.Array,
  scales: fitc.KernelParams,
) -> jax.Array:
  """Computes the negative log likelihood [] per row of those not `given` [N]."""
  process = fitc.fit(latent, rows.y, inducing, scales, given)
  mean, variance = fitc.predict(process, latent)
  variance = variance + process.params.noise_variance
  square = (rows.y.astype(mean.dtype) - mean) ** 2 / variance
  nll = 0.5 * (jnp.log(2.0 * jnp.pi * variance) + square)
  other = rows.mask & ~given
  total = jnp.sum(jnp.where(other, nll, jnp.zeros_like(nll)))
  # A single row leaves no other half.
  count = jnp.maximum(jnp.sum(other, dtype=nll.dtype), 1.0)
  return (total / count).astype(latent.dtype)


def _learn_kernel(
  loss: Any,
  optimizer: optax.GradientTransformation,
  num_local_steps: int,
  floor: Any,
  *,
  by_rows: bool,
  predictive: bool,
) -> Exchange:
  """Makes an exchange: the kernel down, local steps, the mean of all kernels."""

  def broadcast(state: ServerState, server_set: ServerSet | None) -> KernelMessage:
    del server_set
    if predictive:
      return KernelMessage(state.params, state.seed, state.num_rounds)
    return KernelMessage(state.params, (), ())

  def client(
    down: KernelMessage, own: Own, rows: Rows
  ) -> tuple[aggregation.Weighted, Own, Report]:
    local, losses = descend(
      loss(down, rows), optimizer, num_local_steps, down.params, floor
    )
    message = aggregation.weighted(local, rows, by_rows=by_rows)
    return message, own, loss_report(losses[-1], local, rows.y.dtype)

  def server(
    state: ServerState, server_set: ServerSet | None, total: aggregation.Weighted
  ) -> ServerState:
    del server_set
    return state.replace(params=total.mean)

  return Exchange("kernel", broadcast, client, server)


def _own_processes(embed: Any) -> Exchange:
  """Makes an exchange after which each client has the process of its own rows."""

  def broadcast(state: ServerState, server_set: ServerSet | None) -> DeepKernel:
    del server_set
    return state.params

  def client(
    down: DeepKernel, own: Own, rows: Rows
  ) -> tuple[OwnModelMessage, fitc.Sparse, Report]:
    del own
    latent = embed(down.network, rows.x)
    process, nll = own_process(latent, rows, down.inducing, down.scales)
    return own_model_message(nll), process, {}

  return Exchange("own process", broadcast, client, note_models, everybody=True)


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Builds method `pfedgp`."""
  options = config.pfedgp
  network = networks.Extractor(
    config.hidden_size,
    config.latent_size,
    config.num_hidden_layers,
    jnp.dtype(config.dtype),
  )
  return pfedgp(
    network,
    adam(options.learning_rate or config.learning_rate),
    num_local_steps=config.num_local_steps,
    num_inducing=options.num_inducing,
    latent_size=config.latent_size,
    normalise=options.normalise,
    train_scales=options.train_scales,
    predictive=options.objective == "predictive",
    by_rows=config.mean.by_rows,
    with_noise=config.with_noise,
    initial_noise_std=config.initial_noise_std,
    min_noise_std=config.min_noise_std,
    **settings.from_config(config),
  )
