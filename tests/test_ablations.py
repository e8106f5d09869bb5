"""Ablations against a loop over clients: whose kernel, whose rows in the last layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax import algorithms, blr, clients, federation, streaming, urk
from fedbnr_jax import config as config_lib
from fedbnr_jax.errors import InputError
from fedbnr_jax.optimizers import adam

KEY = jax.random.key(0)
NUM_CLIENTS = 3
STEPS = 4


@functools.cache
def _federation():
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(35, 2))
  targets = np.sin(2 * inputs[:, 0]) + 0.1 * rng.normal(size=35)
  parts = federation.partition("sorted", rng, inputs, targets, NUM_CLIENTS)
  built = federation.build(inputs, targets, parts, dtype=jnp.float64)
  server = federation.ServerSet(jnp.asarray(inputs[:6]), jnp.asarray(targets[:6]))
  return built.replace(server=server)


@functools.cache
def _config():
  config = config_lib.base()
  sizes = {"num_samples": 3, "hidden_size": 4, "latent_size": 2, "dtype": "float64"}
  config.update({**sizes, "num_local_steps": STEPS})
  config.kd.num_steps = 2
  return config


@functools.cache
def _built(method):
  return algorithms.method(method).build(_config())


@functools.cache
def _rounds(method, num_rounds=2):
  built = _built(method)
  states, round_ = [built.init(KEY, _federation())], jax.jit(built.round)
  infos = []
  for _ in range(num_rounds):
    state, info = round_(KEY, states[-1], _federation())
    states.append(state)
    infos.append(info)
  return states, infos


def _rows(index):
  return jax.tree.map(lambda leaf: leaf[index], _federation().clients)


def _own(state, index):
  return jax.tree.map(lambda leaf: leaf[index], state.personal)


def _assert_posterior(got, stats, params):
  wanted = blr.posterior(stats, params.noise_std, params.prior_std)
  np.testing.assert_allclose(got.mean, wanted.mean, rtol=1e-8, atol=1e-10)
  np.testing.assert_allclose(got.cholesky, wanted.cholesky, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
  "method, whole", [("avg+local", "fedbnr"), ("kd+local", "fedbnr-kd")]
)
def test_global_kernel_with_last_layers_of_own_rows(method, whole):
  (*_, state), (*_, info) = _rounds(method)
  (*_, reference), _ = _rounds(whole)
  feature_map = urk.from_config(_config())
  for a, b in zip(
    jax.tree.leaves(state.params), jax.tree.leaves(reference.params), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
  for index in range(NUM_CLIENTS):
    own = clients.local_stats(feature_map, state.params, state.omega, _rows(index))
    _assert_posterior(_own(state, index).posterior, own, state.params)
  assert int(info.floats_down) == state.params.size
  assert info.client_loss.shape == (NUM_CLIENTS,)


def _alone(index, num_rounds=2):
  """The kernel of a client that never hears of the others."""
  feature_map = urk.from_config(_config())
  loss = clients.evidence_loss(feature_map)
  (start, *_), _ = _rounds("local+local")
  params = start.params

  @jax.jit
  def steps(params, rows):
    return clients.descend(
      lambda params: loss(params, start.omega, rows),
      adam(_config().learning_rate),
      STEPS,
      params,
      functools.partial(clients.keep_above, 1e-3),
    )[0]

  for _ in range(num_rounds):
    params = steps(params, _rows(index))
  return params


@pytest.mark.parametrize("method", ["local+local", "local+global"])
def test_kernels_of_their_own_with_local_and_global_last_layers(method):
  (*_, state), (*_, info) = _rounds(method)
  feature_map = urk.from_config(_config())
  for index in range(NUM_CLIENTS):
    own, wanted = _own(state, index), _alone(index)
    for a, b in zip(jax.tree.leaves(own.params), jax.tree.leaves(wanted), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11)
    holders = [index] if method == "local+local" else range(NUM_CLIENTS)
    stats = [
      clients.local_stats(feature_map, own.params, state.omega, _rows(other))
      for other in holders
    ]
    _assert_posterior(
      own.posterior, functools.reduce(lambda a, b: a + b, stats), own.params
    )
  if method == "local+local":
    assert int(info.floats_up) == int(info.floats_down) == 0
  else:  # Every kernel's statistics, of every client.
    q = 6
    statistics = q * (q + 1) // 2 + q + 2
    assert int(info.floats_up) == state.params.size + NUM_CLIENTS * statistics


@pytest.mark.parametrize("method", ["avg+local", "local+local"])
def test_prediction_is_a_row_a_client(method):
  (*_, state), _ = _rounds(method)
  x = _federation().clients.x[0, :5]
  mean, variance = _built(method).predict(state, x)
  assert mean.shape == variance.shape == (NUM_CLIENTS, 5)
  feature_map = urk.from_config(_config())
  for index in range(NUM_CLIENTS):
    own = _own(state, index)
    params = state.params if own.params is None else own.params
    features = clients.features_of(feature_map, params, state.omega, x)
    wanted_mean, wanted_variance = blr.predict(own.posterior, features)
    np.testing.assert_allclose(mean[index], wanted_mean, rtol=1e-9)
    np.testing.assert_allclose(variance[index], wanted_variance, rtol=1e-9)


def test_those_who_are_not_asked_keep_what_they_have():
  config = _config().copy_and_resolve_references()
  config.participation = 0.4  # One of three.
  built = algorithms.method("local+local").build(config)
  start = built.init(KEY, _federation())
  state, info = jax.jit(built.round)(KEY, start, _federation())
  answered = np.asarray(info.answered)
  assert answered.sum() == 1
  kernels = state.personal.params.log_noise_std
  changed = np.asarray(kernels != start.personal.params.log_noise_std)
  np.testing.assert_array_equal(changed, answered)
  # Everybody has a last layer all the same.
  assert int(state.num_clients) == NUM_CLIENTS
  assert np.all(np.asarray(state.personal.nll) != 0)


@pytest.mark.parametrize("method", ["avg+local", "local+global", "pfedgp", "fedloc"])
def test_statistics_of_those_who_answer_are_refused_where_all_have_models(method):
  config = _config().copy_and_resolve_references()
  config.participation, config.statistics = 0.4, "answering"
  with pytest.raises(InputError, match=r"config\.statistics"):
    algorithms.method(method).build(config)


def test_models_of_clients_do_not_stream():
  with pytest.raises(InputError, match="stream_clients"):
    streaming.streamed(_built("avg+local"), 2)
