"""Sufficient statistics of the last layer: what a client sends, and what adds."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
from flax import struct


class SufficientStats(struct.PyTreeNode):
  """What a client's rows say about the last layer; `a + b` pools two clients."""

  gram: jax.Array  # [M, M] ΦᵀΦ.
  moment: jax.Array  # [M] Φᵀy.
  energy: jax.Array  # [] yᵀy.
  count: jax.Array  # [] number of rows.

  def __add__(self, other: "SufficientStats") -> "SufficientStats":
    return jax.tree.map(jnp.add, self, other)


def statistics_dtype() -> jnp.dtype:
  """float64 where it is enabled, else float32."""
  return jax.dtypes.canonicalize_dtype(jnp.float64)


def masked(
  features: jax.Array, targets: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Zeroes padding: ([N, M], [N], mask [N] or None) -> features, targets, count []."""
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
  """Statistics of the rows ([N, M], [N]) that `mask` [N] admits.

  They are summed in float64 where it is enabled, whatever the features' dtype:
  phase 2 is small, and its differences are what the likelihood is made of.
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
  """[M + 1, M + 1]: Σ uuᵀ with u = [φ; ηy], of which nothing is negative."""
  moment = target_scale * jnp.asarray(stats.moment)[:, None]
  energy = jnp.reshape(target_scale**2 * jnp.asarray(stats.energy), (1, 1))
  return jnp.block([[jnp.asarray(stats.gram), moment], [moment.T, energy]])


def empty_stats(num_features: int) -> SufficientStats:
  """Statistics of no rows."""
  dtype = statistics_dtype()
  zero = jnp.zeros((), dtype)
  return SufficientStats(
    jnp.zeros((num_features, num_features), dtype),
    jnp.zeros(num_features, dtype),
    zero,
    zero,
  )


def sum_stats(stats: SufficientStats) -> SufficientStats:
  """Pools statistics stacked on a leading client axis [K, ...]."""
  return jax.tree.map(partial(jnp.sum, axis=0), stats)
