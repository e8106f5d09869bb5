"""Computes the sufficient statistics of the last layer, which add over clients."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
from flax import struct


class SufficientStats(struct.PyTreeNode):
  """The statistics hold all that the posterior needs of a client's rows.

  `a + b` are the statistics of the rows of both clients.
  """

  gram: jax.Array  # [M, M] S = ΦᵀΦ.
  moment: jax.Array  # [M] b = Φᵀy.
  energy: jax.Array  # [] yᵀy.
  count: jax.Array  # [] N, the number of rows, as a float.

  def __add__(self, other: "SufficientStats") -> "SufficientStats":
    return jax.tree.map(jnp.add, self, other)


def statistics_dtype() -> jnp.dtype:
  """Returns float64 where it is enabled, else float32."""
  return jax.dtypes.canonicalize_dtype(jnp.float64)


def masked(
  features: jax.Array, targets: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Sets padded rows to zero and counts the others.

  Args:
    features: [N, M].
    targets: [N].
    mask: [N] bool, false for padding; None if there is no padding.

  Returns:
    features [N, M], targets [N], and the count [] of rows where `mask` is true.
  """
  chex.assert_rank([features, targets], [2, 1])
  chex.assert_equal_shape_prefix([features, targets], 1)
  if mask is None:
    return features, targets, jnp.asarray(targets.shape[0], features.dtype)
  chex.assert_equal_shape([targets, mask])
  # `where`, not a product: padding may hold anything, NaN included.
  features = jnp.where(mask[:, None], features, jnp.zeros_like(features))
  targets = jnp.where(mask, targets, jnp.zeros_like(targets))
  return features, targets, jnp.sum(mask, dtype=features.dtype)


def sufficient_stats(
  features: jax.Array, targets: jax.Array, mask: jax.Array | None = None
) -> SufficientStats:
  """Returns the statistics of the rows where `mask` is true.

  The sums are float64 where it is enabled, whatever the features' dtype: they are
  cheap, and the likelihood is made of their differences, which lose digits.

  Args:
    features: [N, M] Φ.
    targets: [N] y.
    mask: [N] bool, false for padding; None if there is no padding.

  Example:
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax import blr
    >>> features, targets = jnp.ones((3, 2)), jnp.array([1.0, 2.0, 3.0])
    >>> stats = blr.sufficient_stats(features, targets)
    >>> stats.gram.shape, stats.moment.tolist(), float(stats.energy)
    ((2, 2), [6.0, 6.0], 14.0)
    >>> int((stats + stats).count)  # Two such clients.
    6
  """
  dtype = statistics_dtype()
  features, targets, count = masked(features.astype(dtype), targets.astype(dtype), mask)
  return SufficientStats(
    gram=jnp.einsum("nm,nl->ml", features, features, precision="highest"),
    moment=jnp.einsum("nm,n->m", features, targets, precision="highest"),
    energy=jnp.sum(targets**2),
    count=count,
  )


def augmented_gram(stats: SufficientStats, target_scale: float = 1.0) -> jax.Array:
  """Returns Σ uuᵀ [M + 1, M + 1] with u = [φ; ηy], which is positive semi-definite.

  Args:
    stats: Statistics of M features.
    target_scale: η, the factor of the targets.
  """
  moment = target_scale * jnp.asarray(stats.moment)[:, None]
  energy = jnp.reshape(target_scale**2 * jnp.asarray(stats.energy), (1, 1))
  return jnp.block([[jnp.asarray(stats.gram), moment], [moment.T, energy]])


def empty_stats(num_features: int) -> SufficientStats:
  """Returns the statistics of no rows, which are zero."""
  dtype = statistics_dtype()
  zero = jnp.zeros((), dtype)
  return SufficientStats(
    jnp.zeros((num_features, num_features), dtype),
    jnp.zeros(num_features, dtype),
    zero,
    zero,
  )


def sum_stats(stats: SufficientStats) -> SufficientStats:
  """Pools the statistics of K clients, stacked along a leading axis [K, ...]."""
  return jax.tree.map(partial(jnp.sum, axis=0), stats)
