"""Fusion of experts: one Gaussian from those of several Gaussian processes.

Each of C experts has seen rows of its own and predicts the same function, with mean
μ_c and variance v_c at every point; v₀ is the variance of their common prior, whose
mean is zero. All of it is about the function: noise is added last, by the caller.
The rules differ in how much each expert's precision 1/v_c counts, β_c, and in whether
the prior, which is inside every expert, is counted once or C times:

  poe           1/v = Σ 1/v_c                       product of experts
  gpoe          1/v = Σ β_c/v_c, β_c = 1/C          generalised
  gpoe-entropy  1/v = Σ β_c/v_c, β_c ∝ h_c, Σβ_c = 1
  bcm           1/v = 1/v₀ + Σ (1/v_c − 1/v₀)       Bayesian committee machine
  rbcm          1/v = 1/v₀ + Σ h_c (1/v_c − 1/v₀)   robust

  μ = v Σ β_c μ_c/v_c,   h_c = ½ (log v₀ − log v_c)

h_c is what an expert has learnt, in nats. An expert that has seen nothing near a
point has h_c = 0 and no say there by `rbcm`, and none by `bcm`, since its mean is
zero. By `poe` and `gpoe` it votes for zero with the precision of the prior.
"""

from collections.abc import Callable
from functools import partial

import chex
import jax
import jax.numpy as jnp

from fedbnr_jax.config import require_choice

RULES = ("poe", "gpoe", "gpoe-entropy", "bcm", "rbcm")
_PRIOR_ONCE = ("bcm", "rbcm")
_WEIGHTS_SUM_TO_ONE = ("gpoe", "gpoe-entropy")

# (means [C, N], variances [C, N], prior variance [], mask [C]) -> mean, variance [N].
Fusion = Callable[..., tuple[jax.Array, jax.Array]]


def fusion(rule: str) -> Fusion:
  """The function `fuse` of one rule, whose name is checked here and now.

  Raises:
    InputError: No rule has this name.
  """
  require_choice("fusion rule", rule, RULES)
  return partial(fuse, rule)


def fuse(
  rule: str,
  means: jax.Array,
  variances: jax.Array,
  prior_variance: jax.Array | float,
  mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """One Gaussian a point from those of C experts.

  Variances below the rounding of the prior's are raised to it. By `bcm` experts that
  are less sure than the prior may leave no precision at all; then the tiniest
  fraction of the prior's that the type resolves remains. Such experts do not arise
  where all share the prior, and `rbcm` ignores them. Without any expert the result
  is the prior.

  Args:
    rule: One of `RULES`.
    means: [C, N], of the function.
    variances: [C, N], of the function, without noise.
    prior_variance: [] v₀.
    mask: [C] bool, false for experts that do not count, which may hold anything.

  Returns:
    Mean [N] and variance [N] of the function; add that of the noise.

  Raises:
    InputError: No rule has this name.
  """
  require_choice("fusion rule", rule, RULES)
  chex.assert_rank([means, variances], 2)
  chex.assert_equal_shape([means, variances])
  dtype = means.dtype
  prior = jnp.asarray(prior_variance, dtype)
  chex.assert_rank(prior, 0)
  tiny = jnp.finfo(dtype).eps
  mask = jnp.ones(means.shape[0], bool) if mask is None else mask.astype(bool)
  chex.assert_shape(mask, means.shape[:1])
  count = jnp.sum(mask, dtype=dtype)

  mask = jnp.broadcast_to(mask[:, None], means.shape)
  means = jnp.where(mask, means, jnp.zeros_like(means))
  variances = jnp.where(mask, variances.astype(dtype), prior)
  variances = jnp.maximum(variances, tiny * prior)
  weights = _weights(rule, variances, prior, mask)
  if rule in _PRIOR_ONCE:
    # As sums of what each adds to the prior: with C/v₀ and (1 − C)/v₀ apart, most
    # digits would cancel.
    precision = (1.0 + jnp.sum(weights * (prior / variances - 1.0), axis=0)) / prior
  else:
    precision = jnp.sum(weights / variances, axis=0)
    precision = jnp.where(count > 0, precision, 1.0 / prior)
  variance = 1.0 / jnp.maximum(precision, tiny / prior)
  return variance * jnp.sum(weights * means / variances, axis=0), variance


def _weights(
  rule: str, variances: jax.Array, prior: jax.Array, mask: jax.Array
) -> jax.Array:
  """β [C, N] at variances [C, N], zero where `mask` [C, N] is false."""
  tiny = jnp.finfo(variances.dtype).eps
  if rule in ("poe", "bcm", "gpoe"):
    weights = jnp.ones_like(variances)
  else:
    weights = jnp.maximum(0.5 * (jnp.log(prior) - jnp.log(variances)), 0.0)
    if rule == "gpoe-entropy":
      weights = weights + tiny  # Equal where nobody has learnt anything.
  weights = jnp.where(mask, weights, jnp.zeros_like(weights))
  if rule in _WEIGHTS_SUM_TO_ONE:
    total = jnp.sum(weights, axis=0, keepdims=True)
    weights = weights / jnp.maximum(total, tiny)
  return weights
