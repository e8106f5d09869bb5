"""Feature maps against the kernels that they stand for."""

import functools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fedbnr_jax import config as config_lib
from fedbnr_jax import networks, urk
from fedbnr_jax.errors import InputError
from tests import oracles

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(6, 3))

MAPS = {
  **{name: lambda s, name=name: urk.random_fourier(s, name) for name in urk.SPECTRA},
  "exponential": urk.exponential,
  "polynomial": urk.polynomial,
  "deep": lambda s: urk.deep(s, 8, num_hidden_layers=2),
  "multiply": lambda s: urk.replicate(s, 8, policy="multiply"),
  "add": lambda s: urk.replicate(s, 8, policy="add"),
}
# Of unit length before the factor S/(S−1), for every x.
FOURIER = [*urk.SPECTRA, "deep", "multiply", "add"]


def _jitted(feature_map):
  return urk.FeatureMap(jax.jit(feature_map.init), jax.jit(feature_map.apply))


@functools.cache
def _built(name, num_samples=4):
  """One compilation for all tests of a map."""
  return _jitted(MAPS[name](num_samples))


def _features(feature_map, x, key=KEY):
  x = jnp.asarray(x)
  return np.asarray(feature_map.apply(feature_map.init(key, x), x))


def _grams(feature_map, x, num_seeds, seed=0):
  """Grams [num_seeds, N, N] of independent draws of ω."""
  keys = jax.random.split(jax.random.key(seed), num_seeds)
  x = jnp.asarray(x)

  @jax.jit
  def gram(key):
    features = feature_map.apply(feature_map.init(key, x), x)
    return features @ features.T

  return np.asarray(jax.lax.map(gram, keys))


# ----------------------------------------------------------------- closed forms


@pytest.mark.parametrize("spectrum", urk.SPECTRA)
def test_fourier_features_reach_their_kernel_at_the_monte_carlo_rate(spectrum):
  length_scale = 1.7
  gap = (X[:, None] - X[None, :]) / length_scale
  kernel = oracles.STATIONARY[spectrum](gap)
  errors = {}
  for num_samples, num_seeds in ((100, 100), (10_000, 10)):
    feature_map = urk.random_fourier(num_samples, spectrum, length_scale)
    grams = _grams(feature_map, X, num_seeds) * (num_samples - 1) / num_samples
    errors[num_samples] = np.sqrt(np.mean((grams - kernel) ** 2))
    # |cos| ≤ 1 has a variance of at most one.
    assert errors[num_samples] < 1 / np.sqrt(num_samples)
    bound = 5 / np.sqrt(num_samples * num_seeds)
    np.testing.assert_allclose(grams.mean(axis=0), kernel, atol=bound)
  assert 6 < errors[100] / errors[10_000] < 16


def test_exponential_features_reach_their_kernel():
  x = 0.3 * X
  kernel = np.exp(np.sum((x[:, None] + x[None, :]) ** 2, -1) / 2)
  num_samples, num_seeds = 20_000, 8
  grams = _grams(urk.exponential(num_samples), x, num_seeds)
  spread = np.sqrt(kernel**4 - kernel**2)  # E exp(2ωᵀz) = exp(2‖z‖²), z = x + x'.
  bound = 5 * spread / np.sqrt(num_samples * num_seeds)
  assert np.all(np.abs(grams.mean(axis=0) - kernel) < bound + 1e-4 * kernel)


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("offset", [0.0, 1.5])
def test_polynomial_features_have_their_kernel_as_expectation(degree, offset):
  """Every outcome of the trials in turn as ω, weighted by its probability."""
  x = X[:, :2]
  assert np.any(x < 0)
  outcomes = oracles.multinomial_trials(2, degree)
  feature_map = _jitted(urk.polynomial(len(outcomes), degree, offset))
  params = feature_map.init(KEY, jnp.asarray(x))
  assert params.omega.shape == (len(outcomes), degree)
  named = np.stack([named for named, _ in outcomes]).astype(params.omega.dtype)
  features = feature_map.apply(params.replace(omega=jnp.asarray(named)), jnp.asarray(x))
  features = np.asarray(features) * np.sqrt(len(outcomes) - 1)  # Undo 1/√(S−1).
  probability = np.array([probability for _, probability in outcomes])
  np.testing.assert_allclose(probability.sum(), 1, rtol=1e-12)
  expectation = (features * probability) @ features.T
  kernel = (x @ x.T + offset) ** degree
  np.testing.assert_allclose(expectation, kernel, rtol=1e-10, atol=1e-10)


def test_polynomial_trials_follow_their_distribution():
  feature_map = urk.polynomial(40_000, degree=2)
  omega = np.asarray(feature_map.init(KEY, jnp.asarray(X)).omega)
  share = np.bincount(omega.ravel(), minlength=4) / omega.size
  np.testing.assert_allclose(share, [1 / 2, 1 / 6, 1 / 6, 1 / 6], atol=0.01)
  # Trials are independent: the counts are multinomial.
  both = np.mean((omega[:, 0] == 0) & (omega[:, 1] == 0))
  np.testing.assert_allclose(both, 1 / 4, atol=0.01)


@pytest.mark.parametrize("num_samples", [2, 5])
def test_expectation_carries_the_printed_factor(num_samples):
  """1/√(S−1) makes the mean of the URK S/(S−1) times the kernel."""
  kernel = oracles.STATIONARY["gaussian"](X[:, None] - X[None, :])
  grams = _grams(urk.random_fourier(num_samples), X, 20_000)
  factor = num_samples / (num_samples - 1)
  np.testing.assert_allclose(grams.mean(axis=0), factor * kernel, atol=0.05)


# ------------------------------------------------------------ every construction


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_features_follow_the_rows_in_shape_and_dtype(name, dtype):
  feature_map = _built(name)
  x = jnp.asarray(X, dtype)
  params = feature_map.init(KEY, x)
  features = feature_map.apply(params, x)
  num_features = 4 if name in ("exponential", "polynomial") else 8
  chex.assert_shape(features, (len(X), num_features))
  chex.assert_type(features, dtype)
  chex.assert_type(jax.tree.leaves(params.theta), dtype)
  chex.assert_axis_dimension(jax.tree.leaves(params.omega)[0], 0, 4)
  if name != "polynomial":  # Whose ω counts.
    chex.assert_type(jax.tree.leaves(params.omega), dtype)


def test_rows_stay_float32_without_x64(x64_off):
  x = jnp.asarray(X, jnp.float32)
  for name in ("deep", "add", "matern32", "polynomial"):
    feature_map = _built(name)
    chex.assert_type(feature_map.apply(feature_map.init(KEY, x), x), jnp.float32)


@pytest.mark.parametrize("name", MAPS)
def test_gram_is_symmetric_and_positive_semi_definite(name):
  """Rows stand twice, so that the Gram is singular."""
  features = _features(_built(name), np.repeat(X[:3], 2, axis=0))
  values = np.linalg.eigvalsh(features @ features.T)
  assert values[0] > -1e-12 * values[-1]
  assert values[-1] > 0


@pytest.mark.parametrize("name", FOURIER)
def test_fourier_features_have_constant_length(name):
  features = _features(_built(name), 3 * X)
  np.testing.assert_allclose(np.sum(features**2, axis=1), 4 / 3, rtol=1e-12)


@pytest.mark.parametrize("name", MAPS)
def test_init_depends_on_the_key_alone(name):
  feature_map = _built(name)
  params = feature_map.init(KEY, jnp.asarray(X))
  chex.assert_trees_all_equal(params, feature_map.init(KEY, jnp.asarray(X + 9.0)))
  other = feature_map.init(jax.random.key(1), jnp.asarray(X))
  leaves = jax.tree.leaves(params.omega), jax.tree.leaves(other.omega)
  assert not np.array_equal(leaves[0][0], leaves[1][0])


@pytest.mark.parametrize("name", MAPS)
def test_each_row_is_mapped_by_itself(name):
  feature_map = _built(name)
  params = feature_map.init(KEY, jnp.asarray(X))
  whole = feature_map.apply(params, jnp.asarray(X))
  mixed = X[::-1].copy()
  mixed[0] = 7.0
  got = feature_map.apply(params, jnp.asarray(mixed))
  np.testing.assert_allclose(got[1:], whole[::-1][1:], rtol=1e-12, atol=1e-14)
  assert not np.allclose(got[0], whole[-1])


# ---------------------------------------------------------------------- the lift


def _tilted(theta, omega, x):
  """A feature [2] of one ω, a dict, and one x."""
  wave = jnp.sin(theta["scale"] * jnp.dot(omega["direction"], x) + omega["phase"])
  return jnp.stack([wave, wave * jnp.sum(x**2)])


def _tilted_map(num_samples):
  def sample(key, x):
    keys = jax.random.split(key)
    direction = jax.random.normal(keys[0], x.shape, x.dtype)
    return {"direction": direction, "phase": jax.random.uniform(keys[1], (), x.dtype)}

  def init_theta(key, omega, x):
    del omega
    return {"scale": jax.random.normal(key, (), x.dtype)}

  return _jitted(urk.from_function(_tilted, sample, num_samples, init_theta))


TILTED = _tilted_map(4)


@hypothesis.settings(max_examples=10)
@hypothesis.given(st.integers(0, 2**31 - 1))
def test_lift_of_a_users_feature_is_a_double_loop(seed):
  num_samples, feature_map = 4, TILTED
  x = jnp.asarray(np.random.default_rng(seed).normal(size=(5, 3)))
  params = feature_map.init(jax.random.key(seed), x)
  slow = np.zeros((5, 2, num_samples))
  for n in range(5):
    for s in range(num_samples):
      direction = np.asarray(params.omega["direction"][s])
      phase = float(params.theta["scale"]) * direction @ np.asarray(x[n])
      wave = np.sin(phase + float(params.omega["phase"][s]))
      slow[n, :, s] = wave, wave * np.sum(np.asarray(x[n]) ** 2)
  slow /= np.sqrt(num_samples - 1)
  got = np.asarray(feature_map.apply(params, x))
  np.testing.assert_allclose(got, slow.reshape(5, -1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("by_sample", [False, True], ids=["shared", "own"])
def test_feature_sees_what_the_embedding_makes_of_the_rows(by_sample):
  """[N, E] is one embedding for all ω, [N, S, E] one for each."""
  omega = np.array([1.0, 2.0, 4.0])

  def embed(theta, omega, x):
    del theta
    rows = jnp.concatenate([x, x**2], 1)
    return rows[:, None, :] + omega[None, :, None] if by_sample else rows

  feature_map = urk.from_function(
    lambda theta, omega, rows: jnp.stack([omega * rows[0], jnp.sum(rows)]),
    lambda key, x: jnp.zeros((), x.dtype),
    3,
    embed=embed,
  )
  params = feature_map.init(KEY, jnp.asarray(X)).replace(omega=jnp.asarray(omega))
  slow = np.zeros((len(X), 2, 3))
  for n, row in enumerate(X):
    for s in range(3):
      seen = np.concatenate([row, row**2]) + by_sample * omega[s]
      slow[n, :, s] = omega[s] * seen[0], np.sum(seen)
  slow = slow.reshape(len(X), -1) / np.sqrt(2)
  np.testing.assert_allclose(
    feature_map.apply(params, jnp.asarray(X)), slow, rtol=1e-12, atol=1e-12
  )


@pytest.mark.parametrize("name", FOURIER)
def test_float32_features_are_the_float64_ones_rounded(name):
  feature_map = _built(name)
  wide = feature_map.init(KEY, jnp.asarray(X))
  narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), wide)
  got = feature_map.apply(narrow, jnp.asarray(X, jnp.float32))
  np.testing.assert_allclose(got, feature_map.apply(wide, jnp.asarray(X)), atol=1e-4)


def test_scalar_feature_gives_one_column_a_sample():
  feature_map = urk.from_function(
    lambda theta, omega, x: omega * x[0], lambda key, x: jnp.sum(x) * 0 + 2.0, 3
  )
  params = feature_map.init(KEY, jnp.asarray(X))
  expected = np.repeat(2 * X[:, :1], 3, axis=1) / np.sqrt(2)
  np.testing.assert_allclose(feature_map.apply(params, jnp.asarray(X)), expected)
  assert jax.tree.leaves(params.theta) == []


@pytest.mark.parametrize("name", MAPS)
def test_draws_are_constants_and_not_trained(name):
  """θ has no leaf that equals a draw, and is all that a gradient in θ moves."""
  params = _built(name).init(KEY, jnp.asarray(X))
  trained = jax.tree.leaves(params.theta)
  expected = {"exponential": 0, "polynomial": 0, "deep": 10, "multiply": 3, "add": 3}
  assert len(trained) == expected.get(name, 1)
  for draws in jax.tree.leaves(params.omega):
    assert not any(leaf.shape == draws.shape for leaf in trained)


# -------------------------------------------------------------------- the kernels


def _identity_shifter(params):
  shifter = jax.tree.map(jnp.zeros_like, params.theta["shifter"])
  shifter["scale"] = jnp.ones(())
  return params.replace(theta={**params.theta, "shifter": shifter})


def test_deep_kernel_with_the_identity_shifter_is_fourier_on_the_latent_space():
  feature_map = _jitted(urk.deep(6, 8, latent_size=4))
  x = jnp.asarray(X)
  params = _identity_shifter(feature_map.init(KEY, x))
  extractor = networks.Extractor(8, 4)
  latent = extractor.apply({"params": params.theta["extractor"]}, x)
  fourier = urk.random_fourier(6)
  theta = {"log_length_scale": jnp.zeros(())}
  expected = fourier.apply(urk.FeatureParams(params.omega, theta), latent)
  np.testing.assert_allclose(feature_map.apply(params, x), expected, rtol=1e-12)


def test_deep_kernel_is_a_double_loop_over_both_networks():
  feature_map = _jitted(urk.deep(3, 8, latent_size=4, shifter_size=5, length_scale=2.0))
  params = feature_map.init(KEY, jnp.asarray(X))
  assert float(params.theta["shifter"]["scale"]) == 0.5
  extractor, shifter = networks.Extractor(8, 4), networks.Shifter(5, 0.5)
  slow = np.zeros((len(X), 2, 3))
  for n, row in enumerate(X):
    rows = jnp.asarray(row)[None]
    (latent,) = extractor.apply({"params": params.theta["extractor"]}, rows)
    for s, omega in enumerate(params.omega):
      frequency = shifter.apply({"params": params.theta["shifter"]}, omega)
      phase = np.asarray(frequency) @ np.asarray(latent)
      slow[n, :, s] = np.cos(phase), np.sin(phase)
  slow = slow.reshape(len(X), -1) / np.sqrt(2)
  np.testing.assert_allclose(
    feature_map.apply(params, jnp.asarray(X)), slow, rtol=1e-10, atol=1e-13
  )


@pytest.mark.parametrize("policy", ["multiply", "add"])
def test_replicate_sees_a_copy_of_the_row_for_each_sample(policy):
  feature_map = _jitted(
    urk.replicate(3, 8, policy=policy, latent_size=4, length_scale=2.0)
  )
  params = feature_map.init(KEY, jnp.asarray(X))
  extractor = networks.Extractor(8, 4)
  slow = np.zeros((len(X), 2, 3))
  for n, row in enumerate(X):
    for s in range(3):
      noise = np.asarray(params.omega["noise"][s])
      copy = row * (1 + noise) if policy == "multiply" else row + noise
      rows = jnp.asarray(copy)[None]
      (latent,) = extractor.apply({"params": params.theta["extractor"]}, rows)
      phase = np.asarray(params.omega["frequency"][s]) @ np.asarray(latent) / 2.0
      slow[n, :, s] = np.cos(phase), np.sin(phase)
  slow = slow.reshape(len(X), -1) / np.sqrt(2)
  np.testing.assert_allclose(
    feature_map.apply(params, jnp.asarray(X)), slow, rtol=1e-10, atol=1e-13
  )


def test_replicate_noise_has_its_scale():
  x = jnp.zeros((1, 4))
  feature_map = _jitted(urk.replicate(5000, 2, noise_scale=0.2))
  draws = feature_map.init(KEY, x).omega["noise"]
  np.testing.assert_allclose(np.std(draws), 0.2, rtol=0.03)


def test_length_scale_divides_the_rows():
  x = jnp.asarray(X)
  unit, scaled = urk.random_fourier(5), urk.random_fourier(5, length_scale=4.0)
  params = scaled.init(KEY, x)
  np.testing.assert_allclose(
    scaled.apply(params, x), unit.apply(unit.init(KEY, x), x / 4.0), rtol=1e-12
  )
  np.testing.assert_allclose(np.exp(params.theta["log_length_scale"]), 4.0, rtol=1e-14)


# ------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
  "build, word",
  [
    (lambda: urk.random_fourier(1), "num_samples"),
    (lambda: urk.exponential(0), "num_samples"),
    (lambda: urk.deep(1, 8), "num_samples"),
    (lambda: urk.random_fourier(5, "gausian"), "gausian"),
    (lambda: urk.random_fourier(5, length_scale=0.0), "length_scale"),
    (lambda: urk.random_fourier(5, length_scale=np.nan), "length_scale"),
    (lambda: urk.polynomial(5, degree=0), "degree"),
    (lambda: urk.polynomial(5, degree=1.5), "degree"),
    (lambda: urk.polynomial(5, offset=-1.0), "offset"),
    (lambda: urk.deep(5, 0), "hidden_size"),
    (lambda: urk.deep(5, 8, latent_size=0), "latent_size"),
    (lambda: urk.deep(5, 8, shifter_size=-1), "shifter_size"),
    (lambda: urk.replicate(5, 8, policy="divide"), "divide"),
    (lambda: urk.replicate(5, 8, noise_scale=0.0), "noise_scale"),
  ],
)
def test_impossible_maps_are_refused_by_name(build, word):
  with pytest.raises(InputError, match=word):
    build()


@pytest.mark.parametrize(
  "name", ["deep", "replicate", "exponential", "polynomial", *urk.SPECTRA]
)
def test_config_builds_every_kernel(name):
  config = config_lib.base()
  config.update({"kernel": name, "num_samples": 4, "hidden_size": 8})
  feature_map = _jitted(urk.from_config(config))
  direct = {
    "deep": lambda: urk.deep(4, 8, length_scale=config.length_scale),
    "replicate": lambda: urk.replicate(4, 8, length_scale=config.length_scale),
    "exponential": lambda: urk.exponential(4),
    "polynomial": lambda: urk.polynomial(4),
  }.get(name, lambda: urk.random_fourier(4, name, config.length_scale))()
  np.testing.assert_array_equal(
    _features(feature_map, X), _features(_jitted(direct), X)
  )


def test_misspelt_kernel_is_answered_with_the_nearest():
  config = config_lib.base()
  config.kernel = "polynomal"
  with pytest.raises(InputError, match="did you mean 'polynomial'"):
    urk.from_config(config)
