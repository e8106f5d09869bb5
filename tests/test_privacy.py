"""Private statistics: calibration, sensitivity, noise, repair; what leaks without."""

import math

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

from fedbnr_jax import model, privacy
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.privacy import Mechanism
from fedbnr_jax.release.trained import load_run
from fedbnr_jax.studies import privacy as study
from launch import privacy as launch_privacy
from launch import train as launch_train
from tests import oracles
from tests.drawings import png_size
from tests.runs import assert_refused, tiny

S = 4
KEY = jax.random.key(0)
FEATURE_MAP = urk.random_fourier(S)
NOISELESS = Mechanism(math.inf, 1e-5, 3.0, FEATURE_MAP.squared_norm)


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


@jax.jit
def _features(x):
  """Features [n, 2S] of rows x [n, 2]."""
  params = FEATURE_MAP.init(jax.random.key(3), jnp.zeros((1, 2)))
  return FEATURE_MAP.apply(params, jnp.asarray(x))


@jax.jit
def _sum(x, y):
  return blr.sufficient_stats(_features(x), y)


def _stats(x, y, mechanism=NOISELESS):
  return _sum(x, privacy.clip_targets(np.asarray(y, float), mechanism))


@hypothesis.given(
  hnp.arrays(np.float64, (4, 2), elements=st.floats(-9, 9)),
  hnp.arrays(np.float64, 4, elements=st.floats(-20, 20)),
)
def test_no_row_changes_the_sums_by_more_than_their_sensitivity(x, y):
  scale = NOISELESS.target_scale
  whole = blr.augmented_gram(_stats(x, y), scale)
  without = blr.augmented_gram(_stats(x[1:], y[1:]), scale)
  change = np.hypot(np.linalg.norm(whole - without), NOISELESS.count_scale)
  assert change <= NOISELESS.sensitivity * (1 + 1e-6)
  if abs(y[0]) >= NOISELESS.target_bound:  # Which is attained.
    np.testing.assert_allclose(change, NOISELESS.sensitivity, rtol=1e-6)


@pytest.mark.parametrize(
  "kernel", ["deep", "replicate", *urk.SPECTRA, "polynomial", "exponential"]
)
def test_features_have_the_norm_that_their_map_says(kernel):
  feature_map = kernels.from_config(tiny(kernel=kernel, num_samples=S))
  x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 2)), jnp.float32)
  features = jax.jit(lambda key, x: feature_map.apply(feature_map.init(key, x), x))(
    jax.random.key(0), x
  )
  norms = jnp.sum(features**2, axis=1)
  if feature_map.squared_norm is None:
    assert norms.max() > 1.1 * norms.min()
  else:
    assert feature_map.squared_norm == S / (S - 1)
    np.testing.assert_allclose(norms, feature_map.squared_norm, rtol=1e-5)


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


# Compiled once for all sizes of noise.
_ADD_NOISE = jax.jit(
  lambda key, stats, noise_std: privacy.add_noise(key, stats, NOISELESS, noise_std)
)
_POSTERIOR = jax.jit(privacy.private_posterior)


def test_without_noise_only_clipping_is_left():
  rng = np.random.default_rng(0)
  stats = _stats(rng.normal(size=(50, 2)), 3 * rng.normal(size=50))
  got = _ADD_NOISE(KEY, stats, NOISELESS.total_noise_std)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(stats), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)
  free = jax.jit(blr.fit_evidence)(stats)
  fitted = _POSTERIOR(stats, 0.0)  # Without noise the ridge has no bound.
  np.testing.assert_allclose((fitted.noise_std, fitted.prior_std), free, rtol=1e-6)


@pytest.mark.parametrize("epsilon", [0.05, 1.0])
def test_released_statistics_are_those_of_some_rows(epsilon):
  rng = np.random.default_rng(0)
  stats = _stats(rng.normal(size=(30, 2)), rng.normal(size=30))
  mechanism = NOISELESS._replace(epsilon=epsilon)
  for seed in range(10):
    got = _ADD_NOISE(jax.random.key(seed), stats, mechanism.total_noise_std)
    values = np.linalg.eigvalsh(blr.augmented_gram(got, mechanism.target_scale))
    assert values[0] >= -1e-9 * values[-1]
    assert got.count >= 1
    fitted = _POSTERIOR(got, mechanism.total_noise_std)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(fitted))
    ridge = float((fitted.noise_std / fitted.prior_std) ** 2)
    assert ridge >= 0.25 * mechanism.noise_std * math.sqrt(2 * 2 * S) * (1 - 1e-9)


def test_the_count_has_the_noise_of_a_few_dozen_rows():
  rng = np.random.default_rng(0)
  stats = _stats(rng.normal(size=(500, 2)), rng.normal(size=500))
  noise_std = NOISELESS._replace(epsilon=1.0).noise_std
  counts = [
    float(_ADD_NOISE(jax.random.key(seed), stats, noise_std).count)
    for seed in range(200)
  ]
  wanted = noise_std / NOISELESS.count_scale
  assert wanted < 40
  np.testing.assert_allclose(np.std(counts), wanted, rtol=0.2)
  np.testing.assert_allclose(np.mean(counts), 500, atol=4 * wanted / math.sqrt(200))


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
  feature_map = urk.random_fourier(25)
  x = jnp.asarray(rng.normal(size=(1200, 3)))
  features = jax.jit(lambda x: feature_map.apply(feature_map.init(KEY, x), x))(x)
  features = np.asarray(features, float)
  others = features[600:]

  def advantage(count, noise_std=0.0):
    members = features[:count]
    gram = members.T @ members
    noise = privacy.symmetric_noise(jax.random.key(1), jnp.asarray(gram), noise_std)
    return privacy.membership_advantage(gram + np.asarray(noise), members, others)

  assert advantage(1) > 0.999
  assert advantage(10) > 0.999
  assert abs(advantage(600) - 0.5) < 0.1
  strong = Mechanism(1.0, 1e-5, 3.0, feature_map.squared_norm).noise_std
  assert abs(advantage(10, strong) - 0.5) < 0.3 < advantage(10) - 0.5


# ------------------------------------------------------------------------ from a run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A finished run, with a kernel that has no network."""
  folder = tmp_path_factory.mktemp("privacy")
  config = tiny(data__num_rows=200, kernel="gaussian")
  launch_train.train(config, str(folder / "run"))
  return folder / "run"


@pytest.fixture
def command(run):
  """Calls the program on the run with these flags."""
  flags = launch_privacy.flags.FLAGS
  if not flags.is_parsed():
    flags.mark_as_parsed()

  def call(**changes):
    with flagsaver.flagsaver(workdir=str(run), **changes):
      launch_privacy.main()

  return call


def test_curves(run, command, capsys):
  command(epsilons=["0.5", "inf"], draws=3)
  curve = pd.read_csv(run / "privacy" / "curve.csv")
  assert list(curve.draw) == [0, 1, 2] * 4
  assert set(curve.noise) == {"central", "client"}
  assert set(curve.epsilon) == {0.5, np.inf}
  median = curve.groupby(["noise", "epsilon"]).test_rmse.median()
  assert median["central", np.inf] <= median["central", 0.5]
  assert median["central", np.inf] == median["client", np.inf]
  std = curve.groupby(["noise", "epsilon"]).noise_std.first()
  assert std["central", np.inf] == 0.0
  np.testing.assert_allclose(std["client", 0.5], math.sqrt(2) * std["central", 0.5])
  leakage = pd.read_csv(run / "privacy" / "leakage.csv")
  bare = leakage[leakage.release == "bare"].set_index("rows").advantage
  assert bare.index.tolist() == [1, 2, 5, 10, 20, 50, 100]  # Of 200 rows, half are in.
  assert bare[1] > 0.99
  noisy = leakage[leakage.release == "ε = 1"].set_index("rows").advantage
  assert noisy[1] < bare[1]
  printed = capsys.readouterr().out
  assert f"{median['central', 0.5]:.4f}"[:5] in printed
  assert printed.endswith(f"written to {run / 'privacy'} and {run / 'figures'}\n")
  for name in ("privacy", "leakage"):
    width, height = png_size(run / "figures" / f"{name}.png")
    assert width > height > 500


def test_scores_of_the_curve_are_those_of_a_release(run):
  """By another way: one draw released, and the raw test rows predicted from it."""
  opened, promise = load_run(run), study.Promise()
  cost = study.cost_curve(opened, [3.0], promise, 3)
  mechanism = promise.mechanism(opened, 3.0, "client")
  assert mechanism._replace(epsilon=math.inf, num_noises=1) == NOISELESS
  key, noise_std = jax.random.split(KEY, 3)[1], mechanism.total_noise_std
  noisy = _ADD_NOISE(key, study.clipped_stats(opened, mechanism), noise_std)
  fitted = _POSTERIOR(noisy, noise_std)
  mean, _ = blr.predict(fitted, opened.features(opened.experiment.test.x))
  dataset, scaler = opened.experiment.dataset, opened.experiment.preprocessor
  targets = dataset.targets[opened.experiment.split.test]
  gap = scaler.unstandardise_mean(np.asarray(mean)) - targets
  (rmse,) = cost.test_rmse[(cost.noise == "client") & (cost.draw == 1)]
  np.testing.assert_allclose(rmse, np.sqrt(np.mean(gap**2)), rtol=1e-6)


@pytest.mark.parametrize(
  "change, part",
  [
    ({"epsilons": []}, "--epsilons is empty"),
    ({"epsilons": ["1", "few"]}, "'few'"),
    ({"delta": 0.0}, "delta"),
    ({"target_bound": -1.0}, "bound"),
  ],
)
def test_bad_flags_are_refused(run, command, change, part):
  before = sorted(run.rglob("*"))
  assert_refused(lambda: command(**change), part)
  assert sorted(run.rglob("*")) == before


def test_kernels_without_a_common_norm_are_refused(run):
  """The folder of another kernel, of which nothing but its config is looked at."""
  trained = model.load(run)
  trained.config.kernel = "polynomial"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(model, "load", lambda path: trained)
    assert_refused(lambda: load_run(run), "'polynomial'", "no bounded norm")
