"""Private release: calibration, sensitivity, noise, repair; and what leaks without."""

import json
import math
import shutil

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import scipy.special
from absl.testing import flagsaver

from fedbnr_jax import blr, model, privacy, urk
from fedbnr_jax.privacy import Mechanism
from fedbnr_jax.records import RunFolder
from launch import predict as launch_predict
from launch import privacy as launch_privacy
from launch import train as launch_train
from tests import oracles
from tests.runs import assert_refused, tiny

S = 4
NOISELESS = Mechanism(math.inf, 1e-5, 3.0, S)


def _analytic(epsilon, delta):
  """The smallest noise by the privacy profile of the Gaussian mechanism, bisected."""

  def excess(log_noise):
    half, shift = 0.5 / math.exp(log_noise), epsilon * math.exp(log_noise)
    first = scipy.special.ndtr(half - shift)
    second = math.exp(epsilon + scipy.special.log_ndtr(-half - shift))
    return first - second - delta

  return math.exp(scipy.optimize.brentq(excess, -5, 5, xtol=1e-12))


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-7])
def test_noise_is_calibrated_as_an_independent_calculation_says(epsilon, delta):
  got = privacy.noise_multiplier(epsilon, delta)
  np.testing.assert_allclose(got, _analytic(epsilon, delta), rtol=1e-4)
  assert got >= _analytic(epsilon, delta) * (1 - 1e-6)  # Never too little.


def test_known_multipliers():
  """Of algorithms.md §10, from elsewhere."""
  got = [privacy.noise_multiplier(epsilon, 1e-5) for epsilon in (0.5, 1, 3, 8)]
  np.testing.assert_allclose(got, [7.03, 3.73, 1.39, 0.60], rtol=2e-3)


# ---------------------------------------------------------------------- sensitivity


def _features(x):
  feature_map = urk.deep(S, 5, latent_size=2)
  params = feature_map.init(jax.random.key(3), jnp.zeros((1, 2)))
  return feature_map.apply(params, jnp.asarray(x))


def _stats(x, y, mechanism=NOISELESS):
  clipped = privacy.clip_targets(np.asarray(y, float), mechanism)
  return blr.sufficient_stats(_features(x), jnp.asarray(clipped))


@hypothesis.given(
  hnp.arrays(np.float64, (4, 2), elements=st.floats(-9, 9)),
  hnp.arrays(np.float64, 4, elements=st.floats(-20, 20)),
)
def test_no_row_changes_the_matrix_by_more_than_its_sensitivity(x, y):
  scale = NOISELESS.target_scale
  whole = blr.augmented_gram(_stats(x, y), scale)
  without = blr.augmented_gram(_stats(x[1:], y[1:]), scale)
  change = np.linalg.norm(whole - without)
  assert change <= NOISELESS.sensitivity * (1 + 1e-6)
  if abs(y[0]) >= NOISELESS.target_bound:  # Which is attained.
    np.testing.assert_allclose(change, NOISELESS.sensitivity, rtol=1e-6)


@pytest.mark.parametrize("kernel", privacy.CONSTANT_NORM)
def test_kernels_of_constant_norm_have_it(kernel):
  config = tiny(kernel=kernel, num_samples=S)
  feature_map = urk.from_config(config)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 2)), jnp.float32)
  features = feature_map.apply(feature_map.init(jax.random.key(0), x), x)
  np.testing.assert_allclose(
    jnp.sum(features**2, axis=1), NOISELESS.norm_squared, rtol=1e-5
  )


# ----------------------------------------------------------------- noise and repair


def test_noise_is_symmetric_and_of_the_size_it_says():
  keys = jax.random.split(jax.random.key(0), 4000)
  like = jnp.zeros((5, 5))
  draws = np.asarray(
    jax.vmap(lambda key: privacy.symmetric_noise(key, like, 2.0))(keys)
  )
  np.testing.assert_array_equal(draws, draws.transpose(0, 2, 1))
  std = draws.std(axis=0)
  np.testing.assert_allclose(np.diag(std), 2.0, rtol=0.05)
  np.testing.assert_allclose(std[np.triu_indices(5, 1)], math.sqrt(2.0), rtol=0.05)


def test_without_noise_only_clipping_is_left():
  rng = np.random.default_rng(0)
  stats = _stats(rng.normal(size=(50, 2)), 3 * rng.normal(size=50))
  got = privacy.release(jax.random.key(0), stats, NOISELESS)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(stats), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("epsilon", [0.05, 1.0])
def test_released_statistics_are_those_of_some_rows(epsilon):
  rng = np.random.default_rng(0)
  stats = _stats(rng.normal(size=(30, 2)), rng.normal(size=30))
  mechanism = NOISELESS._replace(epsilon=epsilon)
  for seed in range(10):
    got = privacy.release(jax.random.key(seed), stats, mechanism)
    values = np.linalg.eigvalsh(blr.augmented_gram(got, mechanism.target_scale))
    assert values[0] >= -1e-9 * values[-1]
    assert got.count >= 1
    fitted = privacy.private_posterior(got, mechanism)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(fitted))
    ridge = float((fitted.noise_std / fitted.prior_std) ** 2)
    assert ridge >= 0.25 * mechanism.noise_std * math.sqrt(2 * 2 * S) * (1 - 1e-9)


def test_each_clients_own_noise_adds_up():
  one = NOISELESS._replace(epsilon=1.0)
  many = one._replace(num_noises=100)
  np.testing.assert_allclose(many.total_noise_std, 10 * one.total_noise_std)
  assert many.noise_std == one.noise_std


def test_bounded_ridge_is_the_best_within_its_bound():
  features, targets = oracles.rows(60, 5)
  stats = blr.sufficient_stats(jnp.asarray(features), jnp.asarray(targets))
  free = blr.fit_evidence(stats)
  rho = float((free[1] / free[0]) ** 2)
  np.testing.assert_allclose(blr.fit_evidence(stats, 2 * rho), free, rtol=1e-6)
  noise_std, prior_std = blr.fit_evidence(stats, rho / 10)
  np.testing.assert_allclose((prior_std / noise_std) ** 2, rho / 10, rtol=1e-6)
  here = oracles.gp_nll(features, targets, noise_std, prior_std)
  for factor in (0.9, 1.1):  # σ is at its best for that ρ.
    other = oracles.gp_nll(features, targets, factor * noise_std, factor * prior_std)
    assert here < other


@pytest.mark.parametrize(
  "change, part",
  [
    ({"epsilon": 0.0}, "epsilon"),
    ({"epsilon": float("nan")}, "epsilon"),
    ({"epsilon": 1e300}, "epsilon"),
    ({"delta": 0.0}, "delta"),
    ({"delta": 1.0}, "delta"),
    ({"target_bound": 0.0}, "bound"),
    ({"num_noises": 0}, "noise"),
  ],
)
def test_what_is_no_mechanism_is_refused(change, part):
  assert_refused(NOISELESS._replace(**change).check, part)


# -------------------------------------------------------------------------- leakage


def test_a_row_alone_is_recovered_up_to_its_sign():
  features = np.asarray(_features(np.array([[0.3, -1.2]])), float)
  (guess,) = privacy.recovered_features(features.T @ features, 1)
  np.testing.assert_allclose(privacy.similarity(guess, features[0]), 1.0, rtol=1e-9)
  np.testing.assert_allclose(np.linalg.norm(guess), np.linalg.norm(features), rtol=1e-9)


def test_few_rows_are_recovered_up_to_a_rotation():
  features = np.asarray(_features(np.random.default_rng(0).normal(size=(3, 2))), float)
  guess = privacy.recovered_features(features.T @ features, 3)
  rotation = guess @ np.linalg.pinv(features)
  np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-6)
  np.testing.assert_allclose(rotation @ features, guess, atol=1e-7)


def test_noise_and_large_sums_hide_who_is_in():
  rng = np.random.default_rng(0)
  feature_map = urk.deep(25, 20, latent_size=3, length_scale=1.0)
  x = jnp.asarray(rng.normal(size=(1200, 3)))
  params = feature_map.init(jax.random.key(0), x)
  features = np.asarray(feature_map.apply(params, x), float)
  others = features[600:]

  def advantage(count, noise_std=0.0):
    members = features[:count]
    gram = members.T @ members
    noise = privacy.symmetric_noise(jax.random.key(1), jnp.asarray(gram), noise_std)
    return privacy.membership_advantage(gram + np.asarray(noise), members, others)

  assert advantage(1) > 0.999
  assert advantage(10) > 0.999
  assert abs(advantage(600) - 0.5) < 0.1
  strong = Mechanism(1.0, 1e-5, 3.0, 25).noise_std
  assert abs(advantage(10, strong) - 0.5) < 0.3 < advantage(10) - 0.5


# ------------------------------------------------------------------------ from a run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("privacy")
  launch_train.train(tiny(data__num_rows=200), str(folder / "run"))
  return folder / "run"


@pytest.fixture
def parsed():
  """Flags at their defaults, which only the programs parse."""
  flags = launch_privacy.flags.FLAGS
  if not flags.is_parsed():
    flags.mark_as_parsed()
  return flags


def test_curve_and_release(run, parsed, capsys):
  folder, trained = RunFolder(run), model.load(run)
  experiment = launch_privacy.experiment_lib.build(trained.config)
  with flagsaver.flagsaver(epsilons=["0.5", "inf"], draws=3):
    launch_privacy.draw_curves(trained, experiment, folder)
  curve = pd.read_csv(run / "privacy" / "curve.csv")
  assert set(curve.noise) == {"central", "client"}
  assert set(curve.epsilon) == {0.5, np.inf}
  median = curve.groupby(["noise", "epsilon"]).test_rmse.median()
  assert median["central", np.inf] <= median["central", 0.5]
  assert median["central", np.inf] == median["client", np.inf]
  for name in ("privacy", "leakage"):
    assert (run / "figures" / f"{name}.png").stat().st_size > 5000

  launch_privacy.release(trained, experiment, folder, folder.summary(), "3")
  told = json.loads((run / "summary.json").read_text())["privacy"]
  assert told["epsilon"] == 3.0
  assert "kernel parameters" in told["not_covered"]
  assert "Not covered" in capsys.readouterr().out
  for epsilon in ("3", "1"):
    assert_refused(
      lambda e=epsilon: launch_privacy.release(
        trained, experiment, folder, folder.summary(), e
      ),
      "already",
      "3.0",
    )
  table = run.parent / "new.csv"
  pd.DataFrame({"x": [-1.0, 0.0, 2.0]}).to_csv(table, index=False)
  outputs = []
  for released in (False, True):
    output = run.parent / f"out{released}.csv"
    launch_predict.predict(str(run), str(table), str(output), released)
    outputs.append(pd.read_csv(output))
  assert np.all(np.isfinite(outputs[1]["mean"]))
  # The folder of the release is enough, and holds nothing that was exact.
  shutil.move(run / "released", run.parent / "handed over")
  alone = model.load_released(run.parent / "handed over")
  again = alone.predict(pd.read_csv(table))
  np.testing.assert_allclose(again["mean"], outputs[1]["mean"], rtol=1e-6)
  exact = trained.state.stats
  assert not np.allclose(alone.state.stats.gram, exact.gram, rtol=1e-6)
  assert not np.allclose(outputs[0]["mean"], outputs[1]["mean"])


def test_no_release_no_prediction_from_it(tmp_path):
  launch_train.train(tiny(), str(tmp_path / "run"))
  assert_refused(lambda: model.load_released(tmp_path / "run"), "no private release")
