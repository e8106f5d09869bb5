"""Statistics, posterior and evidence against the dense Gaussian process in NumPy."""

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import strategies as st

from fedbnr_jax.gp import blr
from tests import oracles

N, M = 30, 8
SIGMA, LAMBDA = 0.3, 1.7

seeds = st.integers(0, 2**32 - 1)
predict = jax.jit(blr.predict, static_argnames="with_noise")
fit_evidence = jax.jit(blr.fit_evidence)
improve_evidence = jax.jit(blr.improve_evidence)
from_stats = jax.jit(blr.negative_log_marginal_likelihood_from_stats)
_stats, _posterior = jax.jit(blr.sufficient_stats), jax.jit(blr.posterior)


def stats_of(features, targets, seed=0):
  """Statistics of at most N rows, at random places among NaN: one program for all."""
  rng = np.random.default_rng(seed)
  num_rows = max(N, len(targets))
  places = rng.permutation(num_rows)[: len(targets)]
  wide = np.full((num_rows, features.shape[1]), np.nan, features.dtype)
  long, mask = np.full(num_rows, np.nan, features.dtype), np.zeros(num_rows, bool)
  wide[places], long[places], mask[places] = features, targets, True
  return _stats(wide, long, mask)


def posterior(stats, sigma, prior):
  """The posterior, with scales that are never weakly typed."""
  return _posterior(stats, *(np.asarray(s, stats.gram.dtype) for s in (sigma, prior)))


# ------------------------------------------------------------------- statistics


@hypothesis.settings(max_examples=15)
@hypothesis.given(seeds, st.floats(0.05, 2.0), st.floats(0.1, 9.0))
def test_any_deal_order_and_padding_give_the_dense_posterior(seed, sigma, prior):
  """K clients of random sizes, NaN in the padding, against the pooled dense GP."""
  features, targets = oracles.rows(N, M, seed)
  rng = np.random.default_rng(seed)
  owner = rng.integers(0, 4, N)
  stats = []
  for client in rng.permutation(4):
    mine = rng.permutation(np.flatnonzero(owner == client))
    stats.append(stats_of(features[mine], targets[mine], seed))
  total = stats[0] + stats[1] + stats[2] + stats[3]
  assert float(total.count) == N

  query = rng.normal(size=(N, M))
  fitted = posterior(total, sigma, prior)
  mean, variance = predict(fitted, query)
  dense = oracles.gp_predict(features, targets, query, sigma, prior)
  scale = np.abs(dense[0]).max()
  np.testing.assert_allclose(mean, dense[0], rtol=1e-9, atol=1e-9 * scale)
  np.testing.assert_allclose(variance, dense[1], rtol=1e-9)
  expected = oracles.gp_nll(features, targets, sigma, prior)
  np.testing.assert_allclose(
    from_stats(total, fitted), expected, rtol=1e-9, atol=1e-9 * N
  )


def test_statistics_are_the_products_with_and_without_a_mask():
  features, targets = oracles.rows(N, M)
  for stats in (_stats(features, targets), stats_of(features, targets)):
    gram = features.T @ features
    np.testing.assert_allclose(stats.gram, gram, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(stats.moment, features.T @ targets, rtol=1e-12)
    np.testing.assert_allclose(stats.energy, targets @ targets, rtol=1e-12)
    assert float(stats.count) == N


def test_padding_content_changes_no_bit_of_the_statistics():
  features, targets = oracles.rows(N, M)
  mask = np.arange(N) < 20
  results = []
  for content in (0.0, 1e30, np.inf, np.nan):
    wide = np.where(mask[:, None], features, content)
    results.append(_stats(wide, np.where(mask, targets, content), mask))
  for other in results[1:]:
    chex.assert_trees_all_equal(results[0], other)


def test_stacked_statistics_sum_as_they_add():
  parts = [stats_of(*oracles.rows(N, M, seed)) for seed in range(3)]
  stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
  added = parts[0] + parts[1] + parts[2]
  chex.assert_trees_all_close(jax.jit(blr.sum_stats)(stacked), added, rtol=1e-13)


def test_empty_statistics_change_nothing(any_x64):
  dtype = np.float64 if any_x64 else np.float32
  stats = stats_of(*(one.astype(dtype) for one in oracles.rows(N, M)))
  chex.assert_trees_all_equal(stats + blr.empty_stats(M), stats)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_augmented_gram_is_the_gram_of_features_and_scaled_targets(scale):
  features, targets = oracles.rows(N, M)
  both = np.column_stack([features, scale * targets])
  got = blr.augmented_gram(stats_of(features, targets), scale)
  np.testing.assert_allclose(got, both.T @ both, rtol=1e-12, atol=1e-12)


def test_statistics_are_as_wide_as_the_device_allows(any_x64):
  rows = [one.astype(np.float32) for one in oracles.rows(N, M)]

  def both(features, targets):
    stats = blr.sufficient_stats(features, targets)
    fitted = blr.posterior(stats, SIGMA, LAMBDA)
    return stats, fitted, blr.predict(fitted, features)

  wide = jnp.float64 if any_x64 else jnp.float32
  chex.assert_type(jax.tree.leaves(jax.eval_shape(both, *rows)), wide)


# -------------------------------------------------------------------- posterior


def test_posterior_is_the_explicit_inverse():
  features, targets = oracles.rows(N, M)
  fitted = posterior(stats_of(features, targets), SIGMA, LAMBDA)
  mean, covariance = oracles.weight_posterior(features, targets, SIGMA, LAMBDA)
  np.testing.assert_allclose(fitted.mean, mean, rtol=1e-10)
  lower = np.asarray(fitted.cholesky)
  np.testing.assert_allclose(
    lower @ lower.T @ covariance, LAMBDA**2 * np.eye(M), atol=1e-10
  )
  got = jax.jit(blr.weight_covariance)(fitted)
  np.testing.assert_allclose(got, covariance, rtol=1e-10, atol=1e-12)
  determined = M - np.trace(covariance) / LAMBDA**2
  np.testing.assert_allclose(
    jax.jit(blr.num_determined)(fitted), determined, rtol=1e-10
  )


def test_no_rows_leave_the_prior():
  empty = stats_of(np.zeros((0, M)), np.zeros(0))
  query = oracles.rows(N, M)[0]
  mean, variance = predict(posterior(empty, SIGMA, LAMBDA), query)
  np.testing.assert_array_equal(mean, np.zeros(N))
  prior = LAMBDA**2 * np.sum(query**2, axis=1) + SIGMA**2
  np.testing.assert_allclose(variance, prior, rtol=1e-13)


def test_noise_is_the_difference_with_noise_makes():
  fitted = posterior(stats_of(*oracles.rows(N, M)), SIGMA, LAMBDA)
  query = oracles.rows(N, M, seed=1)[0]
  mean, variance = map(np.asarray, predict(fitted, query))
  same, latent = map(np.asarray, predict(fitted, query, with_noise=False))
  np.testing.assert_array_equal(mean, same)
  np.testing.assert_allclose(variance - latent, SIGMA**2, rtol=1e-12)
  assert np.all(latent > 0)


def test_samples_have_the_posteriors_mean_and_covariance():
  features, targets = oracles.rows(N, M)
  fitted = posterior(stats_of(features, targets), SIGMA, LAMBDA)
  mean, covariance = oracles.weight_posterior(features, targets, SIGMA, LAMBDA)
  num_samples = 40_000
  draw = jax.jit(blr.sample_weights, static_argnums=2)
  draws = np.asarray(draw(jax.random.key(0), fitted, num_samples))
  assert draws.shape == (num_samples, M)
  # Whitened draws are standard normal: errors of 1/√n, five of them allowed.
  white = np.linalg.solve(np.linalg.cholesky(covariance), (draws - mean).T)
  bound = 5 / np.sqrt(num_samples)
  np.testing.assert_allclose(white.mean(axis=1), 0, atol=bound)
  np.testing.assert_allclose(np.cov(white), np.eye(M), atol=2 * bound)


def test_printed_phase_two_is_the_merged_one():
  """Scatter up, A⁻¹ down, partial means up: the same posterior."""
  parts = [stats_of(*oracles.rows(N, M, seed)) for seed in range(3)]
  total = parts[0] + parts[1] + parts[2]
  scale = np.float64(SIGMA)
  covariance = jax.jit(blr.covariance)(total.gram, scale, np.float64(LAMBDA))
  partial_mean = jax.jit(blr.partial_mean)
  means = [np.asarray(partial_mean(covariance, p.moment, scale)) for p in parts]
  merged = posterior(total, SIGMA, LAMBDA)
  np.testing.assert_allclose(sum(means), merged.mean, rtol=1e-9)
  lower = np.asarray(merged.cholesky)
  np.testing.assert_allclose(
    covariance @ lower @ lower.T, LAMBDA**2 * np.eye(M), atol=1e-10
  )


@pytest.mark.parametrize("num_rows", [400, N], ids=["tall", "wide"])
def test_float32_agrees_with_dense_in_reasonable_cases(num_rows, x64_off):
  """Forty random Fourier features of a smooth kernel, in float32 alone."""
  rng = np.random.default_rng(0)
  omega = rng.normal(size=(5, 20)) / 1.5

  def rows(num_rows):
    x = rng.normal(size=(num_rows, 5))
    features = np.concatenate([np.cos(x @ omega), np.sin(x @ omega)], 1) / np.sqrt(19)
    targets = np.sin(x.sum(1)) + 0.3 * rng.normal(size=num_rows)
    return features.astype(np.float32), targets.astype(np.float32)

  (features, targets), (query, _) = rows(num_rows), rows(N)
  mean, variance = predict(posterior(stats_of(features, targets), 0.3, 1.0), query)
  dense = oracles.gp_predict(features, targets, query, 0.3, 1.0)
  np.testing.assert_allclose(mean, dense[0], atol=1e-4 * np.abs(dense[0]).max())
  np.testing.assert_allclose(variance, dense[1], rtol=1e-4)


# --------------------------------------------------------------------- evidence


def _log_nll(logs, rows):
  """The dense likelihood at (log σ, log λ), and its slope."""
  scales = np.exp(logs)
  slopes = oracles.gp_gradient(*rows, *scales)[2:]
  return oracles.gp_nll(*rows, *scales), np.array(slopes) * scales


@pytest.mark.parametrize("shape", [(N, M), (20, 30)], ids=["tall", "wide"])
@pytest.mark.parametrize("seed", range(3))
def test_evidence_is_stationary_and_the_best_anywhere(shape, seed):
  features, targets = oracles.rows(*shape, seed)
  # A falling spectrum, so that wide features too leave something to the noise.
  decay = 3 * 0.6 ** np.arange(shape[1])
  rows = features * decay, targets + features @ (decay * 2)
  best = np.log(fit_evidence(stats_of(*rows)))
  value, slope = _log_nll(best, rows)
  np.testing.assert_allclose(slope, 0, atol=1e-7 * shape[0])

  grid = np.stack(np.meshgrid(*[np.linspace(-4, 3, 15)] * 2), -1).reshape(-1, 2)
  start = grid[np.argmin([_log_nll(logs, rows)[0] for logs in grid])]
  assert not np.any(np.abs(start) == 4)  # An inner optimum.
  found = scipy.optimize.minimize(
    _log_nll, start, (rows,), jac=True, options={"gtol": 1e-9}
  )
  assert value <= found.fun + 1e-9
  np.testing.assert_allclose(best, found.x, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_evidence_is_mackays_fixed_point(seed):
  features, targets = oracles.rows(N, M, seed)
  got = fit_evidence(stats_of(features, targets))
  np.testing.assert_allclose(got, oracles.mackay(features, targets), rtol=1e-6)


@pytest.mark.parametrize("start", [(0.05, 9.0), (3.0, 0.1)], ids=["sure", "unsure"])
def test_steps_of_em_climb_to_the_evidence(start):
  rows = oracles.rows(N, M)
  stats = stats_of(*rows)
  scales, values = np.array(start), []
  for _ in range(4):
    values.append(oracles.gp_nll(*rows, *scales))
    scales = np.array(improve_evidence(stats, *scales, 1))
  assert np.all(np.diff(values) < 0)
  far = np.array(improve_evidence(stats, *scales, 5000))
  np.testing.assert_allclose(far, fit_evidence(stats), rtol=1e-6)


@hypothesis.settings(max_examples=15)
@hypothesis.given(seeds, st.floats(1e-3, 1e3))
def test_evidence_scales_with_the_targets_and_against_the_features(seed, factor):
  features, targets = oracles.rows(N, M, seed)
  sigma, prior = np.array(fit_evidence(stats_of(features, targets)))
  scaled = fit_evidence(stats_of(features, factor * targets))
  np.testing.assert_allclose(scaled, (factor * sigma, factor * prior), rtol=1e-6)
  scaled = fit_evidence(stats_of(factor * features, targets))
  np.testing.assert_allclose(scaled, (sigma, prior / factor), rtol=1e-6)


def test_evidence_ignores_rotation_and_idle_features():
  features, targets = oracles.rows(N, M - 3)
  idle = np.concatenate([features, np.zeros((N, 3))], axis=1)
  rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(M, M)))[0]
  expected = oracles.mackay(features, targets)
  for same in (idle, idle @ rotation):
    got = fit_evidence(stats_of(same, targets))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_evidence_keeps_to_the_largest_ratio_allowed():
  features, targets = oracles.rows(N, M)
  sigma, prior = np.array(fit_evidence(stats_of(features, targets)))
  limit = 0.3 * (prior / sigma) ** 2
  capped = np.array(fit_evidence(stats_of(features, targets), np.float64(limit)))
  np.testing.assert_allclose((capped[1] / capped[0]) ** 2, limit, rtol=1e-6)
  # At a given ratio the evidence is highest where its slope along both scales is 0.
  slopes = oracles.gp_gradient(features, targets, *capped)[2:]
  np.testing.assert_allclose(np.dot(slopes, capped), 0, atol=1e-6 * N)


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
  dtype = np.float64 if any_x64 else np.float32
  features, targets = (one.astype(dtype) for one in _extremes()[name])
  stats = stats_of(features, targets)
  scales = np.array(fit_evidence(stats))
  assert np.all(np.isfinite(scales))
  assert np.all(scales > 0)
  if any_x64:
    query = np.resize(features, (N, M))
    mean, variance = predict(posterior(stats, *scales), query)
    assert np.all(np.isfinite(mean))
    assert np.all(np.isfinite(variance))


def test_pure_noise_leaves_all_variance_to_the_noise():
  features, targets = _extremes()["pure_noise"]
  sigma, prior = np.array(fit_evidence(stats_of(features, targets)))
  np.testing.assert_allclose(sigma, np.sqrt(np.mean(targets**2)), rtol=1e-6)
  assert prior < 1e-3 * sigma


def test_no_noise_leaves_none():
  features, targets = _extremes()["no_noise"]
  sigma, prior = np.array(fit_evidence(stats_of(features, targets)))
  assert sigma < 1e-6 * np.std(targets)
  weights = np.linalg.lstsq(features, targets)[0]
  np.testing.assert_allclose(prior, np.sqrt(np.mean(weights**2)), rtol=1e-6)
