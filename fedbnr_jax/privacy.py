"""Differentially private release of the last layer's statistics.

Features [cos, sin] of S draws have the same norm, squared c = S/(S−1), whatever the
row, so the statistics have a sensitivity without clipping features. With targets
clipped to |y| ≤ Y, one row changes the augmented Gram matrix Σ uuᵀ, u = [φ; ηy],
η = √c/Y, by 2c in Frobenius norm at most. Gaussian noise on it makes Gram, moment and
energy private together, and what is computed from them costs nothing more.

Covered: the rows' part in the statistics, once, with the kernel given. Not covered: the
kernel's parameters, which were trained on the rows, and the standardisation.
"""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedbnr_jax.blr import SufficientStats, augmented_gram, fit_evidence, posterior
from fedbnr_jax.blr.posterior import Posterior
from fedbnr_jax.errors import InputError

NOT_COVERED = (
  "the kernel parameters, which were trained on the rows without noise, and the means "
  "and deviations of the standardisation; of the run's folder only released/ is private"
)
# Kernels whose features have one norm.
CONSTANT_NORM = (
  *("deep", "replicate", "gaussian", "laplacian", "cauchy"),
  *("matern12", "matern32", "matern52"),
)
# The ridge is at least this part of the noise's spectral norm.
_RIDGE = 0.25
_MAX_EPSILON = 100.0  # Which promises nothing.


class Mechanism(NamedTuple):
  """One (ε, δ) release, for the addition or removal of one row."""

  epsilon: float  # Infinite for none.
  delta: float
  target_bound: float  # Y, in standard deviations of the target; not from the data.
  num_samples: int  # S of the kernel.
  # Noises that are added up: one where only the sum is seen, as under secure
  # aggregation; one a client where each protects itself.
  num_noises: int = 1

  @property
  def norm_squared(self) -> float:
    """c, of every row's features."""
    return self.num_samples / (self.num_samples - 1)

  @property
  def target_scale(self) -> float:
    """η, by which the target is of the features' size."""
    return math.sqrt(self.norm_squared) / self.target_bound

  @property
  def sensitivity(self) -> float:
    """The most that one row changes the augmented Gram matrix, in Frobenius norm."""
    return 2.0 * self.norm_squared

  @property
  def noise_std(self) -> float:
    """Of one noise on one entry of the packed triangle."""
    return self.sensitivity * noise_multiplier(self.epsilon, self.delta)

  @property
  def total_noise_std(self) -> float:
    return math.sqrt(self.num_noises) * self.noise_std

  def check(self) -> None:
    """Raises InputError for what is no mechanism."""
    if not (0 < self.epsilon <= _MAX_EPSILON or self.epsilon == math.inf):
      raise InputError(
        f"epsilon must be positive and at most {_MAX_EPSILON:g}, or infinite for no "
        f"promise, got {self.epsilon}."
      )
    if not 0 < self.delta < 1:
      raise InputError(f"delta must lie between 0 and 1, got {self.delta}.")
    if not 0 < self.target_bound < math.inf:
      raise InputError(
        f"the bound of the target must be positive, got {self.target_bound}."
      )
    if self.num_noises < 1:
      raise InputError(f"there must be at least one noise, got {self.num_noises}.")


def noise_multiplier(epsilon: float, delta: float) -> float:
  """Standard deviation of the noise for a sensitivity of one, calibrated exactly.

  Raises:
    InputError: If the library that accounts for privacy is not installed.
  """
  if math.isinf(epsilon):
    return 0.0
  try:
    import dp_accounting
  except ImportError as error:
    raise InputError(
      "the privacy extra is not installed: pip install 'fedbnr-jax[privacy]'."
    ) from error
  return float(dp_accounting.get_sigma_gaussian(epsilon, delta))


def clip_targets(targets: np.ndarray, mechanism: Mechanism) -> np.ndarray:
  """Standardised targets held to the bound, as every client does before it sums."""
  bound = mechanism.target_bound
  return np.clip(targets, -bound, bound)


def release(
  key: chex.PRNGKey, stats: SufficientStats, mechanism: Mechanism
) -> SufficientStats:
  """Noisy statistics of clipped targets, repaired to be those of some rows.

  The number of rows is not asked for: the trace of the Gram is c times it.

  Args:
    key: Of the noise.
    stats: Summed over clients, targets clipped by `clip_targets`.
    mechanism: What is promised.
  """
  mechanism.check()
  gram = augmented_gram(stats, mechanism.target_scale)
  noisy = gram + symmetric_noise(key, gram, mechanism.total_noise_std)
  (num_features,) = stats.moment.shape
  # Before the repair, which is biased.
  trace = jnp.trace(noisy[:num_features, :num_features])
  values, vectors = jnp.linalg.eigh(noisy)
  # Of the whole matrix: no moment without energy, no negative noise.
  kept = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[None, :]
  sound = jnp.matmul(kept, kept.T, precision="highest")
  scale = mechanism.target_scale
  return SufficientStats(
    gram=sound[:num_features, :num_features],
    moment=sound[:num_features, num_features] / scale,
    energy=sound[num_features, num_features] / scale**2,
    count=jnp.maximum(trace / mechanism.norm_squared, 1.0),
  )


def private_posterior(stats: SufficientStats, mechanism: Mechanism) -> Posterior:
  """The posterior of released statistics.

  σ and λ by their evidence, with a ridge that is not below a part of the noise's
  spectral norm: without, ρ follows the noise.
  """
  norm = mechanism.total_noise_std * math.sqrt(2.0 * stats.moment.shape[0])
  max_rho = None if norm == 0 else 1.0 / (_RIDGE * norm)
  return posterior(stats, *fit_evidence(stats, max_rho))


def symmetric_noise(key: chex.PRNGKey, like: jax.Array, std: float) -> jax.Array:
  """Noise of std `std` on every entry of the triangle, off-diagonal ones times √2.

  Packed so, the norm of a triangle is the Frobenius norm of its matrix.
  """
  draw = jax.random.normal(key, like.shape, like.dtype)
  upper = jnp.triu(draw, 1)
  return std * (jnp.diag(jnp.diagonal(draw)) + (upper + upper.T) / math.sqrt(2.0))


# --------------------------------------------------------------------- the attacker


def recovered_features(gram: np.ndarray, num_rows: int) -> np.ndarray:
  """What a scatter matrix [M, M] of few rows gives away: features [n, M].

  They are those of the rows up to a rotation among them; of one row, up to its sign.
  """
  values, vectors = np.linalg.eigh(gram)
  values, vectors = values[::-1][:num_rows], vectors[:, ::-1][:, :num_rows]
  return np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T


def similarity(guess: np.ndarray, truth: np.ndarray) -> float:
  """|cos| of the angle between two feature vectors [M]: 1 for one and the same row."""
  norms = np.linalg.norm(guess) * np.linalg.norm(truth)
  return float(np.abs(guess @ truth) / max(norms, 1e-300))


def membership_advantage(
  gram: np.ndarray, members: np.ndarray, others: np.ndarray
) -> float:
  """How well a scatter matrix tells rows that are in it from rows that are not.

  The attacker knows the kernel and has candidates, and guesses those to be in whose
  features lie in the span of the matrix: φᵀ(S + τI)⁻¹φ is small.

  Args:
    gram: [M, M], bare, noised or summed.
    members: [n, M] features of rows that are in.
    others: [k, M] features of rows that are not.

  Returns:
    Probability that a member is ranked before another row: 1 if it tells all, ½ if it
    tells nothing.
  """
  values, vectors = np.linalg.eigh(gram)
  floor = 1e-9 * max(values[-1], 1e-300)
  weights = 1.0 / (np.maximum(values, 0.0) + floor)
  inside, outside = (
    np.sum((rows @ vectors) ** 2 * weights, axis=1) for rows in (members, others)
  )
  below = np.mean(inside[:, None] < outside[None, :])
  return float(below + 0.5 * np.mean(inside[:, None] == outside[None, :]))
