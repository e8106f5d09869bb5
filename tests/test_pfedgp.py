"""pFedGP against a loop over clients, and its Gaussian processes against FITC."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbnr_jax import algorithms, federation, fitc, networks
from fedbnr_jax import config as config_lib
from fedbnr_jax.algorithms import pfedgp
from fedbnr_jax.errors import InputError
from fedbnr_jax.optimizers import adam

KEY = jax.random.key(0)
STEPS, RATE = 3, 0.02
NETWORK = networks.Extractor(4, 2, 1, jnp.dtype("float64"))
SETTINGS = {"num_local_steps": STEPS, "num_inducing": 4, "latent_size": 2}


@functools.cache
def _federation(num_clients=3):
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(35, 2))
  targets = np.sin(2 * inputs[:, 0]) + 0.1 * rng.normal(size=35)
  parts = federation.partition("sorted", rng, inputs, targets, num_clients)
  return federation.build(inputs, targets, parts, dtype=jnp.float64)


@functools.cache
def _round(**settings):
  built = pfedgp.pfedgp(NETWORK, adam(RATE), **(SETTINGS | settings))
  start = built.init(KEY, _federation())
  state, info = jax.jit(built.round)(KEY, start, _federation())
  return built, start, state, info


def _rows(index):
  """Without padding."""
  data = _federation().clients
  keep = np.asarray(data.mask[index])
  return data.x[index][keep], data.y[index][keep]


def _embed(theta, x, normalise=True):
  latent = NETWORK.apply(theta, x)
  if not normalise:
    return latent
  return latent / jnp.sqrt(jnp.sum(latent**2, axis=1, keepdims=True) + 1e-12)


def _half(start, index):
  """Of a client's rows, without padding: those given in the first round."""
  mask = _federation().clients.mask[index]
  key = jax.random.fold_in(jax.random.wrap_key_data(start.omega), 0)
  return np.asarray(pfedgp.random_half(key, mask))[np.asarray(mask)]


@pytest.mark.parametrize(
  "settings",
  [{}, {"normalise": False}, {"by_rows": True}, {"predictive": True}],
  ids=lambda settings: "".join(settings) or "default",
)
def test_a_round_is_local_steps_and_their_mean(settings):
  _, start, got, info = _round(**settings)
  optimizer = optax.adam(RATE)
  ends, weights = [], []
  for index in range(3):
    x, y = _rows(index)
    weights.append(len(y) if settings.get("by_rows") else 1)
    given = _half(start, index) if settings.get("predictive") else None

    def loss(params, x=x, y=y, given=given):
      latent = _embed(params.network, x, settings.get("normalise", True))
      if given is None:
        nll = fitc.negative_log_marginal_likelihood(
          latent, y, params.inducing, params.scales
        )
        return nll / len(y)
      process = fitc.fit(latent[given], y[given], params.inducing, params.scales)
      mean, variance = fitc.predict(process, latent[~given])
      std = jnp.sqrt(variance + params.scales.noise_variance)
      return -jnp.mean(jax.scipy.stats.norm.logpdf(y[~given], mean, std))

    gradient = jax.jit(jax.grad(loss))
    params, memory = start.params, optimizer.init(start.params)
    for _ in range(STEPS):
      with jax.numpy_dtype_promotion("standard"):
        updates, memory = optimizer.update(gradient(params), memory)
      params = optax.apply_updates(params, updates)
    ends.append(params)
  shares = np.array(weights) / sum(weights)
  wanted = jax.tree.map(
    lambda *leaves: sum(
      share * leaf for share, leaf in zip(shares, leaves, strict=True)
    ),
    *ends,
  )
  for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
  # P_f + 3 + I · E, both ways.
  size = sum(leaf.size for leaf in jax.tree.leaves(wanted.network)) + 3 + 4 * 2
  assert (int(info.floats_up), int(info.floats_down)) == (size, size)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 8])
def test_halves_are_halves_of_the_rows_and_new_ones_each_round(num_rows):
  mask = jnp.arange(12) < num_rows
  halves = [np.asarray(pfedgp.random_half(jax.random.key(i), mask)) for i in range(5)]
  assert all(half.sum() == (num_rows + 1) // 2 for half in halves)
  assert not any(half[num_rows:].any() for half in halves)
  assert len({half.tobytes() for half in halves}) > (1 if num_rows > 2 else 0)
  shorter = pfedgp.random_half(jax.random.key(0), mask[:9])
  np.testing.assert_array_equal(shorter, halves[0][:9])


def test_the_noise_rests_on_its_floor():
  _, _, state, _ = _round(min_noise_std=0.5)
  assert float(state.params.scales.noise_std) >= 0.5
  assert float(_round()[2].params.scales.noise_std) < 0.5


def test_each_client_predicts_from_its_own_rows():
  built, _, state, info = _round()
  x = _federation().clients.x[0, :6]
  mean, variance = built.predict(state, x)
  assert mean.shape == variance.shape == (3, 6)
  params, losses = state.params, []
  for index in range(3):
    own_x, own_y = _rows(index)
    latent = _embed(params.network, own_x)
    arguments = (latent, own_y, params.inducing, params.scales)
    wanted, wanted_variance = fitc.predict(
      fitc.fit(*arguments), _embed(params.network, x)
    )
    np.testing.assert_allclose(mean[index], wanted, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(
      variance[index], wanted_variance + params.scales.noise_variance, rtol=1e-7
    )
    losses.append(fitc.negative_log_marginal_likelihood(*arguments) / len(own_y))
  np.testing.assert_allclose(info.train_nll, np.mean(losses), rtol=1e-8)
  latent_only = pfedgp.pfedgp(NETWORK, adam(RATE), with_noise=False, **SETTINGS)
  _, without = latent_only.predict(state, x)
  np.testing.assert_allclose(without, variance - params.scales.noise_variance)


def test_scales_that_are_not_trained_stay():
  _, start, state, _ = _round(train_scales=False)
  for a, b in zip(
    jax.tree.leaves(start.params.scales),
    jax.tree.leaves(state.params.scales),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=1e-12)
  assert not np.allclose(start.params.inducing, state.params.inducing)


def test_from_config_in_float32():
  config = config_lib.base()
  config.update({"hidden_size": 4, "latent_size": 2, "num_local_steps": 2})
  config.pfedgp.num_inducing = 3
  built = algorithms.method("pfedgp").build(config)
  data = jax.tree.map(
    lambda leaf: leaf if leaf.dtype == bool else leaf.astype(jnp.float32),
    _federation(),
  )
  state, info = jax.jit(built.round)(KEY, built.init(KEY, data), data)
  assert state.params.inducing.dtype == jnp.float32
  assert np.all(np.isfinite(info.client_loss))


def test_no_inducing_inputs_are_refused():
  config = config_lib.base()
  config.pfedgp.num_inducing = 0
  with pytest.raises(InputError, match=r"pfedgp\.num_inducing"):
    config_lib.validate(config)
  with pytest.raises(InputError, match="num_inducing"):
    algorithms.method("pfedgp").build(config)
