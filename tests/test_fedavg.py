"""FedAvg and FedProx against a loop over clients, and their limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbnr_jax import algorithms, federation, networks
from fedbnr_jax import config as config_lib
from fedbnr_jax.algorithms import fedavg
from fedbnr_jax.errors import InputError
from fedbnr_jax.optimizers import adam
from tests.runs import assert_same_bits

KEY = jax.random.key(0)
STEPS, RATE = 3, 0.02
NETWORK = networks.Regressor(5, 2, 1, jnp.dtype("float64"))


@functools.cache
def _federation(num_clients=3):
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(35, 2))
  targets = np.sin(2 * inputs[:, 0]) + 0.1 * rng.normal(size=35)
  parts = federation.partition("sorted", rng, inputs, targets, num_clients)
  return federation.build(inputs, targets, parts, dtype=jnp.float64)


@functools.cache
def _rounds(num_rounds=2, num_clients=3, steps=STEPS, **settings):
  built = fedavg.fedprox(NETWORK, adam(RATE), num_local_steps=steps, **settings)
  data = _federation(num_clients)
  states, round_ = [built.init(KEY, data)], jax.jit(built.round)
  for _ in range(num_rounds):
    state, info = round_(KEY, states[-1], data)
    states.append(state)
  return built, states, info


@pytest.mark.parametrize("mu, by_rows", [(0.0, False), (0.7, True)])
def test_a_round_is_local_steps_and_their_mean(mu, by_rows):
  _, (start, got), info = _rounds(1, mu=mu, by_rows=by_rows)
  data, optimizer = _federation().clients, optax.adam(RATE)
  locals_, weights, squares = [], [], 0.0
  for index in range(3):
    keep = np.asarray(data.mask[index])
    x, y = data.x[index][keep], data.y[index][keep]

    def loss(theta, x=x, y=y):
      gap = sum(
        jnp.sum((a - b) ** 2)
        for a, b in zip(
          jax.tree.leaves(theta), jax.tree.leaves(start.params.theta), strict=True
        )
      )
      return jnp.mean((NETWORK.apply(theta, x) - y) ** 2) + 0.5 * mu * gap

    gradient = jax.jit(jax.grad(loss))
    theta, memory = start.params.theta, optimizer.init(start.params.theta)
    for _ in range(STEPS):
      with jax.numpy_dtype_promotion("standard"):
        updates, memory = optimizer.update(gradient(theta), memory)
      theta = optax.apply_updates(theta, updates)
    locals_.append(theta)
    weights.append(len(y) if by_rows else 1)
  total = sum(weights)
  wanted = jax.tree.map(
    lambda *leaves: (
      sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)) / total
    ),
    *locals_,
  )
  for a, b in zip(
    jax.tree.leaves(got.params.theta), jax.tree.leaves(wanted), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
  for index in range(3):
    keep = np.asarray(data.mask[index])
    error = NETWORK.apply(got.params.theta, data.x[index][keep]) - data.y[index][keep]
    squares += float(jnp.sum(error**2))
  np.testing.assert_allclose(got.params.noise_std**2, squares / 35, rtol=1e-9)
  size = sum(leaf.size for leaf in jax.tree.leaves(wanted))
  assert (int(info.floats_up), int(info.floats_down)) == (size + 2, size + 1)
  # Of all rows under N(prediction, σ²).
  nll = 0.5 * np.log(2 * np.pi * squares / 35) + 0.5
  np.testing.assert_allclose(info.train_nll, nll, rtol=1e-9)


def test_fedprox_without_pull_is_fedavg_bit_for_bit():
  config = config_lib.base()
  config.update({"hidden_size": 5, "num_local_steps": 2})
  config.fedprox.mu = 0.0
  states = []
  for method in ("fedavg", "fedprox"):
    built = algorithms.method(method).build(config)
    data = jax.tree.map(
      lambda leaf: leaf if leaf.dtype == bool else leaf.astype(jnp.float32),
      _federation(),
    )
    states.append(jax.jit(built.round)(KEY, built.init(KEY, data), data)[0])
  assert_same_bits(*states)


def test_a_strong_pull_holds_clients_back():
  def moved(mu):
    _, (start, *_, end), _ = _rounds(3, steps=20, mu=mu)
    gap = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), start.params, end.params)
    return sum(float(leaf) for leaf in jax.tree.leaves(gap.theta))

  assert moved(1e4) < 0.05 * moved(0.0)


def test_it_learns_and_predicts_with_one_error_bar():
  built, states, info = _rounds(6, steps=20)
  data = _federation().clients
  mean, variance = built.predict(states[-1], data.x[0])
  assert mean.shape == variance.shape == data.y[0].shape
  assert np.unique(np.asarray(variance)).size == 1
  first, last = (float(built.train_nll(state)) for state in (states[1], states[-1]))
  assert last < first
  np.testing.assert_allclose(built.scales(states[-1])[0] ** 2, variance[0])
  assert np.all(np.isfinite(info.client_loss))


def test_float32_without_x64(x64_off):
  config = config_lib.base()
  config.update({"hidden_size": 5, "num_local_steps": 2})
  built = algorithms.method("fedavg").build(config)
  data = _federation.__wrapped__()
  data = jax.tree.map(
    lambda leaf: leaf if leaf.dtype == bool else leaf.astype(jnp.float32), data
  )
  state, info = jax.jit(built.round)(KEY, built.init(KEY, data), data)
  assert state.params.log_noise_std.dtype == jnp.float32
  assert np.isfinite(info.train_nll)


@pytest.mark.parametrize("settings", [{"mu": -1.0}, {"mu": np.inf}, {"steps": 0}])
def test_bad_settings_are_refused_before_tracing(settings):
  steps = settings.pop("steps", STEPS) if "steps" in settings else STEPS
  with pytest.raises(InputError):
    fedavg.fedprox(NETWORK, adam(RATE), num_local_steps=steps, **settings)
