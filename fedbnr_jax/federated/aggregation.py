"""How the server makes one kernel of many: mean of parameters, kernel distillation.

An aggregator says what a client sends after its local steps, and what the server does
with the sum of what they sent.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.exchange import Message
from fedbnr_jax.federated.federation import Rows, ServerSet
from fedbnr_jax.federated.local_steps import descend, keep_above
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.kernel_model import ModelParams, features_of
from fedbnr_jax.names import require_choice

Scales = Literal["arithmetic", "log"]
SCALES: tuple[str, ...] = get_args(Scales)


class Aggregator(NamedTuple):
  """The client's side and the server's side of an aggregation."""

  # (server's set) -> what of it every client needs, as a part of the down message.
  inputs: Callable[[ServerSet | None], Message]
  # (local params, ω, own rows, inputs) -> up message, summed over clients.
  message: Callable[[ModelParams, Any, Rows, Message], Message]
  # (broadcast params, ω, summed message, server's set) -> new params.
  combine: Callable[[ModelParams, Any, Message, ServerSet | None], ModelParams]


class Weighted(struct.PyTreeNode):
  """A client's part of a mean; the sum over clients gives the mean."""

  values: Any  # Any tree of arrays, times the client's weight.
  weight: jax.Array  # [] the client's weight.

  @property
  def mean(self) -> Any:
    """The mean of the clients' values, once their parts are summed."""
    return jax.tree.map(lambda leaf: leaf / self.weight, self.values)


class Natural(struct.PyTreeNode):
  """Model parameters with σ and λ themselves in place of their logarithms."""

  theta: Any
  noise_std: jax.Array  # [] σ
  prior_std: jax.Array  # [] λ


def weighted(values: Any, rows: Rows, *, by_rows: bool) -> Weighted:
  """Weights a client's values by one, or by its number of rows."""
  dtype = jax.tree.leaves(values)[0].dtype
  weight = jnp.sum(rows.mask, dtype=dtype) if by_rows else jnp.ones((), dtype)
  return Weighted(jax.tree.map(lambda leaf: weight * leaf, values), weight)


def mean(*, scales: Scales = "arithmetic", by_rows: bool = False) -> Aggregator:
  """Averages the clients' parameters, σ and λ included, as FedAvg does.

  Args:
    scales: Whether σ and λ themselves are averaged, as the paper prints it, or their
      logarithms.
    by_rows: Whether each client weighs as much as it has rows; plain mean otherwise.
  """
  require_choice("scales", scales, SCALES)
  arithmetic = scales == "arithmetic"

  def message(params: ModelParams, omega: Any, rows: Rows, inputs: Message) -> Weighted:
    del omega, inputs
    values: Any = params
    if arithmetic:
      values = Natural(params.theta, params.noise_std, params.prior_std)
    return weighted(values, rows, by_rows=by_rows)

  def combine(
    params: ModelParams, omega: Any, total: Weighted, server_set: ServerSet | None
  ) -> ModelParams:
    del params, omega, server_set
    average = total.mean
    if not arithmetic:
      return average
    return ModelParams(
      average.theta, jnp.log(average.noise_std), jnp.log(average.prior_std)
    )

  return Aggregator(lambda server_set: (), message, combine)


class GramMessage(struct.PyTreeNode):
  """What a client sends for distillation; summable."""

  gram: jax.Array  # [Q(Q + 1)/2] triangle of its Gram on the server's inputs.
  count: jax.Array  # [] one.
  start: Any  # Weighted parameters, or () if the server starts from its own.


def distillation(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  *,
  num_steps: int,
  alpha: float,
  min_noise_std: float,
  start: Aggregator | None = None,
) -> Aggregator:
  """Distils kernels: the server fits the mean of the clients' Grams on its inputs.

  A client receives the server's inputs, never its targets, and sends its Gram on them.
  The paper has clients send their parameters and the server compute the Grams; the
  result is the same, and without `start` no client's parameters are sent.

  Args:
    feature_map: The kernel.
    optimizer: The server's optimiser.
    num_steps: Distillation steps in a round.
    alpha: Weight α of the match against the evidence of the server's own rows.
    min_noise_std: Floor of σ.
    start: An aggregator by `mean`, to start from the mean of the clients' parameters,
      which they then also send. Without it the steps start from the broadcast
      parameters, as the paper prints it.
  """
  if num_steps < 1:
    raise InputError(f"kd.num_steps must be at least 1, got {num_steps}.")
  if not alpha >= 0:
    raise InputError(f"kd.alpha must not be negative, got {alpha}.")

  def inputs(server_set: ServerSet | None) -> jax.Array:
    return _required(server_set).x

  def message(
    params: ModelParams, omega: Any, rows: Rows, inputs: jax.Array
  ) -> GramMessage:
    features = features_of(feature_map, params.theta, omega, inputs)
    gram = jnp.matmul(features, features.T, precision="highest")
    own = start.message(params, omega, rows, ()) if start else ()
    return GramMessage(blr.pack(gram), jnp.ones((), gram.dtype), own)

  def combine(
    params: ModelParams, omega: Any, total: GramMessage, server_set: ServerSet | None
  ) -> ModelParams:
    server_set = _required(server_set)
    if start:
      params = start.combine(params, omega, total.start, server_set)
    mean_gram = blr.unpack(total.gram / total.count)
    loss = distillation_loss(feature_map, omega, server_set, mean_gram, alpha)
    floor = partial(keep_above, min_noise_std)
    return descend(loss, optimizer, num_steps, params, floor)[0]

  return Aggregator(inputs, message, combine)


def distillation_loss(
  feature_map: urk.FeatureMap,
  omega: Any,
  server_set: ServerSet,
  target_gram: jax.Array,
  alpha: float,
) -> Callable[[ModelParams], jax.Array]:
  """Makes the loss NLL_kd/n + (α/n²) ‖ΦΦᵀ − K̄‖² with K̄ [Q, Q] the mean Gram."""

  def loss(params: ModelParams) -> jax.Array:
    features = features_of(feature_map, params.theta, omega, server_set.x)
    nll = blr.negative_log_marginal_likelihood(
      features, server_set.y, params.noise_std, params.prior_std
    )
    gap = jnp.matmul(features, features.T, precision="highest") - target_gram
    return nll / server_set.y.shape[0] + alpha * jnp.mean(gap**2)

  return loss


def _required(server_set: ServerSet | None) -> ServerSet:
  if server_set is None:
    raise InputError("kernel distillation needs a server set: see Federation.server.")
  return server_set
