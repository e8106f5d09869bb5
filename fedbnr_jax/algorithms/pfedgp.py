"""pFedGP for regression: a deep kernel that is shared, a Gaussian process each.

Clients train network, inducing inputs in its latent space and kernel scales together,
on the FITC evidence of their own rows, or on the likelihood of one half of them given
the other, and all of these are averaged. Each client's
Gaussian process is then rebuilt from its own rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import linen as nn
from flax import struct

from fedbnr_jax import aggregation, fitc, networks
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
  copies,
  count_clients,
  no_floats,
  own_process,
)
from fedbnr_jax.clients import descend, keep_above, num_floats, unless_finite
from fedbnr_jax.federation import Clients, Federation, ServerSet
from fedbnr_jax.mapping import Placement
from fedbnr_jax.optimizers import adam
from fedbnr_jax.participation import Participation


class DeepKernel(struct.PyTreeNode):
  """What is trained and averaged."""

  network: Any
  inducing: jax.Array  # [I, E] in the latent space.
  scales: fitc.KernelParams


class Personal(struct.PyTreeNode):
  """A client's Gaussian process; stacked [K, ...] in the state."""

  process: fitc.Sparse
  nll: jax.Array  # [] per row, of its own rows.


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
    optimizer: Of the local steps; its state starts afresh every round.
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
    by_rows: Weight each client by its number of rows; plain mean otherwise.
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

  def init(key: chex.PRNGKey, federation: Federation) -> ServerState:
    x = federation.clients.x
    key_network, key_inducing = jax.random.split(key)
    theta = network.init(key_network, jnp.zeros(x.shape[1:], x.dtype))
    # Near the latent vectors, whose norm is one.
    inducing = jax.random.normal(key_inducing, (num_inducing, latent_size), x.dtype)
    scales = fitc.kernel_params(1.0, 1.0, initial_noise_std, x.dtype)
    params = DeepKernel(theta, inducing / latent_size**0.5, scales)
    nobody = jnp.zeros((1, latent_size), x.dtype)
    empty = fitc.fit(nobody, nobody[:, 0], params.inducing, scales, jnp.zeros(1, bool))
    own = Personal(empty, jnp.zeros((), empty.weights.dtype))
    zero = jnp.zeros((), jnp.int32)
    # What halves are drawn with; an array, which checkpoints hold.
    halves = jax.random.key_data(jax.random.fold_in(key, 1)) if predictive else ()
    state = ServerState(halves, params, (), (), zero, zero)
    state = state.replace(personal=copies(own, federation.num_clients))
    return placement.replicated(state)

  def predict(state: ServerState, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    latent = embed(state.params.network, x)
    mean, variance = jax.vmap(fitc.predict, in_axes=(0, None))(
      state.personal.process, latent
    )
    if with_noise:
      variance = variance + state.personal.process.params.noise_variance[:, None]
    return mean, variance

  def scales(state: ServerState) -> tuple[Any, Any]:
    return state.params.scales.noise_std, state.params.scales.output_std

  floor = partial(_project, min_noise_std)
  loss = partial(_loss, embed, train_scales=train_scales, predictive=predictive)
  learning = _learn_kernel(loss, optimizer, num_local_steps, floor, by_rows)
  return FederatedAlgorithm(
    init=init,
    stages=(Stage((learning, _own_processes(embed))),),
    train_nll=lambda state: jnp.mean(state.personal.nll),
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
  """Latent vectors [N, E] of rows x [N, D]."""
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
  state: ServerState,
  rows: Clients,
  *,
  train_scales: bool,
  predictive: bool,
) -> Callable[[DeepKernel], jax.Array]:
  """What a client descends in this round, per row []."""
  given = rows.mask
  if predictive:  # Drawn here, once, and not in every step.
    key = jax.random.fold_in(jax.random.wrap_key_data(state.omega), state.num_rounds)
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
  rows: Clients,
  given: jax.Array,
  inducing: jax.Array,
  scales: fitc.KernelParams,
) -> jax.Array:
  """Negative log likelihood [] per row of those that are not given [N]."""
  process = fitc.fit(latent, rows.y, inducing, scales, given)
  mean, variance = fitc.predict(process, latent)
  variance = variance + process.params.noise_variance
  square = (rows.y.astype(mean.dtype) - mean) ** 2 / variance
  nll = 0.5 * (jnp.log(2.0 * jnp.pi * variance) + square)
  asked = rows.mask & ~given
  total = jnp.sum(jnp.where(asked, nll, jnp.zeros_like(nll)))
  # A single row has nobody to be asked about.
  count = jnp.maximum(jnp.sum(asked, dtype=nll.dtype), 1.0)
  return (total / count).astype(latent.dtype)


def _learn_kernel(
  loss: Any,
  optimizer: optax.GradientTransformation,
  num_local_steps: int,
  floor: Any,
  by_rows: bool,
) -> Exchange:
  """Local steps, and the mean of what all have come to."""

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, jax.Array]:
    del server
    local, losses = descend(
      loss(state, rows), optimizer, num_local_steps, state.params, floor
    )
    message = aggregation.weighted(local, rows, by_rows=by_rows)
    return message, unless_finite(local, losses[-1], rows.y.dtype)

  def combine(
    state: ServerState, server: ServerSet | None, total: aggregation.Weighted
  ) -> ServerState:
    del server
    return state.replace(params=total.mean)

  def floats(state: ServerState, server: ServerSet | None) -> Floats:
    del server
    return Floats(num_floats(state.params), num_floats(state.params))

  return Exchange(client, combine, floats)


def _own_processes(embed: Any) -> Exchange:
  """Each client's Gaussian process, of its own rows; nothing is sent."""

  def client(
    state: ServerState, server: ServerSet | None, rows: Clients
  ) -> tuple[Any, Any]:
    del server
    params = state.params
    latent = embed(params.network, rows.x)
    own = Personal(*own_process(latent, rows, params.inducing, params.scales))
    return jnp.ones((), jnp.int32), (None, own)

  return Exchange(client, count_clients, no_floats, asks_all=True, keeps=True)


def from_config(config: ml_collections.ConfigDict) -> FederatedAlgorithm:
  """Method `pfedgp`."""
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
