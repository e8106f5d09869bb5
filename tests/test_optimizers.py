"""Adam against Optax's, and both in float32 against float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedbnr_jax.federated.optimizers import adam, lbfgs
from fedbnr_jax.precision import enable_x64
from tests import oracles

RATE = 0.05
# Slopes from 1e-4 to 1e4, of both signs.
SCALES = np.geomspace(1e-4, 1e4, 12) * (-1) ** np.arange(12)


def _slope(params, step):
  """Gradient of an ill-scaled quadratic with a wave that changes every step."""
  scales = jnp.asarray(SCALES, params.dtype)
  return scales * (jnp.abs(scales) * params - jnp.cos(params + step))


def _path(optimizer, dtype, num_steps=60):
  """Parameters [T, 12] of every step."""
  params = jnp.linspace(-1.0, 1.0, 12, dtype=dtype)

  def step(carry, time):
    params, state = carry
    updates, state = optimizer.update(_slope(params, time), state, params)
    params = optax.apply_updates(params, updates)
    return (params, state), params

  times = jnp.arange(num_steps).astype(dtype)
  start = params, optimizer.init(params)
  return np.asarray(jax.jit(lambda: jax.lax.scan(step, start, times)[1])())


def test_float64_path_is_optax_path():
  got = _path(adam(RATE), jnp.float64)
  expected = _path(oracles.loose(optax.adam(RATE)), jnp.float64)
  assert np.abs(np.diff(expected, axis=0)).min(axis=0).max() > 1e-6  # It moves.
  np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def _float32_updates(optimizer, num_steps=200):
  """Updates [T] for a constant gradient of one: each is −rate in exact arithmetic."""
  gradient = jnp.ones((), jnp.float32)

  def step(state, _):
    updates, state = optimizer.update(gradient, state, gradient)
    return state, updates

  start = optimizer.init(gradient)
  run = jax.jit(lambda: jax.lax.scan(step, start, None, length=num_steps)[1])
  return np.asarray(run(), float)


def test_float32_corrections_keep_their_digits(x64_off):
  mine = _float32_updates(adam(1.0))
  theirs = _float32_updates(oracles.loose(optax.adam(1.0)))
  assert np.abs(mine + 1).max() < 3e-6  # 1.4e-6, and 1.0e-5 without expm1.
  assert np.abs(mine + 1).max() < 0.5 * np.abs(theirs + 1).max()


def test_float32_path_is_nearer_to_float64_than_optax_path():
  exact = _path(adam(RATE), jnp.float64)
  with enable_x64(False):
    mine = _path(adam(RATE), jnp.float32)
    theirs = _path(oracles.loose(optax.adam(RATE)), jnp.float32)
  mine, theirs = (np.linalg.norm(path - exact) for path in (mine, theirs))
  assert mine < 4e-5
  assert mine < 0.25 * theirs  # 9e-6 against 2e-4.


def test_state_and_updates_keep_the_types_of_a_mixed_tree(any_x64):
  wide = jnp.float64 if any_x64 else jnp.float32
  params = {"a": jnp.ones((2, 3), jnp.float32), "b": [jnp.ones((), wide)]}
  optimizer = adam(RATE)
  state, update = optimizer.init(params), jax.jit(optimizer.update)
  for _ in range(2):
    updates, new_state = update(params, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    state = new_state
  assert int(state[0].count) == 2


def test_clients_in_a_batch_are_a_loop():
  params = np.random.default_rng(0).normal(size=(3, 12))
  optimizer = adam(RATE)

  def two_steps(params):
    state = optimizer.init(params)
    for step in (0.0, 1.0):
      updates, state = optimizer.update(_slope(params, step), state)
      params = optax.apply_updates(params, updates)
    return params

  alone = jax.jit(two_steps)
  loop = np.stack([alone(client) for client in params])
  together = jax.jit(jax.vmap(two_steps))(params)
  np.testing.assert_allclose(together, loop, rtol=1e-13)


def test_lbfgs_goes_downhill_where_curvature_is_negative():
  """From near the top of a wave, where Optax's own direction soon points uphill."""

  def value(x):
    return jnp.sum(jnp.cos(x)) + 0.1 * x[0] * x[1]

  optimizer, theirs = map(oracles.loose, (lbfgs(), optax.scale_by_lbfgs()))
  x = jnp.array([0.1, -0.05, 0.2])
  state, other = optimizer.init(x), theirs.init(x)
  uphill = 0
  gradient, value = jax.jit(jax.grad(value)), jax.jit(value)
  mine, plain = jax.jit(optimizer.update), jax.jit(theirs.update)
  for _ in range(25):
    slope = gradient(x)
    direction, state = mine(slope, state, x)
    opposite, other = plain(slope, other, x)
    uphill += bool(jnp.vdot(-opposite, slope) > 0)
    assert float(jnp.vdot(direction, slope)) < 0
    step = 1.0
    while not value(x + step * direction) < value(x) and step > 1e-9:
      step /= 4
    x = x + step * direction
  assert uphill  # Or nothing was shown.
  np.testing.assert_allclose(gradient(x), 0.0, atol=1e-4)
