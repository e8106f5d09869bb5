"""Conformal thresholds from summed counts, against crepes and a plain quantile."""

import math

import crepes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import conformal
from fedbnr_jax.intervals import Calibration, columns

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
ONE_BIN = conformal.EDGES[1] / conformal.EDGES[0]


def drawn(law: str, num_rows: int, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  values = {
    "normal": rng.normal(size=num_rows),
    "heavy": rng.standard_t(2, size=num_rows),
    "small": 1e-2 * rng.normal(size=num_rows),
    "few values": rng.integers(1, 4, size=num_rows).astype(float),
  }
  return np.abs(values[law])


def calibrated(scores: np.ndarray, by: str = "rows") -> Calibration:
  return Calibration(conformal.count(scores), by)


@pytest.mark.parametrize("law", ["normal", "heavy", "small", "few values"])
@pytest.mark.parametrize("num_rows", [19, 100, 1001])
@pytest.mark.parametrize("level", LEVELS)
def test_threshold_is_the_plain_quantile_up_to_a_bin(law, num_rows, level):
  scores = drawn(law, num_rows)
  rank = math.ceil(round(level * (num_rows + 1), 9))
  got = conformal.threshold(conformal.count(scores), level)
  if rank > num_rows:
    assert got == math.inf
    return
  wanted = np.sort(scores)[rank - 1]
  assert wanted <= got <= wanted * ONE_BIN


@pytest.mark.parametrize("num_rows", [25, 500])
@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_intervals_are_those_of_crepes_up_to_a_bin(num_rows, level):
  rng = np.random.default_rng(num_rows)
  mean, std, noise = rng.normal(size=(3, num_rows))
  std = np.exp(std)
  y = mean + 1.5 * std * noise
  oracle = crepes.ConformalRegressor().fit(np.abs(y - mean), sigmas=std)
  wanted = oracle.predict_int(mean, sigmas=std, confidence=level)
  counts = conformal.count(conformal.scores(mean, std**2, y))
  reach = conformal.threshold(counts, level)
  wide = (wanted[:, 1] - wanted[:, 0]) / (2 * std)
  np.testing.assert_array_less(wide, reach * (1 + 1e-9))
  np.testing.assert_array_less(reach, wide * ONE_BIN)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=40), st.integers(1, 5))
def test_counts_of_clients_add_up_to_those_of_pooled_rows(values, num_clients):
  scores = np.array(values)
  parts = np.array_split(scores, num_clients)
  total = sum(conformal.count(part) for part in parts)
  np.testing.assert_array_equal(total, conformal.count(scores))
  assert total.sum() == len(scores)


def test_coverage_is_promised_on_average_and_not_much_exceeded():
  level, num_rows, repetitions = 0.9, 40, 2000
  rng = np.random.default_rng(0)
  scores = np.abs(rng.standard_t(3, size=(repetitions, num_rows)))
  new = np.abs(rng.standard_t(3, size=repetitions))
  reach = [conformal.threshold(conformal.count(one), level) for one in scores]
  share = np.mean(new <= reach)
  assert 0.885 < share < 0.935  # 0.9 to 0.93, and the chance of 2000 draws.


def test_no_rounding_moves_a_rank():
  for level, num_rows in [(0.95, 19), (0.9, 9), (0.7, 9), (0.99, 99), (0.29, 99)]:
    scores = np.linspace(0.1, 5, num_rows)
    reach = conformal.threshold(conformal.count(scores), level)
    wanted = scores[round(level * (num_rows + 1)) - 1]
    assert wanted <= reach <= wanted * ONE_BIN


@pytest.mark.parametrize(
  "level, fewest", [(0.5, 1), (0.9, 9), (0.95, 19), (0.999, 999)]
)
def test_a_level_begins_at_so_many_rows(level, fewest):
  assert conformal.fewest_rows(level) == fewest
  assert math.isfinite(calibrated(np.ones(fewest)).threshold(level))
  highest = rf"{100 * (fewest - 1) / fewest:.4g} %"
  with pytest.raises(
    InputError, match=rf"takes {fewest} rows.*with {fewest - 1}, .*{highest}"
  ):
    calibrated(np.ones(fewest - 1)).threshold(level)


def test_scores_that_are_no_numbers_or_too_large_only_widen():
  bad = np.array([np.nan, np.inf, 1e9])
  assert conformal.count(bad)[-1] == 3
  mixed = calibrated(np.concatenate([np.ones(97), bad]))
  assert mixed.threshold(0.9) < 1.03
  with pytest.raises(InputError, match="more than 100 standard deviations"):
    mixed.threshold(0.99)


def test_share_of_scores_within_a_reach_is_that_of_the_rows_up_to_a_bin():
  scores = drawn("normal", 5000)
  got = conformal.share_within(conformal.count(scores), 1.96)
  assert abs(got - np.mean(scores <= 1.96)) < 0.004


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, 95.0, np.nan])
def test_a_level_that_is_none_is_refused(level):
  with pytest.raises(InputError, match="between 0 and 1"):
    calibrated(np.ones(100)).threshold(level)
  with pytest.raises(InputError, match="between 0 and 1"):
    columns(np.zeros(2), np.ones(2), level, None)


def test_columns_are_named_by_level():
  mean, std = np.array([1.0, 2.0]), np.array([0.5, 2.0])
  calibration = calibrated(drawn("normal", 2000))
  found = columns(mean, std, (0.5, 0.999), calibration)
  kinds = [
    f"{side}{level}{kind}"
    for level in ("50", "99.9")
    for kind in ("", "_conformal")
    for side in ("lower", "upper")
  ]
  assert list(found) == kinds
  half = calibration.threshold(0.5)
  np.testing.assert_array_equal(found["upper50_conformal"], mean + half * std)
  np.testing.assert_allclose(found["lower50"], mean - 0.6745 * std, rtol=1e-4)
  assert list(columns(mean, std, None, None)) == ["lower95", "upper95"]


def test_95_percent_is_left_out_with_a_warning_unless_asked_for():
  mean, std, few = np.zeros(2), np.ones(2), calibrated(np.ones(12))
  with pytest.warns(UserWarning, match="takes 19 rows, and the model was .* with 12"):
    assert list(columns(mean, std, None, few)) == ["lower95", "upper95"]
  assert list(columns(mean, std, None, few, warn=False)) == ["lower95", "upper95"]
  with pytest.raises(InputError, match="19 rows"):
    columns(mean, std, 0.95, few)
  with pytest.raises(InputError, match="joined or left"):
    columns(mean, std, 0.5, few._replace(outdated=True))
