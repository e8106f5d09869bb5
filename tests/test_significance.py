"""Standard errors and Wilcoxon marks against enumeration of all signs."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedbnr_jax.report import significance

SEEDS = range(10)


def _enumerated(differences):
  """p that the sum of ranks of positive differences is as large, by all 2ᴺ signs."""
  differences = np.asarray([d for d in differences if d != 0])
  ranks = stats.rankdata(np.abs(differences))
  signs = np.array(list(itertools.product((0, 1), repeat=len(ranks))))
  return np.mean(signs @ ranks >= ranks[differences > 0].sum())


def _differences(negative_ranks, n=10):
  """Differences of sizes 1 to n, those of the given ranks negative."""
  return np.array(
    [-rank if rank in negative_ranks else rank for rank in range(1, n + 1)]
  )


def _mark(differences, seeds=None):
  """The mark of scores that differ so from a reference of which seed 3 is worst."""
  differences = np.asarray(differences, dtype=float)
  seeds = range(len(differences)) if seeds is None else seeds
  reference = pd.Series(np.arange(len(differences)) % 4 * 16.0, index=seeds)
  return significance.mark(reference + differences, reference)


def test_sem_is_by_hand():
  assert significance.sem([1.0, 2.0, 3.0, 4.0]) == pytest.approx(
    math.sqrt(5 / 3) / 2, rel=1e-14
  )
  assert significance.sem([1.0, math.nan, 3.0]) == pytest.approx(1.0, rel=1e-14)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_sem_is_unknown_without_two_finite_values(values):
  assert math.isnan(significance.sem(values))


@pytest.mark.parametrize(
  "negative_ranks, worse, better",
  [
    ((), "⇑", "⇓"),
    ((5,), "⇑", "⇓"),  # W⁻ = 5: p = .0098.
    ((2, 3), "⇑", "⇓"),
    ((6,), "↑", "↓"),  # W⁻ = 6: p = .0137.
    ((1, 2, 3), "↑", "↓"),
    ((10,), "↑", "↓"),  # W⁻ = 10: p = .0420.
    ((1, 2, 3, 4), "↑", "↓"),
    ((1, 10), "", ""),  # W⁻ = 11: p = .0527.
    ((2, 4, 5), "", ""),
  ],
)
def test_thresholds_at_ten_pairs(negative_ranks, worse, better):
  differences = _differences(negative_ranks)
  assert _mark(differences) == worse
  assert _mark(-differences) == better


@pytest.mark.parametrize("n", [5, 7, 10])
def test_p_is_the_enumerated_one(n):
  rng = np.random.default_rng(n)
  for _ in range(5):
    differences = rng.normal(0.5, 1.0, n)
    p = significance.wilcoxon(differences, "greater")
    assert p == pytest.approx(_enumerated(differences), rel=1e-12)
    assert significance.wilcoxon(-differences, "less") == pytest.approx(p, rel=1e-12)


@pytest.mark.parametrize(
  "differences",
  [
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    [1, 1, 1, 1, 1, 1, 1, 1, 1, -1],
    [2, 2, -1, 3, 3, 3, 4, 5, 6, 7],
    [0, 0, 1, 2, 3, 4, 5, -6, 7, 8],
    [0, 0, 0, 2, 2, 2, 2, -1, 2, 0],
  ],
)
def test_ties_and_zeros_are_exact_and_silent(differences):
  p = significance.wilcoxon(differences, "greater")
  assert p == pytest.approx(_enumerated(differences), rel=1e-12)


def test_many_ties_are_approximated_silently():
  differences = [1.0] * 14 + [-1.0] * 2 + [0.0] * 4
  p = significance.wilcoxon(differences, "greater")
  assert p == pytest.approx(_enumerated(differences), rel=0.5)


def test_methods_that_do_not_differ_have_no_mark():
  assert significance.wilcoxon(np.zeros(10), "greater") == 1.0
  assert significance.wilcoxon(np.zeros(10), "less") == 1.0
  assert _mark(np.zeros(10)) == ""


@pytest.mark.parametrize("n, worse", [(1, ""), (4, ""), (5, "↑"), (6, "↑"), (7, "⇑")])
def test_below_five_pairs_there_is_no_mark(n, worse):
  assert _mark(_differences((), n)) == worse


def test_pairs_are_made_by_seed():
  scores = pd.Series(np.arange(10.0) + 0.5, index=SEEDS)
  reference = pd.Series(np.arange(10.0), index=SEEDS)
  assert significance.mark(scores, reference.iloc[::-1]) == "⇑"
  # Only seeds that both have are pairs, and a missing score is no run.
  assert significance.mark(scores.iloc[:7], reference.iloc[3:]) == ""
  assert significance.mark(scores.iloc[:8], reference.iloc[3:]) == "↑"
  assert significance.mark(scores.where(scores < 4), reference) == ""


def test_an_infinite_score_is_the_worst():
  scores = pd.Series([math.inf, 1.0, 2.0, 3.0, 4.0])
  assert significance.mark(scores, pd.Series(np.zeros(5))) == "↑"
  assert significance.mark(scores, scores) == ""
