"""Noise that varies with the input, from sums over clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax import algorithms, blr, experiment, metrics, program
from fedbnr_jax import config as config_lib
from fedbnr_jax import federation as federation_lib
from tests.runs import tiny


def _rows(num_rows=3000, unequal=True, seed=0):
  """Features with a constant, targets whose noise grows along the second feature."""
  rng = np.random.default_rng(seed)
  x = rng.uniform(-1, 1, size=num_rows)
  features = np.stack([np.ones(num_rows), x, x**2], axis=1)
  std = 0.3 * np.exp(1.5 * x) if unequal else np.full(num_rows, 0.3)
  return features, features @ [1.0, -2.0, 0.5] + std * rng.normal(size=num_rows), std


def _fit(features, targets, num_clients=1):
  """As the exchanges do it: statistics, shape of the noise, scale of the noise."""
  parts = [
    (jnp.asarray(f), jnp.asarray(y))
    for f, y in zip(
      np.array_split(features, num_clients),
      np.array_split(targets, num_clients),
      strict=True,
    )
  ]

  def add(*trees):
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)

  stats = add(*(blr.sufficient_stats(*part) for part in parts))
  fitted = blr.posterior(stats, *blr.fit_evidence(stats))
  moments = add(*(blr.noise_moments(*part, fitted) for part in parts))
  fitted = blr.fit_noise(fitted, stats, moments)
  ratio = add(*(blr.noise_ratio(*part, fitted) for part in parts))
  return blr.scale_noise(fitted, ratio, stats.count)


def test_unequal_noise_is_found():
  features, targets, std = _rows()
  fitted = _fit(features, targets)
  got = np.sqrt(blr.noise_variance(fitted, jnp.asarray(features)))
  assert np.max(np.abs(np.log(got / std))) < 0.2
  ratio = blr.noise_ratio(jnp.asarray(features), jnp.asarray(targets), fitted)
  np.testing.assert_allclose(ratio, len(targets) - blr.num_determined(fitted))


def test_equal_noise_stays_equal():
  features, targets, std = _rows(unequal=False)
  fitted = _fit(features, targets)
  got = np.sqrt(blr.noise_variance(fitted, jnp.asarray(features)))
  np.testing.assert_allclose(got, std, rtol=0.1)


def test_few_rows_do_not_make_the_noise_small():
  """Residuals of a fit with nearly as many weights as rows are smaller than noise."""
  noise = []
  for seed in range(20):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(120, 60)) / np.sqrt(60)
    targets = features @ rng.normal(size=60) + 0.3 * rng.normal(size=120)
    variance = blr.noise_variance(_fit(features, targets), jnp.asarray(features))
    noise.append(float(jnp.sqrt(jnp.mean(variance))))
  assert abs(np.mean(noise) - 0.3) < 0.03


def test_predictions_are_calibrated_where_one_sigma_is_not():
  features, targets, _ = _rows()
  new, truth, _ = _rows(seed=1)
  fitted = _fit(features, targets)
  constant = fitted.replace(noise_weights=None, noise_offset=None)
  scores = [
    metrics.evaluate(*blr.predict(one, jnp.asarray(new)), jnp.asarray(truth))
    for one in (fitted, constant)
  ]
  assert scores[0]["ece"] < 0.02 < 0.05 < scores[1]["ece"]
  assert scores[0]["nll"] < scores[1]["nll"] - 0.1
  np.testing.assert_allclose(scores[0]["rmse"], scores[1]["rmse"], rtol=1e-12)


@pytest.mark.parametrize("num_clients", [2, 7, 100])
def test_any_partition_gives_the_same_noise(num_clients):
  features, targets, _ = _rows(300)
  one, many = _fit(features, targets), _fit(features, targets, num_clients)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


def test_padding_does_not_count():
  features, targets, _ = _rows(40)
  fitted = _fit(features, targets)
  padded = jnp.asarray(np.pad(features, ((0, 9), (0, 0)), constant_values=np.nan))
  y, mask = jnp.asarray(np.pad(targets, (0, 9))), jnp.arange(49) < 40
  for function in (blr.noise_moments, blr.noise_ratio):
    got = function(padded, y, fitted, mask)
    wanted = function(jnp.asarray(features), jnp.asarray(targets), fitted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-12)


def test_perfect_fit_stays_finite():
  features, _, _ = _rows(50)
  fitted = _fit(features, features @ np.array([1.0, -2.0, 0.5]))
  variance = blr.noise_variance(fitted, jnp.asarray(features))
  assert np.all(np.isfinite(variance))
  assert np.all(variance >= 0)


def test_held_out_rows_tell_the_noise_that_a_fit_by_heart_hides():
  """As many weights as rows: no residual is left, and other rows have large ones."""
  rng = np.random.default_rng(0)
  weights = rng.normal(size=60)

  def rows(num_rows):
    features = rng.normal(size=(num_rows, 60)) / np.sqrt(60)
    targets = features @ weights + 0.3 * rng.normal(size=num_rows)
    return jnp.asarray(features), jnp.asarray(targets)

  fitted = blr.posterior(blr.sufficient_stats(*rows(60)), 1e-3, 10.0)
  fitted = fitted.replace(noise_weights=jnp.zeros(60), noise_offset=jnp.zeros(()))
  held_out, (new, truth) = rows(500), rows(2000)
  scores = [
    metrics.evaluate(*blr.predict(one, new), truth)
    for one in (fitted, blr.held_out_noise(*held_out, fitted))
  ]
  assert scores[0]["coverage95"] < 0.1
  assert abs(scores[1]["coverage95"] - 0.95) < 0.02
  assert scores[1]["ece"] < 0.03
  np.testing.assert_array_equal(scores[0]["rmse"], scores[1]["rmse"])


def test_held_out_noise_is_that_of_all_rows_where_these_are_not_fitted():
  """With no row in the posterior all are held out, and none is spent on the fit."""
  features, targets, _ = _rows(300)
  rows = jnp.asarray(features), jnp.asarray(targets)
  prior = blr.posterior(blr.empty_stats(3), 0.3, 1.0)
  got = blr.held_out_noise(*rows, prior)
  stats, moments = blr.sufficient_stats(*rows), blr.noise_moments(*rows, prior)
  shaped = blr.fit_noise(prior, stats, moments)
  wanted = blr.scale_noise(shaped, blr.noise_ratio(*rows, shaped), stats.count)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-12)


def test_validation_rows_set_the_bars_of_exact_training_and_nothing_else():
  states, scores = {}, {}
  for noise in ("constant", "held-out"):
    run = experiment.build(tiny(method="fedbnr-exact", exact__noise=noise))
    step = jax.jit(program.make_program(run).step)
    state = run.algorithm.init(run.key_init, run.federation)
    for _ in range(2):
      state, _, _, scores[noise] = step(
        run.key_rounds, state, run.federation, run.validation, run.test
      )
    states[noise] = state
  for a, b in zip(
    jax.tree.leaves(states["constant"].params),
    jax.tree.leaves(states["held-out"].params),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  np.testing.assert_allclose(
    scores["constant"]["rmse"], scores["held-out"]["rmse"], rtol=1e-5
  )
  assert scores["constant"]["nll"] != scores["held-out"]["nll"]
  # After a round the noise is that of its own kernel, not of the one before.
  last = states["held-out"]
  again = run.algorithm.calibrate(last, run.validation.x, run.validation.y)
  np.testing.assert_allclose(
    again.posterior.noise_offset, last.posterior.noise_offset, rtol=1e-6
  )


@pytest.mark.parametrize("method", ["fedbnr-ev", "fedbnr-exact"])
def test_a_round_learns_the_noise_of_all_clients(method):
  config = config_lib.base()
  sizes = {"num_samples": 6, "hidden_size": 8, "latent_size": 2, "num_local_steps": 2}
  config.update(sizes)
  config.evidence.noise = config.exact.noise = "varying"
  built = algorithms.method(method).build(config)
  features, targets, _ = _rows(200)
  parts = np.array_split(np.arange(200), 4)
  data = federation_lib.build(features[:, 1:], targets / targets.std(), parts)
  key = jax.random.key(0)
  state = built.init(key, data)
  before = jax.tree.structure(state)
  state, info = jax.jit(built.round)(key, state, data)
  assert jax.tree.structure(state) == before
  assert np.linalg.norm(state.posterior.noise_weights) > 0
  _, variance = built.predict(state, federation_lib.pooled(data).clients.x[0])
  assert np.all(variance > 0)
  config.evidence.noise = config.exact.noise = "constant"
  plain = algorithms.method(method).build(config)
  floats = [
    one.floats(one.stages, state, None) for one in (built, plain)
  ]  # Up and down.
  assert floats[0][0] - floats[1][0] == 2 * 12 + 2 + 1
  assert int(info.floats_up) == floats[0][0]
