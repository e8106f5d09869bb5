"""What private statistics are: the influence of a row, noise, and repair after it.

The features [cos, sin] of S draws of ω have the same squared norm c = S/(S−1) for every
row, so the statistics have a bounded sensitivity without clipping the features; a bound
c of the squared norm would do as well. With targets clipped to |y| ≤ Y, adding or
removing one row changes the augmented Gram matrix Σ uuᵀ, u = [φ; ηy], η = √c/Y, by at
most 2c in Frobenius norm, and the number of rows by one. Noise on both makes Gram,
moment, energy and count private together; whatever is computed from them afterwards
spends no further privacy.

The Gaussian noise here is drawn fast and in floating point: it is for studies of what
noise costs. A release, of which somebody may see every bit, has the integers and the
noise of `fedbnr_jax.release`. The promise covers one use of the rows in the statistics,
for a given kernel and standardisation.
"""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp.blr import SufficientStats, augmented_gram, fit_evidence, posterior
from fedbnr_jax.gp.blr.posterior import Posterior

# "central": one noise on the sum over clients; "client": each client adds its own.
NOISES = ("central", "client")

# The ridge σ²/λ² is at least this fraction of the noise's spectral norm.
_RIDGE = 0.25
_MAX_EPSILON = 100.0  # A larger ε promises nothing worth the name.
# A row counts, beside the matrix, as this share of the matrix's sensitivity: noise on
# the count is then that of a few dozen rows, and costs the matrix 1 % more noise.
_COUNT_SHARE = 1 / 8


class Mechanism(NamedTuple):
  """One (ε, δ) release, which protects the addition or removal of one row."""

  epsilon: float  # Infinite: no noise and no promise.
  delta: float
  # Y: targets are clipped to so many standard deviations. It must not be computed from
  # the rows.
  target_bound: float
  squared_norm: float  # c, which the squared norm of no row's features exceeds.
  # Number of independent noises in the sum: 1 where only the sum is seen, as under
  # secure aggregation; the number of clients where each client adds its own.
  num_noises: int = 1

  @property
  def target_scale(self) -> float:
    """η, which scales a clipped target to the norm of the features."""
    return math.sqrt(self.squared_norm) / self.target_bound

  @property
  def count_scale(self) -> float:
    """What a row adds to the count, in the unit of the matrix."""
    return _COUNT_SHARE * 2.0 * self.squared_norm

  @property
  def sensitivity(self) -> float:
    """The most that one row changes the matrix, in Frobenius norm, and the count."""
    return math.hypot(2.0 * self.squared_norm, self.count_scale)

  @property
  def noise_std(self) -> float:
    """Standard deviation of one noise on one entry of the packed triangle."""
    return self.sensitivity * noise_multiplier(self.epsilon, self.delta)

  @property
  def total_noise_std(self) -> float:
    """Standard deviation of the sum of all noises on one entry."""
    return math.sqrt(self.num_noises) * self.noise_std

  def check(self) -> None:
    """Raises InputError if a field has a value that no mechanism can have."""
    check_promise(self.epsilon, self.delta)
    if not 0 < self.target_bound < math.inf:
      raise InputError(
        f"the bound of the target must be positive, got {self.target_bound}."
      )
    if self.num_noises < 1:
      raise InputError(f"there must be at least one noise, got {self.num_noises}.")


def check_promise(epsilon: float, delta: float) -> None:
  """Raises InputError for an ε or a δ that no mechanism can have."""
  if not (0 < epsilon <= _MAX_EPSILON or epsilon == math.inf):
    raise InputError(
      f"epsilon must be positive and at most {_MAX_EPSILON:g}, or infinite for no "
      f"promise, got {epsilon}."
    )
  if not 0 < delta < 1:
    raise InputError(f"delta must lie between 0 and 1, got {delta}.")


def noise_multiplier(epsilon: float, delta: float) -> float:
  """Returns the noise's standard deviation for a sensitivity of one.

  It is the smallest one with which the Gaussian mechanism is (ε, δ) private.

  Raises:
    InputError: If dp_accounting, which computes it, is not installed.
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
  """Clips standardised targets [N] to ±Y; each client does so before it sums."""
  bound = mechanism.target_bound
  return np.clip(targets, -bound, bound)


def add_noise(
  key: chex.PRNGKey,
  stats: SufficientStats,
  mechanism: Mechanism,
  noise_std: float | jax.Array,
) -> SufficientStats:
  """Returns statistics with Gaussian noise, repaired to be those of some rows.

  Args:
    key: Draws the noise.
    stats: Sum over clients, with targets clipped by `clip_targets`.
    mechanism: Only its `squared_norm` and `target_bound` are used.
    noise_std: [], on one entry of the packed triangle, and on the scaled count.
  """
  key_gram, key_count = jax.random.split(key)
  gram = augmented_gram(stats, mechanism.target_scale)
  noisy = gram + symmetric_noise(key_gram, gram, noise_std)
  draw = jax.random.normal(key_count, (), gram.dtype)
  count = stats.count + noise_std * draw / mechanism.count_scale
  return repaired(noisy, count, mechanism.target_scale)


def repaired(gram: jax.Array, count: jax.Array, target_scale: float) -> SufficientStats:
  """Returns the statistics in noisy sums, projected to be those of some rows.

  Args:
    gram: [M + 1, M + 1], the augmented Gram matrix Σ uuᵀ with noise.
    count: [], the number of rows with noise.
    target_scale: η.
  """
  num_features = len(gram) - 1
  values, vectors = jnp.linalg.eigh(gram)
  # Clipping the eigenvalues of the whole augmented matrix keeps its parts consistent:
  # no moment without energy, and a residual that is not negative.
  root = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[None, :]
  projected = jnp.matmul(root, root.T, precision="highest")
  return SufficientStats(
    gram=projected[:num_features, :num_features],
    moment=projected[:num_features, num_features] / target_scale,
    energy=projected[num_features, num_features] / target_scale**2,
    count=jnp.maximum(count, 1.0),
  )


def private_posterior(
  stats: SufficientStats, noise_std: float | jax.Array
) -> Posterior:
  """Returns the posterior of released statistics, with σ and λ by their evidence.

  The ridge σ²/λ² is kept above a fraction of the noise's spectral norm, because the
  evidence alone would fit the noise.

  Args:
    stats: Statistics with noise, as by `repaired`.
    noise_std: [], the noise that they hold: the mechanism's `total_noise_std`.
  """
  dtype = stats.gram.dtype
  spectral_norm = noise_std * math.sqrt(2.0 * stats.moment.shape[0])
  # Infinite, and so no bound, where there is no noise.
  max_rho = 1.0 / (_RIDGE * jnp.asarray(spectral_norm, dtype))
  return posterior(stats, *fit_evidence(stats, max_rho))


def symmetric_noise(
  key: chex.PRNGKey, like: jax.Array, std: float | jax.Array
) -> jax.Array:
  """Draws a symmetric matrix [M, M]: std on the diagonal, std/√2 beside it.

  If a triangle is packed with its off-diagonal entries times √2, so that its norm is
  the Frobenius norm of the matrix, then this is independent noise of `std` on every
  entry of the packed triangle.
  """
  draw = jax.random.normal(key, like.shape, like.dtype)
  upper = jnp.triu(draw, 1)
  return std * (jnp.diag(jnp.diagonal(draw)) + (upper + upper.T) / math.sqrt(2.0))


# --------------------------------------------------------------------- the attacker


def recovered_features(gram: np.ndarray, num_rows: int) -> np.ndarray:
  """Returns the features [n, M] that a Gram matrix [M, M] of few rows gives away.

  They equal the rows' features up to a rotation among the rows; for a single row, up to
  its sign.
  """
  values, vectors = np.linalg.eigh(gram)
  values, vectors = values[::-1][:num_rows], vectors[:, ::-1][:, :num_rows]
  return np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T


def similarity(guess: np.ndarray, truth: np.ndarray) -> float:
  """Returns |cos| of the angle between two feature vectors [M]; 1 for the same row."""
  norms = np.linalg.norm(guess) * np.linalg.norm(truth)
  return float(np.abs(guess @ truth) / max(norms, 1e-300))


def membership_advantage(
  gram: np.ndarray, members: np.ndarray, others: np.ndarray
) -> float:
  """Measures how well a Gram matrix separates its own rows from other rows.

  The attacker knows the kernel, has candidate rows, and guesses that a candidate is a
  member if its features lie in the span of the matrix, that is if φᵀ(G + τI)⁻¹φ is
  small.

  Args:
    gram: [M, M], exact or noisy.
    members: [n, M] features of rows that are in the matrix.
    others: [k, M] features of rows that are not.

  Returns:
    The probability that a member is ranked before another row: 1 if the matrix
    separates them perfectly, ½ if it says nothing.
  """
  values, vectors = np.linalg.eigh(gram)
  floor = 1e-9 * max(values[-1], 1e-300)
  weights = 1.0 / (np.maximum(values, 0.0) + floor)
  inside, outside = (
    np.sum((rows @ vectors) ** 2 * weights, axis=1) for rows in (members, others)
  )
  below = np.mean(inside[:, None] < outside[None, :])
  return float(below + 0.5 * np.mean(inside[:, None] == outside[None, :]))
