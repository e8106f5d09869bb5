"""Unifying random kernel: a feature map g(ω, x), lifted over ω-samples and rows.

A kernel is k(x, x') = E_ω[g(ω, x)ᵀ g(ω, x')]. Given S draws of ω, the features
of x are the S vectors g(ω_r, x) side by side, divided by √(S−1), so that their
inner product is the paper's URK(x, x'). Any distribution of ω and any g give a
positive semi-definite kernel; `from_function` takes both.

Every map has the interface of `FeatureMap`. Its parameters keep the draws of ω,
made once and shared by all clients, apart from θ, which is trained.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct

from fedbnr_jax.errors import InputError

# One ω and one x, both without a batch axis: (θ, ω, x [D]) -> [d] or [].
RandomFeature = Callable[[Any, Any, jax.Array], jax.Array]
# Draws ω for inputs of the shape and dtype of x: (key, x [D]) -> pytree.
SampleOmega = Callable[[chex.PRNGKey, jax.Array], Any]
InitTheta = Callable[[chex.PRNGKey, Any, jax.Array], Any]
# What a network makes of all rows at once: (θ, ω [S, ...], x [N, D]) -> [N, E], or
# [N, S, E] where each sample sees a row in its own way.
Embed = Callable[[Any, Any, jax.Array], jax.Array]


class FeatureParams(struct.PyTreeNode):
  """Parameters of a feature map."""

  omega: Any  # [S, ...] draws of ω; constants.
  theta: Any  # Trained pytree; empty for a fixed kernel.


class Shared(NamedTuple):
  """What of a feature map all rows share: a matrix R(θ), φ(x) = R(θ) u(θ, x).

  It is computed once for all rows. In a gradient it can be left to whoever has sums:
  with c_n the gradient of a loss in the features of row n, R needs nothing of the rows
  but H = Σ c_n φ_nᵀ [M, M].
  """

  # Parameters -> a pytree of arrays.
  compute: Callable[[FeatureParams], Any]
  # (parameters, x [N, D], what `compute` gives) -> features [N, M].
  apply: Callable[[FeatureParams, jax.Array, Any], jax.Array]
  # (parameters, what `compute` gives, H [M, M]) -> gradient in θ by way of R.
  gradient: Callable[[FeatureParams, Any, jax.Array], Any]


class FeatureMap(NamedTuple):
  """A kernel as pure functions, as in Flax and Optax."""

  # (key, x [N, D], inputs) -> parameters; only the shape and type of x matter. `inputs`
  # is what is publicly known of the inputs, an `InputSummary`, or () for nothing.
  init: Callable[..., FeatureParams]
  apply: Callable[[FeatureParams, jax.Array], jax.Array]  # x [N, D] -> [N, M]
  # (key, x [N, D], inputs) -> ω [S, ...], the draws that `init` makes of the same key.
  draw: Callable[..., Any]
  # The squared norm of the features of every row, where all rows have the same one.
  squared_norm: float | None = None
  # θ -> [] what the squared norm of no row's features exceeds, where there is a bound.
  norm_bound: Callable[[Any], jax.Array] | None = None
  # (parameters, x [N, D], shared) -> [N] what k(x, x) has more than the features'
  # squared norm, where they lose some of the kernel, as inducing features do.
  missing: Callable[[FeatureParams, jax.Array, Any], jax.Array] | None = None
  # Whether draws need an `InputSummary`.
  needs_inputs: bool = False
  # θ -> [] nats that the prior of θ adds to the negative log evidence.
  penalty: Callable[[Any], jax.Array] | None = None
  # What all rows share, where that is worth computing once.
  shared: Shared | None = None


class Source(NamedTuple):
  """What ω is drawn from, which goes over the wire in its place."""

  seed: jax.Array  # [2] uint32, `jax.random.key_data` of the key that `init` was given.
  inputs: Any = ()  # An InputSummary where the kernel draws inputs, else ().


def num_features(feature_map: FeatureMap, x: jax.Array, inputs: Any = ()) -> int:
  """Counts the features M that a map gives to rows x [N, D]."""
  params = jax.eval_shape(feature_map.init, jax.random.key(0), x, inputs)
  return jax.eval_shape(feature_map.apply, params, x).shape[-1]


def draw_omega(feature_map: FeatureMap, source: Source, x: jax.Array) -> Any:
  """Draws ω [S, ...], so that its source can be sent in its place.

  Args:
    feature_map: The kernel.
    source: The seed, and what is known of the inputs.
    x: [N, D] rows, of which only the shape and type matter.
  """
  key = jax.random.wrap_key_data(source.seed)
  return feature_map.draw(key, jnp.zeros_like(x), source.inputs)


def shared_part(feature_map: FeatureMap, params: FeatureParams) -> Any:
  """Computes what of the features all rows share; () where that is nothing."""
  return feature_map.shared.compute(params) if feature_map.shared else ()


def apply_shared(
  feature_map: FeatureMap, params: FeatureParams, x: jax.Array, shared: Any
) -> jax.Array:
  """Computes features [N, M] of rows x [N, D], given what `shared_part` gives."""
  if feature_map.shared is None:
    return feature_map.apply(params, x)
  return feature_map.shared.apply(params, x, shared)


def from_function(
  g: RandomFeature,
  sample_omega: SampleOmega,
  num_samples: int,
  init_theta: InitTheta | None = None,
  embed: Embed | None = None,
  *,
  unit_norm: bool = False,
) -> FeatureMap:
  """Lifts `g`, written for one ω and one x, to rows and S samples.

  Args:
    g: Maps (θ, ω, x [D]) to d features [d], or to one feature [].
    sample_omega: Draws one ω, given a key and one row x [D].
    num_samples: S, the number of draws; at least 2.
    init_theta: Makes θ from a key, one ω and one x [D]; without it θ is empty.
    embed: A network that wants all rows at once; `g` then sees what it makes of x in
      place of x.
    unit_norm: Whether every g(ω, x) has norm one, as a cosine and sine have.

  Returns:
    A feature map with M = d·S features.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax import urk
    >>> kernel = urk.from_function(
    ...   g=lambda theta, omega, x: jnp.tanh(jnp.dot(omega, x)),
    ...   sample_omega=lambda key, x: jax.random.normal(key, x.shape, x.dtype),
    ...   num_samples=20,
    ... )
    >>> x = jnp.ones((5, 3))
    >>> kernel.apply(kernel.init(jax.random.key(0), x), x).shape
    (5, 20)
  """
  if num_samples < 2:
    raise InputError(f"num_samples must be at least 2, got {num_samples}.")

  def draw(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> Any:
    del inputs
    chex.assert_rank(x, 2)
    key_omega, _ = jax.random.split(key)
    keys = jax.random.split(key_omega, num_samples)
    return jax.vmap(sample_omega, in_axes=(0, None))(keys, x[0])

  def init(key: chex.PRNGKey, x: jax.Array, inputs: Any = ()) -> FeatureParams:
    omega = draw(key, x, inputs)
    _, key_theta = jax.random.split(key)
    one_omega = jax.tree.map(lambda draws: draws[0], omega)
    theta = {} if init_theta is None else init_theta(key_theta, one_omega, x[0])
    return FeatureParams(omega, theta)

  def apply(params: FeatureParams, x: jax.Array) -> jax.Array:
    chex.assert_rank(x, 2)
    # What depends on x alone is computed once for all samples, and what depends
    # on ω alone once for all rows: vmap batches only what it must.
    rows = x if embed is None else embed(params.theta, params.omega, x)
    by_sample = None if rows.ndim == 2 else 0
    over_samples = jax.vmap(g, in_axes=(None, 0, by_sample), out_axes=-1)
    over_rows = jax.vmap(over_samples, in_axes=(None, None, 0))
    features = over_rows(params.theta, params.omega, rows)  # [N, d, S] or [N, S]
    scale = jnp.asarray(num_samples - 1, features.dtype) ** -0.5
    return features.reshape(x.shape[0], -1) * scale

  if not unit_norm:
    return FeatureMap(init, apply, draw)
  return FeatureMap(init, apply, draw, *constant_norm(num_samples / (num_samples - 1)))


def constant_norm(squared: float) -> tuple[float, Callable[[Any], jax.Array]]:
  """Gives the two fields of a map in which every row has this squared norm."""
  return squared, lambda theta: jnp.asarray(squared)


def check_positive(**values: float) -> None:
  """Raises InputError for the first value that is not a positive number."""
  for name, value in values.items():
    if not value > 0:
      raise InputError(f"{name} must be positive, got {value}.")
