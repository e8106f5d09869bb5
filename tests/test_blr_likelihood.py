"""The marginal likelihood and its gradient against the dense Gaussian in NumPy.

Most tests share a few compiled programs: rows are padded to one shape a system, and
every scale is an array.
"""

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fedbnr_jax.gp import blr
from fedbnr_jax.gp.blr import solver
from tests import oracles

SIGMA, LAMBDA = 0.3, 1.7
SHAPES = [(30, 8), (8, 30)]
WIDE_SHAPES = [(332, 100), (34, 100)]  # Rows of float32.
either = pytest.mark.parametrize("shape", SHAPES, ids=["primal", "dual"])
wide = pytest.mark.parametrize("shape", WIDE_SHAPES, ids=["primal", "dual"])
seeds = st.integers(0, 2**32 - 1)

EVERY = (0, 1, 2, 3)  # Features, targets, σ, λ.
_value = jax.jit(blr.negative_log_marginal_likelihood)
_value_and_gradient = jax.value_and_grad(blr.negative_log_marginal_likelihood, EVERY)
_one = jax.jit(_value_and_gradient)
_many = jax.jit(jax.vmap(_value_and_gradient))


def _arrays(features, *rest):
  """Brings rows and scales to the dtype of the features: no number is weakly typed."""
  return (features, *(np.asarray(one, features.dtype) for one in rest))


def nll(features, targets, sigma, prior, mask=None):
  """The likelihood alone."""
  return _value(*_arrays(features, targets, sigma, prior), mask)


def value_and_gradient(features, targets, sigma, prior, mask=None):
  """The likelihood and its four derivatives; without a mask, of all rows."""
  mask = np.ones(len(targets), bool) if mask is None else mask
  return _one(*_arrays(features, targets, sigma, prior), mask)


def _batch(*clients):
  """The same for stacked clients, as NumPy's arrays, whose slices compile nothing."""
  return jax.tree.map(np.asarray, _many(*clients))


def _scattered(features, targets, num_rows, content=np.nan, seed=1):
  """Rows at random places, in their order, among `content`."""
  rng = np.random.default_rng(seed)
  places = np.sort(rng.permutation(num_rows)[: len(targets)])
  wide = np.full((num_rows, features.shape[1]), content)
  long, mask = np.full(num_rows, content), np.zeros(num_rows, bool)
  wide[places], long[places], mask[places] = features, targets, True
  return wide, long, mask


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


# --------------------------------------------------------------- dense derivatives


def _dense_gradient(features, targets, sigma, prior):
  """Derivatives of the dense likelihood, by formulae that hold for complex numbers."""
  dense = prior**2 * features @ features.T + sigma**2 * np.eye(len(targets))
  inverse = np.linalg.inv(dense)
  solved = inverse @ targets
  curved = inverse - np.outer(solved, solved)  # Twice the derivative in `dense`.
  return (
    prior**2 * curved @ features,
    solved,
    sigma * np.trace(curved),
    prior * np.sum(features * (curved @ features)),
  )


def _dense_nll(features, targets, sigma, prior):
  dense = prior**2 * features @ features.T + sigma**2 * np.eye(len(targets))
  quadratic = targets @ np.linalg.solve(dense, targets)
  log_det = np.log(np.linalg.det(dense))
  return 0.5 * (len(targets) * np.log(2 * np.pi) + log_det + quadratic)


def _along(fn, arguments, direction):
  """The derivative of a function along a line, by a complex step: no digit is lost."""
  step = 1e-30
  moved = [a + 1j * step * d for a, d in zip(arguments, direction, strict=True)]
  values = fn(*moved)
  if isinstance(values, tuple):
    return tuple(np.imag(value) / step for value in values)
  return np.imag(values) / step


def _direction(arguments, seed=5):
  rng = np.random.default_rng(seed)
  return [rng.normal(size=np.shape(one)) for one in arguments]


def _dot(tree, other):
  return sum(np.sum(a * b) for a, b in zip(tree, other, strict=True))


@either
def test_oracles_agree_with_each_other(shape):
  arguments = (*oracles.rows(*shape, 3), SIGMA, LAMBDA)
  slopes = _dense_gradient(*arguments)
  chex.assert_trees_all_close(oracles.gp_gradient(*arguments), slopes, rtol=1e-9)
  for seed in range(3):
    direction = _direction(arguments, seed)
    slope = _along(_dense_nll, arguments, direction)
    np.testing.assert_allclose(_dot(slopes, direction), slope, rtol=1e-9)


# ----------------------------------------------------------------- value and slope


@either
@hypothesis.settings(max_examples=25)
@hypothesis.given(seeds, st.floats(0.05, 2.0), st.floats(0.1, 9.0), st.integers(1, 8))
def test_value_and_gradient_are_the_dense_ones(shape, seed, sigma, prior, missing):
  """Also of fewer rows, scattered among NaN, whose derivatives are zero."""
  num_rows = shape[0] - missing + 1
  arguments = (*oracles.rows(num_rows, shape[1], seed), sigma, prior)
  features, targets, mask = _scattered(*arguments[:2], shape[0], seed=seed)
  value, gradient = value_and_gradient(features, targets, sigma, prior, mask)
  expected = oracles.gp_nll(*arguments)
  np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-9 * num_rows)
  by_features, by_targets, *by_scales = map(np.asarray, gradient)
  assert not np.any(by_features[~mask])
  assert not np.any(by_targets[~mask])
  got = by_features[mask], by_targets[mask], *by_scales
  expected = oracles.gp_gradient(*arguments)
  for mine, exact in zip(got, expected, strict=True):
    scale = max(1.0, np.abs(exact).max())
    np.testing.assert_allclose(mine, exact, rtol=1e-8, atol=1e-8 * scale)


@either
def test_no_mask_admits_every_row(shape):
  rows = oracles.rows(*shape)
  value = nll(*rows, SIGMA, LAMBDA)
  np.testing.assert_allclose(
    value, oracles.gp_nll(*rows, SIGMA, LAMBDA), rtol=1e-11, atol=1e-10
  )
  rows[1][2] = np.nan
  assert np.isnan(nll(*rows, SIGMA, LAMBDA))  # Without a mask, NaN is seen.


@pytest.mark.parametrize(
  "num_rows, num_features, padded",
  [(30, 8, 40), (8, 30, 40), (8, 30, 20)],
  ids=["primal", "dual_to_primal", "dual"],
)
def test_padding_length_changes_only_rounding(num_rows, num_features, padded):
  rows = oracles.rows(num_rows, num_features)
  expected = oracles.gp_nll(*rows, SIGMA, LAMBDA)
  for seed in range(2):
    features, targets, mask = _scattered(*rows, padded, seed=seed)
    value = nll(features, targets, SIGMA, LAMBDA, mask)
    np.testing.assert_allclose(value, expected, rtol=1e-11)


@either
def test_padding_content_changes_no_bit(shape):
  rows = oracles.rows(shape[0] - 3, shape[1])
  results = []
  for content in (0.0, 1e30, np.inf, np.nan):
    features, targets, mask = _scattered(*rows, shape[0], content)
    results.append(value_and_gradient(features, targets, SIGMA, LAMBDA, mask))
  for other in results[1:]:
    chex.assert_trees_all_equal(results[0], other)


@either
def test_clients_at_once_are_the_dense_ones(shape):
  """Three clients of all rows, five and one, each with its own scales."""
  counts = (shape[0], 5, 1)
  clients = [(*oracles.rows(n, shape[1], n), 0.2 + 0.1 * n, 1.0 + n) for n in counts]
  padded = [_scattered(*rows, shape[0]) for *rows, _, _ in clients]
  features, targets, mask = (np.stack(part) for part in zip(*padded, strict=True))
  sigmas, priors = (np.array([client[i] for client in clients]) for i in (2, 3))
  values, gradients = _batch(features, targets, sigmas, priors, mask)
  for k, client in enumerate(clients):
    np.testing.assert_allclose(values[k], oracles.gp_nll(*client), rtol=1e-9)
    by_features, by_targets, *by_scales = (np.asarray(part[k]) for part in gradients)
    assert not np.any(by_features[~mask[k]])
    assert not np.any(by_targets[~mask[k]])
    got = by_features[mask[k]], by_targets[mask[k]], *by_scales
    expected = oracles.gp_gradient(*client)
    chex.assert_trees_all_close(got, expected, rtol=1e-8, atol=1e-9)


@either
def test_second_derivatives_along_a_line_are_the_dense_ones(shape):
  """Forward over forward; the first derivative comes with it."""
  arguments = _arrays(*oracles.rows(*shape, seed=5), SIGMA, LAMBDA)
  direction = _direction(arguments)

  @jax.jit
  def derivatives(arguments, direction):
    def value(t):
      moved = jax.tree.map(lambda a, d: a + t * d, arguments, direction)
      return blr.negative_log_marginal_likelihood(*moved)

    def slope(t):
      return jax.jvp(value, (t,), (jnp.ones(()),))[1]

    return jax.jvp(slope, (jnp.zeros(()),), (jnp.ones(()),))

  got = derivatives(list(arguments), direction)
  curvature = _dot(_along(_dense_gradient, arguments, direction), direction)
  expected = _dot(_dense_gradient(*arguments), direction), curvature
  np.testing.assert_allclose(got, expected, rtol=1e-8)


@jax.jit
def _hessian_vector(features, targets, sigma, prior, vector):
  """Reverse over reverse, in the features."""

  def slope(features):
    fn = blr.negative_log_marginal_likelihood
    return jnp.sum(jax.grad(fn)(features, targets, sigma, prior) * vector)

  return jax.grad(slope)(features)


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-8), ("float32", 1e-4)])
@pytest.mark.parametrize("shape", [(60, 20), (12, 20)], ids=["primal", "dual"])
def test_hessian_vector_product_is_the_dense_one(shape, dtype, tolerance):
  rows = [one.astype(dtype) for one in _fourier(*shape, 1.5)]
  arguments = _arrays(*rows, 0.5, 1.0)
  vector = np.random.default_rng(7).normal(size=shape).astype(dtype)
  got = _hessian_vector(*arguments, vector)
  assert got.dtype == dtype
  exact = [np.asarray(one, float) for one in arguments]
  direction = vector.astype(float), 0.0, 0.0, 0.0
  expected = _along(_dense_gradient, exact, direction)[0]
  assert _error(got, expected) < tolerance


# ----------------------------------------------------- float32 without any float64


def test_float32_is_kept(any_x64):
  rows = (np.ones((30, 8), np.float32), np.ones(30, np.float32))
  shapes = jax.eval_shape(_one, *_arrays(*rows, SIGMA, LAMBDA), np.ones(30, bool))
  chex.assert_type(jax.tree.leaves(shapes), jnp.float32)


@wide
def test_float32_alone_holds_in_reasonable_cases(shape, x64_off):
  arguments = *_fourier(*shape, 1.5), 0.3, 1.0
  errors = _errors(value_and_gradient(*arguments), *arguments)
  assert np.all(errors < 1e-5)


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


@pytest.mark.parametrize("num_rows", [3300, 60], ids=["primal", "dual"])
def test_float32_factor_exists_for_a_very_smooth_kernel(num_rows, x64_off):
  features, targets = _fourier(num_rows, 100, 10.0, num_inputs=2)
  assert np.isfinite(nll(features, targets, 0.01, 10.0))


# -------------------------------------------- float32 features, float64 factor


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
  # The scales as the program had them.
  sigma, prior = float(np.float32(noise_std)), float(np.float32(prior_std))
  arguments = features, targets, sigma, prior
  exact = oracles.gp_nll(*arguments), *oracles.gp_gradient(*arguments)
  least = (len(targets), 0.0, 0.0, 1 / sigma, 1 / prior)
  triples = zip((got[0], *got[1]), exact, least, strict=True)
  return np.array([_error(*triple) for triple in triples])


@wide
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("prior", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("share", [0.9, 0.01], ids=["just_below", "far_below"])
def test_mixed_precision_holds_below_its_bound(rows, shape, prior, share):
  features, targets = ROWS[rows](*shape)
  sigma = _noise_std(features, prior, share * solver.MAX_ROUNDING)
  arguments = features, targets, sigma, prior
  errors = _errors(value_and_gradient(*arguments), *arguments)
  if rows == "collapsed":  # Features: up to three times the bound.
    assert errors[1] < 4 * solver.MAX_ROUNDING
    assert np.all(np.delete(errors, 1) < solver.MAX_ROUNDING)
  else:
    assert np.all(errors < 0.025 * solver.MAX_ROUNDING)


@wide
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sigma, prior", [(1e-3, 3.0), (1e-3, 10.0), (0.02, 1.0)])
def test_float64_takes_over_where_noise_is_small(rows, shape, sigma, prior):
  features, targets = ROWS[rows](*shape)
  assert sigma < _noise_std(features, prior, solver.MAX_ROUNDING)
  arguments = features, targets, sigma, prior
  errors = _errors(value_and_gradient(*arguments), *arguments)
  assert np.all(errors < 1e-6)


def test_slope_in_the_noise_survives_weights_that_explain_every_row():
  """N − γ is a trace of 1e-4 beside N = 34."""
  features = _fourier(34, 100, 1.0)[0]
  arguments = features, np.zeros(34, np.float32), np.float32(1e-3), np.float32(10.0)
  exact = oracles.gp_gradient(*arguments)[2]
  assert 1e-6 < exact * 1e-3 < 1e-3
  assert _error(value_and_gradient(*arguments)[1][2], exact) < 1e-5


@wide
def test_slope_in_the_features_survives_a_small_rank(shape):
  """Most of B⁻¹ is the identity, which its product with the features must cancel."""
  rng = np.random.default_rng(0)
  features = rng.normal(size=(shape[0], 3)) @ rng.normal(size=(3, shape[1])) / 17.0
  targets = features @ rng.normal(size=shape[1]) + 1e-3 * rng.normal(size=shape[0])
  arguments = features.astype(np.float32), targets.astype(np.float32), 1e-3, 10.0
  assert _errors(value_and_gradient(*arguments), *arguments)[1] < 1e-4


# ------------------------------------------- one choice of precision for a batch


def _clients(shape, third_share):
  """Three clients [3, ...]; the third has this share of the bound's rounding."""
  features, targets = map(
    np.stack, zip(*[_fourier(*shape, 1.5, seed) for seed in range(3)], strict=True)
  )
  third = _noise_std(features[2], 1.0, third_share * solver.MAX_ROUNDING)
  sigma = np.array([1.0, 2.0, third], np.float32)
  assert all(s > _noise_std(features[0], 1.0, solver.MAX_ROUNDING) for s in sigma[:2])
  return features, targets, sigma, np.ones(3, np.float32), np.ones(targets.shape, bool)


@wide
def test_a_batch_with_and_without_an_extreme_client_is_a_loop(shape):
  for share in (0.5, 1e4):
    clients = _clients(shape, share)
    values = _batch(*clients)
    for k in range(3):
      client = [one[k] for one in clients]
      mine = jax.tree.map(lambda leaf, k=k: leaf[k], values)
      assert np.all(_errors(mine, *client[:4]) < 1e-4)
      alone = value_and_gradient(*client)
      chex.assert_trees_all_close(mine, alone, rtol=1e-3, atol=1e-3)


@wide
def test_the_bound_decides_between_the_routes(shape):
  """The first client's bits tell which route the whole batch took."""
  mixed, below, above, exact = (
    jax.tree.map(lambda leaf: leaf[0], _batch(*_clients(shape, share)))
    for share in (0.5, 0.98, 1.02, 1e4)
  )
  chex.assert_trees_all_equal(mixed, below)
  chex.assert_trees_all_equal(above, exact)
  assert not np.array_equal(below[1][0], above[1][0])


def _count_choices(jaxpr):
  """Branches on data; those on the platform inside JAX have one output each."""
  here = sum(e.primitive.name == "cond" and len(e.outvars) > 1 for e in jaxpr.eqns)
  inner = [p.jaxpr for e in jaxpr.eqns for p in e.params.values() if hasattr(p, "eqns")]
  return here + sum(map(_count_choices, inner))


def test_shared_scales_and_a_batch_of_batches_make_one_choice():
  features, targets = map(
    np.stack, zip(*[_fourier(12, 20, 1.5, seed) for seed in range(6)], strict=True)
  )
  features, targets = features.reshape(2, 3, 12, 20), targets.reshape(2, 3, 12)
  scales = np.float32(0.5), np.float32(1.0)
  axes = (0, 0, None, None)
  nested = jax.vmap(jax.vmap(_value_and_gradient, axes), axes)
  # With a choice for each client both routes would run, and none be left.
  assert _count_choices(jax.make_jaxpr(nested)(features, targets, *scales).jaxpr) == 1
  got = jax.tree.map(np.asarray, jax.jit(nested)(features, targets, *scales))
  for i, j in np.ndindex(2, 3):
    mine = jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], got)
    assert np.all(_errors(mine, features[i, j], targets[i, j], *scales) < 1e-4)


def test_descent_in_a_scan_crosses_from_one_route_to_the_other():
  """σ shrinks from step to step; a loop in NumPy is the oracle."""
  features, targets = _fourier(60, 20, 1.5)
  limit = _noise_std(features, 1.0, solver.MAX_ROUNDING)
  sigmas = (limit * np.array([4, 2, 1.1, 0.9, 0.1, 0.01])).astype(np.float32)

  def step(features, sigma):
    value, slopes = _value_and_gradient(features, targets, sigma, jnp.float32(1.0))
    return features - 1e-5 * slopes[0], value

  scanned, values = jax.jit(lambda f: jax.lax.scan(step, f, sigmas))(features)
  wide, expected = features.astype(float), []
  for sigma in sigmas:
    expected.append(oracles.gp_nll(wide, targets, float(sigma), 1.0))
    wide = wide - 1e-5 * oracles.gp_gradient(wide, targets, sigma, 1.0)[0]
  np.testing.assert_allclose(values, expected, rtol=1e-4)
  assert _error(np.asarray(scanned) - features, wide - features) < 1e-3
