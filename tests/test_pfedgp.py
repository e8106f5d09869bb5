"""pFedGP against a loop over clients, and its Gaussian processes against FITC."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbnr_jax import algorithms
from fedbnr_jax.algorithms import pfedgp
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import fitc, networks
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import config_checks
from tests import methods, oracles
from tests.methods import KEY, NUM_CLIENTS, SIZES, small

NETWORK = networks.Extractor(5, 2, 1, jnp.dtype("float64"))
# Options in company, where none hides another: each case costs a compilation.
CASES = {
  "default": {},
  "not normalised, by rows, with a floor": {
    "pfedgp__normalise": False,
    "mean__by_rows": True,
    "min_noise_std": 0.495,
  },
  "predictive": {"pfedgp__objective": "predictive"},
}


@functools.cache
def _first_exchange(**fields):
  """The start, and the parameters after the kernel's exchange of the first round."""
  learning = methods.built("pfedgp", **fields).exchanges[0]
  assert learning.name == "kernel"
  server = methods.two_rounds("pfedgp").states[0].server
  if fields.get("pfedgp__objective") == "predictive":
    server = server.replace(seed=np.asarray([3, 4], np.uint32))
  down, client = learning.broadcast(server, None), jax.jit(learning.client)
  messages = [
    jax.device_get(client(down, (), methods.rows_of(small(), k))[0])
    for k in range(NUM_CLIENTS)
  ]
  total = jax.tree.map(lambda *leaves: sum(leaves), *messages)
  return server, jax.device_get(learning.server(server, None, total).params)


def _embed(theta, x, normalise):
  latent = NETWORK.apply(theta, x)
  if not normalise:
    return latent
  return latent / jnp.sqrt(jnp.sum(latent**2, axis=1, keepdims=True) + 1e-12)


def _mean(values, mask):
  return jnp.sum(jnp.where(mask, values, jnp.zeros_like(values))) / jnp.sum(
    mask, dtype=values.dtype
  )


@functools.cache
def _slow_step(name):
  """A step of one client, with the floor of σ afterwards."""
  config = methods.config("pfedgp", **CASES[name])
  optimizer = oracles.loose(optax.adam(config.learning_rate))
  options = config.pfedgp

  def loss(params, rows, given):
    latent = _embed(params.network, rows.x, options.normalise)
    scales = params.scales
    if options.objective == "evidence":
      nll = fitc.negative_log_marginal_likelihood(
        latent, rows.y, params.inducing, scales, rows.mask
      )
      return nll / jnp.sum(rows.mask, dtype=nll.dtype)
    process = fitc.fit(latent, rows.y, params.inducing, scales, given)
    mean, variance = fitc.predict(process, latent)
    std = jnp.sqrt(variance + scales.noise_variance)
    density = jax.scipy.stats.norm.logpdf(rows.y, mean, std)
    return -_mean(density, rows.mask & ~given)

  def step(params, memory, rows, given):
    gradient = jax.grad(loss)(params, rows, given)
    updates, memory = optimizer.update(gradient, memory)
    params = optax.apply_updates(params, updates)
    floor = jnp.maximum(params.scales.log_noise_std, jnp.log(config.min_noise_std))
    scales = params.scales.replace(log_noise_std=floor)
    return params.replace(scales=scales), memory

  return config.num_local_steps, optimizer, jax.jit(step)


@pytest.mark.parametrize("name", CASES)
def test_a_round_is_local_steps_and_their_mean(name):
  start, got = _first_exchange(**CASES[name])
  num_steps, optimizer, step = _slow_step(name)
  ends = []
  for k in range(NUM_CLIENTS):
    rows, given = methods.rows_of(small(), k), np.zeros(12, bool)
    if "predictive" in name:
      key = jax.random.fold_in(jax.random.wrap_key_data(start.seed), 0)
      given = np.asarray(_half(key, rows.mask))
    params, memory = start.params, optimizer.init(start.params)
    for _ in range(num_steps):
      params, memory = step(params, memory, rows, given)
    ends.append(jax.device_get(params))
  if "floor" in name:  # On which some rest.
    assert min(end.scales.log_noise_std for end in ends) == np.log(0.495)
  weights = np.array(SIZES, float) if "by rows" in name else None
  wanted = jax.tree.map(
    lambda *leaves: np.average(leaves, axis=0, weights=weights), *ends
  )
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
  if name == "default":  # And the round does no more to the kernel.
    whole = methods.two_rounds("pfedgp").states[1].server.params
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


_half = jax.jit(pfedgp.random_half)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 8])
def test_halves_are_halves_of_the_rows_and_new_ones_each_round(num_rows):
  mask = np.arange(12) < num_rows
  halves = [np.asarray(_half(jax.random.key(i), mask)) for i in range(5)]
  assert all(half.sum() == (num_rows + 1) // 2 for half in halves)
  assert not any(half[num_rows:].any() for half in halves)
  assert len({half.tobytes() for half in halves}) > (1 if num_rows > 2 else 0)
  shorter = _half(jax.random.key(0), mask[:9])
  np.testing.assert_array_equal(shorter, halves[0][:9])


def test_a_server_of_the_predictive_objective_has_a_seed_to_send():
  algorithm = methods.built("pfedgp", **CASES["predictive"])
  state = jax.eval_shape(algorithm.init, KEY, small())
  assert (state.server.seed.shape, state.server.seed.dtype) == ((2,), np.uint32)
  assert methods.two_rounds("pfedgp").last.server.seed == ()


def test_each_client_predicts_from_its_own_rows():
  (*_, state), (*_, info) = methods.two_rounds("pfedgp")
  x = small().clients.x[3]
  mean, variance = methods.compiled("pfedgp").predict(state, x)
  params = state.server.params

  @jax.jit
  @jax.vmap
  def one(rows):
    latent = _embed(params.network, rows.x, True)
    arguments = (latent, rows.y, params.inducing, params.scales, rows.mask)
    nll = fitc.negative_log_marginal_likelihood(*arguments)
    wanted = fitc.predict(fitc.fit(*arguments), _embed(params.network, x, True))
    return *wanted, nll / jnp.sum(rows.mask, dtype=nll.dtype)

  wanted, wanted_variance, nll = one(small().clients)
  np.testing.assert_allclose(mean, wanted, rtol=1e-7, atol=1e-9)
  noise = float(params.scales.noise_variance)
  np.testing.assert_allclose(variance, np.asarray(wanted_variance) + noise, rtol=1e-7)
  np.testing.assert_allclose(info.train_nll, np.mean(nll), rtol=1e-8)


def test_scales_that_are_not_trained_stay():
  start, end = _first_exchange(pfedgp__train_scales=False)
  for a, b in zip(
    jax.tree.leaves(start.params.scales), jax.tree.leaves(end.scales), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-12)
  assert not np.allclose(start.params.inducing, end.inducing)


def test_a_round_in_float32():
  program, data = methods.compiled("pfedgp", dtype="float32"), small(dtype=np.float32)
  (_, state), (info,) = methods.run(program, data, 1)
  chex.assert_type(jax.tree.leaves(state.server.params), np.float32)
  chex.assert_tree_all_finite((state, info))
  mean, variance = program.predict(state, data.clients.x[3])
  assert np.all(np.isfinite(mean))
  assert np.all(variance > 0)


def test_no_inducing_inputs_are_refused():
  config = config_lib.base()
  config.pfedgp.num_inducing = 0
  with pytest.raises(InputError, match=r"pfedgp\.num_inducing"):
    config_checks.validate(config)
  with pytest.raises(InputError, match="num_inducing"):
    algorithms.method("pfedgp").build(config)
