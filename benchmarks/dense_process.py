"""A dense Gaussian process: Matérn 3/2 with a scale for each input, plus a linear part.

Its scales maximise the evidence of at most 1,500 rows, by L-BFGS from one start; its
posterior is of at most 5,000. Both are random samples where there are more rows. All of
it is float64.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from fedbnr_jax.gp.urk.inducing_inputs import kernel_matrix
from fedbnr_jax.precision import float64

_EVIDENCE_ROWS, _POSTERIOR_ROWS = 1500, 5000
_MAX_STEPS = 60
_JITTER = 1e-6
_CHUNK = 2000  # Rows that are predicted at a time.


@dataclasses.dataclass(frozen=True)
class Process:
  """A posterior: its rows, and the scales of its kernel."""

  log_scales: np.ndarray  # [D + 3] of ℓ [D], both amplitudes, and the noise.
  x: np.ndarray  # [N, D]
  factor: np.ndarray  # [N, N] lower Cholesky factor of the targets' covariance.
  y: np.ndarray  # [N]
  num_evaluations: int

  def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means [P] and variances [P] of targets at x [P, D]."""
    with float64():
      chunks = [
        _predict(self.log_scales, self.x, self.factor, self.y, part)
        for part in np.split(x.astype(np.float64), range(_CHUNK, len(x), _CHUNK))
      ]
      means, variances = zip(*chunks, strict=True)
      return np.concatenate(means), np.concatenate(variances)


def fit(x: np.ndarray, y: np.ndarray, seed: int) -> Process:
  """Fits scales and posterior to inputs x [N, D] and targets y [N], standardised."""
  order = np.random.default_rng(seed).permutation(len(x))
  x, y = x[order].astype(np.float64), y[order].astype(np.float64)
  some = x[:_EVIDENCE_ROWS], y[:_EVIDENCE_ROWS]
  num_inputs = x.shape[1]
  start = np.concatenate(
    [
      np.full(num_inputs, 0.5 * np.log(num_inputs)),
      [0.0, -0.5 * np.log(num_inputs) - 1.0, np.log(0.3)],
    ]
  )
  with float64():
    loss = jax.jit(jax.value_and_grad(_negative_evidence))

    def objective(log_scales: np.ndarray) -> tuple[float, np.ndarray]:
      value, slope = loss(log_scales, *some)
      if not np.isfinite(value):
        return 1e10, np.zeros_like(log_scales)
      return float(value), np.asarray(slope)

    # Within these bounds the covariance can be factored.
    bounds = [(-5.0, 9.0)] * num_inputs + [(-9.0, 5.0)] * 2 + [(-5.0, 2.0)]
    found = scipy.optimize.minimize(
      objective,
      start,
      jac=True,
      method="L-BFGS-B",
      bounds=bounds,
      options={"maxiter": _MAX_STEPS, "maxcor": 20},
    )
    x, y = x[:_POSTERIOR_ROWS], y[:_POSTERIOR_ROWS]
    factor = np.linalg.cholesky(np.asarray(_covariance(found.x, x)))
  return Process(found.x, x, factor, y, int(found.nfev))


def _kernel(log_scales: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """The kernel [N, P] between rows a [N, D] and b [P, D]."""
  lengths, (matern, linear, _) = jnp.exp(log_scales[:-3]), jnp.exp(log_scales[-3:])
  near = kernel_matrix("matern32", a / lengths[None, :], b / lengths[None, :])
  return matern**2 * near + linear**2 * (a @ b.T)


@jax.jit
def _covariance(log_scales: jax.Array, x: jax.Array) -> jax.Array:
  noise = jnp.exp(2 * log_scales[-1]) + _JITTER
  return _kernel(log_scales, x, x) + noise * jnp.eye(len(x), dtype=x.dtype)


def _negative_evidence(log_scales: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """The negative log marginal likelihood [] a row, without its constant."""
  factor = jnp.linalg.cholesky(_covariance(log_scales, x))
  white = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
  return (0.5 * white @ white + jnp.sum(jnp.log(jnp.diag(factor)))) / len(y)


@jax.jit
def _predict(
  log_scales: jax.Array, x: jax.Array, factor: jax.Array, y: jax.Array, new: jax.Array
) -> tuple[jax.Array, jax.Array]:
  across = _kernel(log_scales, x, new)  # [N, P]
  solved = jax.scipy.linalg.solve_triangular(
    factor, jnp.concatenate([across, y[:, None]], axis=1), lower=True
  )
  spread, white = solved[:, :-1], solved[:, -1]
  matern, linear, noise = jnp.exp(2 * log_scales[-3:])
  prior = matern + linear * jnp.sum(new * new, axis=1) + noise
  return spread.T @ white, prior - jnp.sum(spread * spread, axis=0)
