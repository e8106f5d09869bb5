"""FedAvg and FedProx against a loop over clients, and their limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbnr_jax.algorithms import fedavg
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.optimizers import adam
from fedbnr_jax.gp import networks
from tests import methods, oracles
from tests.methods import NUM_CLIENTS, NUM_ROWS, SIZES, small
from tests.runs import assert_same_bits

STEPS, RATE = 20, 0.005
NETWORK = networks.Regressor(5, 2, 1, jnp.dtype("float64"))


@functools.cache
def _rounds(num_rounds=6, **settings):
  built = fedavg.fedprox(NETWORK, adam(RATE), num_local_steps=STEPS, **settings)
  program = methods.compile_method(built)
  return program, methods.run(program, small(), num_rounds)


@functools.cache
def _apply():
  return jax.jit(NETWORK.apply)


@functools.cache
def _slow_step(mu):
  """A step of one client, whose padding has no weight."""
  optimizer = oracles.loose(optax.adam(RATE))

  def loss(theta, broadcast, rows):
    gaps = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), theta, broadcast)
    errors = (NETWORK.apply(theta, rows.x) - rows.y) ** 2
    return jnp.mean(errors, where=rows.mask) + 0.5 * mu * sum(jax.tree.leaves(gaps))

  def step(theta, memory, broadcast, rows):
    updates, memory = optimizer.update(jax.grad(loss)(theta, broadcast, rows), memory)
    return optax.apply_updates(theta, updates), memory

  return optimizer, jax.jit(step)


@pytest.mark.parametrize("mu, by_rows", [(0.0, False), (0.7, True)])
def test_a_round_is_local_steps_and_their_mean(mu, by_rows):
  _, (states, infos) = _rounds(mu=mu, by_rows=by_rows)
  start, got, info = states[0].server.params.theta, states[1].server, infos[0]
  (optimizer, step), data, ends = _slow_step(mu), small(), []
  for k in range(NUM_CLIENTS):
    theta, memory = start, optimizer.init(start)
    for _ in range(STEPS):
      theta, memory = step(theta, memory, start, methods.rows_of(data, k))
    ends.append(theta)
  wanted = jax.tree.map(
    lambda *leaves: np.average(
      leaves, axis=0, weights=np.array(SIZES, float) if by_rows else None
    ),
    *ends,
  )
  for a, b in zip(
    jax.tree.leaves(got.params.theta), jax.tree.leaves(wanted), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
  x, y, mask = data.clients.x.reshape(-1, 2), data.clients.y, data.clients.mask
  errors = np.asarray(_apply()(got.params.theta, x))[mask.ravel()] - y[mask]
  square = np.mean(errors**2)
  np.testing.assert_allclose(got.params.noise_std**2, square, rtol=1e-9)
  # Of all rows under N(prediction, σ²).
  nll = 0.5 * np.log(2 * np.pi * square) + 0.5
  np.testing.assert_allclose(info.train_nll, nll, rtol=1e-9)
  assert len(errors) == NUM_ROWS


def test_a_strong_pull_holds_clients_back():
  def moved(mu):
    _, (states, _) = _rounds(mu=mu, by_rows=False)
    gap = jax.tree.map(
      lambda a, b: np.sum((a - b) ** 2),
      states[0].server.params.theta,
      states[3].server.params.theta,
    )
    return sum(jax.tree.leaves(gap))

  assert moved(1e4) < 0.05 * moved(0.0)


def test_it_learns_and_predicts_with_one_error_bar():
  program, (states, infos) = _rounds(mu=0.0, by_rows=False)
  data = small().clients
  mean, variance = program.predict(states[-1], data.x[0])
  assert mean.shape == variance.shape == data.y[0].shape
  assert np.unique(np.asarray(variance)).size == 1
  assert infos[-1].train_nll < infos[0].train_nll - 0.05
  np.testing.assert_allclose(
    float(program.algorithm.scales(states[-1])[0]) ** 2, variance[0], rtol=1e-12
  )
  assert np.all(np.isfinite(infos[-1].client_loss))


def test_fedprox_without_pull_is_fedavg_bit_for_bit(x64_off):
  """In float32, without any wider type."""
  data, states = small(dtype=np.float32), []
  for method, fields in (("fedavg", {}), ("fedprox", {"fedprox__mu": 0.0})):
    program = methods.compiled(method, dtype="float32", **fields)
    (_, state), (info,) = methods.run(program, data, 1)
    assert np.isfinite(info.train_nll)
    states.append(state)
  assert_same_bits(*states)
  assert states[0].server.params.log_noise_std.dtype == np.float32


@pytest.mark.parametrize(
  "settings", [{"mu": -1.0}, {"mu": np.inf}, {"num_local_steps": 0}]
)
def test_bad_settings_are_refused_before_tracing(settings):
  with pytest.raises(InputError):
    fedavg.fedprox(NETWORK, adam(RATE), **({"num_local_steps": STEPS} | settings))
