"""Fuses the Gaussian predictions of several experts into one.

Each of C experts has seen rows of its own and predicts the same function, with mean
μ_c and variance v_c at every point; v₀ is the variance of their common prior, whose
mean is zero. Means and variances are those of the function: the caller adds the
variance of the noise last. The rules differ in how much each expert's precision 1/v_c
counts, β_c, and in whether the prior, which is inside every expert, is counted once or
C times:

  poe           1/v = Σ 1/v_c                       product of experts
  gpoe          1/v = Σ β_c/v_c, β_c = 1/C          generalised
  gpoe-entropy  1/v = Σ β_c/v_c, β_c ∝ h_c, Σβ_c = 1
  bcm           1/v = 1/v₀ + Σ (1/v_c − 1/v₀)       Bayesian committee machine
  rbcm          1/v = 1/v₀ + Σ h_c (1/v_c − 1/v₀)   robust

  μ = v Σ β_c μ_c/v_c,   h_c = ½ (log v₀ − log v_c)

h_c is what an expert has learnt, in nats. An expert that has seen nothing near a
point has h_c = 0 and no say there by `rbcm`, and none by `bcm`, since its mean is
zero. By `poe` and `gpoe` it votes for zero with the precision of the prior.

To add a rule, add a line to the table above and an entry to `RULES`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Protocol

import chex
import jax
import jax.numpy as jnp

from fedbnr_jax.names import require_choice


class Fusion(Protocol):
  """A fusion makes one Gaussian a point from those of C experts."""

  def __call__(
    self,
    means: jax.Array,
    variances: jax.Array,
    prior_variance: jax.Array | float,
    mask: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns mean [N] and variance [N] of the function, without noise.

    Args:
      means: [C, N] means of the function.
      variances: [C, N] variances of the function, without noise.
      prior_variance: [] v₀.
      mask: [C] bool, false for experts to leave out.
    """


@dataclasses.dataclass(frozen=True)
class Rule:
  """A rule says how much each expert counts, and how often the prior does.

  Attributes:
    weights: Maps variances [C, N] and the prior variance [] to weights β [C, N].
    sum_to_one: Whether the weights are divided by their sum over the experts.
    prior_once: Whether the prior is counted once, instead of once an expert.
  """

  weights: Callable[[jax.Array, jax.Array], jax.Array]
  sum_to_one: bool = False
  prior_once: bool = False


def _equal(variances: jax.Array, prior: jax.Array) -> jax.Array:
  """Lets every expert count fully: ones [C, N]."""
  del prior
  return jnp.ones_like(variances)


def _learnt(variances: jax.Array, prior: jax.Array) -> jax.Array:
  """Lets an expert count by what it has learnt: h [C, N], zero at least."""
  return jnp.maximum(0.5 * (jnp.log(prior) - jnp.log(variances)), 0.0)


def _learnt_or_equal(variances: jax.Array, prior: jax.Array) -> jax.Array:
  """Returns h [C, N] with a little more, equal where no expert has learnt anything."""
  return _learnt(variances, prior) + jnp.finfo(variances.dtype).eps


RULES = {
  "poe": Rule(_equal),
  "gpoe": Rule(_equal, sum_to_one=True),
  "gpoe-entropy": Rule(_learnt_or_equal, sum_to_one=True),
  "bcm": Rule(_equal, prior_once=True),
  "rbcm": Rule(_learnt, prior_once=True),
}


def fusion(rule: str) -> Fusion:
  """Returns the fusion by one of `RULES`, and checks the name at once.

  Raises:
    InputError: If no rule has this name.
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
  """Makes one Gaussian a point from those of C experts.

  Variances below the rounding of the prior's are raised to it. By `bcm`, experts that
  are less sure than the prior may leave no precision at all; the result then has the
  smallest fraction of the prior's precision that the dtype resolves. Such experts do
  not arise where all share the prior, and `rbcm` ignores them. Without any expert the
  result is the prior.

  Args:
    rule: The name of one of `RULES`.
    means: [C, N] means of the function.
    variances: [C, N] variances of the function, without noise.
    prior_variance: [] v₀.
    mask: [C] bool, false for experts to leave out, whose values may be anything.

  Returns:
    Mean [N] and variance [N] of the function, to which the caller adds the noise.

  Raises:
    InputError: If no rule has this name.

  Example:
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax.gp import experts
    >>> means, variances = jnp.array([[2.0], [0.0]]), jnp.array([[0.1], [1.0]])
    >>> mean, _ = experts.fuse("rbcm", means, variances, prior_variance=1.0)
    >>> round(float(mean[0]), 2)  # The second expert knows nothing, and has no say.
    2.03
  """
  require_choice("fusion rule", rule, RULES)
  chosen = RULES[rule]
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
  weights = chosen.weights(variances, prior)
  weights = jnp.where(mask, weights, jnp.zeros_like(weights))
  if chosen.sum_to_one:
    total = jnp.sum(weights, axis=0, keepdims=True)
    weights = weights / jnp.maximum(total, tiny)
  if chosen.prior_once:
    # What each expert adds to the prior is summed. If C/v₀ and (1 − C)/v₀ were summed
    # apart, most digits would cancel.
    precision = (1.0 + jnp.sum(weights * (prior / variances - 1.0), axis=0)) / prior
  else:
    precision = jnp.sum(weights / variances, axis=0)
    precision = jnp.where(count > 0, precision, 1.0 / prior)
  variance = 1.0 / jnp.maximum(precision, tiny / prior)
  return variance * jnp.sum(weights * means / variances, axis=0), variance
