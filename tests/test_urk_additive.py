"""Functions of one input each; a blend of kernels; and what of features rows share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax.gp import urk
from fedbnr_jax.gp.urk import additive_inputs
from tests import oracles
from tests.runs import assert_refused
from tests.test_urk_sums import KEY, X, features, summary

RNG = np.random.default_rng(3)


def scaled(map_, inputs, x=X):
  """The parameters of a map with every number of θ moved away from its start."""
  params = map_.init(KEY, jnp.asarray(x), inputs)
  moved = jax.tree.map(
    lambda leaf: leaf + 0.3 * RNG.normal(size=leaf.shape), params.theta
  )
  return params.replace(theta=moved)


# --------------------------------------------------------------------------- additive


@pytest.mark.parametrize("spectrum", urk.PROFILES)
def test_it_is_the_sum_of_kernels_of_one_input_each(spectrum):
  """Exactly so, but for jitter, where rows are made of knots."""
  one, inputs = urk.additive(5, spectrum), summary()
  params = scaled(one, inputs)
  knots = np.asarray(params.omega)
  assert knots.shape == (5, 3)
  rows = np.stack([RNG.permutation(knots[:, d]) for d in range(3)], axis=1)
  phi = np.asarray(one.apply(params, rows))
  scale, size = (np.exp(np.asarray(params.theta[f"log_{n}"]))
                 for n in ("length_scale", "amplitude"))  # fmt: skip
  kernel = oracles.STATIONARY[spectrum]
  expected = sum(
    size[d] ** 2
    / 3
    * kernel((rows[:, None, d, None] - rows[None, :, d, None]) / scale[d])
    for d in range(3)
  )
  np.testing.assert_allclose(phi @ phi.T, expected, atol=1e-4)
  assert phi.shape == (5, 15)


def test_norms_are_bounded_and_what_is_missing_is_told():
  one, inputs = urk.additive(4), summary()
  params = scaled(one, inputs)
  phi = np.asarray(one.apply(params, X))
  norm, bound = np.sum(phi**2, axis=1), float(one.norm_bound(params.theta))
  assert np.all(norm <= bound)
  missing = one.missing(params, jnp.asarray(X), one.shared.compute(params))
  np.testing.assert_allclose(missing, bound - norm, rtol=1e-9)
  assert np.max(missing) > 0.05 * bound  # Four knots leave something between them.


def test_knots_are_quantiles_or_the_two_values_of_an_indicator():
  knots = np.asarray(additive_inputs.knots(4, summary(2, (0.3, 0.7)), np.float64))
  levels = (np.arange(4) + 0.5) / 4
  expected = np.asarray(jax.scipy.stats.norm.ppf(levels))
  np.testing.assert_allclose(knots[:, 0], expected, atol=0.02)
  np.testing.assert_array_equal(knots[:, 2], [-0.5, 2.0, -0.5, 2.0])


@pytest.mark.parametrize("num_inputs, count", [(3, 16), (60, 10), (400, 2)])
def test_many_inputs_have_fewer_knots(num_inputs, count):
  assert additive_inputs.knots(16, summary(num_inputs), np.float64).shape[0] == count


def test_one_knot_is_refused():
  assert_refused(lambda: urk.additive(1), "num_knots", "at least 2")


# ------------------------------------------------------------------------------ blend


def at_inducing_inputs(map_, **theta):
  """Φ [6, S] of rows that are inducing inputs, which lose nothing; these rows; θ."""
  params = map_.init(KEY, jnp.asarray(X), summary())
  rows = np.asarray(params.omega)[:6]
  assert set(theta) == set(params.theta)
  theta = {name: jnp.asarray(value) for name, value in theta.items()}
  return np.asarray(map_.apply(params.replace(theta=theta), rows)), rows


def test_a_blend_is_the_weighted_mean_of_its_kernels():
  weights, scale = np.array([0.1, 0.2, 0.3, 0.4]), np.array([1.0, 2.0, 3.0])
  phi, rows = at_inducing_inputs(
    urk.inducing(60, "blend"),
    log_length_scale=np.log([2.0, 1.0, 2.0]),
    log_laplacian_scale=np.log(scale),
    log_weights=np.log(weights),
  )
  apart = rows[:, None] - rows[None, :]
  names = ("matern12", "matern32", "gaussian")
  parts = [oracles.STATIONARY[name](apart / [2.0, 1.0, 2.0]) for name in names]
  parts += [oracles.STATIONARY["laplacian"](apart / scale)]
  np.testing.assert_allclose(phi @ phi.T, np.tensordot(weights, parts, 1), atol=1e-4)


def test_the_laplacian_is_a_product_of_kernels_of_one_input_each():
  scale = np.array([1.0, 2.0, 3.0])
  laplacian = urk.inducing(60, "laplacian")
  phi, rows = at_inducing_inputs(laplacian, log_length_scale=np.log(scale))
  each = np.exp(-np.abs(rows[:, None] - rows[None, :]) / scale)
  np.testing.assert_allclose(phi @ phi.T, np.prod(each, axis=-1), atol=1e-4)


@pytest.mark.parametrize("spectrum", ["laplacian", "blend"])
def test_the_prior_is_centred_where_length_scales_start(spectrum):
  map_ = urk.inducing(4, spectrum, spread=2.0)
  theta = map_.init(KEY, jnp.asarray(X), summary()).theta
  np.testing.assert_allclose(map_.penalty(theta), 0.0, atol=1e-12)
  num_scales = 3 * (1 + (spectrum == "blend"))
  moved = jax.tree.map(lambda leaf: leaf + 2.0, theta)
  by_weights = 2.0 if spectrum == "blend" else 0.0  # Four of them, of deviation two.
  np.testing.assert_allclose(map_.penalty(moved), 0.5 * num_scales + by_weights)


def test_a_blend_has_no_fourier_features():
  assert_refused(lambda: urk.ard(4, "blend"), "blend", "inducing")


# --------------------------------------------------------------- what all rows share


MAPS = {
  "inducing": urk.inducing(4),
  "laplacian": urk.inducing(4, "laplacian"),
  "blend": urk.inducing(4, "blend"),
  "additive": urk.additive(3),
  "sum": urk.add(urk.linear(), urk.inducing(4), urk.random_fourier(3), urk.additive(3)),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_gradient_is_that_of_rows_and_that_of_what_they_share(name):
  """Autodiff of the features, against both parts: rows see R as a constant."""
  map_ = MAPS[name]
  params = scaled(map_, summary())
  shared = map_.shared.compute(params)
  phi = map_.shared.apply(params, X, shared)
  np.testing.assert_allclose(phi, map_.apply(params, X), rtol=1e-12, atol=1e-14)
  slope = RNG.normal(size=phi.shape)  # Of a loss, in the features.

  def loss(theta, constant=None):
    own = params.replace(theta=theta)
    got = (
      map_.apply(own, X) if constant is None else map_.shared.apply(own, X, constant)
    )
    return jnp.sum(slope * got)

  by_rows = jax.grad(loss)(params.theta, shared)
  by_shared = map_.shared.gradient(params, shared, jnp.asarray(slope.T @ phi))
  both = jax.tree.map(jnp.add, by_rows, by_shared)
  whole = jax.grad(loss)(params.theta)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9), both, whole
  )
  assert max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(by_shared)) > 1e-2


def test_maps_that_share_nothing_are_applied_as_they_are():
  one = urk.random_fourier(3)
  phi, params = features(one)
  assert urk.shared_part(one, params) == ()
  np.testing.assert_array_equal(urk.apply_shared(one, params, X, ()), phi)
