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
STEPS, RATE, FLOOR = 3, 0.02, 1e-3
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


@pytest.mark.parametrize("normalise", [True, False])
def test_a_round_is_local_steps_and_their_mean(normalise):
  _, start, got, info = _round(normalise=normalise)
  optimizer = optax.adam(RATE)
  ends = []
  for index in range(3):
    x, y = _rows(index)

    def loss(params, x=x, y=y):
      latent = _embed(params.network, x, normalise)
      nll = fitc.negative_log_marginal_likelihood(
        latent, y, params.inducing, params.scales
      )
      return nll / len(y)

    gradient = jax.jit(jax.grad(loss))
    params, memory = start.params, optimizer.init(start.params)
    for _ in range(STEPS):
      with jax.numpy_dtype_promotion("standard"):
        updates, memory = optimizer.update(gradient(params), memory)
      params = optax.apply_updates(params, updates)
    ends.append(params)
  wanted = jax.tree.map(lambda *leaves: sum(leaves) / 3, *ends)
  for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
  # P_f + 3 + I · E, both ways.
  size = sum(leaf.size for leaf in jax.tree.leaves(wanted.network)) + 3 + 4 * 2
  assert (int(info.floats_up), int(info.floats_down)) == (size, size)


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
