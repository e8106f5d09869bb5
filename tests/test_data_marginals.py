"""Marginals from sums: near to exact quantiles, whoever holds which values."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from scipy import special, stats

from fedbnr_jax.data import marginals

RNG = np.random.default_rng(0)
# Standardised inputs of several kinds, with ties, tails and few values.
COLUMNS = {
  "normal": RNG.normal(size=3000),
  "long tail": np.append(RNG.normal(size=3000) * 0.02, 50.0),
  "huge": np.append(RNG.normal(size=3000) * 1e-9, 1e9),
  "integers": RNG.integers(0, 7, size=3000) / 2.0 - 1.5,
  "two values": (RNG.uniform(size=3000) < 0.1) * 3.0 - 0.3,
}


def exact_scores(values: np.ndarray) -> np.ndarray:
  levels = (stats.rankdata(values, method="average") - 0.5) / len(values)
  return np.clip(special.ndtri(levels), -marginals.CLIP, marginals.CLIP)


@pytest.mark.parametrize("name", [n for n in COLUMNS if n != "huge"])
def test_scores_are_near_those_of_exact_ranks(name):
  values = COLUMNS[name]
  got, expected = marginals.fit([values]).scores(values), exact_scores(values)
  # Within a few ranks.
  np.testing.assert_allclose(
    special.ndtr(got), special.ndtr(expected), atol=3 / len(values)
  )
  # Where values repeat, bins hold one value each, and nothing is approximated.
  if len(np.unique(values)) < 100:
    np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("power", [1, 3, 6])
def test_scores_of_very_long_tails_take_further_passes(power):
  """Nearly all rows lie within a thousandth of a deviation, and so share few bins."""
  values = np.exp(power * COLUMNS["normal"])
  values = (values - values.mean()) / values.std()
  got = marginals.fit([values]).scores(values)
  np.testing.assert_allclose(got, exact_scores(values), atol=0.01)


@pytest.mark.parametrize("name", COLUMNS)
def test_scores_rise_with_the_value_and_are_bounded(name):
  values = COLUMNS[name]
  grid = np.sort(np.append(np.linspace(-1e12, 1e12, 101), values))
  scores = marginals.fit([values]).scores(grid)
  assert np.all(np.diff(scores) >= 0)
  assert np.all(np.abs(scores) <= marginals.CLIP)


@pytest.mark.parametrize("name", COLUMNS)
def test_partitions_do_not_matter(name):
  values = COLUMNS[name]
  pooled = marginals.fit([values])
  dealt = marginals.fit(np.array_split(np.sort(values), 7))
  np.testing.assert_array_equal(dealt.levels, pooled.levels)
  np.testing.assert_allclose(dealt.values, pooled.values, rtol=1e-12, atol=1e-20)


def test_quantiles_are_near_the_exact_ones():
  values = COLUMNS["normal"]
  levels = (np.arange(marginals.NUM_QUANTILES) + 0.5) / marginals.NUM_QUANTILES
  expected = np.quantile(values, levels, method="hazen")
  np.testing.assert_allclose(marginals.fit([values]).quantiles(), expected, atol=0.02)


@hypothesis.given(
  st.lists(st.floats(-1e12, 1e12, allow_subnormal=False), min_size=1, max_size=30)
)
def test_every_value_is_counted_once_and_none_is_lost(values):
  values = np.array(values)
  edges = marginals.coarse_edges()
  first = marginals.bin_sums(values, edges)
  second = marginals.bin_sums(values, marginals.finer_edges(edges, first.counts))
  for sums in (first, second):
    assert sums.counts.sum() == len(values)
    np.testing.assert_allclose(sums.sums.sum(), values.sum(), rtol=1e-9, atol=1e-3)


def test_the_correlation_is_that_of_the_scores():
  x = RNG.multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], size=4000)
  factor = marginals.correlation_factor(np.cov(x.T))
  np.testing.assert_allclose(factor @ factor.T, np.corrcoef(x.T), atol=1e-5)
  repeated = marginals.correlation_factor(np.cov(np.stack([x[:, 0], x[:, 0]])))
  assert np.all(np.isfinite(repeated))
