"""Bayesian linear regression against the dense Gaussian process it stands for."""

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import strategies as st

from fedbnr_jax import blr
from fedbnr_jax.blr import likelihood
from tests import oracles

N, M = 30, 8
SIGMA, LAMBDA = 0.3, 1.7
SHAPES = [(30, 8), (8, 30)]  # Primal, dual.

nll = jax.jit(blr.negative_log_marginal_likelihood)
stats_of = jax.jit(blr.sufficient_stats)
posterior = jax.jit(blr.posterior)
predict = jax.jit(blr.predict, static_argnames="with_noise")
fit_evidence = jax.jit(blr.fit_evidence)
from_stats = jax.jit(blr.negative_log_marginal_likelihood_from_stats)


def _padded(features, targets, num_rows, content):
  """Rows at the front, `content` behind them, and their mask."""
  extra = num_rows - len(targets)
  features = np.pad(features, ((0, extra), (0, 0)), constant_values=content)
  targets = np.pad(targets, (0, extra), constant_values=content)
  return features, targets, np.arange(num_rows) < num_rows - extra


def _scattered(features, targets, num_rows, seed):
  """Rows at random places among NaN."""
  rng = np.random.default_rng(seed)
  places = rng.permutation(num_rows)[: len(targets)]
  wide = np.full((num_rows, features.shape[1]), np.nan)
  long, mask = np.full(num_rows, np.nan), np.zeros(num_rows, bool)
  wide[places], long[places], mask[places] = features, targets, True
  return wide, long, mask


def _dense_nll(features, targets, noise_std, prior_std, mask=None):
  """The dense form, for autodiff; masked rows become noise alone, then leave."""
  padding = 0.0
  if mask is not None:
    features = jnp.where(mask[:, None], features, 0.0)
    targets = jnp.where(mask, targets, 0.0)
    one = 0.5 * np.log(2 * np.pi) + jnp.log(noise_std)
    padding = jnp.sum(~mask, dtype=features.dtype) * one
  dense = prior_std**2 * features @ features.T
  dense = dense + noise_std**2 * jnp.eye(len(targets))
  quadratic = targets @ jnp.linalg.solve(dense, targets)
  log_det = jnp.linalg.slogdet(dense)[1]
  return 0.5 * (len(targets) * np.log(2 * np.pi) + log_det + quadratic) - padding


def _fourier(num_rows, num_features, length_scale, seed=0, num_inputs=5):
  """Random Fourier features and standardised targets, exact in float32."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(num_rows, num_inputs))
  omega = rng.normal(size=(num_features // 2, num_inputs)) / length_scale
  phase = x @ omega.T
  features = np.concatenate([np.cos(phase), np.sin(phase)], 1)
  features /= np.sqrt(num_features / 2 - 1)
  targets = np.sin(x.sum(1)) + 0.3 * rng.normal(size=num_rows)
  targets = (targets - targets.mean()) / targets.std()
  return features.astype(np.float32), targets.astype(np.float32)


# ------------------------------------------------------------------- statistics


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(0.05, 2.0), st.floats(0.1, 9.0))
def test_any_deal_order_and_padding_give_the_dense_posterior(seed, sigma, prior):
  """K clients of random sizes, NaN in the padding, against the pooled dense GP."""
  features, targets = oracles.rows(N, M, seed)
  rng = np.random.default_rng(seed)
  owner = rng.integers(0, 4, N)
  stats = []
  for client in rng.permutation(4):
    mine = rng.permutation(np.flatnonzero(owner == client))
    padded = _scattered(features[mine], targets[mine], N, seed)
    stats.append(stats_of(*padded))
  total = stats[0] + stats[1] + stats[2] + stats[3]
  assert float(total.count) == N

  query = rng.normal(size=(6, M))
  mean, variance = predict(posterior(total, sigma, prior), query)
  dense = oracles.gp_predict(features, targets, query, sigma, prior)
  scale = np.abs(dense[0]).max()
  np.testing.assert_allclose(mean, dense[0], rtol=1e-9, atol=1e-9 * scale)
  np.testing.assert_allclose(variance, dense[1], rtol=1e-9)
  value = from_stats(total, posterior(total, sigma, prior))
  expected = oracles.gp_nll(features, targets, sigma, prior)
  np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-9 * N)


def test_statistics_are_the_products():
  features, targets = oracles.rows(N, M)
  stats = stats_of(features, targets)
  np.testing.assert_allclose(stats.gram, features.T @ features, rtol=1e-12, atol=1e-12)
  np.testing.assert_allclose(stats.moment, features.T @ targets, rtol=1e-12)
  np.testing.assert_allclose(stats.energy, targets @ targets, rtol=1e-12)
  assert float(stats.count) == N


def test_stacked_statistics_sum_as_they_add():
  parts = [stats_of(*oracles.rows(N, M, seed)) for seed in range(3)]
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
  added = parts[0] + parts[1] + parts[2]
  chex.assert_trees_all_close(blr.sum_stats(stacked), added, rtol=1e-13)


def test_statistics_are_as_wide_as_the_device_allows(any_x64):
  features, targets = (a.astype(np.float32) for a in oracles.rows(N, M))
  stats = stats_of(features, targets)
  fitted = posterior(stats, SIGMA, LAMBDA)
  wide = jnp.float64 if any_x64 else jnp.float32
  chex.assert_type([*jax.tree.leaves(stats), *jax.tree.leaves(fitted)], wide)
  chex.assert_type(list(predict(fitted, features)), wide)
  value = nll(features, targets, SIGMA, LAMBDA)
  assert value.dtype == jnp.float32  # Local steps keep the features' dtype.


# ------------------------------------------------------------------- likelihood


@pytest.mark.parametrize("shape", SHAPES)
@hypothesis.settings(max_examples=15)
@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(0.05, 2.0), st.floats(0.1, 9.0))
def test_likelihood_is_the_dense_one(shape, seed, sigma, prior):
  features, targets = oracles.rows(*shape, seed)
  expected = oracles.gp_nll(features, targets, sigma, prior)
  value = nll(features, targets, sigma, prior)
  np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-9 * shape[0])


@pytest.mark.parametrize("num_rows", [9, 40], ids=["dual", "primal"])
def test_masked_rows_turn_dual_into_primal_and_back(num_rows):
  """M = 20: 9 rows are solved in the dual form, padded to 40 in the primal one."""
  features, targets = oracles.rows(9, 20)
  expected = oracles.gp_nll(features, targets, SIGMA, LAMBDA)
  value = nll(*_padded(features, targets, num_rows, np.nan)[:2], SIGMA, LAMBDA)
  assert np.isnan(value) == (num_rows > 9)  # Without the mask, NaN is seen.
  for rows in (
    _padded(features, targets, num_rows, np.nan),
    _scattered(features, targets, num_rows, 1),
  ):
    value = nll(*rows[:2], SIGMA, LAMBDA, rows[2])
    np.testing.assert_allclose(value, expected, rtol=1e-11)


@pytest.mark.parametrize("num_features", [4, 60], ids=["primal", "dual"])
def test_padding_content_changes_no_bit(num_features):
  features, targets = oracles.rows(20, num_features)
  grad = jax.jit(
    jax.value_and_grad(blr.negative_log_marginal_likelihood, argnums=(2, 3))
  )
  results = []
  for content in (0.0, 1e30, np.inf, np.nan):
    f, t, mask = _padded(features, targets, 25, content)
    results.append((grad(f, t, SIGMA, LAMBDA, mask), stats_of(f, t, mask)))
  for other in results[1:]:
    chex.assert_trees_all_equal(results[0], other)


@pytest.mark.parametrize("num_features", [4, 60], ids=["primal", "dual"])
def test_padding_length_changes_only_rounding(num_features):
  features, targets = oracles.rows(20, num_features)
  value = nll(features, targets, SIGMA, LAMBDA)
  stats = stats_of(features, targets)
  for num_rows in (21, 37):
    f, t, mask = _padded(features, targets, num_rows, np.nan)
    np.testing.assert_allclose(nll(f, t, SIGMA, LAMBDA, mask), value, rtol=1e-12)
    chex.assert_trees_all_close(stats_of(f, t, mask), stats, rtol=1e-12, atol=1e-12)


EVERY = (0, 1, 2, 3)  # Features, targets, σ, λ.
gradient = jax.jit(jax.grad(blr.negative_log_marginal_likelihood, EVERY))
dense_gradient = jax.jit(jax.grad(_dense_nll, EVERY))


@pytest.mark.parametrize("shape", SHAPES)
@hypothesis.settings(max_examples=10)
@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(0.1, 2.0), st.floats(0.1, 9.0))
def test_gradient_is_the_dense_autodiff(shape, seed, sigma, prior):
  arguments = jax.tree.map(jnp.asarray, (*oracles.rows(*shape, seed), sigma, prior))
  got, expected = gradient(*arguments), dense_gradient(*arguments)
  chex.assert_trees_all_close(got, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_of_masked_rows_under_vmap_is_the_dense_one(shape):
  features, targets = zip(
    *[oracles.rows(*shape, seed) for seed in range(3)], strict=True
  )
  features, targets = jnp.asarray(features), jnp.asarray(targets)
  mask = jnp.arange(shape[0])[None, :] < jnp.asarray([[shape[0]], [5], [1]])
  dirty = jnp.where(mask[..., None], features, jnp.nan)
  scales = jnp.asarray(SIGMA), jnp.asarray(LAMBDA)
  axes = (0, 0, None, None, 0)
  got = jax.jit(jax.vmap(gradient, axes))(dirty, targets, *scales, mask)
  assert not np.any(got[0][~mask])
  assert not np.any(got[1][~mask])
  expected = jax.jit(jax.vmap(dense_gradient, axes))(features, targets, *scales, mask)
  chex.assert_trees_all_close(got, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_first_and_second_derivatives_along_a_line_are_the_dense_ones(shape):
  rng = np.random.default_rng(5)
  arguments = (*oracles.rows(*shape, seed=5), SIGMA, LAMBDA)
  arguments = jax.tree.map(jnp.asarray, arguments)
  direction = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), arguments)

  def along(fn, order):
    if order == 0:
      return lambda t: fn(*jax.tree.map(lambda a, d: a + t * d, arguments, direction))
    inner = along(fn, order - 1)
    return lambda t: jax.jvp(inner, (t,), (jnp.ones(()),))[1]

  for order in (1, 2):
    got = jax.jit(along(blr.negative_log_marginal_likelihood, order))(jnp.zeros(()))
    expected = jax.jit(along(_dense_nll, order))(jnp.zeros(()))
    np.testing.assert_allclose(got, expected, rtol=1e-8)


@pytest.mark.parametrize("shape", SHAPES)
def test_hessian_vector_product_is_the_dense_one(shape):
  """Reverse over reverse, in the features."""
  features, targets = map(jnp.asarray, oracles.rows(*shape, seed=6))
  vector = jnp.asarray(np.random.default_rng(7).normal(size=shape))

  def product(fn):
    slope = jax.grad(lambda f: fn(f, targets, SIGMA, LAMBDA))
    return jax.jit(jax.grad(lambda f: jnp.sum(slope(f) * vector)))(features)

  got, expected = product(blr.negative_log_marginal_likelihood), product(_dense_nll)
  scale = float(jnp.abs(expected).max())
  np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-9 * scale)


# ---------------------------------------------------------------------- float32


@pytest.mark.parametrize("num_rows, num_features", [(400, 40), (30, 40)])
def test_float32_agrees_with_dense_in_reasonable_cases(num_rows, num_features, x64_off):
  features, targets = _fourier(num_rows, num_features, 1.5)
  query = _fourier(20, num_features, 1.5, seed=0)[0]
  stats = stats_of(features, targets)
  mean, variance = predict(posterior(stats, 0.3, 1.0), query)
  dense = oracles.gp_predict(features, targets, query, 0.3, 1.0)
  np.testing.assert_allclose(mean, dense[0], atol=1e-4 * np.abs(dense[0]).max())
  np.testing.assert_allclose(variance, dense[1], rtol=1e-4)
  value = nll(features, targets, 0.3, 1.0)
  np.testing.assert_allclose(
    value, oracles.gp_nll(features, targets, 0.3, 1.0), rtol=1e-4
  )


def _float32_quadratic_error(features, targets, sigma, prior):
  """Relative error of yᵀ(λ²ΦΦᵀ + σ²I)⁻¹y: what y adds to the likelihood."""
  full = nll(features, targets, sigma, prior)
  none = nll(features, 0 * targets, sigma, prior)
  wide, y = features.astype(float), targets.astype(float)
  # By the matrix inversion lemma: [M, M], as 3300 rows are slow for a test.
  rho = (prior / sigma) ** 2
  root = np.linalg.qr(np.vstack([np.sqrt(rho) * wide, np.eye(wide.shape[1])]))[0]
  top = root[: len(y)]
  exact = (y @ y - np.sum((top.T @ y) ** 2)) / sigma**2
  return abs(2 * (float(full) - float(none)) / exact - 1)


@pytest.mark.parametrize(
  "length_scale, sigma, prior, shift, scale",
  [(1.0, 0.05, 10.0, 0, 1), (3.0, 0.05, 10.0, 0, 1), (1.0, 4.0, 500.0, 454, 17)]
  + [(1.0, 0.05, 50.0, 20, 3)],
  ids=["table", "smooth", "ccpp_raw", "sml_raw"],
)
def test_float32_quadratic_form_holds_in_hard_cases(
  length_scale, sigma, prior, shift, scale, x64_off
):
  features, targets = _fourier(3300, 100, length_scale)
  targets = (shift + scale * targets).astype(np.float32)
  assert _float32_quadratic_error(features, targets, sigma, prior) < 1e-4


def test_float32_quadratic_form_holds_in_the_dual_form(x64_off):
  features, targets = _fourier(60, 100, 3.0)
  assert _float32_quadratic_error(features, targets, 0.05, 10.0) < 1e-4


@pytest.mark.parametrize("num_rows", [3300, 90], ids=["primal", "dual"])
def test_float32_factor_exists_for_a_very_smooth_kernel(num_rows, x64_off):
  features, targets = _fourier(num_rows, 100, 10.0, num_inputs=2)
  value = nll(features, targets, 0.01, 10.0)
  assert np.isfinite(value)


# -------------------------------------------- float32 features, float64 factor


value_and_gradient = jax.jit(
  jax.value_and_grad(blr.negative_log_marginal_likelihood, EVERY)
)


def _collapsed(num_rows, num_features, seed=0):
  """Rows that are nearly one and the same, and targets that are nearly constant."""
  rng = np.random.default_rng(seed)
  row = _fourier(2, num_features, 1.0, seed)[0][:1]
  features = row + 1e-4 * rng.normal(size=(num_rows, num_features))
  targets = 1.0 + 0.01 * rng.normal(size=num_rows)
  return features.astype(np.float32), targets.astype(np.float32)


ROWS = {"fourier": lambda n, m: _fourier(n, m, 1.5), "collapsed": _collapsed}


def _noise_std(features, prior_std, rounding):
  """The σ at which the bound on float32's rounding has this value."""
  trace = np.sum(features.astype(float) ** 2)
  return np.float32(prior_std * np.sqrt(np.finfo("f").eps * trace / rounding))


def _error(got, exact, least=0.0):
  """Relative, of the norm, which counts as no smaller than `least`."""
  exact = np.asarray(exact, float)
  difference = np.linalg.norm(np.asarray(got, float) - exact)
  return difference / max(np.linalg.norm(exact), least)


def _errors(got, features, targets, noise_std, prior_std):
  """Relative errors of value, ∂Φ, ∂y, ∂σ, ∂λ.

  Value and slopes in σ, λ are differences and may vanish: then they are compared with
  a nat per row and with what one row or one weight adds.
  """
  sigma, prior = float(noise_std), float(prior_std)
  arguments = features, targets, sigma, prior
  exact = oracles.gp_nll(*arguments), *oracles.gp_gradient(*arguments)
  least = (len(targets), 0.0, 0.0, 1 / sigma, 1 / prior)
  triples = zip((got[0], *got[1]), exact, least, strict=True)
  return np.array([_error(*triple) for triple in triples])


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_oracle_is_the_dense_autodiff(shape):
  arguments = jax.tree.map(jnp.asarray, (*oracles.rows(*shape, 3), SIGMA, LAMBDA))
  expected = dense_gradient(*arguments)
  chex.assert_trees_all_close(oracles.gp_gradient(*arguments), expected, rtol=1e-9)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("num_rows", [332, 34], ids=["primal", "dual"])
@pytest.mark.parametrize("prior", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("share", [0.9, 0.01], ids=["just_below", "far_below"])
def test_mixed_precision_holds_below_its_bound(rows, num_rows, prior, share):
  features, targets = ROWS[rows](num_rows, 100)
  sigma = _noise_std(features, prior, share * likelihood._MAX_ROUNDING)
  arguments = features, targets, sigma, np.float32(prior)
  errors = _errors(value_and_gradient(*arguments), *arguments)
  if rows == "collapsed":  # Features: up to three times the bound.
    assert errors[1] < 4 * likelihood._MAX_ROUNDING
    assert np.all(np.delete(errors, 1) < likelihood._MAX_ROUNDING)
  else:
    assert np.all(errors < 0.025 * likelihood._MAX_ROUNDING)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("num_rows", [332, 34], ids=["primal", "dual"])
@pytest.mark.parametrize("sigma, prior", [(1e-3, 3.0), (1e-3, 10.0), (0.02, 1.0)])
def test_float64_takes_over_where_noise_is_small(rows, num_rows, sigma, prior):
  features, targets = ROWS[rows](num_rows, 100)
  arguments = features, targets, np.float32(sigma), np.float32(prior)
  assert sigma < _noise_std(features, prior, likelihood._MAX_ROUNDING)
  errors = _errors(value_and_gradient(*arguments), *arguments)
  assert np.all(errors < 1e-6)


def test_slope_in_the_noise_survives_weights_that_explain_every_row():
  """N − γ is a trace of 1e-4 beside N = 34."""
  features = _fourier(34, 100, 1.0)[0]
  arguments = features, np.zeros(34, np.float32), np.float32(1e-3), np.float32(10.0)
  exact = oracles.gp_gradient(*arguments)[2]
  assert 1e-6 < exact * 1e-3 < 1e-3
  assert _error(gradient(*arguments)[2], exact) < 1e-5


def test_slope_in_the_features_survives_a_small_rank():
  """Most of B⁻¹ is the identity, which its product with the features must cancel."""
  rng = np.random.default_rng(0)
  features = rng.normal(size=(90, 3)) @ rng.normal(size=(3, 100)) / 17.0
  targets = features @ rng.normal(size=100) + 1e-3 * rng.normal(size=90)
  arguments = *(a.astype(np.float32) for a in (features, targets)), 1e-3, 10.0
  arguments = jax.tree.map(np.float32, arguments)
  assert _errors(value_and_gradient(*arguments), *arguments)[1] < 1e-4


def _always_exact(monkeypatch, arguments):
  with monkeypatch.context() as patch:
    patch.setattr(likelihood, "_MAX_ROUNDING", 0.0)
    fresh = jax.grad(lambda *a: blr.negative_log_marginal_likelihood(*a), EVERY)
    return jax.jit(fresh)(*arguments)


@pytest.mark.parametrize("num_rows", [60, 12], ids=["primal", "dual"])
def test_the_bound_decides_between_the_routes(num_rows, monkeypatch):
  features, targets = _fourier(num_rows, 20, 1.5)
  for share, mixed in ((0.9, True), (1.1, False)):
    sigma = _noise_std(features, 1.0, share * likelihood._MAX_ROUNDING)
    arguments = features, targets, sigma, np.float32(1.0)
    exact = _always_exact(monkeypatch, arguments)
    same = jax.tree.map(np.array_equal, gradient(*arguments), exact)
    assert same[0] != mixed


def _clients(num_rows, num_features, extreme):
  """Three clients [3, ...] with their own scales; the second one extreme or not."""
  features, targets = zip(
    *[_fourier(num_rows, num_features, 1.5, seed) for seed in range(3)], strict=True
  )
  sigma = np.array([1.0, 1e-3 if extreme else 0.8, 2.0], np.float32)
  return np.stack(features), np.stack(targets), sigma, np.ones(3, np.float32)


@pytest.mark.parametrize("num_rows", [60, 12], ids=["primal", "dual"])
@pytest.mark.parametrize("extreme", [False, True])
def test_batch_with_and_without_an_extreme_client_is_a_loop(num_rows, extreme):
  clients = _clients(num_rows, 20, extreme)
  got = jax.jit(jax.vmap(value_and_gradient))(*clients)
  for k in range(3):
    client = [a[k] for a in clients]
    mine = jax.tree.map(lambda leaf, k=k: leaf[k], got)
    assert np.all(_errors(mine, *client) < 1e-4)
    chex.assert_trees_all_close(mine, value_and_gradient(*client), rtol=1e-3, atol=1e-3)


def _count_choices(jaxpr):
  """Branches on data; those on the platform inside JAX have one output each."""
  here = sum(e.primitive.name == "cond" and len(e.outvars) > 1 for e in jaxpr.eqns)
  inner = [p.jaxpr for e in jaxpr.eqns for p in e.params.values() if hasattr(p, "eqns")]
  return here + sum(map(_count_choices, inner))


def test_shared_scales_and_a_batch_of_batches_make_one_choice():
  features, targets, *_ = _clients(12, 20, extreme=False)
  features, targets = (np.stack([a, a[::-1]]) for a in (features, targets))
  scales = np.float32(0.5), np.float32(1.0)
  axes = (0, 0, None, None)
  nested = jax.vmap(jax.vmap(value_and_gradient, axes), axes)
  # With a choice for each client both routes would run, and none be left.
  assert _count_choices(jax.make_jaxpr(nested)(features, targets, *scales).jaxpr) == 1
  got = jax.jit(nested)(features, targets, *scales)
  for i, j in np.ndindex(2, 3):
    mine = jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], got)
    assert np.all(_errors(mine, features[i, j], targets[i, j], *scales) < 1e-4)


def test_descent_in_a_scan_crosses_from_one_route_to_the_other():
  """σ shrinks from step to step; a loop outside of jit is the oracle."""
  features, targets = _fourier(60, 20, 1.5)
  limit = _noise_std(features, 1.0, likelihood._MAX_ROUNDING)
  sigmas = (limit * np.array([4, 2, 1.1, 0.9, 0.1, 0.01])).astype(np.float32)

  def step(features, sigma):
    value, slopes = value_and_gradient(features, targets, sigma, jnp.float32(1.0))
    return features - 1e-5 * slopes[0], value

  scanned, values = jax.jit(lambda f: jax.lax.scan(step, f, sigmas))(features)
  wide, expected = features.astype(float), []
  for sigma in sigmas:
    expected.append(oracles.gp_nll(wide, targets, float(sigma), 1.0))
    wide = wide - 1e-5 * oracles.gp_gradient(wide, targets, sigma, 1.0)[0]
  np.testing.assert_allclose(values, expected, rtol=1e-4)
  assert _error(np.asarray(scanned) - features, wide - features) < 1e-3


@pytest.mark.parametrize("num_rows", [60, 12], ids=["primal", "dual"])
def test_hessian_vector_product_of_float32_features_is_the_dense_one(num_rows):
  features, targets = map(jnp.asarray, _fourier(num_rows, 20, 1.5))
  vector = np.random.default_rng(7).normal(size=features.shape)

  def product(fn, dtype):
    f, t, v = (jnp.asarray(a, dtype) for a in (features, targets, vector))
    slope = jax.grad(lambda f: fn(f, t, jnp.asarray(0.5, dtype), jnp.asarray(1, dtype)))
    return jax.jit(jax.grad(lambda f: jnp.sum(slope(f) * v)))(f)

  got = product(blr.negative_log_marginal_likelihood, jnp.float32)
  expected = product(_dense_nll, jnp.float64)
  assert got.dtype == jnp.float32
  assert _error(got, expected) < 1e-4


@pytest.mark.parametrize("num_rows", [332, 34], ids=["primal", "dual"])
def test_gradient_without_float64_holds_in_reasonable_cases(num_rows, x64_off):
  arguments = *_fourier(num_rows, 100, 1.5), np.float32(0.3), np.float32(1.0)
  errors = _errors(value_and_gradient(*arguments), *arguments)
  assert np.all(errors < 1e-5)


# -------------------------------------------------------------------- posterior


def test_posterior_is_the_explicit_inverse():
  features, targets = oracles.rows(N, M)
  fitted = posterior(stats_of(features, targets), SIGMA, LAMBDA)
  mean, covariance = oracles.weight_posterior(features, targets, SIGMA, LAMBDA)
  np.testing.assert_allclose(fitted.mean, mean, rtol=1e-10)
  precision = fitted.cholesky @ fitted.cholesky.T / LAMBDA**2
  np.testing.assert_allclose(precision @ covariance, np.eye(M), atol=1e-11)


def test_no_rows_leave_the_prior():
  empty = stats_of(np.zeros((3, M)), np.zeros(3), np.zeros(3, bool))
  query = oracles.rows(5, M)[0]
  mean, variance = predict(posterior(empty, SIGMA, LAMBDA), query)
  np.testing.assert_array_equal(mean, np.zeros(5))
  prior = LAMBDA**2 * np.sum(query**2, axis=1) + SIGMA**2
  np.testing.assert_allclose(variance, prior, rtol=1e-13)


def test_noise_is_the_difference_with_noise_makes():
  fitted = posterior(stats_of(*oracles.rows(N, M)), SIGMA, LAMBDA)
  query = oracles.rows(5, M, seed=1)[0]
  mean, variance = predict(fitted, query)
  same, latent = predict(fitted, query, with_noise=False)
  np.testing.assert_array_equal(mean, same)
  np.testing.assert_allclose(variance - latent, SIGMA**2, rtol=1e-12)
  assert np.all(latent > 0)


def test_samples_have_the_posteriors_mean_and_covariance():
  features, targets = oracles.rows(N, 3)
  fitted = posterior(stats_of(features, targets), SIGMA, LAMBDA)
  mean, covariance = oracles.weight_posterior(features, targets, SIGMA, LAMBDA)
  num_samples = 40_000
  draws = np.asarray(blr.sample_weights(jax.random.key(0), fitted, num_samples))
  assert draws.shape == (num_samples, 3)
  # Whitened draws are standard normal: errors of 1/√n, five of them allowed.
  white = np.linalg.solve(np.linalg.cholesky(covariance), (draws - mean).T)
  bound = 5 / np.sqrt(num_samples)
  np.testing.assert_allclose(white.mean(axis=1), 0, atol=bound)
  np.testing.assert_allclose(np.cov(white), np.eye(3), atol=2 * bound)


def test_printed_phase_two_is_the_merged_one():
  """Scatter up, A⁻¹ down, partial means up: the same posterior."""
  parts = [stats_of(*oracles.rows(N, M, seed)) for seed in range(3)]
  total = parts[0] + parts[1] + parts[2]
  covariance = blr.covariance(total.gram, SIGMA, LAMBDA)
  mean = sum(blr.partial_mean(covariance, part.moment, SIGMA) for part in parts)
  merged = posterior(total, SIGMA, LAMBDA)
  np.testing.assert_allclose(mean, merged.mean, rtol=1e-9)
  precision = merged.cholesky @ merged.cholesky.T / LAMBDA**2
  np.testing.assert_allclose(covariance @ precision, np.eye(M), atol=1e-11)


# --------------------------------------------------------------------- evidence


def _log_nll(logs, features, targets):
  return _dense_nll(features, targets, jnp.exp(logs[0]), jnp.exp(logs[1]))


log_values = jax.jit(jax.vmap(_log_nll, (0, None, None)))
log_slope = jax.jit(jax.grad(_log_nll))


@pytest.mark.parametrize("shape", [(60, 8), (20, 40)], ids=["tall", "wide"])
@pytest.mark.parametrize("seed", range(3))
def test_evidence_is_stationary_and_the_best_anywhere(shape, seed):
  features, targets = oracles.rows(*shape, seed)
  # A falling spectrum, so that wide features too leave something to the noise.
  decay = 3 * 0.6 ** np.arange(shape[1])
  targets = targets + features @ (decay * 2)
  features, targets = jnp.asarray(features * decay), jnp.asarray(targets)
  best = jnp.log(jnp.stack(fit_evidence(stats_of(features, targets))))
  slope = log_slope(best, features, targets)
  np.testing.assert_allclose(slope, 0, atol=1e-7 * shape[0])

  grid = np.stack(np.meshgrid(*[np.linspace(-4, 3, 15)] * 2), -1).reshape(-1, 2)
  values = log_values(jnp.asarray(grid), features, targets)
  assert not np.any(np.abs(grid[np.argmin(values)]) == 4)  # An inner optimum.
  found = scipy.optimize.minimize(
    lambda logs: log_values(logs[None], features, targets)[0],
    grid[np.argmin(values)],
    jac=lambda logs: log_slope(jnp.asarray(logs), features, targets),
    options={"gtol": 1e-9},
  )
  value = log_values(best[None], features, targets)[0]
  assert value <= found.fun + 1e-9
  np.testing.assert_allclose(best, found.x, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_evidence_is_mackays_fixed_point(seed):
  features, targets = oracles.rows(60, M, seed)
  got = fit_evidence(stats_of(features, targets))
  np.testing.assert_allclose(got, oracles.mackay(features, targets), rtol=1e-6)


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_evidence_scales_with_the_targets_and_against_the_features(seed, factor):
  features, targets = oracles.rows(N, M, seed)
  sigma, prior = fit_evidence(stats_of(features, targets))
  scaled = fit_evidence(stats_of(features, factor * targets))
  np.testing.assert_allclose(scaled, (factor * sigma, factor * prior), rtol=1e-6)
  scaled = fit_evidence(stats_of(factor * features, targets))
  np.testing.assert_allclose(scaled, (sigma, prior / factor), rtol=1e-6)


def test_evidence_ignores_rotation_and_idle_features():
  features, targets = oracles.rows(N, M)
  expected = fit_evidence(stats_of(features, targets))
  rng = np.random.default_rng(0)
  rotation = np.linalg.qr(rng.normal(size=(M, M)))[0]
  got = fit_evidence(stats_of(features @ rotation, targets))
  np.testing.assert_allclose(got, expected, rtol=1e-7)
  idle = np.concatenate([features, np.zeros((N, 3))], axis=1)
  np.testing.assert_allclose(fit_evidence(stats_of(idle, targets)), expected, rtol=1e-7)


def _extremes():
  rng = np.random.default_rng(0)
  features, targets = oracles.rows(N, M)
  low_rank = rng.normal(size=(N, 2)) @ rng.normal(size=(2, M))
  orthogonal = np.linalg.qr(np.column_stack([features, targets]))[0][:, -1]
  return {
    "pure_noise": (features, orthogonal),
    "no_noise": (features, features @ rng.normal(size=M)),
    "rank_deficient": (low_rank, targets),
    "rank_deficient_no_noise": (low_rank, low_rank @ np.ones(M)),
    "wide": oracles.rows(5, M),
    "one_row": oracles.rows(1, M),
    "no_features": (np.zeros((N, M)), targets),
    "small": (1e-6 * features, 1e-6 * targets),
    "large": (1e5 * features, 1e5 * targets),
  }


@pytest.mark.parametrize("name", _extremes())
def test_evidence_is_finite_and_positive_at_the_extremes(name, any_x64):
  features, targets = _extremes()[name]
  dtype = np.float64 if any_x64 else np.float32
  stats = stats_of(features.astype(dtype), targets.astype(dtype))
  scales = np.array(fit_evidence(stats))
  assert np.all(np.isfinite(scales))
  assert np.all(scales > 0)


def test_pure_noise_leaves_all_variance_to_the_noise():
  features, targets = _extremes()["pure_noise"]
  sigma, prior = fit_evidence(stats_of(features, targets))
  np.testing.assert_allclose(sigma, np.sqrt(np.mean(targets**2)), rtol=1e-6)
  assert prior < 1e-3 * sigma


def test_no_noise_leaves_none():
  features, targets = _extremes()["no_noise"]
  sigma, prior = fit_evidence(stats_of(features, targets))
  assert sigma < 1e-6 * np.std(targets)
  weights = np.linalg.lstsq(features, targets)[0]
  np.testing.assert_allclose(prior, np.sqrt(np.mean(weights**2)), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(set(_extremes()) - {"rank_deficient_no_noise"}))
def test_posterior_at_the_evidence_is_finite(name):
  _assert_finite_posterior(name)


def test_posterior_at_the_evidence_is_finite_without_rank_or_noise():
  _assert_finite_posterior("rank_deficient_no_noise")


def _assert_finite_posterior(name):
  features, targets = _extremes()[name]
  stats = stats_of(features, targets)
  mean, variance = predict(posterior(stats, *fit_evidence(stats)), features)
  assert np.all(np.isfinite(mean))
  assert np.all(np.isfinite(variance))
