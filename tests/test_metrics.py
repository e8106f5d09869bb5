"""The scores against known values, slow loops, SciPy and their own symmetries."""

import math

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from hypothesis import strategies as st

from fedbnr_jax.gp import metrics
from fedbnr_jax.precision import enable_x64

N = 200
calibration = jax.jit(metrics.calibration, static_argnums=3)
coverage = jax.jit(metrics.coverage, static_argnums=3)
evaluate = jax.jit(metrics.evaluate)
rmse, nll, crps = map(jax.jit, (metrics.rmse, metrics.nll, metrics.crps))

KEYS = {"rmse", "nll", "crps", "coverage95", "ece", "mce", "bri", "ece10"}


def _rows(num_rows=N, seed=0, spread=1.3):
  """Predictions whose errors are `spread` times what they promise."""
  rng = np.random.default_rng(seed)
  mean = rng.normal(size=num_rows) * 3.0
  variance = rng.uniform(0.2, 2.0, num_rows)
  targets = mean + spread * np.sqrt(variance) * rng.normal(size=num_rows)
  return mean, variance, targets


def _slow_calibration(mean, variance, targets, num_levels):
  """The definitions, read literally: a loop over levels and over rows."""
  gaps, squares = [], []
  for k in range(1, num_levels + 1):
    level = (k - 0.5) / num_levels
    inside = []
    for m, v, y in zip(mean, variance, targets, strict=True):
      reach = math.erf(abs(y - m) / math.sqrt(2.0 * v))
      inside.append(float(reach <= level))
      squares.append((level - inside[-1]) ** 2)
    gaps.append(abs(np.mean(inside) - level))
  return {"ece": np.mean(gaps), "mce": np.max(gaps), "bri": np.mean(squares)}


def _quantile_rows(num_rows=20_000):
  """Targets at evenly spread quantiles: calibrated without any chance in it."""
  share = (np.arange(num_rows) + 0.5) / num_rows
  targets = scipy.stats.norm.ppf(share)
  return np.zeros(num_rows), np.ones(num_rows), targets


@pytest.mark.parametrize(
  "num_levels, ece, mce, bri", [(100, 0.5, 0.995, 0.3333), (10, 0.5, 0.95, 0.3325)]
)
@pytest.mark.parametrize("miss", [1e3, 0.0], ids=["never", "always"])
def test_extremes_score_as_published(num_levels, ece, mce, bri, miss, any_x64):
  zeros = np.zeros(N)
  got = calibration(zeros, zeros + 1.0, zeros + miss, num_levels)
  np.testing.assert_allclose(got["ece"], ece, atol=1e-6)
  np.testing.assert_allclose(got["mce"], mce, atol=1e-6)
  np.testing.assert_allclose(got["bri"], bri, atol=5e-5)


@pytest.mark.parametrize("num_levels, bri", [(100, 0.1666), (10, 0.1674)])
def test_calibrated_rows_score_zero(num_levels, bri, any_x64):
  got = calibration(*_quantile_rows(), num_levels)
  # Half a row of rounding at each level, and float32's own.
  assert got["ece"] < 2e-4
  assert got["mce"] < 4e-4
  np.testing.assert_allclose(got["bri"], bri, atol=1e-4)


def test_calibration_of_random_honest_rows():
  got = calibration(*_rows(200_000, spread=1.0), 100)
  # The Kolmogorov–Smirnov distance is below 2/√N with probability .9993.
  assert got["ece"] < got["mce"] < 2.0 / math.sqrt(200_000)
  np.testing.assert_allclose(got["bri"], 1.0 / 6.0, atol=1e-3)


def test_half_way_rows_show_that_brier_is_not_minimal_when_calibrated():
  zeros = np.zeros(N)
  half = scipy.stats.norm.ppf(0.75)  # The edge of the central 50 % interval.
  got = calibration(zeros, zeros + 1.0, zeros + half, 20_000)
  np.testing.assert_allclose(got["ece"], 0.25, atol=1e-4)
  np.testing.assert_allclose(got["bri"], 1.0 / 12.0, atol=1e-4)


def test_limits_of_many_levels():
  mean, variance, targets = _rows()
  reached = scipy.special.erf(np.abs(targets - mean) / np.sqrt(2.0 * variance))
  got = calibration(mean, variance, targets, 20_000)
  brier = np.mean(reached**3 + (1.0 - reached) ** 3) / 3.0
  np.testing.assert_allclose(got["bri"], brier, atol=1e-6)
  distance = scipy.stats.kstest(reached, "uniform").statistic
  np.testing.assert_allclose(got["mce"], distance, atol=1e-4)


@pytest.mark.parametrize("num_levels", [1, 10, 100])
@pytest.mark.parametrize("num_rows", [1, 2, 57])
def test_calibration_matches_loop(num_levels, num_rows):
  rows = _rows(num_rows, seed=num_rows)
  got = calibration(*rows, num_levels)
  chex.assert_trees_all_close(got, _slow_calibration(*rows, num_levels), atol=1e-12)


_ROW = st.tuples(st.floats(-5, 5), st.floats(0.01, 9), st.floats(-9, 9))


@hypothesis.given(st.lists(_ROW, min_size=1, max_size=9))
def test_calibration_matches_loop_on_any_rows(rows):
  rows = np.array(rows).T
  chex.assert_trees_all_close(
    calibration(*rows, 10), _slow_calibration(*rows, 10), atol=1e-9
  )


def test_point_scores_match_scipy(any_x64):
  mean, variance, targets = _rows()
  tolerance = 1e-12 if any_x64 else 1e-5
  density = scipy.stats.norm(mean, np.sqrt(variance)).logpdf(targets)
  np.testing.assert_allclose(
    nll(mean, variance, targets), -np.mean(density), rtol=tolerance
  )
  np.testing.assert_allclose(
    rmse(mean, targets),
    np.sqrt(np.mean((mean - targets) ** 2)),
    rtol=tolerance,
  )


def test_crps_matches_its_integral():
  mean, variance, targets = _rows(12)

  def score(m, v, y):
    below = scipy.stats.norm(m, math.sqrt(v)).cdf
    # The integrand jumps at the target, so each side is integrated alone.
    left, _ = scipy.integrate.quad(lambda t: below(t) ** 2, -60.0, y, limit=200)
    right, _ = scipy.integrate.quad(lambda t: (1.0 - below(t)) ** 2, y, 60.0, limit=200)
    return left + right

  slow = np.mean([score(*row) for row in zip(mean, variance, targets, strict=True)])
  np.testing.assert_allclose(crps(mean, variance, targets), slow, rtol=1e-6)


def test_crps_of_a_sure_prediction_is_the_absolute_error(any_x64):
  mean, _, targets = _rows()
  got = crps(mean, np.full_like(mean, 1e-12), targets)
  np.testing.assert_allclose(got, np.mean(np.abs(mean - targets)), rtol=1e-5)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_coverage_counts_rows_in_the_interval(level, any_x64):
  mean, variance, targets = _rows()
  low, high = scipy.stats.norm.interval(level, mean, np.sqrt(variance))
  expected = np.mean((low <= targets) & (targets <= high))
  got = coverage(mean, variance, targets, level)
  np.testing.assert_allclose(got, expected, atol=1e-6)


def test_evaluate_gathers_every_score():
  rows = _rows()
  got = evaluate(*rows)
  assert set(got) == KEYS
  chex.assert_shape(list(got.values()), ())
  expected = {
    "rmse": rmse(rows[0], rows[2]),
    "nll": nll(*rows),
    "crps": crps(*rows),
    "coverage95": coverage(*rows, 0.95),
    **calibration(*rows, 100),
    "ece10": calibration(*rows, 10)["ece"],
  }
  chex.assert_trees_all_close(got, expected, rtol=1e-12)


def test_order_of_rows_does_not_matter():
  rows = _rows()
  order = np.random.default_rng(1).permutation(len(rows[0]))
  chex.assert_trees_all_close(
    evaluate(*rows), evaluate(*(row[order] for row in rows)), rtol=1e-12
  )


def test_shift_and_scale():
  mean, variance, targets = _rows()
  scale, shift = 7.0, -40.0
  moved = evaluate(scale * mean + shift, scale**2 * variance, scale * targets + shift)
  expected = dict(evaluate(mean, variance, targets))
  expected["rmse"] *= scale
  expected["crps"] *= scale
  expected["nll"] += math.log(scale)
  chex.assert_trees_all_close(moved, expected, rtol=1e-9)


def test_jit_changes_nothing(any_x64):
  rows = _rows()
  plain, jitted = metrics.evaluate(*rows), evaluate(*rows)
  tolerance = 1e-12 if any_x64 else 1e-5
  chex.assert_trees_all_close(plain, jitted, rtol=tolerance, atol=tolerance)
  dtype = jnp.float64 if any_x64 else jnp.float32
  assert {value.dtype for value in jitted.values()} == {jnp.dtype(dtype)}


@pytest.mark.parametrize(
  "dtypes, wide",
  [
    (("float32", "float32", "float32"), "float32"),
    (("float32", "float64", "float32"), "float64"),
    (("float64", "float64", "float64"), "float64"),
    (("float16", "float16", "float16"), "float32"),
    (("bfloat16", "float16", "float32"), "float32"),
    (("float32", "float64", "int32"), "float64"),
  ],
)
def test_mixed_types_meet_in_the_widest(dtypes, wide, any_x64):
  rows = [np.asarray(r, jnp.dtype(d)) for r, d in zip(_rows(), dtypes, strict=True)]
  expected = jnp.dtype(wide if any_x64 else "float32")
  got = evaluate(*rows)
  assert {value.dtype for value in got.values()} == {expected}
  # No type is narrowed on the way: values of narrow rows are as good as of wide ones.
  with enable_x64(True):
    exact = evaluate(*(np.asarray(row, np.float64) for row in rows))
  tolerance = 1e-12 if expected == np.float64 else 1e-5
  np.testing.assert_allclose(got["crps"], exact["crps"], rtol=tolerance)
  exact = jax.tree.map(lambda value: np.asarray(value, expected), exact)
  chex.assert_trees_all_close(got, exact, rtol=1e-4, atol=6e-3)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_does_not_pass_for_a_miss(place):
  rows = [row.copy() for row in _rows()]
  rows[place][3] = np.nan
  got = evaluate(*rows)
  # A variance plays no part in the error of the mean.
  checked = KEYS - {"rmse"} if place == 1 else KEYS
  assert all(np.isnan(got[name]) for name in checked)


@pytest.mark.parametrize(
  "shapes",
  [((5,), (4,), (5,)), ((5, 1), (5, 1), (5, 1)), ((5,), (), (5,)), ((0,), (0,), (0,))],
  ids=["length", "rank", "scalar", "empty"],
)
def test_wrong_shapes_are_refused(shapes):
  arrays = [np.ones(shape) for shape in shapes]
  for score in (metrics.nll, metrics.crps, metrics.calibration, metrics.evaluate):
    with pytest.raises(AssertionError):
      jax.eval_shape(score, *arrays)


def test_a_grid_needs_a_level():
  with pytest.raises(ValueError, match="num_levels must be at least 1, got 0"):
    metrics.calibration(*_rows(), num_levels=0)


def test_scores_of_all_rows_follow_from_sums_of_parts():
  rows, sums = _rows(), jax.jit(metrics.score_sums)
  parts = zip(*(np.split(row, [1, 51, 101, 151]) for row in rows), strict=True)
  first, *others = (sums(*part) for part in parts)
  total = sum(others, start=first)
  assert float(total.count) == N
  got = jax.jit(metrics.scores)(total)
  chex.assert_trees_all_close(got, evaluate(*rows), rtol=1e-12)
