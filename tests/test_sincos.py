"""One function for cosine and sine against NumPy in float64."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fedbnr_jax.gp.sincos import cos_sin

fast = jax.jit(cos_sin)
TOLERANCE = 1e-7


@pytest.fixture(autouse=True, scope="module")
def _as_users_compile():
  """Has XLA optimise, as the other tests do not: digits are what is tested here."""
  name = "jax_disable_most_optimizations"
  before = jax.config.values[name]
  jax.config.update(name, False)
  yield
  jax.config.update(name, before)


def _exact(phase):
  wide = np.asarray(phase, np.float64)
  return np.stack([np.cos(wide), np.sin(wide)])


def _error(phase):
  phase = np.asarray(phase, np.float32)
  return np.abs(np.asarray(fast(phase), np.float64) - _exact(phase)).max()


@pytest.mark.parametrize("limit", [1.0, 300.0, 1e4, 5e4])
def test_error_on_a_dense_grid_is_below_a_float32_unit(limit, any_x64):
  assert _error(np.linspace(-limit, limit, 1_000_001)) < TOLERANCE


def test_every_float_beside_a_multiple_of_an_eighth_turn_finds_its_quadrant():
  """Where the quadrant changes, and where cosine or sine passes through zero."""
  below = above = (np.arange(-60_000, 60_001) * np.pi / 4).astype(np.float32)
  for _ in range(4):
    assert _error(below) < TOLERANCE
    assert _error(above) < TOLERANCE
    below = np.nextafter(below, np.float32(-np.inf))
    above = np.nextafter(above, np.float32(np.inf))


def test_small_phases_keep_their_relative_precision():
  phase = np.geomspace(1e-30, 0.5, 10_001).astype(np.float32)
  for signed in (phase, -phase):
    np.testing.assert_allclose(fast(signed)[1], _exact(signed)[1], rtol=1.5e-7)


@pytest.mark.parametrize("size", [1e6, 2.0**24, 2.0**31, 1e20, np.finfo("f").max])
def test_huge_phases_stay_bounded(size):
  phase = np.float32(size) * np.linspace(-1, 1, 100_001).astype(np.float32)
  values = np.asarray(fast(phase))
  assert np.all(np.isfinite(values))
  assert np.abs(values).max() <= 1 + 1e-6


def test_nothing_comes_of_nothing(any_x64):
  phase = np.array([np.nan, np.inf, -np.inf], np.float32)
  assert np.all(np.isnan(fast(phase)))


@hypothesis.settings(max_examples=200)
@hypothesis.given(st.floats(-5e4, 5e4, width=32))
def test_any_phase_lies_on_the_unit_circle_in_its_place(phase):
  cosine, sine = np.asarray(fast(np.float32(phase)), np.float64)
  np.testing.assert_allclose([cosine, sine], _exact(np.float32(phase)), atol=TOLERANCE)
  np.testing.assert_allclose(cosine**2 + sine**2, 1, atol=3e-7)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 1, 3), (0, 2)])
def test_any_shape_gains_one_leading_axis(shape, any_x64):
  phase = np.random.default_rng(0).normal(0, 9, shape).astype(np.float32)
  values = fast(phase)
  assert values.shape == (2, *shape)
  assert values.dtype == jnp.float32
  np.testing.assert_allclose(values, _exact(phase), atol=TOLERANCE)


def test_rows_by_vmap_are_rows_at_once_and_so_it_is_without_jit():
  phase = np.random.default_rng(0).normal(0, 9, (3, 4)).astype(np.float32)
  rows = jax.jit(jax.vmap(cos_sin, in_axes=0, out_axes=1))(phase)
  np.testing.assert_array_equal(rows, fast(phase))
  np.testing.assert_allclose(cos_sin(phase), _exact(phase), atol=TOLERANCE)


def test_float64_is_exact():
  phase = np.random.default_rng(1).normal(0, 100, (50,))
  values = fast(phase)
  assert values.dtype == jnp.float64
  np.testing.assert_allclose(values, _exact(phase), atol=1e-15)


@pytest.mark.parametrize("dtype, atol", [("float32", TOLERANCE), ("float64", 1e-14)])
@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_derivative_is_a_quarter_turn_ahead(mode, dtype, atol):
  phase = np.random.default_rng(2).normal(0, 30, 40).astype(dtype)
  slopes = jax.jit(jax.vmap(mode(cos_sin)))(phase)
  assert slopes.dtype == phase.dtype
  cosine, sine = _exact(phase)
  np.testing.assert_allclose(slopes, np.stack([-sine, cosine], 1), atol=atol)


def test_second_derivative_is_half_a_turn_ahead():
  phase = np.random.default_rng(3).normal(0, 30, 40).astype(np.float32)
  slopes = jax.jit(jax.vmap(jax.jacfwd(jax.jacrev(cos_sin))))(phase)
  np.testing.assert_allclose(slopes, -_exact(phase).T, atol=TOLERANCE)
