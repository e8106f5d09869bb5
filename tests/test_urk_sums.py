"""Kernels that compose: sums, a length-scale for each input, inducing features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from fedbnr_jax.gp import urk
from fedbnr_jax.gp.urk import inducing_inputs
from fedbnr_jax.gp.urk.fourier import orthogonal_spectrum
from tests import oracles
from tests.runs import assert_refused

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(9, 3))


def summary(num_numeric=3, frequencies=(), correlation=0.0) -> urk.InputSummary:
  """Numeric inputs with normal marginals, then one categorical column."""
  size = num_numeric + len(frequencies)
  levels = (np.arange(400) + 0.5) / 400
  normal = np.asarray(jax.scipy.stats.norm.ppf(levels))
  related = np.full((num_numeric, num_numeric), correlation)
  np.fill_diagonal(related, 1.0)
  factor = scipy.linalg.block_diag(
    np.linalg.cholesky(related), np.eye(len(frequencies))
  )
  column = np.array([size] * num_numeric + [0] * len(frequencies), np.int32)
  frequency = np.array([1.0] * num_numeric + list(frequencies))
  return urk.InputSummary(
    quantiles=np.repeat(normal[:, None], size, axis=1),
    factor=factor,
    column=column,
    log_frequency=np.log(frequency),
    levels=np.stack([np.full(size, -0.5), np.full(size, 2.0)]),
  )


def features(feature_map, x=X, inputs=(), theta=None):
  params = feature_map.init(KEY, jnp.asarray(x), inputs)
  if theta is not None:
    params = params.replace(theta=theta)
  return np.asarray(feature_map.apply(params, jnp.asarray(x))), params


# --------------------------------------------------------------------------- sums


def test_a_sum_is_the_sum_of_its_kernels_by_their_amplitudes():
  parts = (urk.random_fourier(4, "matern32"), urk.linear(), urk.deep(3, 5))
  whole = urk.add(*parts)
  _, params = features(whole)
  amplitude = np.array([0.5, 2.0, 3.0])
  theta = {**params.theta, "log_amplitude": jnp.log(amplitude)}
  phi = np.asarray(whole.apply(params.replace(theta=theta), X))
  expected = sum(
    a**2 * (lambda f: f @ f.T)(np.asarray(part.apply(urk.FeatureParams(w, t), X)))
    for a, part, w, t in zip(
      amplitude, parts, params.omega, params.theta["parts"], strict=True
    )
  )
  np.testing.assert_allclose(phi @ phi.T, expected, rtol=1e-10)
  assert phi.shape[1] == urk.num_features(whole, X) == 8 + 4 + 6


def test_parts_of_one_kind_have_draws_of_their_own():
  part = urk.random_fourier(4)
  omega = urk.add(part, part).init(KEY, X).omega
  assert not np.any(np.asarray(omega[0]) == np.asarray(omega[1]))


def test_the_linear_kernel_is_exact():
  phi, _ = features(urk.linear())
  np.testing.assert_allclose(phi @ phi.T, 1 + X @ X.T / 3, rtol=1e-12)


def test_a_sum_of_nothing_is_refused():
  assert_refused(urk.add, "at least one part")


@pytest.mark.parametrize("bad", ["matern23+linear", "deep+", "deep++linear"])
def test_an_unknown_part_is_named(bad):
  assert_refused(lambda: urk.build(bad, lambda part: {}), "a part of kernel", bad)


# ------------------------------------------------------- a length-scale for each input


@pytest.mark.parametrize("basis", ["fourier", "inducing"])
def test_length_scales_of_each_input_scale_that_input(basis):
  inputs = summary() if basis == "inducing" else ()
  one = urk.ard(5, "matern32", basis=basis)
  length_scale = np.array([0.5, 2.0, 9.0])
  phi, params = features(
    one, inputs=inputs, theta={"log_length_scale": np.log(length_scale)}
  )
  if basis == "inducing":
    params = params.replace(omega=np.asarray(params.omega) / length_scale)
  unit = params.replace(theta={"log_length_scale": jnp.zeros(3)})
  expected = np.asarray(one.apply(unit, X / length_scale))
  np.testing.assert_allclose(phi, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spectrum", ["gaussian", "matern12", "matern32", "matern52"])
def test_orthogonal_draws_have_the_kernel_as_mean_and_a_smaller_error(spectrum):
  kernel = oracles.STATIONARY[spectrum](X[:, None] - X[None, :])
  errors = {}
  for orthogonal in (False, True):
    one = urk.random_fourier(6, spectrum, orthogonal=orthogonal)
    apply = jax.jit(jax.vmap(lambda key, one=one: one.apply(one.init(key, X), X)))
    phi = np.asarray(apply(jax.random.split(KEY, 400)))
    grams = phi @ phi.transpose(0, 2, 1) * 5 / 6
    np.testing.assert_allclose(grams.mean(axis=0), kernel, atol=5 / np.sqrt(6 * 400))
    errors[orthogonal] = np.mean((grams - kernel) ** 2)
  assert errors[True] < errors[False]


def test_orthogonal_draws_are_orthogonal_within_blocks():
  omega = np.asarray(orthogonal_spectrum(KEY, "matern32", 7, X[0]))
  for start in (0, 3):
    gram = omega[start : start + 3] @ omega[start : start + 3].T
    np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-12)
  assert omega.shape == (7, 3)


@pytest.mark.parametrize(
  "options, parts",
  [
    ({"spectrum": "laplacian", "orthogonal": True}, ["orthogonal", "laplacian"]),
    ({"spectrum": "cauchy", "basis": "inducing"}, ["spectrum", "cauchy"]),
    ({"spectrum": "gaussian", "basis": "nystrom"}, ["basis", "nystrom"]),
    ({"spectrum": "gaussian", "basis": "inducing", "orthogonal": True}, ["fourier"]),
    ({"spectrum": "matern32", "length_scale": 0.0}, ["length_scale", "positive"]),
  ],
)
def test_what_a_stationary_kernel_cannot_be(options, parts):
  assert_refused(lambda: urk.ard(4, **options), *parts)


# ------------------------------------------------------------------ inducing features


@pytest.mark.parametrize("spectrum", inducing_inputs.PROFILES)
def test_inducing_features_are_the_nystrom_approximation(spectrum):
  phi, params = features(
    urk.inducing(6, spectrum, 0.7, isotropic=True), inputs=summary()
  )
  kernel, z = oracles.STATIONARY[spectrum], np.asarray(params.omega)

  def matrix(a, b):
    return kernel((a[:, None] - b[None, :]) / 0.7)

  among = matrix(z, z) + 1e-5 * np.eye(6)
  expected = matrix(X, z) @ np.linalg.solve(among, matrix(z, X))
  np.testing.assert_allclose(phi @ phi.T, expected, atol=1e-6)
  assert np.all(np.sum(phi**2, axis=1) <= 1)


def test_more_inducing_inputs_come_nearer_to_the_kernel():
  kernel = oracles.STATIONARY["matern32"]((X[:, None] - X[None, :]) / 3.0)
  errors = []
  for size in (5, 50, 500):
    phi, _ = features(
      urk.inducing(size, "matern32", 3.0, isotropic=True), inputs=summary()
    )
    errors.append(np.max(np.abs(phi @ phi.T - kernel)))
  assert errors[0] > errors[1] > errors[2]
  assert errors[2] < 0.1


def test_the_gradient_is_finite_where_rows_are_inducing_inputs():
  one = urk.inducing(4, "matern12")
  params = one.init(KEY, jnp.asarray(X), summary())
  gradient = jax.grad(
    lambda theta: jnp.sum(one.apply(params.replace(theta=theta), params.omega))
  )(params.theta)
  assert np.all(np.isfinite(gradient["log_length_scale"]))


def test_drawn_inputs_have_the_marginals_and_correlations_of_their_summary():
  drawn = np.asarray(
    inducing_inputs.draw_inputs(KEY, 20_000, summary(correlation=0.6), jnp.float64)
  )
  np.testing.assert_allclose(drawn.mean(axis=0), 0.0, atol=0.03)
  np.testing.assert_allclose(np.corrcoef(drawn.T)[0, 1], 0.6, atol=0.02)
  assert np.all(
    np.abs(drawn) <= 3.1
  )  # Beyond the outermost quantiles there is nothing.


def test_exactly_one_indicator_is_on_as_often_as_its_category():
  frequencies = (0.7, 0.2, 0.1)
  inputs = summary(1, frequencies)
  drawn = np.asarray(inducing_inputs.draw_inputs(KEY, 20_000, inputs, jnp.float64))
  on = drawn[:, 1:] == 2.0
  assert np.all(on | (drawn[:, 1:] == -0.5))
  assert np.all(on.sum(axis=1) == 1)
  np.testing.assert_allclose(on.mean(axis=0), frequencies, atol=0.015)


def test_inducing_inputs_without_a_summary_are_a_programming_error():
  with pytest.raises(TypeError, match="InputSummary"):
    urk.inducing(4).init(KEY, X)


# ------------------------------------------------------------------------- norms


def test_norms_are_within_their_bounds():
  """Of constant norm, bounded, and without a bound."""
  inputs, x = summary(), np.clip(3 * X, -3, 3)
  constant, bounded = urk.ard(4, "gaussian"), urk.inducing(20, length_scale=5.0)
  both = urk.add(constant, bounded, urk.linear(largest_input=3.0))
  for one in (constant, bounded, both):
    phi, params = features(one, x, inputs)
    if one is both:
      params.theta["log_amplitude"] = jnp.asarray([0.3, -0.2, 0.5])
      phi = np.asarray(one.apply(params, x))
    norms, bound = np.sum(phi**2, axis=1), float(one.norm_bound(params.theta))
    assert np.all(norms <= bound * (1 + 1e-12))
    assert np.max(norms) > 0.3 * bound  # The bound is no idle one.
  assert constant.squared_norm == pytest.approx(4 / 3)
  assert bounded.squared_norm is None
  assert urk.add(constant, urk.linear()).norm_bound is None
