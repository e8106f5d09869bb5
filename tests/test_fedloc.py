"""FedLoc: proximal ADMM against its definition, the fusion against experts.py."""

import functools

import chex
import jax
import numpy as np
import pytest

from fedbnr_jax import algorithms
from fedbnr_jax.algorithms import fedloc
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import experts, fitc
from fedbnr_jax.run import config as config_lib
from tests import methods
from tests.methods import KEY, NUM_CLIENTS, NUM_ROWS, small

RHO, FACTOR, NUM_ITERATIONS = 50.0, 10.0, 2


@functools.cache
def _gradient():
  """Of the evidence of one client's rows, whose padding has no weight."""

  def evidence(params, rows, inducing):
    return fitc.negative_log_marginal_likelihood(
      rows.x, rows.y, inducing, params, rows.mask
    )

  return jax.jit(jax.grad(evidence))


def _slow_iterations(start, inducing, num_iterations):
  """Proximal ADMM, client by client: the consensus and all multipliers."""
  consensus = start
  multipliers = [jax.tree.map(np.zeros_like, consensus)] * NUM_CLIENTS
  for _ in range(num_iterations):
    messages = []
    for k in range(NUM_CLIENTS):
      gradient = _gradient()(consensus, methods.rows_of(small(), k), inducing[k])
      local = jax.tree.map(
        lambda z, g, b: z - (g + b) / (RHO + FACTOR * RHO),
        consensus,
        jax.device_get(gradient),
        multipliers[k],
      )
      multipliers[k] = jax.tree.map(
        lambda b, n, z: b + RHO * (n - z), multipliers[k], local, consensus
      )
      messages.append(jax.tree.map(lambda n, b: n + b / RHO, local, multipliers[k]))
    consensus = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *messages)
  return consensus, jax.tree.map(lambda *leaves: np.stack(leaves), *multipliers)


def _assert_close(one, other):
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8)


def test_rounds_are_iterations_of_proximal_admm():
  options = methods.config("fedloc").fedloc
  assert (options.rho, options.proximity) == (RHO, FACTOR)
  assert options.num_iterations == NUM_ITERATIONS
  states, _ = methods.two_rounds("fedloc")
  start = states[0]
  assert start.server.params.log_length_scale.shape == (2,)
  wanted = _slow_iterations(start.server.params, start.own.inducing, 2 * NUM_ITERATIONS)
  _assert_close((states[-1].server.params, states[-1].own.multipliers), wanted)


def test_one_length_scale_for_all_inputs_is_one_that_is_agreed_on():
  """One iteration, message by message."""
  algorithm = methods.built("fedloc", fedloc__ard=False)
  shapes = jax.eval_shape(algorithm.init, KEY, small())
  assert shapes.server.params.log_length_scale.shape == ()
  start = methods.two_rounds("fedloc").states[0]
  params = fitc.KernelParams(np.array(0.1), np.array(0.0), np.array(-0.5))
  server, iterate = start.server.replace(params=params), algorithm.exchanges[0]
  down, client = iterate.broadcast(server, None), jax.jit(iterate.client)
  zeros = jax.tree.map(np.zeros_like, params)
  answers = []
  for k in range(NUM_CLIENTS):
    own = jax.tree.map(lambda leaf, k=k: leaf[k], start.own).replace(multipliers=zeros)
    answers.append(jax.device_get(client(down, own, methods.rows_of(small(), k))))
  total = jax.tree.map(lambda *leaves: sum(leaves), *[up for up, *_ in answers])
  multipliers = jax.tree.map(
    lambda *leaves: np.stack(leaves), *[own.multipliers for _, own, _ in answers]
  )
  wanted = _slow_iterations(params, start.own.inducing, 1)
  _assert_close((iterate.server(server, None, total).params, multipliers), wanted)


def test_the_consensus_follows_momentum_descent_on_the_mean_gradient():
  """Quadratics ½ a (z − m)² of five clients: only the mean of β comes back into z."""
  rng = np.random.default_rng(1)
  curvature, centre = rng.uniform(0.5, 2.0, (5, 4)), rng.normal(size=(5, 4))
  rho, factor = 3.0, 10.0
  z, multipliers = np.zeros(4), [np.zeros(4)] * 5
  server, momentum = np.zeros(4), np.zeros(4)
  for _ in range(60):
    ends = []
    for index in range(5):
      gradient = curvature[index] * (z - centre[index])
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
  """In whole rounds, with one length-scale for all inputs."""
  (start, *_, end), _ = methods.two_rounds("fedloc", fedloc__rho=1e9, fedloc__ard=False)
  assert start.server.params.log_length_scale.shape == ()
  chex.assert_trees_all_close(start.server.params, end.server.params, atol=1e-6, rtol=0)
  moved = jax.tree.map(np.array_equal, start.server.params, end.server.params)
  assert not any(jax.tree.leaves(moved))


def test_a_large_rho_holds_one_step_where_it_is():
  z, gradient = np.ones(3), np.array([-1e3, 0.0, 1e3])
  local, multipliers = fedloc.admm_step(
    z, gradient, np.zeros(3), rho=1e9, proximity=10.0
  )
  np.testing.assert_allclose(local + multipliers / 1e9, z, atol=1e-6)


@pytest.mark.parametrize("log_noise_std", [400.0, np.nan])
def test_scales_that_have_diverged_show_in_every_clients_loss(log_noise_std):
  """As they do after steps with too small a ρ: what a training stops by."""
  start = methods.two_rounds("fedloc").last
  params = start.server.params.replace(log_noise_std=np.array(log_noise_std))
  start = start.replace(server=start.server.replace(params=params))
  _, (info,) = methods.run(methods.compiled("fedloc"), small(), 1, start)
  assert not np.any(np.isfinite(info.client_loss))


@functools.cache
def _processes():
  """Mean and variance of each client's process at x, fitted anew."""

  def one(rows, inducing, params, x):
    return fitc.predict(fitc.fit(rows.x, rows.y, inducing, params, rows.mask), x)

  return jax.jit(jax.vmap(one, in_axes=(0, 0, None, None)))


@pytest.mark.parametrize("method, rule", [("fedloc", "rbcm"), ("fedloc-poe", "poe")])
def test_prediction_is_fused_from_processes_of_own_rows(method, rule):
  state, x = methods.two_rounds(method).last, small().clients.x[3]
  params = state.server.params
  means, variances = _processes()(small().clients, state.own.inducing, params, x)
  mean, variance = jax.jit(lambda *a: experts.fusion(rule)(*a))(
    means, variances, params.prior_variance
  )
  got_mean, got_variance = methods.compiled(method).predict(state, x)
  np.testing.assert_allclose(got_mean, mean, rtol=1e-7, atol=1e-9)
  noise = np.asarray(params.noise_variance)
  np.testing.assert_allclose(got_variance, variance + noise, rtol=1e-7)


def test_inducing_inputs_are_the_clients_own_rows():
  start = methods.two_rounds("fedloc").states[0]
  for k in range(NUM_CLIENTS):
    rows = methods.rows_of(small(), k)
    for chosen in start.own.inducing[k]:
      assert np.any(np.all(np.isclose(rows.x[rows.mask], chosen), axis=1))


def test_one_client_with_all_rows_inducing_is_an_exact_process():
  fields = {"fedloc__num_inducing": NUM_ROWS, "fedloc__rule": "bcm"}
  algorithm, data = methods.built("fedloc", **fields), small([np.arange(NUM_ROWS)])
  x, y = methods.table()
  new = x[:5] + 0.1

  @jax.jit
  def fitted(data):
    """The start, and the prediction after the exchange that makes processes."""
    state, processes = algorithm.init(KEY, data), algorithm.exchanges[1]
    own = jax.tree.map(lambda leaf: leaf[0], state.own)
    down = processes.broadcast(state.server, None)
    _, own, _ = processes.client(down, own, methods.rows_of(data, 0))
    own = jax.tree.map(lambda leaf: leaf[None], own)
    return state.server.params, algorithm.predict(state.replace(own=own), new)

  params, (mean, _) = fitted(data)

  def kernel(a, b):
    gap = (a[:, None, :] - b[None, :, :]) / np.asarray(params.length_scale)
    return float(params.prior_variance) * np.exp(-0.5 * np.sum(gap**2, axis=2))

  gram = kernel(x, x) + float(params.noise_variance) * np.eye(len(y))
  wanted = kernel(new, x) @ np.linalg.solve(gram, y)
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
