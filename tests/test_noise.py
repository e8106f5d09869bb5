"""Noise that varies with the input, from sums over clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax import algorithms
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.federated import federation as federation_lib
from fedbnr_jax.federated.federation import Rows
from fedbnr_jax.gp import blr, metrics, urk
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import experiment, program, training
from tests.runs import tiny

PADDED = 3000  # All rows of a test go into so many places: one program a function.

stats_of = jax.jit(blr.sufficient_stats)
fit_evidence = jax.jit(blr.fit_evidence)
posterior = jax.jit(blr.posterior)
noise_moments, noise_ratio = jax.jit(blr.noise_moments), jax.jit(blr.noise_ratio)
fit_noise, scale_noise = jax.jit(blr.fit_noise), jax.jit(blr.scale_noise)
held_out_noise = jax.jit(blr.held_out_noise)
num_determined = jax.jit(blr.num_determined)
_noise_variance, _predict = jax.jit(blr.noise_variance), jax.jit(blr.predict)
evaluate = jax.jit(metrics.evaluate)


def _rows(num_rows=PADDED, unequal=True, seed=0):
  """Features with a constant, targets whose noise grows along the second feature."""
  rng = np.random.default_rng(seed)
  x = rng.uniform(-1, 1, size=num_rows)
  features = np.stack([np.ones(num_rows), x, x**2], axis=1)
  std = 0.3 * np.exp(1.5 * x) if unequal else np.full(num_rows, 0.3)
  return features, features @ [1.0, -2.0, 0.5] + std * rng.normal(size=num_rows), std


def _padded(features, targets):
  """Rows, then NaN, and the mask."""
  extra = PADDED - len(targets)
  features = np.pad(features, ((0, extra), (0, 0)), constant_values=np.nan)
  targets = np.pad(targets, (0, extra), constant_values=np.nan)
  return features, targets, np.arange(PADDED) < PADDED - extra


def _add(trees):
  return jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *trees)


def _fit(features, targets, num_clients=1):
  """As the exchanges do it: statistics, shape of the noise, scale of the noise."""
  rows = np.array_split(np.arange(len(targets)), num_clients)
  clients = [_padded(features[mine], targets[mine]) for mine in rows]
  stats = _add([stats_of(*client) for client in clients])
  fitted = posterior(stats, *fit_evidence(stats))
  moments = _add([noise_moments(x, y, fitted, mask) for x, y, mask in clients])
  fitted = fit_noise(fitted, stats, moments)
  ratio = _add([noise_ratio(x, y, fitted, mask) for x, y, mask in clients])
  return scale_noise(fitted, ratio, stats.count)


def noise_variance(fitted, features):
  """The noise's variance at the rows themselves."""
  padded = np.pad(features, ((0, PADDED - len(features)), (0, 0)))
  return np.asarray(_noise_variance(fitted, padded))[: len(features)]


def _scores(fitted, features, targets):
  return evaluate(*_predict(fitted, features), targets)


def test_unequal_noise_is_found():
  features, targets, std = _rows()
  fitted = _fit(features, targets)
  got = np.sqrt(noise_variance(fitted, features))
  assert np.max(np.abs(np.log(got / std))) < 0.2
  padded, y, mask = _padded(features, targets)
  ratio = noise_ratio(padded, y, fitted, mask)
  np.testing.assert_allclose(ratio, len(targets) - float(num_determined(fitted)))


def test_equal_noise_stays_equal():
  features, targets, std = _rows(unequal=False)
  got = np.sqrt(noise_variance(_fit(features, targets), features))
  np.testing.assert_allclose(got, std, rtol=0.1)


def test_few_rows_do_not_make_the_noise_small():
  """Residuals of a fit with nearly as many weights as rows are smaller than noise."""
  noise = []
  for seed in range(20):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(120, 60)) / np.sqrt(60)
    targets = features @ rng.normal(size=60) + 0.3 * rng.normal(size=120)
    variance = noise_variance(_fit(features, targets), features)
    noise.append(np.sqrt(np.mean(variance)))
  assert abs(np.mean(noise) - 0.3) < 0.03


def test_predictions_are_calibrated_where_one_sigma_is_not():
  features, targets, _ = _rows()
  new, truth, _ = _rows(seed=1)
  fitted = _fit(features, targets)
  constant = fitted.replace(noise_weights=None, noise_offset=None)
  scores = [_scores(one, new, truth) for one in (fitted, constant)]
  assert scores[0]["ece"] < 0.02 < 0.05 < scores[1]["ece"]
  assert scores[0]["nll"] < scores[1]["nll"] - 0.1
  np.testing.assert_allclose(scores[0]["rmse"], scores[1]["rmse"], rtol=1e-12)


@pytest.mark.parametrize("num_clients", [2, 7, 100])
def test_any_partition_gives_the_same_noise(num_clients):
  features, targets, _ = _rows(300)
  one, many = _fit(features, targets), _fit(features, targets, num_clients)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("function", [noise_moments, noise_ratio])
def test_padding_does_not_count(function):
  features, targets, _ = _rows(40)
  fitted = _fit(features, targets)
  padded, y, mask = _padded(features, targets)
  got, wanted = function(padded, y, fitted, mask), function(features, targets, fitted)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-12)


def test_perfect_fit_stays_finite():
  features, _, _ = _rows(50)
  fitted = _fit(features, features @ np.array([1.0, -2.0, 0.5]))
  variance = noise_variance(fitted, features)
  assert np.all(np.isfinite(variance))
  assert np.all(variance >= 0)


def test_held_out_rows_tell_the_noise_that_a_fit_by_heart_hides():
  """As many weights as rows: no residual is left, and other rows have large ones."""
  rng = np.random.default_rng(0)
  weights = rng.normal(size=60)

  def rows(num_rows):
    features = rng.normal(size=(num_rows, 60)) / np.sqrt(60)
    return features, features @ weights + 0.3 * rng.normal(size=num_rows)

  stats = stats_of(*_padded(*rows(60)))
  fitted = posterior(stats, np.float64(1e-3), np.float64(10.0))
  fitted = fitted.replace(noise_weights=np.zeros(60), noise_offset=np.zeros(()))
  held_out, new = rows(500), rows(PADDED)
  scores = [_scores(one, *new) for one in (fitted, held_out_noise(*held_out, fitted))]
  assert scores[0]["coverage95"] < 0.1
  assert abs(scores[1]["coverage95"] - 0.95) < 0.02
  assert scores[1]["ece"] < 0.03
  np.testing.assert_array_equal(scores[0]["rmse"], scores[1]["rmse"])


def test_held_out_noise_is_that_of_all_rows_where_these_are_not_fitted():
  """With no row in the posterior all are held out, and none is spent on the fit."""
  features, targets, _ = _rows()
  nobody = np.zeros(PADDED, bool)
  prior = posterior(
    stats_of(features, targets, nobody), np.float64(0.3), np.float64(1.0)
  )
  got = held_out_noise(features, targets, prior)
  padded, y, mask = _padded(features, targets)
  shaped = fit_noise(
    prior, stats_of(padded, y, mask), noise_moments(padded, y, prior, mask)
  )
  ratio = noise_ratio(padded, y, shaped, mask)
  wanted = scale_noise(shaped, ratio, np.float64(PADDED))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-12)


# ------------------------------------------------------------- in rounds of training


def test_validation_rows_set_the_bars_of_exact_training_and_nothing_else():
  states, scores = {}, {}
  for noise in ("constant", "held-out"):
    config = tiny(method="fedbnr-exact", exact__noise=noise, kernel="gaussian")
    run = experiment.build(config)
    step = jax.jit(program.make_program(run.algorithm).step)
    state = jax.jit(run.algorithm.init)(run.key_init, run.federation)
    for _ in range(2):
      state, _, _, scores[noise] = step(
        run.key_rounds, state, run.federation, run.validation, run.test
      )
    states[noise] = state
  for a, b in zip(
    jax.tree.leaves(states["constant"].server.params),
    jax.tree.leaves(states["held-out"].server.params),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  np.testing.assert_allclose(
    scores["constant"]["rmse"], scores["held-out"]["rmse"], rtol=1e-5
  )
  assert scores["constant"]["nll"] != scores["held-out"]["nll"]
  # After a round the noise is that of its own kernel, not of the one before.
  last = states["held-out"].server
  calibrate = jax.jit(run.algorithm.calibrate)
  again = calibrate(last, run.validation.x, run.validation.y)
  np.testing.assert_allclose(
    again.posterior.noise_offset, last.posterior.noise_offset, rtol=1e-6
  )


ONE_LAYER = (
  "fedbnr",
  "fedbnr-kd",
  "fedbnr-ev",
  "fedbnr-exact",
  "fedbnr-ard",
  "central",
)


@pytest.mark.parametrize("method", ONE_LAYER)
def test_held_out_noise_is_an_option_of_every_method_with_one_last_layer(method):
  fields = {f"{group}noise": "held-out" for group in ("", "evidence__", "sparse__")}
  fields |= {"exact__noise": "held-out", "sparse__kernel": "gaussian"}
  run = experiment.build(tiny(method=method, kernel="gaussian", **fields))
  state = jax.jit(run.algorithm.init)(run.key_init, run.federation)
  x, y = run.validation.x, run.validation.y
  got = jax.jit(run.algorithm.calibrate)(state.server, x, y).posterior
  theta, omega = state.server.params.theta, state.server.omega
  features = jax.jit(kernels.of_last_layer(run.config).apply)(
    urk.FeatureParams(omega, theta), x
  )
  wanted = held_out_noise(features, y, state.server.posterior)
  np.testing.assert_allclose(got.noise_offset, wanted.noise_offset, rtol=1e-6)
  np.testing.assert_allclose(got.noise_weights, wanted.noise_weights, atol=1e-6)
  assert np.linalg.norm(got.noise_offset) > 0


@pytest.mark.parametrize("method", ["fedbnr-ev", "fedbnr-exact"])
def test_a_round_learns_the_noise_of_all_clients(method):
  features, targets, _ = _rows(200)
  parts = np.array_split(np.arange(200), 4)
  data = federation_lib.build(features[:, 1:], targets / targets.std(), parts)
  config = config_lib.base()
  config.update({"kernel": "gaussian", "num_samples": 6, "num_local_steps": 2})
  config.evidence.noise = config.exact.noise = "varying"
  built = algorithms.method(method).build(config)
  key = jax.random.key(0)
  state = jax.jit(built.init)(key, data)
  before = jax.tree.structure(state)
  state, info = jax.jit(built.round)(key, state, data)
  assert jax.tree.structure(state) == before
  assert np.linalg.norm(state.server.posterior.noise_weights) > 0
  x = federation_lib.pooled(data).clients.x[0]
  _, variance = jax.jit(built.predict)(state, x)
  assert np.all(variance > 0)
  config.evidence.noise = config.exact.noise = "constant"
  plain = algorithms.method(method).build(config)
  _, plain_info = jax.jit(plain.round)(key, jax.jit(plain.init)(key, data), data)
  # Σ φ g and Σ φ [12], Σ g and Σ g², and then Σ r²/σ²(x).
  assert int(info.floats_up) - int(plain_info.floats_up) == 2 * 12 + 2 + 1


def test_error_bars_are_scaled_to_held_out_errors():
  """The mean stays; intervals of 90 % cover nearly 90 % of the rows."""
  features, targets, _ = _rows()
  fitted = _fit(features, targets)
  # As if the posterior had learnt its rows by heart.
  narrow = fitted.replace(noise_std=0.2 * fitted.noise_std)
  got = jax.jit(_rescaled)(features, targets, narrow)
  mean, variance = _predict(got, features)
  np.testing.assert_array_equal(mean, _predict(fitted, features)[0])
  squares = (targets - _predict(narrow, features)[0]) ** 2
  before = np.asarray(squares / _predict(narrow, features)[1])
  count = len(before)
  by_squares = (np.sum(before) + 20) / (count + 20)
  by_quantile = np.sort(before)[int(np.ceil(0.9 * (count + 1))) - 1] / 1.6448536**2
  factor = np.exp(np.average(np.log([by_quantile, by_squares]), weights=[count, 20]))
  # The quantile is known up to a bin, whose edges are 0.45 % apart.
  np.testing.assert_allclose(squares / variance, before / factor, rtol=9.1e-3)
  covered = np.mean(np.asarray(squares / variance) <= 1.6448536**2)
  assert covered == pytest.approx(0.9, abs=0.05)
  ratio = [one.prior_std / one.noise_std for one in (narrow, got)]
  np.testing.assert_allclose(ratio[0], ratio[1], rtol=1e-12)


def _rescaled(features, targets, fitted):
  return blr.rescaled(fitted, blr.error_sums(features, targets, fitted))


@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e7])
def test_held_out_errors_of_any_size_are_counted_and_add_over_clients(scale):
  """Padding counts for nothing; rows beyond the bins are in the outermost ones."""
  features, targets, _ = _rows()
  fitted = _fit(features, targets)
  far = targets + scale
  whole = blr.error_sums(features, far, fitted)
  np.testing.assert_allclose(np.sum(whole.bins), len(targets))
  padded = jnp.pad(features, ((0, 3), (0, 0))), jnp.pad(far, (0, 3))
  place = np.arange(len(far) + 3)
  parts = [
    blr.error_sums(*padded, fitted, jnp.asarray(mine & (place < len(far))))
    for mine in (place < 30, place >= 30)
  ]
  total = jax.tree.map(jnp.add, *parts)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), total, whole)
  assert np.isfinite(blr.rescaled(fitted, total).noise_std)


def test_without_held_out_rows_error_bars_stay_as_they_are():
  features, targets, _ = _rows()
  fitted = _fit(features, targets)
  nobody = blr.error_sums(features, targets, fitted, jnp.zeros(len(targets), bool))
  got = blr.rescaled(fitted, nobody)
  np.testing.assert_allclose(got.noise_std, fitted.noise_std, rtol=1e-12)


@pytest.mark.parametrize("kind", ["held-out", "rescaled"])
def test_error_bars_by_exchanges_are_those_of_pooled_rows(kind):
  """Three clients who each answer by their own held-out rows, and one who has all."""
  run = experiment.build(tiny(method="fedbnr", noise=kind, num_rounds=1))
  state = jax.jit(run.algorithm.init)(run.key_init, run.federation).server
  x, y = run.validation.x, run.validation.y
  wanted = run.algorithm.calibrate(state, x, y).posterior
  for exchange in run.algorithm.held_out:
    down = exchange.broadcast(state, None)
    parts = [
      exchange.answer(down, (), Rows(x[some], y[some], jnp.ones(len(y[some]), bool)))[0]
      for some in np.array_split(np.arange(len(y)), 3)
    ]
    total = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    state = exchange.server(state, None, total)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
    state.posterior,
    wanted,
  )


@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_rows_that_are_predicted_exactly_do_not_end_all_doubt(num_rows):
  """Nine rows in ten without an error, or one row alone, shrink no bar to nothing."""
  features, targets, _ = _rows()
  fitted = _fit(features, targets)
  some = features[:num_rows]
  exact = np.array(_predict(fitted, some)[0])
  exact[num_rows // 2 + 1 :: 20] += 5.0
  got = _rescaled(some, jnp.asarray(exact), fitted)
  assert 0.2 < got.noise_std / fitted.noise_std < 5.0


def test_a_run_scales_its_bars_by_validation_rows_alone():
  runs = {kind: _trained(kind) for kind in ("varying", "rescaled")}
  plain, got = (run.state.server.posterior for run in runs.values())
  # Two programs: the same steps, but for the order in which they are computed.
  np.testing.assert_allclose(plain.mean, got.mean, rtol=1e-9)
  assert got.noise_std != pytest.approx(float(plain.noise_std), rel=1e-6)
  record, other = runs["rescaled"].best, runs["varying"].best
  assert record["val_rmse"] == pytest.approx(other["val_rmse"], rel=1e-9)


def _trained(kind):
  config = tiny(method="fedbnr", noise=kind, num_rounds=1, dtype="float64")
  run = experiment.build(config)
  return training.train(run, program.make_program(run.algorithm, transform=jax.jit))
