"""What a client does: local steps against a plain loop, statistics of its rows."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbnr_jax import blr, clients, federation, urk
from tests import oracles

KEY = jax.random.key(0)
NUM_CLIENTS = 5


def _clients(num_clients=NUM_CLIENTS, dtype=np.float64):
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(40, 2))
  targets = np.sin(inputs.sum(1)) + 0.1 * rng.normal(size=40)
  parts = np.split(rng.permutation(40), [3, 11, 18, 30])[:num_clients]
  return federation.build(inputs, targets, parts, dtype=dtype).clients


def _model(feature_map, x, noise_std=0.4, prior_std=1.3):
  params = feature_map.init(KEY, x)
  logs = (jnp.log(jnp.asarray(std, x.dtype)) for std in (noise_std, prior_std))
  return params.omega, clients.ModelParams(params.theta, *logs)


def _one(rows, k):
  return jax.tree.map(lambda leaf: leaf[k], rows)


# -------------------------------------------------------------------- local steps


def test_params_give_scales_and_size():
  params = clients.ModelParams(
    {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}, jnp.log(0.2), jnp.log(3.0)
  )
  np.testing.assert_allclose(params.noise_std, 0.2, rtol=1e-12)
  np.testing.assert_allclose(params.prior_std, 3.0, rtol=1e-12)
  assert params.size == 12


def test_loss_is_the_dense_likelihood_per_row():
  rows = _clients()
  feature_map = urk.random_fourier(4)
  omega, params = _model(feature_map, rows.x[0])
  loss = jax.jit(clients.evidence_loss(feature_map))
  for k in range(NUM_CLIENTS):
    kept = np.asarray(rows.mask[k])
    full = feature_map.apply(urk.FeatureParams(omega, params.theta), rows.x[k])
    expected = oracles.gp_nll(full[kept], rows.y[k][kept], 0.4, 1.3) / kept.sum()
    np.testing.assert_allclose(loss(params, omega, _one(rows, k)), expected, rtol=1e-9)


@pytest.mark.parametrize("make", [optax.sgd, optax.adam])
def test_descent_is_a_plain_loop_with_a_fresh_optimiser(make):
  rows = _one(_clients(), 3)
  feature_map = urk.random_fourier(4)
  omega, start = _model(feature_map, rows.x)
  loss = clients.evidence_loss(feature_map)
  optimizer, floor = oracles.loose(make(0.2)), 0.35

  value_and_grad = jax.jit(jax.value_and_grad(loss))
  params, state, values = start, optimizer.init(start), []
  for _ in range(6):
    value, gradient = value_and_grad(params, omega, rows)
    values.append(value)
    updates, state = optimizer.update(gradient, state, params)
    params = optax.apply_updates(params, updates)
    noise = max(float(params.log_noise_std), np.log(floor))
    params = params.replace(log_noise_std=jnp.asarray(noise))

  @jax.jit
  def descend(start):
    return clients.descend(
      lambda params: loss(params, omega, rows),
      optimizer,
      6,
      start,
      functools.partial(clients.keep_above, floor),
    )

  got, losses = descend(start)
  chex.assert_trees_all_close(got, params, rtol=1e-10)
  np.testing.assert_allclose(losses, values, rtol=1e-10)
  again, same = descend(start)  # No state survives the call.
  chex.assert_trees_all_equal((again, same), (got, losses))


def test_noise_rests_on_its_floor_and_leaves_it_again():
  def pulled(sign):
    return lambda params: sign * params.log_noise_std + 0.0 * params.log_prior_std

  start = clients.ModelParams({}, jnp.log(0.5), jnp.log(1.0))
  floor = functools.partial(clients.keep_above, 0.1)
  low, _ = clients.descend(pulled(1.0), optax.sgd(1.0), 5, start, floor)
  np.testing.assert_allclose(low.noise_std, 0.1, rtol=1e-12)
  up, _ = clients.descend(pulled(-1.0), optax.sgd(0.5), 2, low, floor)
  np.testing.assert_allclose(up.noise_std, 0.1 * np.e, rtol=1e-12)
  np.testing.assert_array_equal(up.prior_std, start.prior_std)


def test_steps_stay_in_float32_beside_float64_statistics():
  rows = _one(_clients(dtype=np.float32), 3)
  feature_map = urk.random_fourier(4)
  omega, params = _model(feature_map, rows.x)
  loss = clients.evidence_loss(feature_map)
  got, losses = clients.descend(
    lambda params: loss(params, omega, rows),
    optax.adam(0.1),
    2,
    params,
    functools.partial(clients.keep_above, 1e-3),
  )
  chex.assert_type([*jax.tree.leaves(got), losses], jnp.float32)
  stats = clients.local_stats(feature_map, got, omega, rows)
  chex.assert_type(jax.tree.leaves(stats), jnp.float64)


def test_local_statistics_are_those_of_the_admitted_rows():
  rows = _one(_clients(), 1)
  feature_map = urk.random_fourier(4)
  omega, params = _model(feature_map, rows.x)
  features = feature_map.apply(urk.FeatureParams(omega, params.theta), rows.x)
  got = clients.local_stats(feature_map, params, omega, rows)
  expected = blr.sufficient_stats(features[rows.mask], rows.y[rows.mask])
  chex.assert_trees_all_close(got, expected, rtol=1e-12, atol=1e-13)
  assert float(got.count) == 8
