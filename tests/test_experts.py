"""Fusion of experts against sums written out by hand."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import experts

C, N = 4, 6
PRIOR = 1.7


def _total(rule, means, variances, mask):
  mean, variance = experts.fuse(rule, means, variances, PRIOR, mask)
  return jnp.sum(mean) + jnp.sum(variance)


fuse = jax.jit(experts.fuse, static_argnums=0)
slopes = jax.jit(jax.grad(_total, argnums=(1, 2)), static_argnums=0)
every_rule = pytest.mark.parametrize("rule", experts.RULES)
seeds = st.integers(0, 2**32 - 1)


def _experts(seed=0, num_experts=C):
  """Means and variances [C, N], the latter below the prior's."""
  rng = np.random.default_rng(seed)
  means = rng.normal(size=(num_experts, N))
  return means, PRIOR * rng.uniform(1e-3, 0.999, size=(num_experts, N))


def _by_hand(rule, means, variances, prior):
  """The rules as they are printed, one point at a time."""
  fused = []
  for mean, variance in zip(np.transpose(means), np.transpose(variances), strict=True):
    learnt = 0.5 * (np.log(prior) - np.log(variance))
    weights = {
      "poe": np.ones(len(mean)),
      "gpoe": np.full(len(mean), 1 / len(mean)),
      "gpoe-entropy": learnt / np.sum(learnt),
      "bcm": np.ones(len(mean)),
      "rbcm": learnt,
    }[rule]
    precision = np.sum(weights / variance)
    if rule in ("bcm", "rbcm"):
      precision += (1 - np.sum(weights)) / prior
    fused.append((np.sum(weights * mean / variance) / precision, 1 / precision))
  return np.transpose(fused)


@pytest.mark.parametrize(
  "rule, mean, variance",
  [
    ("poe", 14 / 6, 1 / 6),
    ("gpoe", 14 / 6, 1 / 3),
    ("gpoe-entropy", 2.6, 0.3),  # Weights 1/3 and 2/3.
    ("bcm", 14 / 5, 1 / 5),
    ("rbcm", 13 * np.log(2) / (1 + 3.5 * np.log(2)), 1 / (1 + 3.5 * np.log(2))),
  ],
)
def test_two_experts_by_hand(rule, mean, variance):
  """N(1, 1/2) and N(3, 1/4) under the prior N(0, 1)."""
  means, variances = np.array([[1.0], [3.0]]), np.array([[0.5], [0.25]])
  fused = fuse(rule, means, variances, 1.0)
  np.testing.assert_allclose(fused[0], [mean], rtol=1e-12)
  np.testing.assert_allclose(fused[1], [variance], rtol=1e-12)


@every_rule
@hypothesis.given(seeds)
def test_rules_are_as_printed_in_any_order(rule, seed):
  means, variances = _experts(seed)
  expected = _by_hand(rule, means, variances, PRIOR)
  order = np.random.default_rng(seed).permutation(C)
  for chosen in (np.arange(C), order):
    fused = fuse(rule, means[chosen], variances[chosen], PRIOR)
    np.testing.assert_allclose(fused, expected, rtol=1e-9, atol=1e-12)


@every_rule
@pytest.mark.parametrize("content", [np.nan, np.inf, 7.0])
def test_masked_experts_do_not_count(rule, content):
  means, variances = _experts()
  mask = np.array([True, False, True, False])
  garbled = [np.where(mask[:, None], array, content) for array in (means, variances)]
  expected = _by_hand(rule, means[mask], variances[mask], PRIOR)
  np.testing.assert_allclose(fuse(rule, *garbled, PRIOR, mask), expected, rtol=1e-9)

  for gradient in map(np.asarray, slopes(rule, *garbled, mask)):
    assert np.all(np.isfinite(gradient))
    assert not np.any(gradient[~mask])


@every_rule
def test_without_experts_the_prior_remains(rule):
  means = np.full((C, N), np.nan)
  mean, variance = fuse(rule, means, means, PRIOR, np.zeros(C, bool))
  np.testing.assert_array_equal(mean, np.zeros(N))
  np.testing.assert_allclose(variance, np.full(N, PRIOR), rtol=1e-12)


@pytest.mark.parametrize("rule", ["poe", "gpoe", "gpoe-entropy", "bcm"])
def test_one_expert_is_itself(rule):
  means, variances = _experts(num_experts=1)
  mean, variance = fuse(rule, means, variances, PRIOR)
  np.testing.assert_allclose(mean, means[0], rtol=1e-12)
  np.testing.assert_allclose(variance, variances[0], rtol=1e-12)


def test_one_expert_is_itself_by_rbcm_once_it_has_learnt_one_nat():
  """It is more cautious than the expert before, and less after."""
  variances = PRIOR * np.exp([[-1.0, -2.0, -4.0]])
  fused = fuse("rbcm", np.ones((1, 3)), variances, PRIOR)
  before, at, after = np.asarray(fused[1]) / variances[0]
  assert before > 1
  np.testing.assert_allclose(at, 1.0, rtol=1e-12)
  assert after < 1


@pytest.mark.parametrize("rule", ["gpoe-entropy", "bcm", "rbcm"])
def test_uninformed_experts_have_no_say(rule):
  means, variances = _experts()
  more = np.concatenate([means, np.zeros((3, N))])
  wide = np.concatenate([variances, np.full((3, N), PRIOR)])
  expected = fuse(rule, means, variances, PRIOR)
  np.testing.assert_allclose(fuse(rule, more, wide, PRIOR), expected, rtol=1e-9)


@pytest.mark.parametrize("rule", ["poe", "gpoe"])
def test_uninformed_experts_pull_products_to_zero(rule):
  means, variances = _experts()
  more = np.concatenate([means, np.zeros((3, N))])
  wide = np.concatenate([variances, np.full((3, N), PRIOR)])
  alone = fuse(rule, means, variances, PRIOR)[0]
  assert np.all(np.abs(fuse(rule, more, wide, PRIOR)[0]) < np.abs(alone))


@every_rule
def test_experts_that_know_nothing_together(rule):
  """Only the product of experts grows sure of nothing."""
  variances = np.full((C, N), PRIOR)
  mean, variance = fuse(rule, np.zeros((C, N)), variances, PRIOR)
  np.testing.assert_array_equal(mean, np.zeros(N))
  expected = PRIOR / C if rule == "poe" else PRIOR
  np.testing.assert_allclose(variance, np.full(N, expected), rtol=1e-12)


def test_bcm_pools_measurements_of_one_number():
  """Experts that share nothing but the number lose nothing: Bayes' rule itself."""
  rng = np.random.default_rng(0)
  noise = 0.4
  rows = [rng.normal(2.0, noise, size=(size, N)) for size in (1, 3, 7)]

  def posterior(measured):
    variance = 1 / (1 / PRIOR + len(measured) / noise**2)
    return variance * np.sum(measured, axis=0) / noise**2, np.full(N, variance)

  means, variances = np.stack([posterior(mine) for mine in rows], axis=1)
  fused = fuse("bcm", means, variances, PRIOR)
  np.testing.assert_allclose(fused, posterior(np.concatenate(rows)), rtol=1e-12)


@every_rule
def test_no_variance_and_too_much_stay_finite(any_x64, rule):
  """Experts that are certain, and experts less sure than the prior."""
  variances = np.array([[0.0, PRIOR, 3.0], [0.0, 0.5, 90.0]], np.float32)
  fused = fuse(rule, np.ones_like(variances), variances, PRIOR)
  assert all(value.dtype == jnp.float32 for value in fused)
  mean, variance = map(np.asarray, fused)
  assert np.all(np.isfinite(mean))
  assert np.all(np.isfinite(variance))
  assert np.all(variance > 0)
  np.testing.assert_allclose(mean[0], 1.0, rtol=1e-5)  # Both are certain of it.


def test_bcm_without_precision_keeps_a_little():
  """Two experts less sure than the prior: 1/3 + 1/3 − 1 < 0."""
  variances = np.full((2, N), 3.0)
  variance = np.asarray(fuse("bcm", np.zeros((2, N)), variances, 1.0)[1])
  np.testing.assert_allclose(variance * np.finfo(float).eps, np.ones(N))


@every_rule
def test_the_factory_gives_the_rule(rule):
  means, variances = _experts()
  fused = jax.jit(experts.fusion(rule))(means, variances, PRIOR)
  np.testing.assert_array_equal(fused, fuse(rule, means, variances, PRIOR))


@pytest.mark.parametrize("take", [experts.fusion, lambda rule: fuse(rule, 0, 0, 0)])
def test_an_unknown_rule_is_refused(take):
  with pytest.raises(InputError, match=r"'rbmc': did you mean 'rbcm'\?"):
    take("rbmc")


def test_shapes_that_do_not_fit_are_refused():
  means, variances = _experts()
  for arguments in (
    (means[0], variances[0], PRIOR),
    (means, variances[:, :-1], PRIOR),
    (means, variances, np.full(N, PRIOR)),
    (means, variances, PRIOR, np.ones(N, bool)),
  ):
    with pytest.raises(AssertionError):
      fuse("poe", *arguments)
