"""How the server makes one kernel of many: mean of parameters, kernel distillation.

An aggregator is two pure functions: what a client says after its local steps, and
what the server does with the sum of what they said. That only the sum is read is
what lets clients stream by in chunks, and what secure aggregation needs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedbnr_jax import blr, urk
from fedbnr_jax.clients import ModelParams, descend, features_of, keep_above
from fedbnr_jax.errors import InputError
from fedbnr_jax.federation import Clients, ServerSet


class Aggregator(NamedTuple):
  """Client side and server side of an aggregation."""

  # (local params, ω, own rows, server's set) -> message, summed over clients.
  message: Callable[[ModelParams, Any, Clients, ServerSet | None], Any]
  # (broadcast params, ω, summed message, server's set) -> new params.
  combine: Callable[[ModelParams, Any, Any, ServerSet | None], ModelParams]
  # (params, server's set) -> floats in a client's message.
  floats: Callable[[ModelParams, ServerSet | None], int]


class Weighted(struct.PyTreeNode):
  """A client's part of a mean of parameters; summable."""

  params: Any  # Weighted sum of parameters.
  weight: jax.Array  # [] sum of weights.

  @property
  def mean(self) -> Any:
    return jax.tree.map(lambda leaf: leaf / self.weight, self.params)


def weighted(params: Any, rows: Clients, *, by_rows: bool) -> Weighted:
  """Any parameters with the weight of their client: one, or its number of rows."""
  dtype = jax.tree.leaves(params)[0].dtype
  weight = jnp.sum(rows.mask, dtype=dtype) if by_rows else jnp.ones((), dtype)
  return Weighted(jax.tree.map(lambda leaf: weight * leaf, params), weight)


def mean(
  *, scales: Literal["arithmetic", "log"] = "arithmetic", by_rows: bool = False
) -> Aggregator:
  """FedAvg: the mean of the clients' parameters, σ and λ included.

  Args:
    scales: Average σ and λ themselves, as printed, or their logarithms.
    by_rows: Weight each client by its number of rows; plain mean otherwise.
  """
  if scales not in ("arithmetic", "log"):
    raise InputError(f"scales must be 'arithmetic' or 'log', got {scales!r}.")

  def message(
    params: ModelParams, omega: Any, rows: Clients, server: ServerSet | None
  ) -> Weighted:
    del omega, server
    natural = _natural(params) if scales == "arithmetic" else params
    return weighted(natural, rows, by_rows=by_rows)

  def combine(
    params: ModelParams, omega: Any, total: Weighted, server: ServerSet | None
  ) -> ModelParams:
    del params, omega, server
    return _logarithmic(total.mean) if scales == "arithmetic" else total.mean

  def floats(params: ModelParams, server: ServerSet | None) -> int:
    del server
    return params.size

  return Aggregator(message, combine, floats)


def distillation(
  feature_map: urk.FeatureMap,
  optimizer: optax.GradientTransformation,
  *,
  num_steps: int,
  alpha: float,
  min_noise_std: float,
  start: Aggregator | None = None,
) -> Aggregator:
  """Kernel distillation: fit the mean of the clients' Gram matrices on X_kd.

  A client's message is its Gram on the server's inputs. The paper has clients send
  their parameters and the server compute the Grams; the result is the same, and this
  way, but for `start`, no client's parameters are sent.

  Args:
    feature_map: The kernel.
    optimizer: Of the server.
    num_steps: Distillation steps in a round.
    alpha: Weight α of the match against the evidence of the server's own rows.
    min_noise_std: Floor of σ.
    start: An aggregator by `mean`, to start from the mean of the clients' parameters,
      which they then also send. Without it, from the broadcast ones, as printed.
  """
  if num_steps < 1:
    raise InputError(f"kd.num_steps must be at least 1, got {num_steps}.")
  if not alpha >= 0:
    raise InputError(f"kd.alpha must not be negative, got {alpha}.")

  def message(
    params: ModelParams, omega: Any, rows: Clients, server: ServerSet | None
  ) -> tuple[jax.Array, Weighted | None, jax.Array]:
    server = _required(server)
    features = features_of(feature_map, params, omega, server.x)
    gram = jnp.matmul(features, features.T, precision="highest")
    own = start.message(params, omega, rows, server) if start else None
    return gram, own, jnp.ones((), gram.dtype)

  def combine(
    params: ModelParams, omega: Any, total: Any, server: ServerSet | None
  ) -> ModelParams:
    server = _required(server)
    gram_sum, own_sum, num_clients = total
    if start:
      params = start.combine(params, omega, own_sum, server)
    loss = distillation_loss(feature_map, omega, server, gram_sum / num_clients, alpha)
    floor = partial(keep_above, min_noise_std)
    return descend(loss, optimizer, num_steps, params, floor)[0]

  def floats(params: ModelParams, server: ServerSet | None) -> int:
    num_rows = _required(server).y.shape[0]
    # A symmetric matrix is sent as its triangle; X_kd goes down once, not counted.
    triangle = num_rows * (num_rows + 1) // 2
    return triangle + (start.floats(params, server) if start else 0)

  return Aggregator(message, combine, floats)


def distillation_loss(
  feature_map: urk.FeatureMap,
  omega: Any,
  server: ServerSet,
  target_gram: jax.Array,
  alpha: float,
) -> Callable[[ModelParams], jax.Array]:
  """NLL_kd/n + (α/n²) ‖ΦΦᵀ − K̄‖², with K̄ [Q, Q] the clients' mean Gram."""

  def loss(params: ModelParams) -> jax.Array:
    features = features_of(feature_map, params, omega, server.x)
    nll = blr.negative_log_marginal_likelihood(
      features, server.y, params.noise_std, params.prior_std
    )
    gap = jnp.matmul(features, features.T, precision="highest") - target_gram
    return nll / server.y.shape[0] + alpha * jnp.mean(gap**2)

  return loss


def _natural(params: ModelParams) -> ModelParams:
  return params.replace(log_noise_std=params.noise_std, log_prior_std=params.prior_std)


def _logarithmic(params: ModelParams) -> ModelParams:
  return params.replace(
    log_noise_std=jnp.log(params.log_noise_std),
    log_prior_std=jnp.log(params.log_prior_std),
  )


def _required(server: ServerSet | None) -> ServerSet:
  if server is None:
    raise InputError("kernel distillation needs a server set: see Federation.server.")
  return server
