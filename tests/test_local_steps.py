"""Local steps against a plain loop; the floor of σ; what a loss reports."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbnr_jax.federated.local_steps import descend, keep_above, loss_report
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.kernel_model import (
  ModelParams,
  evidence_loss,
  features_of,
  model_params,
)
from tests import methods, oracles
from tests.methods import KEY

FEATURE_MAP = urk.random_fourier(4)


def _model(x, dtype=np.float64):
  start = jax.jit(FEATURE_MAP.init)(KEY, x)
  return start.omega, model_params(start.theta, 0.4, 1.3, dtype)


def _loss(params, omega, rows):
  return evidence_loss(FEATURE_MAP, params, omega, rows.x, rows.y, rows.mask)


@pytest.mark.parametrize("make", [optax.sgd, optax.adam])
def test_descent_is_a_plain_loop_with_a_fresh_optimiser(make):
  rows = methods.rows_of(methods.small(), 3)
  omega, start = _model(rows.x)
  optimizer, floor = oracles.loose(make(0.2)), 0.35

  @jax.jit
  def step(params, state):
    value, gradient = jax.value_and_grad(_loss)(params, omega, rows)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value

  params, state, values = start, optimizer.init(start), []
  for _ in range(6):
    params, state, value = step(params, state)
    values.append(value)
    noise = max(float(params.log_noise_std), np.log(floor))
    params = params.replace(log_noise_std=jnp.asarray(noise))

  @jax.jit
  def all_steps(start):
    return descend(
      lambda params: _loss(params, omega, rows),
      optimizer,
      6,
      start,
      functools.partial(keep_above, floor),
    )

  got, losses = all_steps(start)
  chex.assert_trees_all_close(got, params, rtol=1e-10)
  np.testing.assert_allclose(losses, values, rtol=1e-10)
  chex.assert_trees_all_equal(all_steps(start), (got, losses))  # No state survives.


def test_noise_rests_on_its_floor_and_leaves_it_again():
  start = ModelParams({}, jnp.log(0.5), jnp.log(1.0))

  @functools.partial(jax.jit, static_argnums=1)
  def pulled(start, num_steps, sign, rate):
    return descend(
      lambda params: sign * rate * params.log_noise_std + 0.0 * params.log_prior_std,
      optax.sgd(1.0),
      num_steps,
      start,
      functools.partial(keep_above, 0.1),
    )[0]

  low = pulled(start, 5, 1.0, 1.0)
  np.testing.assert_allclose(low.noise_std, 0.1, rtol=1e-12)
  up = pulled(low, 2, -1.0, 0.5)
  np.testing.assert_allclose(up.noise_std, 0.1 * np.e, rtol=1e-12)
  np.testing.assert_array_equal(up.prior_std, start.prior_std)


def test_steps_stay_in_float32_beside_float64_statistics():
  rows = methods.rows_of(methods.small(dtype=np.float32), 3)
  omega, params = _model(rows.x, np.float32)

  @jax.jit
  def steps(params):
    got, losses = descend(
      lambda params: _loss(params, omega, rows),
      optax.adam(0.1),
      2,
      params,
      functools.partial(keep_above, 1e-3),
    )
    features = features_of(FEATURE_MAP, got.theta, omega, rows.x)
    return (got, losses), features, blr.sufficient_stats(features, rows.y, rows.mask)

  got, features, stats = steps(params)
  chex.assert_type([*jax.tree.leaves(got), features], jnp.float32)
  chex.assert_type(jax.tree.leaves(stats), jnp.float64)
  chex.assert_tree_all_finite((got, stats))
  kept = np.asarray(features, float)[rows.mask]
  np.testing.assert_allclose(stats.gram, kept.T @ kept, rtol=1e-12, atol=1e-13)
  np.testing.assert_allclose(stats.moment, kept.T @ rows.y[rows.mask], rtol=1e-6)
  assert float(stats.count) == rows.mask.sum()


@pytest.mark.parametrize(
  "loss, reached, finite",
  [
    (1.5, {"a": np.ones(3)}, True),
    (np.inf, {"a": np.ones(3)}, False),
    (1.5, {"a": np.array([1.0, np.nan, 1.0]), "b": np.ones(2)}, False),
    (1.5, {"a": np.ones(3), "b": np.array(np.inf)}, False),
  ],
)
def test_loss_is_reported_unless_something_reached_is_not_finite(loss, reached, finite):
  report = jax.jit(lambda *a: loss_report(*a, np.float32))(np.asarray(loss), reached)
  assert report["loss"].dtype == np.float32
  expected = loss if finite else np.nan
  np.testing.assert_array_equal(report["loss"], np.float32(expected))
