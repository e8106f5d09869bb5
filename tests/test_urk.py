"""Feature maps against the kernels that they stand for."""

import functools
import re

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fedbnr_jax.algorithms import kernels
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import urk
from fedbnr_jax.run import config as config_lib
from tests import oracles

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(6, 3))

S = 100
LENGTH_SCALE = 1.7
SIZES = {"latent_size": 4, "length_scale": 2.0}

MAPS = {
  **{
    name: lambda s, name=name: urk.random_fourier(s, name, LENGTH_SCALE)
    for name in urk.SPECTRA
  },
  "exponential": urk.exponential,
  "polynomial": urk.polynomial,
  "deep": lambda s: urk.deep(s, 8, num_hidden_layers=2, shifter_size=5, **SIZES),
  "multiply": lambda s: urk.replicate(s, 8, policy="multiply", **SIZES),
  "add": lambda s: urk.replicate(s, 8, policy="add", noise_scale=0.2, **SIZES),
}
# Their features have unit length before the factor S/(S−1), for every x.
FOURIER = [*urk.SPECTRA, "deep", "multiply", "add"]


def _jitted(feature_map):
  return feature_map._replace(
    init=jax.jit(feature_map.init), apply=jax.jit(feature_map.apply)
  )


@functools.cache
def _built(name):
  """One compilation for all tests of a map."""
  return _jitted(MAPS[name](S))


def _features(feature_map, x, key=KEY):
  return np.asarray(feature_map.apply(feature_map.init(key, x), x))


def _draws(feature_map, num_seeds):
  """Parameters of independent draws of ω, from programs that are compiled already."""
  keys = jax.random.split(KEY, num_seeds)
  return (feature_map.init(keys[i], X) for i in range(num_seeds))


def _grams(feature_map, x, num_seeds):
  """Grams [num_seeds, N, N] of independent draws of ω."""
  features = [
    np.asarray(feature_map.apply(params, x))
    for params in _draws(feature_map, num_seeds)
  ]
  return np.stack([one @ one.T for one in features])


@pytest.mark.parametrize("name", MAPS)
def test_a_seed_gives_the_draws_of_the_start(name):
  """So that a client which is sent the seed has the server's ω, to the bit."""
  drawn = urk.draw_omega(MAPS[name](S), urk.Source(jax.random.key_data(KEY)), X)
  start = MAPS[name](S).init(KEY, X).omega
  jax.tree.map(np.testing.assert_array_equal, drawn, start)


# ----------------------------------------------------------------- closed forms


@pytest.mark.parametrize("spectrum", urk.SPECTRA)
def test_fourier_features_reach_their_kernel_at_the_monte_carlo_rate(spectrum):
  """The mean is the kernel, and one map's error that of S independent samples."""
  kernel = oracles.STATIONARY[spectrum]
  gap = (X[:, None] - X[None, :]) / LENGTH_SCALE
  num_seeds = 600
  grams = _grams(_built(spectrum), X, num_seeds) * (S - 1) / S
  bound = 5 / np.sqrt(S * num_seeds)  # |cos| ≤ 1 has a variance of at most one.
  np.testing.assert_allclose(grams.mean(axis=0), kernel(gap), atol=bound)
  spread = (1 + kernel(2 * gap)) / 2 - kernel(gap) ** 2  # Of cos(ωᵀδ).
  error = np.mean((grams - kernel(gap)) ** 2)
  np.testing.assert_allclose(error, np.mean(spread) / S, rtol=0.1)


def test_exponential_features_reach_their_kernel():
  x = 0.3 * X
  kernel = np.exp(np.sum((x[:, None] + x[None, :]) ** 2, -1) / 2)
  num_seeds = 1600
  grams = _grams(_built("exponential"), x, num_seeds) * (S - 1) / S
  spread = np.sqrt(kernel**4 - kernel**2)  # E exp(2ωᵀz) = exp(2‖z‖²), z = x + x'.
  bound = 5 * spread / np.sqrt(S * num_seeds)
  assert np.all(np.abs(grams.mean(axis=0) - kernel) < bound)


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("offset", [0.0, 1.5])
def test_polynomial_features_have_their_kernel_as_expectation(degree, offset):
  """Every outcome of the trials in turn as ω, weighted by its probability."""
  x = X[:, :2]
  assert np.any(x < 0)
  outcomes = oracles.multinomial_trials(2, degree)
  feature_map = urk.polynomial(len(outcomes), degree, offset)
  params = jax.eval_shape(feature_map.init, KEY, x)
  assert params.omega.shape == (len(outcomes), degree)
  named = np.stack([named for named, _ in outcomes]).astype(params.omega.dtype)
  features = jax.jit(feature_map.apply)(params.replace(omega=named), x)
  features = np.asarray(features) * np.sqrt(len(outcomes) - 1)  # Undo 1/√(S−1).
  probability = np.array([probability for _, probability in outcomes])
  np.testing.assert_allclose(probability.sum(), 1, rtol=1e-12)
  expectation = (features * probability) @ features.T
  kernel = (x @ x.T + offset) ** degree
  np.testing.assert_allclose(expectation, kernel, rtol=1e-10, atol=1e-10)


def test_polynomial_trials_follow_their_distribution():
  draws = _draws(_built("polynomial"), 400)
  omega = np.concatenate([np.asarray(params.omega) for params in draws])
  share = np.bincount(omega.ravel(), minlength=4) / omega.size
  np.testing.assert_allclose(share, [1 / 2, 1 / 6, 1 / 6, 1 / 6], atol=0.01)
  # Trials are independent: the counts are multinomial.
  both = np.mean((omega[:, 0] == 0) & (omega[:, 1] == 0))
  np.testing.assert_allclose(both, 1 / 4, atol=0.01)


def test_expectation_carries_the_printed_factor():
  """1/√(S−1) makes the mean of the URK S/(S−1) times the kernel: twice, for S = 2."""
  kernel = oracles.STATIONARY["gaussian"](X[:, None] - X[None, :])
  feature_map = urk.random_fourier(2)

  @jax.jit
  def mean_gram(keys):
    def gram(key):
      features = feature_map.apply(feature_map.init(key, X), X)
      return features @ features.T

    return jnp.mean(jax.lax.map(gram, keys), axis=0)

  got = mean_gram(jax.random.split(KEY, 20_000))
  np.testing.assert_allclose(got, 2 * kernel, atol=0.05)


# ------------------------------------------------------------ every construction


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_features_follow_the_rows_in_shape_and_dtype(name, dtype, any_x64):
  feature_map = MAPS[name](S)
  dtype = jax.dtypes.canonicalize_dtype(dtype)
  x = jax.ShapeDtypeStruct(X.shape, dtype)
  params = jax.eval_shape(feature_map.init, KEY, x)
  features = jax.eval_shape(feature_map.apply, params, x)
  num_features = S if name in ("exponential", "polynomial") else 2 * S
  assert features.shape == (len(X), num_features)
  chex.assert_type([features, *jax.tree.leaves(params.theta)], dtype)
  assert all(leaf.shape[0] == S for leaf in jax.tree.leaves(params.omega))
  if name != "polynomial":  # Whose ω counts.
    chex.assert_type(jax.tree.leaves(params.omega), dtype)


@pytest.mark.parametrize("name", ["deep", "add", "matern32", "polynomial"])
def test_rows_stay_float32_without_x64(name, x64_off):
  features = _features(_built(name), X.astype(np.float32))
  assert features.dtype == np.float32
  assert np.all(np.isfinite(features))


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
  np.testing.assert_allclose(np.sum(features**2, axis=1), S / (S - 1), rtol=1e-12)


@pytest.mark.parametrize("name", MAPS)
def test_init_depends_on_the_key_alone(name):
  feature_map = _built(name)
  params = feature_map.init(KEY, X)
  chex.assert_trees_all_equal(params, feature_map.init(KEY, X + 9.0))
  other = feature_map.init(jax.random.key(1), X)
  leaves = jax.tree.leaves(params.omega), jax.tree.leaves(other.omega)
  assert not np.array_equal(leaves[0][0], leaves[1][0])


@pytest.mark.parametrize("name", MAPS)
def test_each_row_is_mapped_by_itself(name):
  feature_map = _built(name)
  params = feature_map.init(KEY, X)
  whole = np.asarray(feature_map.apply(params, X))
  mixed = X[::-1].copy()
  mixed[0] = 7.0
  got = np.asarray(feature_map.apply(params, mixed))
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
  params = urk.FeatureParams(omega, {})
  slow = np.zeros((len(X), 2, 3))
  for n, row in enumerate(X):
    for s in range(3):
      seen = np.concatenate([row, row**2]) + by_sample * omega[s]
      slow[n, :, s] = omega[s] * seen[0], np.sum(seen)
  slow = slow.reshape(len(X), -1) / np.sqrt(2)
  got = jax.jit(feature_map.apply)(params, X)
  np.testing.assert_allclose(got, slow, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FOURIER)
def test_float32_features_are_the_float64_ones_rounded(name):
  feature_map = _built(name)
  wide = feature_map.init(KEY, X)
  narrow = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), wide)
  got = feature_map.apply(narrow, X.astype(np.float32))
  np.testing.assert_allclose(got, feature_map.apply(wide, X), atol=1e-4)


def test_scalar_feature_gives_one_column_a_sample():
  feature_map = _jitted(
    urk.from_function(
      lambda theta, omega, x: omega * x[0], lambda key, x: jnp.sum(x) * 0 + 2.0, 3
    )
  )
  params = feature_map.init(KEY, X)
  expected = np.repeat(2 * X[:, :1], 3, axis=1) / np.sqrt(2)
  np.testing.assert_allclose(feature_map.apply(params, X), expected)
  assert jax.tree.leaves(params.theta) == []


@pytest.mark.parametrize("name", MAPS)
def test_draws_are_constants_and_not_trained(name):
  """θ has no leaf that equals a draw, and is all that a gradient in θ moves."""
  params = jax.eval_shape(MAPS[name](S).init, KEY, X)
  trained = jax.tree.leaves(params.theta)
  expected = {"exponential": 0, "polynomial": 0, "deep": 10, "multiply": 3, "add": 3}
  assert len(trained) == expected.get(name, 1)
  for draws in jax.tree.leaves(params.omega):
    assert not any(leaf.shape == draws.shape for leaf in trained)


# -------------------------------------------------------------------- the kernels


def _extracted(theta, x):
  """What the extractor of two hidden layers, or of one, makes of rows [N, D]."""
  params = jax.tree.map(np.asarray, theta["extractor"])
  for layer in (*([params["Dense_0"]] if "Dense_0" in params else []), params):
    x = np.maximum(x @ layer["kernel"] + layer["bias"], 0)
  return x @ params["output"].T


def _shifted(theta, omega):
  """What the shifter makes of ω [S, E]."""
  params = jax.tree.map(np.asarray, theta["shifter"])
  first, second = params["Dense_0"], params["Dense_1"]
  hidden = np.tanh(omega @ first["kernel"] + first["bias"])
  return params["scale"] * (omega + hidden @ second["kernel"] + second["bias"])


def _moved(theta):
  """Every parameter somewhat off its start, so that no bias is zero."""
  return jax.tree.map(lambda leaf: np.asarray(leaf) + 0.05, theta)


def test_deep_kernel_is_fourier_features_of_both_networks():
  feature_map = _built("deep")
  params = feature_map.init(KEY, X)
  assert float(params.theta["shifter"]["scale"]) == 1 / SIZES["length_scale"]
  params = params.replace(theta=_moved(params.theta))
  frequency = _shifted(params.theta, np.asarray(params.omega))
  phase = _extracted(params.theta, X) @ frequency.T
  slow = np.concatenate([np.cos(phase), np.sin(phase)], axis=1) / np.sqrt(S - 1)
  got = feature_map.apply(params, X)
  np.testing.assert_allclose(got, slow, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("policy", ["multiply", "add"])
def test_replicate_sees_a_copy_of_the_row_for_each_sample(policy):
  feature_map = _built(policy)
  params = feature_map.init(KEY, X)
  params = params.replace(theta=_moved(params.theta))
  noise, frequency = (np.asarray(params.omega[k]) for k in ("noise", "frequency"))
  slow = np.zeros((len(X), 2, S))
  for s in range(S):
    copy = X * (1 + noise[s]) if policy == "multiply" else X + noise[s]
    phase = _extracted(params.theta, copy) @ frequency[s] / SIZES["length_scale"]
    slow[:, 0, s], slow[:, 1, s] = np.cos(phase), np.sin(phase)
  slow = slow.reshape(len(X), -1) / np.sqrt(S - 1)
  got = feature_map.apply(params, X)
  np.testing.assert_allclose(got, slow, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("policy, scale", [("multiply", 0.5), ("add", 0.2)])
def test_replicate_noise_has_its_scale(policy, scale):
  draws = _draws(_built(policy), 50)
  noise = np.stack([np.asarray(params.omega["noise"]) for params in draws])
  np.testing.assert_allclose(np.std(noise), scale, rtol=0.03)


def test_length_scale_divides_the_rows():
  feature_map = _built("gaussian")
  params = feature_map.init(KEY, X)
  unit = params.replace(theta={"log_length_scale": np.zeros(())})
  np.testing.assert_allclose(
    feature_map.apply(params, X),
    feature_map.apply(unit, X / LENGTH_SCALE),
    rtol=1e-12,
    atol=1e-14,
  )
  length_scale = np.exp(params.theta["log_length_scale"])
  np.testing.assert_allclose(length_scale, LENGTH_SCALE, rtol=1e-14)


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


def _program(feature_map):
  """The map as a text that has every operation and every number in it."""
  params = jax.eval_shape(feature_map.init, KEY, X)
  programs = [
    jax.make_jaxpr(feature_map.init)(KEY, X),
    jax.make_jaxpr(feature_map.apply)(params, X),
  ]
  return [re.sub(r"0x[0-9a-f]+", "", f"{one} {one.consts}") for one in programs]


@pytest.mark.parametrize(
  "name",
  ["deep", "replicate", "exponential", "polynomial", *urk.SPECTRA, "matern32+linear"],
)
def test_config_builds_every_kernel(name):
  """With fields that are not the defaults, so that none is forgotten."""
  sizes = {"latent_size": 3, "num_hidden_layers": 2, "length_scale": 1.3}
  replicate = {"policy": "add", "noise_scale": 0.7}
  polynomial = {"degree": 3, "offset": 0.6}
  config = config_lib.base()
  config.update({"kernel": name, "num_samples": 4, "hidden_size": 8, **sizes})
  config.update({"shifter_size": 7, "replicate": replicate, "polynomial": polynomial})
  config.update({"ard": {"length_scale": 0.4}})
  direct = {
    "deep": lambda: urk.deep(4, 8, shifter_size=7, **sizes),
    "replicate": lambda: urk.replicate(4, 8, **replicate, **sizes),
    "exponential": lambda: urk.exponential(4),
    "polynomial": lambda: urk.polynomial(4, **polynomial),
    "matern32+linear": lambda: urk.add(
      urk.ard(4, "matern32", length_scale=0.4), urk.linear()
    ),
  }.get(name, lambda: urk.random_fourier(4, name, 0.4, isotropic=False))()
  assert _program(kernels.from_config(config)) == _program(direct)
  if name != "exponential":
    assert _program(direct) != _program(urk.exponential(4))


def test_misspelt_kernel_is_answered_with_the_nearest():
  config = config_lib.base()
  config.kernel = "polynomal"
  with pytest.raises(InputError, match="did you mean 'polynomial'"):
    kernels.from_config(config)
