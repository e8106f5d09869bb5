"""FedLoc: proximal ADMM against its definition, the fusion against experts.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax import algorithms, experts, federation, fitc
from fedbnr_jax import config as config_lib
from fedbnr_jax.algorithms import fedloc
from fedbnr_jax.errors import InputError

KEY = jax.random.key(0)
SETTINGS = {
  "rho": 50.0,
  "proximity": 10.0,
  "num_iterations": 3,
  "num_inducing": 6,
  "rule": "rbcm",
}


@functools.cache
def _federation(num_clients=3):
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(35, 2))
  targets = np.sin(2 * inputs[:, 0]) + 0.1 * rng.normal(size=35)
  parts = federation.partition("sorted", rng, inputs, targets, num_clients)
  return federation.build(inputs, targets, parts, dtype=jnp.float64)


@functools.cache
def _rounds(num_rounds=2, num_clients=3, **settings):
  built = fedloc.fedloc(**(SETTINGS | settings))
  data = _federation(num_clients)
  states, round_ = [built.init(KEY, data)], jax.jit(built.round)
  for _ in range(num_rounds):
    state, info = round_(KEY, states[-1], data)
    states.append(state)
  return built, states, info


def _rows(index, num_clients=3):
  """Without padding."""
  data = _federation(num_clients).clients
  keep = np.asarray(data.mask[index])
  return data.x[index][keep], data.y[index][keep]


@pytest.mark.parametrize("ard", [True, False])
def test_rounds_are_iterations_of_proximal_admm(ard):
  _, (start, *_, got), info = _rounds(ard=ard)
  rho, proximity = SETTINGS["rho"], SETTINGS["proximity"] * SETTINGS["rho"]
  consensus = start.params
  multipliers = [jax.tree.map(jnp.zeros_like, consensus)] * 3

  @jax.jit
  def gradient(params, x, y, inducing):
    nll = fitc.negative_log_marginal_likelihood
    return jax.grad(lambda params: nll(x, y, inducing, params))(params)

  for _ in range(2 * SETTINGS["num_iterations"]):
    messages = []
    for index in range(3):
      own = gradient(consensus, *_rows(index), start.personal.inducing[index])
      local = jax.tree.map(
        lambda z, g, b: z - (g + b) / (rho + proximity),
        consensus,
        own,
        multipliers[index],
      )
      multipliers[index] = jax.tree.map(
        lambda b, n, z: b + rho * (n - z), multipliers[index], local, consensus
      )
      messages.append(jax.tree.map(lambda n, b: n + b / rho, local, multipliers[index]))
    consensus = jax.tree.map(lambda *leaves: sum(leaves) / 3, *messages)
  for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(consensus), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)
  size = (2 if ard else 1) + 2
  iterations = SETTINGS["num_iterations"]
  assert int(info.floats_up) == iterations * size
  assert int(info.floats_down) == iterations * size


def test_the_consensus_follows_momentum_descent_on_the_mean_gradient():
  """Quadratics ½ a (z − m)² of five clients: only the mean of β comes back into z."""
  rng = np.random.default_rng(1)
  curvature, centre = rng.uniform(0.5, 2.0, (5, 4)), rng.normal(size=(5, 4))
  rho, factor = 3.0, 10.0
  z, multipliers = jnp.zeros(4), [jnp.zeros(4)] * 5
  server, momentum = np.zeros(4), np.zeros(4)
  for _ in range(60):
    ends = []
    for index in range(5):
      gradient = jnp.asarray(curvature[index] * (np.asarray(z) - centre[index]))
      local, multipliers[index] = fedloc.admm_step(
        z, gradient, multipliers[index], rho=rho, proximity=factor
      )
      ends.append(local + multipliers[index] / rho)
    z = sum(ends) / 5
    mean = np.mean(curvature * (server - centre), axis=0)
    renewed = (factor * rho * momentum - rho * mean) / (rho + factor * rho)
    server = server - (mean + momentum) / (rho + factor * rho) + renewed / rho
    momentum = renewed
    np.testing.assert_allclose(z, server, rtol=1e-10, atol=1e-12)


def test_a_large_rho_holds_the_scales_where_they_are():
  _, (start, *_, end), _ = _rounds(rho=1e9)
  for a, b in zip(
    jax.tree.leaves(start.params), jax.tree.leaves(end.params), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("rule", ["rbcm", "poe"])
def test_prediction_is_fused_from_processes_of_own_rows(rule):
  built, (*_, state), _ = _rounds(rule=rule)
  x = _federation().clients.x[0, :7]
  params = state.params
  predictions = [
    fitc.predict(fitc.fit(*_rows(index), state.personal.inducing[index], params), x)
    for index in range(3)
  ]
  means, variances = (jnp.stack(part) for part in zip(*predictions, strict=True))
  mean, variance = experts.fuse(rule, means, variances, params.prior_variance)
  got_mean, got_variance = built.predict(state, x)
  np.testing.assert_allclose(got_mean, mean, rtol=1e-7, atol=1e-9)
  np.testing.assert_allclose(got_variance, variance + params.noise_variance, rtol=1e-7)


def test_inducing_inputs_are_the_clients_own_rows():
  _, (start, *_), _ = _rounds()
  for index in range(3):
    x, _ = _rows(index)
    for chosen in np.asarray(start.personal.inducing[index]):
      assert np.any(np.all(np.isclose(np.asarray(x), chosen), axis=1))


def test_one_client_with_all_rows_inducing_is_an_exact_process():
  built, (*_, state), _ = _rounds(num_clients=1, num_inducing=35, rule="bcm")
  x, y = (np.asarray(part) for part in _rows(0, 1))
  params = state.params

  def kernel(a, b):
    gap = (a[:, None, :] - b[None, :, :]) / np.asarray(params.length_scale)
    return float(params.prior_variance) * np.exp(-0.5 * np.sum(gap**2, axis=2))

  new = x[:5] + 0.1
  gram = kernel(x, x) + float(params.noise_variance) * np.eye(len(y))
  wanted = kernel(new, x) @ np.linalg.solve(gram, y)
  mean, _ = built.predict(state, jnp.asarray(new))
  np.testing.assert_allclose(mean, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
  "name, value",
  [("rule", "rbmc"), ("rho", 0.0), ("num_inducing", 0), ("num_iterations", -1)],
)
def test_bad_options_are_refused(name, value):
  config = config_lib.base()
  config.fedloc[name] = value
  with pytest.raises(InputError, match="did you mean" if name == "rule" else name):
    algorithms.method("fedloc").build(config)
