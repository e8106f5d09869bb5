"""The sparse Gaussian process against the dense Gaussian it stands for."""

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from fedbnr_jax.gp import fitc

N, M, D = 24, 12, 3
PADDED = 31
LENGTHS, OUTPUT, SIGMA = np.array([0.8, 1.5, 2.5]), 1.3, 0.3
JITTER = 1e-6

kernel = jax.jit(fitc.squared_exponential)
choose = jax.jit(fitc.choose_inducing, static_argnums=3)

scales = st.tuples(st.floats(0.3, 4.0), st.floats(0.2, 5.0), st.floats(0.05, 2.0))
seeds = st.integers(0, 2**32 - 1)


@jax.jit
def everything(x, y, inducing, params, mask, query):
  """Likelihood, its gradient, fit, prediction: one program for most of the tests."""
  likelihood = jax.value_and_grad(fitc.negative_log_marginal_likelihood, (0, 1, 2, 3))
  value, gradient = likelihood(x, y, inducing, params, mask)
  fitted = fitc.fit(x, y, inducing, params, mask)
  return value, gradient, fitted, fitc.predict(fitted, query)


def _rows(num_rows=N, seed=0):
  """Inputs [N, D] and targets [N] of a smooth function."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(num_rows, D))
  return x, np.sin(x.sum(axis=1)) + 0.2 * rng.normal(size=num_rows)


def _inputs(num_inputs, seed=0):
  return np.random.default_rng([seed, 1]).normal(size=(num_inputs, D))


def _params(scale=1.0, output=OUTPUT, sigma=SIGMA):
  return fitc.kernel_params(scale * LENGTHS, output, sigma)


def _scattered(x, y, seed=0, content=np.nan):
  """Rows at random places of [PADDED, D], in their order, among `content`."""
  places = np.sort(np.random.default_rng(seed).permutation(PADDED)[: len(y)])
  wide, long = np.full((PADDED, D), content), np.full(PADDED, content)
  mask = np.zeros(PADDED, bool)
  wide[places], long[places], mask[places] = x, y, True
  return wide, long, mask


def _sparse(x, y, inducing, params, query, seed=0):
  """NLL, mean and variance of the rows, scattered among NaN."""
  wide, long, mask = _scattered(x, y, seed)
  value, _, _, predicted = everything(wide, long, inducing, params, mask, query)
  return value, *predicted


def _dense_kernel(a, b, params):
  """The kernel by explicit differences."""
  gap = (a[:, None, :] - b[None, :, :]) / np.asarray(params.length_scale, float)
  return float(params.output_std) ** 2 * np.exp(-0.5 * np.sum(gap**2, axis=-1))


def _gaussian(covariance, cross, prior, y):
  """NLL of y, and mean and variance of what has covariance `cross` with it."""
  value = -scipy.stats.multivariate_normal(cov=covariance).logpdf(y)
  solved = np.linalg.solve(covariance, cross.T)
  return value, solved.T @ y, prior - np.sum(cross * solved.T, axis=1)


def _dense(x, y, inducing, params, query):
  """FITC's NLL, mean and variance, from Q + Λ itself."""
  prior, noise = float(params.output_std) ** 2, float(params.noise_std) ** 2
  own = _dense_kernel(inducing, inducing, params)
  own = own + JITTER * prior * np.eye(len(inducing))
  to_rows = np.linalg.solve(own, _dense_kernel(inducing, x, params))
  low_rank = _dense_kernel(x, inducing, params) @ to_rows
  covariance = low_rank + np.diag(prior - np.diag(low_rank) + noise)
  cross = _dense_kernel(query, inducing, params) @ to_rows
  return _gaussian(covariance, cross, prior, y)


def _exact(x, y, params, query):
  """NLL, mean and variance of the exact Gaussian process."""
  noise = float(params.noise_std) ** 2 * np.eye(len(y))
  covariance = _dense_kernel(x, x, params) + noise
  cross = _dense_kernel(query, x, params)
  return _gaussian(covariance, cross, float(params.output_std) ** 2, y)


def _narrow(*arrays):
  return tuple(np.asarray(array, np.float32) for array in arrays)


# ----------------------------------------------------------------------- kernel


@pytest.mark.parametrize("lengths", [LENGTHS, 1.2], ids=["many", "one"])
def test_kernel_is_its_formula(lengths):
  x, inducing = _rows()[0], _inputs(M)
  params = fitc.kernel_params(lengths, OUTPUT, SIGMA)
  value = kernel(x, inducing, params.length_scale, params.output_std)
  np.testing.assert_allclose(value, _dense_kernel(x, inducing, params), rtol=1e-12)


def test_kernel_far_from_the_origin_keeps_its_digits_in_float32(x64_off):
  params = _params()
  x, inducing = _narrow(_rows()[0] + 1000.0, _inputs(M) + 1000.0)
  value = kernel(x, inducing, params.length_scale, params.output_std)
  expected = _dense_kernel(x.astype(float), inducing.astype(float), params)
  np.testing.assert_allclose(value, expected, atol=1e-5)


def test_kernel_at_distance_zero_is_the_prior_and_has_a_derivative():
  x, params = _rows()[0], _params()

  def total(a, b):
    value = fitc.squared_exponential(a, b, params.length_scale, params.output_std)
    return jnp.sum(jnp.diagonal(value)), value

  grads, value = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(x, x)
  np.testing.assert_allclose(np.diagonal(value), OUTPUT**2, rtol=1e-12)
  assert np.max(value) <= OUTPUT**2 * (1 + 1e-12)
  chex.assert_trees_all_close(grads, (np.zeros_like(x),) * 2, atol=1e-12)


# --------------------------------------------------------- likelihood and posterior


@hypothesis.given(seeds, scales, st.integers(1, N))
def test_likelihood_and_prediction_are_the_dense_ones(seed, scale, num_rows):
  x, y = _rows(num_rows, seed)
  inducing, query, params = _inputs(M, seed), _inputs(N, seed + 1), _params(*scale)
  value, mean, variance = _sparse(x, y, inducing, params, query, seed)
  expected = _dense(x, y, inducing, params, query)
  prior = float(params.prior_variance)
  np.testing.assert_allclose(value, expected[0], rtol=1e-7, atol=1e-6)
  np.testing.assert_allclose(mean, expected[1], rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(variance, expected[2], rtol=1e-6, atol=1e-8 * prior)


@pytest.mark.parametrize("sigma", [0.1, 0.5])
@pytest.mark.parametrize("num_rows", [M, M - 5], ids=["once", "some_twice"])
def test_all_rows_as_inducing_inputs_give_the_exact_process(sigma, num_rows):
  """Also if some are in twice, as for a client with few rows."""
  (x, y), query, params = _rows(num_rows), _inputs(N), _params(sigma=sigma)
  inducing = x[np.arange(M) % num_rows]
  got, expected = _sparse(x, y, inducing, params, query), _exact(x, y, params, query)
  # The jitter is 1e-6 s_f², a relative 2e-4 of the smaller σ².
  for one, other in zip(got, expected, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("content", [np.nan, np.inf, 1e300, 7.0])
def test_padding_is_inert(content):
  """Against the rows alone and no mask; derivatives included."""
  (x, y), model = _rows(), (_inputs(M), _params())
  wide, long, mask = _scattered(x, y, content=content)
  query = _inputs(N, 1)
  value, gradient, *rest = everything(wide, long, *model, mask, query)
  assert not any(np.any(np.asarray(part)[~mask]) for part in gradient[:2])
  gradient = (*(np.asarray(part)[mask] for part in gradient[:2]), *gradient[2:])
  expected = everything(x, y, *model, None, query)
  got = (value, gradient, *rest)
  chex.assert_trees_all_close(got, expected, rtol=1e-8, atol=1e-8)


def test_without_rows_the_prior_remains():
  nothing, params, mask = np.full((PADDED, D), np.nan), _params(), np.zeros(PADDED)
  value, gradient, _, (mean, variance) = everything(
    nothing, nothing[:, 0], _inputs(M), params, mask.astype(bool), _inputs(N, 1)
  )
  assert float(value) == 0.0
  chex.assert_tree_all_finite(gradient)
  np.testing.assert_array_equal(mean, np.zeros(N))
  np.testing.assert_allclose(variance, np.full(N, OUTPUT**2), rtol=1e-9)


def test_clients_at_once_are_clients_in_turn():
  """Three ragged clients, each with inducing inputs and parameters of its own."""
  clients = []
  for index, num_rows in enumerate((N, 5, 1)):
    wide, long, mask = _scattered(*_rows(num_rows, index), index)
    params = _params(scale=1.0 + index, sigma=0.2 + index)
    clients.append((wide, long, _inputs(M, index), params, mask))
  stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *clients)
  query = _inputs(N, 9)

  @jax.jit
  @jax.vmap
  def together(*client):
    value = fitc.negative_log_marginal_likelihood(*client)
    return value, fitc.predict(fitc.fit(*client), query)

  values, (means, variances) = jax.tree.map(np.asarray, together(*stacked))
  for index, client in enumerate(clients):
    value, _, _, predicted = everything(*client, query)
    got = values[index], (means[index], variances[index])
    chex.assert_trees_all_close(got, (value, predicted), rtol=1e-9, atol=1e-9)


def test_gradient_is_the_slope():
  wide, long, mask = _scattered(*_rows(), content=0.0)
  query = _inputs(N, 1)
  flat, unravel = ravel_pytree((wide, long, _inputs(M), _params()))
  slope = ravel_pytree(everything(*unravel(flat), mask, query)[1])[0]
  for seed in range(4):
    step = 1e-5 * np.random.default_rng(seed).normal(size=flat.shape)
    up, down = (
      everything(*unravel(flat + sign * step), mask, query)[0] for sign in (1.0, -1.0)
    )
    np.testing.assert_allclose(2.0 * np.dot(slope, step), up - down, rtol=1e-5)


# -------------------------------------------------------------------- prediction


@hypothesis.given(seeds, scales)
def test_variance_lies_between_zero_and_the_prior(seed, scale):
  """Also at the inducing inputs and the rows, where all but the noise is known."""
  (x, y), params = _rows(M, seed), _params(*scale)
  query = np.concatenate([x, 3.0 * _inputs(N - M, seed)])
  _, _, variance = _sparse(x, y, x, params, query)
  assert np.all(variance > 0)
  # Compiled and not, the same exp may differ in its last digit.
  assert np.all(variance <= params.prior_variance * (1 + 1e-12))


def test_far_from_the_rows_the_prior_returns():
  query = 100.0 + _inputs(N, 1)
  _, mean, variance = _sparse(*_rows(), _inputs(M), _params(), query)
  np.testing.assert_array_equal(mean, np.zeros(N))
  np.testing.assert_allclose(variance, np.full(N, OUTPUT**2), rtol=1e-9)


# --------------------------------------------------------------------- precision


def test_types_are_as_wide_as_the_device_allows(any_x64):
  x, y, inducing, query = _narrow(*_rows(), _inputs(M), _inputs(N))
  got = jax.eval_shape(everything, x, y, inducing, _params(), None, query)
  value, gradient, fitted, predicted = got
  wide = jnp.float64 if any_x64 else jnp.float32
  chex.assert_type(jax.tree.leaves((fitted, predicted)), wide)
  chex.assert_type([value, *gradient[:3]], jnp.float32)  # As the rows.
  chex.assert_type(jax.tree.leaves(gradient[3]), wide)  # As the parameters.
  params = fitc.kernel_params(LENGTHS, OUTPUT, SIGMA, jnp.float32)
  chex.assert_type(jax.tree.leaves(params), jnp.float32)
  assert not any(leaf.weak_type for leaf in jax.tree.leaves((params, _params())))


def test_float32_agrees_with_the_dense_form(x64_off):
  (x, y), params = _rows(), _params()
  inducing, query = _inputs(M), _inputs(N, 1)
  wide, long, mask = _scattered(x, y)
  narrow = _narrow(wide, long, inducing)
  got = everything(*narrow, params, mask, *_narrow(query))
  value, mean, variance = _dense(x, y, inducing, params, query)
  chex.assert_tree_all_finite(got)
  np.testing.assert_allclose(got[0], value, rtol=1e-3)
  np.testing.assert_allclose(got[3][0], mean, atol=5e-3)
  np.testing.assert_allclose(got[3][1], variance, atol=2e-3)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("sigma", [1e-3, 1.0])
def test_hard_systems_stay_finite(any_x64, scale, sigma):
  """K_ZZ of rank one or six, and less noise than float32 resolves beside s_f."""
  x, y = _rows()
  wide, long, mask = _scattered(x, y)
  inducing = np.concatenate([x[: M // 2], x[: M // 2]])
  params, arrays = _params(scale=scale, sigma=sigma), (wide, long, inducing)
  arrays = arrays if any_x64 else _narrow(*arrays)
  got = everything(*arrays, params, mask, x if any_x64 else np.float32(x))
  chex.assert_tree_all_finite(got)
  variance = got[3][1]
  assert np.all((variance >= 0) & (variance <= params.prior_variance * (1 + 1e-6)))


# --------------------------------------------------------------- inducing inputs


@hypothesis.given(seeds, st.integers(1, N))
def test_inducing_inputs_are_valid_rows_each_as_often(seed, num_rows):
  x, y = _rows(num_rows, seed)
  wide, _, mask = _scattered(x, y, seed)
  chosen = np.asarray(choose(jax.random.key(seed), wide, mask, M))
  index = [np.flatnonzero(np.all(x == row, axis=1)) for row in chosen]
  assert all(len(found) == 1 for found in index)
  times = np.bincount(np.concatenate(index), minlength=num_rows)
  assert times.max() - times.min() <= 1


def test_inducing_inputs_are_drawn_by_the_key():
  x, _ = _rows()
  first, second = (choose(jax.random.key(seed), x, None, M) for seed in range(2))
  assert not np.array_equal(first, second)
  np.testing.assert_array_equal(first, choose(jax.random.key(0), x, None, M))
  behind = np.pad(x, ((0, PADDED - N), (0, 0)), constant_values=np.nan)
  again = choose(jax.random.key(0), behind, np.arange(PADDED) < N, M)
  np.testing.assert_array_equal(first, again)


def test_more_inducing_inputs_than_places_are_all_rows(any_x64):
  x = np.float32(_rows()[0])
  chosen = choose(jax.random.key(0), x, None, PADDED)
  assert chosen.shape == (PADDED, D)
  assert chosen.dtype == x.dtype
  np.testing.assert_array_equal(np.unique(chosen, axis=0), np.unique(x, axis=0))


def test_inducing_inputs_of_many_clients_even_of_an_empty_one():
  wide, _, mask = _scattered(*_rows())
  inputs, masks = np.stack([wide, wide]), np.stack([mask, np.zeros_like(mask)])
  keys = jax.random.split(jax.random.key(0), 2)
  many = jax.jit(jax.vmap(lambda *client: fitc.choose_inducing(*client, M)))
  choices = np.asarray(many(keys, inputs, masks))
  np.testing.assert_array_equal(choices[0], choose(keys[0], wide, mask, M))
  assert not np.any(choices[1])


# ------------------------------------------------------------------------ shapes


def test_shapes_that_do_not_fit_are_refused():
  (x, y), inducing, params = _rows(), _inputs(M), _params()
  for arguments in (
    (x, y[:-1], inducing, params, None, x),
    (x, y[:, None], inducing, params, None, x),
    (x, y, inducing[:, :2], params, None, x),
    (x, y, inducing[0], params, None, x),
    (x, y, inducing, fitc.kernel_params(LENGTHS[:2], OUTPUT, SIGMA), None, x),
    (x, y, inducing, params, np.ones(N - 1, bool), x),
    (x, y, inducing, params, None, x[0]),
    (x, y, inducing, params, None, x[:, :2]),
  ):
    with pytest.raises(AssertionError):
      jax.eval_shape(everything, *arguments)
