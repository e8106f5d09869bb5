"""Sparse Gaussian process by FITC: M inducing inputs carry what N rows say.

The prior has zero mean, so targets should be centred. Under FITC the targets are

  y ~ N(0, Q + Λ),   Q = VᵀV,   V = L_u⁻¹ K_ZX,   Λ = diag(K_XX − Q) + σ²,

with L_u the factor of K_ZZ. Everything follows from V, the diagonal Λ and the
factor of B = I + VΛ⁻¹Vᵀ, so the work is O(NM²) and nothing of size N x N appears.
With the rows themselves as inducing inputs this is the exact Gaussian process, but
for the jitter.

Kernels and systems are computed in float64 where it is enabled, whatever the type
of the rows. All functions are pure and may be mapped over an axis of clients.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.typing import ArrayLike, DTypeLike

from fedbnr_jax.blr.factor import guarded_cholesky
from fedbnr_jax.blr.statistics import masked, statistics_dtype

_product = partial(jnp.matmul, precision="highest")


class KernelParams(struct.PyTreeNode):
  """Scales of the kernel and of the noise, as logarithms: what is trained."""

  log_length_scale: jax.Array  # [], or [D] for one a dimension (ARD).
  log_output_std: jax.Array  # [] log s_f
  log_noise_std: jax.Array  # [] log σ

  @property
  def length_scale(self) -> jax.Array:
    """[] or [D]."""
    return jnp.exp(self.log_length_scale)

  @property
  def output_std(self) -> jax.Array:
    """[] s_f."""
    return jnp.exp(self.log_output_std)

  @property
  def noise_std(self) -> jax.Array:
    """[] σ."""
    return jnp.exp(self.log_noise_std)

  @property
  def prior_variance(self) -> jax.Array:
    """[] s_f², of the function before any row is seen."""
    return self.output_std**2

  @property
  def noise_variance(self) -> jax.Array:
    """[] σ²: add it to a latent variance to have that of y."""
    return self.noise_std**2


def kernel_params(
  length_scale: ArrayLike,
  output_std: ArrayLike,
  noise_std: ArrayLike,
  dtype: DTypeLike | None = None,
) -> KernelParams:
  """Parameters from positive scales: length_scale [] or [D], the others [].

  Their type is `dtype`, by default float64 where it is enabled.
  """
  # A type is always named: a scale from a bare number would have a weak one, which
  # training changes.
  dtype = statistics_dtype() if dtype is None else dtype
  scales = (length_scale, output_std, noise_std)
  return KernelParams(*(jnp.log(jnp.asarray(scale, dtype)) for scale in scales))


class Sparse(struct.PyTreeNode):
  """A fitted sparse Gaussian process: all that prediction needs."""

  inducing: jax.Array  # [M, D] Z.
  prior_cholesky: jax.Array  # [M, M] L_u, lower factor of K_ZZ and its jitter.
  weights: jax.Array  # [M] a = B⁻¹VΛ⁻¹y.
  cholesky: jax.Array  # [M, M] L_B, lower factor of B.
  params: KernelParams


def squared_exponential(
  a: jax.Array, b: jax.Array, length_scale: jax.Array, output_std: jax.Array
) -> jax.Array:
  """Kernel [N, M], s_f² exp(−½ Σ_d (a_d − b_d)²/ℓ_d²), of a [N, D] and b [M, D].

  The length-scale ℓ is [] or [D], the output's standard deviation s_f is [].
  """
  chex.assert_rank([a, b, length_scale, output_std], [2, 2, {0, 1}, 0])
  num_inputs = a.shape[1]
  chex.assert_axis_dimension(b, 1, num_inputs)
  if length_scale.ndim == 1:
    chex.assert_shape(length_scale, (num_inputs,))
  # Only the rounding of distances depends on the origin, so it needs no derivative.
  origin = jax.lax.stop_gradient(jnp.mean(b, axis=0, keepdims=True))
  scale = jnp.broadcast_to(length_scale, (1, num_inputs))
  a, b = (a - origin) / scale, (b - origin) / scale
  # One product of matrices needs no differences [N, M, D]: less memory, less time.
  squares = jnp.sum(a**2, axis=1)[:, None] + jnp.sum(b**2, axis=1)[None, :]
  distance = jnp.maximum(squares - 2.0 * _product(a, b.T), 0.0)  # Rounding crosses 0.
  return output_std**2 * jnp.exp(-0.5 * distance)


def negative_log_marginal_likelihood(
  x: jax.Array,
  y: jax.Array,
  inducing: jax.Array,
  params: KernelParams,
  mask: jax.Array | None = None,
) -> jax.Array:
  """−log N(y | 0, Q + Λ), constants included, of the rows that `mask` admits.

  Args:
    x: [N, D].
    y: [N].
    inducing: [M, D].
    params: Scales of the kernel and of the noise.
    mask: [N] bool, false for padding, which may hold anything.

  Returns:
    [] in nats, a sum over rows, in the type of x.
  """
  return condition(x, y, inducing, params, mask)[1].astype(x.dtype)


def fit(
  x: jax.Array,
  y: jax.Array,
  inducing: jax.Array,
  params: KernelParams,
  mask: jax.Array | None = None,
) -> Sparse:
  """Conditions on the rows (x [N, D], y [N]) that `mask` [N] admits.

  Without any row the result predicts the prior.
  """
  return condition(x, y, inducing, params, mask)[0]


def predict(sparse: Sparse, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Mean [N] and variance [N] of the function at x [N, D], without noise.

  The variance lies between zero and the prior's. That of y is larger by
  `params.noise_variance`, which rules of fusion want added last.
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
  """Inducing inputs [num_inducing, D]: a random subset of the rows x [N, D].

  Only rows that `mask` [N] admits are taken, each once before any is taken again.
  Repeated ones add nothing, and the jitter bears them. Padding behind the rows does
  not change the choice. Without any row the inputs are zero.
  """
  chex.assert_rank(x, 2)
  num_rows = x.shape[0]
  mask = jnp.ones(num_rows, bool) if mask is None else mask.astype(bool)
  chex.assert_shape(mask, (num_rows,))
  score = jnp.where(mask, jax.random.uniform(key, (num_rows,), jnp.float32), 2.0)
  order = jnp.argsort(score)  # Padding last.
  turn = jnp.arange(num_inducing) % jnp.maximum(jnp.sum(mask), 1)
  return jnp.where(mask[:, None], x, jnp.zeros_like(x))[order[turn]]


def condition(
  x: jax.Array,
  y: jax.Array,
  inducing: jax.Array,
  params: KernelParams,
  mask: jax.Array | None = None,
) -> tuple[Sparse, jax.Array]:
  """`fit` and the negative log likelihood [] of the same rows, for one's work."""
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
  if mask is not None:  # A padded row says nothing, and the log of its Λ is zero.
    whitened = jnp.where(mask[None, :], whitened, jnp.zeros_like(whitened))
    diagonal = jnp.where(mask, diagonal, jnp.ones_like(diagonal))
  scaled = whitened / jnp.sqrt(diagonal)[None, :]
  cholesky = guarded_cholesky(identity + _product(scaled, scaled.T))
  weights = cho_solve((cholesky, True), _product(whitened, y / diagonal))
  residual = y - _product(weights, whitened)
  gap = _product(whitened, residual / diagonal) - weights
  weights = weights + cho_solve((cholesky, True), gap)  # One step of refinement.

  # The weights minimise the sum of the two squares: their error enters squared.
  residual = y - _product(weights, whitened)
  quadratic = jnp.sum(residual**2 / diagonal) + jnp.sum(weights**2)
  log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(cholesky))) + jnp.sum(jnp.log(diagonal))
  nll = 0.5 * (count * jnp.log(2.0 * jnp.pi) + log_det + quadratic)
  return Sparse(inducing, prior_cholesky, weights, cholesky, params), nll


def _whiten(
  x: jax.Array, inducing: jax.Array, prior_cholesky: jax.Array, params: KernelParams
) -> jax.Array:
  """L_u⁻¹ K_ZX [M, N] at x [N, D]."""
  cross = squared_exponential(x, inducing, params.length_scale, params.output_std)
  return solve_triangular(prior_cholesky, cross.T, lower=True)
