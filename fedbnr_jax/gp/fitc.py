"""Fits a sparse Gaussian process by FITC: M inducing inputs Z stand for N rows.

The prior has zero mean, so targets should be centred. Under FITC the targets are

  y ~ N(0, Q + Λ),   Q = VᵀV,   V = L_u⁻¹ K_ZX,   Λ = diag(K_XX − Q) + σ²,

with L_u the lower Cholesky factor of K_ZZ. Everything follows from V [M, N], the
diagonal Λ [N] and the factor of B = I + VΛ⁻¹Vᵀ [M, M], so the work is O(NM²) and
nothing of size N x N appears. If the rows themselves are the inducing inputs, this is
the exact Gaussian process, up to the jitter.

Kernels and systems are computed in float64 where it is enabled, whatever the dtype
of the rows. All functions are pure and may be mapped over an axis of clients.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.typing import ArrayLike, DTypeLike

from fedbnr_jax.gp.blr.factor import guarded_cholesky
from fedbnr_jax.gp.blr.statistics import masked, statistics_dtype

_product = partial(jnp.matmul, precision="highest")


class KernelParams(struct.PyTreeNode):
  """The trained parameters are logarithms of the kernel's and the noise's scales."""

  log_length_scale: jax.Array  # [] log ℓ, or [D] for one a dimension (ARD).
  log_output_std: jax.Array  # [] log s_f.
  log_noise_std: jax.Array  # [] log σ.

  @property
  def length_scale(self) -> jax.Array:
    """The length-scale ℓ of the kernel, [] or [D]."""
    return jnp.exp(self.log_length_scale)

  @property
  def output_std(self) -> jax.Array:
    """The standard deviation s_f [] of the function under the prior."""
    return jnp.exp(self.log_output_std)

  @property
  def noise_std(self) -> jax.Array:
    """The standard deviation σ [] of the noise."""
    return jnp.exp(self.log_noise_std)

  @property
  def prior_variance(self) -> jax.Array:
    """The variance s_f² [] of the function before any row is seen."""
    return self.output_std**2

  @property
  def noise_variance(self) -> jax.Array:
    """The variance σ² [] by which y varies more than the function."""
    return self.noise_std**2


def kernel_params(
  length_scale: ArrayLike,
  output_std: ArrayLike,
  noise_std: ArrayLike,
  dtype: DTypeLike | None = None,
) -> KernelParams:
  """Makes parameters from positive scales.

  Args:
    length_scale: [] ℓ, or [D] for one a dimension.
    output_std: [] s_f.
    noise_std: [] σ.
    dtype: The parameters' dtype; None for float64 where it is enabled, else float32.
  """
  # The dtype is always explicit: a scale from a bare number would be weakly typed, and
  # training would change its type and so compile twice.
  dtype = statistics_dtype() if dtype is None else dtype
  scales = (length_scale, output_std, noise_std)
  return KernelParams(*(jnp.log(jnp.asarray(scale, dtype)) for scale in scales))


class Sparse(struct.PyTreeNode):
  """A fitted sparse Gaussian process holds all that prediction needs."""

  inducing: jax.Array  # [M, D] inducing inputs Z.
  prior_cholesky: jax.Array  # [M, M] L_u, lower factor of K_ZZ plus jitter.
  weights: jax.Array  # [M] B⁻¹VΛ⁻¹y.
  cholesky: jax.Array  # [M, M] lower factor of B.
  params: KernelParams


def squared_exponential(
  a: jax.Array, b: jax.Array, length_scale: jax.Array, output_std: jax.Array
) -> jax.Array:
  """Returns the kernel matrix [N, M] with entries s_f² exp(−½ Σ_d (a_d − b_d)²/ℓ_d²).

  Args:
    a: [N, D] inputs.
    b: [M, D] inputs.
    length_scale: ℓ, [] or [D].
    output_std: [] s_f.
  """
  chex.assert_rank([a, b, length_scale, output_std], [2, 2, {0, 1}, 0])
  num_inputs = a.shape[1]
  chex.assert_axis_dimension(b, 1, num_inputs)
  if length_scale.ndim == 1:
    chex.assert_shape(length_scale, (num_inputs,))
  # Distances near the origin lose fewer digits. Nothing but rounding depends on where
  # the origin is, so it needs no derivative.
  origin = jax.lax.stop_gradient(jnp.mean(b, axis=0, keepdims=True))
  scale = jnp.broadcast_to(length_scale, (1, num_inputs))
  a, b = (a - origin) / scale, (b - origin) / scale
  # ‖a − b‖² = ‖a‖² + ‖b‖² − 2aᵀb takes less memory and time than differences [N, M, D].
  # Rounding may make it negative.
  squares = jnp.sum(a**2, axis=1)[:, None] + jnp.sum(b**2, axis=1)[None, :]
  distance = jnp.maximum(squares - 2.0 * _product(a, b.T), 0.0)
  return output_std**2 * jnp.exp(-0.5 * distance)


def negative_log_marginal_likelihood(
  x: jax.Array,
  y: jax.Array,
  inducing: jax.Array,
  params: KernelParams,
  mask: jax.Array | None = None,
) -> jax.Array:
  """Returns −log N(y | 0, Q + Λ), constants included, of the rows where `mask` is true.

  Args:
    x: [N, D] inputs.
    y: [N] targets.
    inducing: [M, D] inducing inputs.
    params: Scales of the kernel and of the noise.
    mask: [N] bool, false for padding, which may hold anything.

  Returns:
    [] in nats, a sum over rows, in the dtype of x.
  """
  return condition(x, y, inducing, params, mask)[1].astype(x.dtype)


def fit(
  x: jax.Array,
  y: jax.Array,
  inducing: jax.Array,
  params: KernelParams,
  mask: jax.Array | None = None,
) -> Sparse:
  """Conditions the process on the rows where `mask` is true.

  Without any row the result predicts the prior.

  Args:
    x: [N, D] inputs.
    y: [N] targets.
    inducing: [M, D] inducing inputs.
    params: Scales of the kernel and of the noise.
    mask: [N] bool, false for padding, which may hold anything.
  """
  return condition(x, y, inducing, params, mask)[0]


def predict(sparse: Sparse, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Predicts mean [N] and variance [N] of the function at x [N, D], without noise.

  The variance lies between zero and the prior's. The variance of y is larger by
  `params.noise_variance`; where experts are fused, it is added after the fusion.
  """
  chex.assert_rank(x, 2)
  x = x.astype(sparse.weights.dtype)
  whitened = _whiten(x, sparse.inducing, sparse.prior_cholesky, sparse.params)
  explained = solve_triangular(sparse.cholesky, whitened, lower=True)
  prior = sparse.params.prior_variance
  variance = jnp.maximum(prior - jnp.sum(whitened**2, axis=0), 0.0)
  variance = jnp.minimum(variance + jnp.sum(explained**2, axis=0), prior)
  return _product(sparse.weights, whitened), variance


def choose_inducing(
  key: chex.PRNGKey, x: jax.Array, mask: jax.Array | None, num_inducing: int
) -> jax.Array:
  """Draws inducing inputs [num_inducing, D] from the rows at random.

  Each row is taken once before any is taken again. Repeated inputs add nothing, and
  the jitter keeps their kernel matrix definite. Padding behind the rows does not change
  the choice. Without any row the inputs are zero.

  Args:
    key: Source of the draw.
    x: [N, D] inputs.
    mask: [N] bool, false for padding; None if there is no padding.
    num_inducing: M, the number of inducing inputs.
  """
  chex.assert_rank(x, 2)
  num_rows = x.shape[0]
  mask = jnp.ones(num_rows, bool) if mask is None else mask.astype(bool)
  chex.assert_shape(mask, (num_rows,))
  score = jnp.where(mask, jax.random.uniform(key, (num_rows,), jnp.float32), 2.0)
  order = jnp.argsort(score)  # Padding scores 2 and so comes last.
  turn = jnp.arange(num_inducing) % jnp.maximum(jnp.sum(mask), 1)
  return jnp.where(mask[:, None], x, jnp.zeros_like(x))[order[turn]]


def condition(
  x: jax.Array,
  y: jax.Array,
  inducing: jax.Array,
  params: KernelParams,
  mask: jax.Array | None = None,
) -> tuple[Sparse, jax.Array]:
  """Returns `fit` and the negative log likelihood [] in one computation.

  Args:
    x: [N, D] inputs.
    y: [N] targets.
    inducing: [M, D] inducing inputs.
    params: Scales of the kernel and of the noise.
    mask: [N] bool, false for padding, which may hold anything.
  """
  dtype = statistics_dtype()
  chex.assert_rank(inducing, 2)
  x, y, count = masked(x.astype(dtype), y.astype(dtype), mask)
  inducing = inducing.astype(dtype)
  params = jax.tree.map(partial(jnp.asarray, dtype=dtype), params)
  prior = params.prior_variance
  identity = jnp.eye(inducing.shape[0], dtype=dtype)
  own = squared_exponential(inducing, inducing, params.length_scale, params.output_std)
  jitter = 1e-6 if dtype == jnp.float64 else 1e-4
  prior_cholesky = guarded_cholesky(own + jitter * prior * identity)

  whitened = _whiten(x, inducing, prior_cholesky, params)
  diagonal = jnp.maximum(prior - jnp.sum(whitened**2, axis=0), 0.0)
  diagonal = diagonal + params.noise_variance
  if mask is not None:  # A padded row has V = 0 and Λ = 1, whose logarithm is zero.
    whitened = jnp.where(mask[None, :], whitened, jnp.zeros_like(whitened))
    diagonal = jnp.where(mask, diagonal, jnp.ones_like(diagonal))
  scaled = whitened / jnp.sqrt(diagonal)[None, :]
  cholesky = guarded_cholesky(identity + _product(scaled, scaled.T))
  weights = cho_solve((cholesky, True), _product(whitened, y / diagonal))
  residual = y - _product(weights, whitened)
  gap = _product(whitened, residual / diagonal) - weights
  weights = weights + cho_solve((cholesky, True), gap)  # One step of refinement.

  # The exact weights minimise the sum of the two squares, so an error of the weights
  # enters the quadratic form squared.
  residual = y - _product(weights, whitened)
  quadratic = jnp.sum(residual**2 / diagonal) + jnp.sum(weights**2)
  log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(cholesky))) + jnp.sum(jnp.log(diagonal))
  nll = 0.5 * (count * jnp.log(2.0 * jnp.pi) + log_det + quadratic)
  return Sparse(inducing, prior_cholesky, weights, cholesky, params), nll


def _whiten(
  x: jax.Array, inducing: jax.Array, prior_cholesky: jax.Array, params: KernelParams
) -> jax.Array:
  """Returns V = L_u⁻¹ K_ZX [M, N] at x [N, D]."""
  cross = squared_exponential(x, inducing, params.length_scale, params.output_std)
  return solve_triangular(prior_cholesky, cross.T, lower=True)
