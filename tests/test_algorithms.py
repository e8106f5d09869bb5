"""Rounds against a plain loop over clients, and the pooled Gaussian process."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbnr_jax import aggregation, algorithms, blr, clients, federation, urk
from fedbnr_jax import config as config_lib
from fedbnr_jax.algorithms import central, fedbnr
from fedbnr_jax.errors import InputError
from fedbnr_jax.mapping import Placement
from fedbnr_jax.participation import Participation
from tests import oracles

KEY = jax.random.key(0)
SIZES = [3, 11, 7, 12, 7]
NUM_ROWS = sum(SIZES)
STEPS, FLOOR = 3, 1e-2


def _table():
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(NUM_ROWS, 2))
  return inputs, np.sin(2 * inputs.sum(1)) + 0.1 * rng.normal(size=NUM_ROWS)


def _parts():
  return np.split(np.random.default_rng(1).permutation(NUM_ROWS), np.cumsum(SIZES)[:-1])


def _federation(parts=None, dtype=jnp.float64, num_padded_rows=None):
  parts = _parts() if parts is None else parts
  built = federation.build(
    *_table(), parts, dtype=dtype, num_padded_rows=num_padded_rows
  )
  rng = np.random.default_rng(2)
  x, y = rng.normal(size=(6, 2)), rng.normal(size=6)
  server = federation.ServerSet(jnp.asarray(x, dtype), jnp.asarray(y, dtype))
  return built.replace(server=server)


FEATURE_MAP = urk.deep(3, 5, latent_size=2, shifter_size=3)
APPLY = jax.jit(FEATURE_MAP.apply)
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
AGGREGATORS = {
  "fedbnr": aggregation.mean(),
  "fedbnr-kd": aggregation.distillation(
    FEATURE_MAP, OPTIMIZER, num_steps=2, alpha=1.0, min_noise_std=FLOOR
  ),
}


class Jitted(NamedTuple):
  """The functions of a method, compiled."""

  init: Any
  round: Any
  predict: Any


@functools.cache
def _algorithm(name, batch_size=None):
  built = fedbnr.fedbnr(
    FEATURE_MAP,
    OPTIMIZER,
    AGGREGATORS["fedbnr" if name == "central" else name],
    num_local_steps=STEPS,
    min_noise_std=FLOOR,
    placement=Placement(batch_size),
  )
  if name == "central":
    built = central.central(built)
  return Jitted(*map(jax.jit, (built.init, built.round, built.predict)))


def _run(algorithm, data, num_rounds=2):
  state, infos = algorithm.init(KEY, data), []
  for _ in range(num_rounds):
    state, info = algorithm.round(KEY, state, data)
    infos.append(info)
  return state, infos


def _pooled_features(state, data):
  mask = np.asarray(data.clients.mask)
  x, y = np.asarray(data.clients.x)[mask], np.asarray(data.clients.y)[mask]
  params = urk.FeatureParams(state.omega, state.params.theta)
  return np.asarray(APPLY(params, jnp.asarray(x))), y


# -------------------------------------------------------------------- the round


@functools.cache
def _slow_step():
  """One optimiser step of one client, jitted for speed alone."""
  loss = clients.evidence_loss(FEATURE_MAP)

  def step(params, state, omega, rows):
    value, gradient = jax.value_and_grad(loss)(params, omega, rows)
    updates, state = OPTIMIZER.update(gradient, state, params)
    params = optax.apply_updates(params, updates)
    floor = jnp.maximum(params.log_noise_std, jnp.log(FLOOR))
    return params.replace(log_noise_std=floor), state, value

  return jax.jit(step)


def _slow_round(state, data, aggregator):
  """A loop over clients, one at a time."""
  message, combine = jax.jit(aggregator.message), jax.jit(aggregator.combine)
  messages, losses = [], []
  for k in range(data.num_clients):
    rows = jax.tree.map(lambda leaf, k=k: leaf[k], data.clients)
    params, optimizer_state = state.params, OPTIMIZER.init(state.params)
    for _ in range(STEPS):
      params, optimizer_state, loss = _slow_step()(
        params, optimizer_state, state.omega, rows
      )
    messages.append(message(params, state.omega, rows, data.server))
    losses.append(loss)
  total = jax.tree.map(lambda *leaves: sum(leaves), *messages)
  params = combine(state.params, state.omega, total, data.server)
  return params, losses


@pytest.mark.parametrize("batch_size", [None, 2, 1], ids=["auto", "chunks", "singly"])
@pytest.mark.parametrize("name", AGGREGATORS)
def test_round_is_a_plain_loop_over_clients(name, batch_size):
  data, algorithm = _federation(), _algorithm(name, batch_size)
  state = algorithm.init(KEY, data)
  for _ in range(2):
    params, losses = _slow_round(state, data, AGGREGATORS[name])
    state, info = algorithm.round(KEY, state, data)
    chex.assert_trees_all_close(state.params, params, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(info.client_loss, losses, rtol=1e-10)
    np.testing.assert_array_equal(info.answered, [True] * len(SIZES))
    assert int(state.num_clients) == len(SIZES)
  assert int(state.num_rounds) == 2


@pytest.mark.parametrize("name", AGGREGATORS)
def test_last_layer_is_the_dense_process_on_the_pooled_rows(name):
  data, algorithm = _federation(), _algorithm(name)
  state, infos = _run(algorithm, data)
  features, y = _pooled_features(state, data)
  scales = float(state.params.noise_std), float(state.params.prior_std)
  query = jnp.asarray(np.random.default_rng(3).normal(size=(5, 2)))
  mean, variance = algorithm.predict(state, query)
  params = urk.FeatureParams(state.omega, state.params.theta)
  queried = np.asarray(APPLY(params, query))
  expected = oracles.gp_predict(features, y, queried, *scales)
  np.testing.assert_allclose(mean, expected[0], rtol=1e-9, atol=1e-10)
  np.testing.assert_allclose(variance, expected[1], rtol=1e-9)
  nll = oracles.gp_nll(features, y, *scales) / NUM_ROWS
  np.testing.assert_allclose(infos[-1].train_nll, nll, rtol=1e-9)
  expected = blr.sufficient_stats(jnp.asarray(features), jnp.asarray(y))
  chex.assert_trees_all_close(state.stats, expected, rtol=1e-10, atol=1e-11)


def test_training_lowers_the_global_evidence_loss():
  _, infos = _run(_algorithm("fedbnr"), _federation(), 8)
  assert infos[-1].train_nll < infos[0].train_nll - 0.02


@pytest.mark.parametrize(
  "participation", [Participation(), Participation(0.5, 0.2)], ids=["full", "partial"]
)
def test_many_rounds_are_one_trace(participation):
  chex.clear_trace_counter()
  algorithm, data = _algorithm("fedbnr"), _federation()
  state = algorithm.init(KEY, data)
  counted = jax.jit(chex.assert_max_traces(fedbnr_round(participation), n=1))
  for index in range(3):
    state, _ = counted(jax.random.key(index), state, data)
  assert int(state.num_rounds) == 3


def fedbnr_round(participation):
  return fedbnr.fedbnr(
    FEATURE_MAP,
    OPTIMIZER,
    AGGREGATORS["fedbnr"],
    num_local_steps=STEPS,
    participation=participation,
  ).round


@pytest.mark.parametrize("batch_size", [None, 2, 1], ids=["auto", "chunks", "singly"])
def test_round_keeps_the_types_of_the_state(batch_size, any_x64):
  dtype = jnp.float64 if any_x64 else jnp.float32
  data, algorithm = _federation(dtype=dtype), _algorithm("fedbnr", batch_size)
  before = algorithm.init(KEY, data)
  after, _ = algorithm.round(KEY, before, data)
  chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
  assert before.num_clients.dtype == jnp.int32


# ------------------------------------------------------------------- invariances


@pytest.mark.parametrize("name", AGGREGATORS)
def test_order_of_clients_does_not_matter(name):
  data, algorithm = _federation(), _algorithm(name)
  state, infos = _run(algorithm, data)
  order = np.array([3, 0, 4, 2, 1])
  shuffled = jax.tree.map(lambda leaf: leaf[order], data.clients)
  other, other_infos = _run(algorithm, data.replace(clients=shuffled))
  chex.assert_trees_all_close(other, state, rtol=1e-10, atol=1e-11)
  np.testing.assert_allclose(
    other_infos[-1].client_loss, infos[-1].client_loss[order], rtol=1e-10
  )


@pytest.mark.parametrize("name", ["fedbnr", "fedbnr-kd", "central"])
def test_padding_length_changes_at_most_the_last_digits(name):
  # 14 and 16 rows: both in the primal form, with more rows than the 6 features.
  algorithm = _algorithm(name)
  state, _ = _run(algorithm, _federation(num_padded_rows=14), 1)
  longer, _ = _run(algorithm, _federation(num_padded_rows=16), 1)
  chex.assert_trees_all_close(longer, state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("held", [-7.0, 1e6, np.nan])
@pytest.mark.parametrize("name", ["fedbnr", "fedbnr-kd", "central"])
def test_what_padding_holds_changes_no_bit(name, held):
  data, algorithm = _federation(), _algorithm(name)
  state, infos = _run(algorithm, data)
  mask = data.clients.mask
  dirty = data.clients.replace(
    x=jnp.where(mask[..., None], data.clients.x, held),
    y=jnp.where(mask, data.clients.y, held),
  )
  other, other_infos = _run(algorithm, data.replace(clients=dirty))
  chex.assert_trees_all_equal(other, state)
  chex.assert_trees_all_equal(other_infos, infos)


def test_central_is_fedbnr_with_one_client_for_any_deal():
  whole = _federation([np.arange(NUM_ROWS)])
  expected, _ = _run(_algorithm("fedbnr"), whole)
  got, infos = _run(_algorithm("central"), _federation())
  chex.assert_trees_all_close(got, expected, rtol=1e-10, atol=1e-11)
  assert infos[0].client_loss.shape == infos[0].answered.shape == (1,)
  assert int(got.num_clients) == 1


def test_initial_kernel_depends_on_the_key_alone():
  algorithm = _algorithm("fedbnr")
  one = algorithm.init(KEY, _federation([np.arange(NUM_ROWS)]))
  many = algorithm.init(KEY, _federation())
  chex.assert_trees_all_equal(one, many)
  data = _federation()
  data = data.replace(clients=data.clients.replace(x=data.clients.x + 1))
  chex.assert_trees_all_equal(algorithm.init(KEY, data), many)
  other = algorithm.init(jax.random.key(1), _federation())
  assert not np.array_equal(other.omega, many.omega)


@pytest.mark.parametrize("name", ["fedbnr", "fedbnr-kd", "central"])
def test_before_the_first_round_predictions_are_the_priors(name):
  algorithm = _algorithm(name)
  state = algorithm.init(KEY, _federation())
  assert int(state.num_clients) == int(state.num_rounds) == 0
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.stats))
  query = jnp.asarray(np.random.default_rng(3).normal(size=(5, 2)))
  mean, variance = algorithm.predict(state, query)
  features = APPLY(urk.FeatureParams(state.omega, state.params.theta), query)
  np.testing.assert_array_equal(mean, 0)
  # σ = 0.5, λ = 1.
  np.testing.assert_allclose(variance, 0.25 + np.sum(features**2, 1), rtol=1e-12)


def test_noise_stays_above_its_floor():
  """Targets that the kernel fits without noise pull σ down."""
  data = _federation()
  data = data.replace(clients=data.clients.replace(y=0 * data.clients.y))
  state, _ = _run(_algorithm("fedbnr"), data, 60)
  np.testing.assert_allclose(state.params.noise_std, FLOOR, rtol=1e-6)


# --------------------------------------------------------------- dtypes and size


@pytest.mark.parametrize("name", AGGREGATORS)
def test_network_is_float32_and_statistics_as_wide_as_they_can(name, any_x64):
  data, algorithm = _federation(dtype=jnp.float32), _algorithm(name)
  state, infos = _run(algorithm, data, 1)
  network = [*jax.tree.leaves(state.params), *jax.tree.leaves(state.omega)]
  chex.assert_type([*network, infos[0].client_loss], jnp.float32)
  wide = jnp.float64 if any_x64 else jnp.float32
  last_layer = [*jax.tree.leaves(state.stats), *jax.tree.leaves(state.posterior)]
  chex.assert_type([*last_layer, infos[0].train_nll], wide)
  mean, variance = algorithm.predict(state, data.clients.x[0])
  assert np.all(np.isfinite(mean))
  assert np.all(variance > 0)


def test_floats_are_those_of_phase_one_and_the_merged_phase_two():
  state, infos = _run(_algorithm("fedbnr"), _federation(), 1)
  num_kernel = sum(leaf.size for leaf in jax.tree.leaves(state.params.theta))
  q = 2 * 3  # Two features a sample.
  triangle = q * (q + 1) // 2
  assert int(infos[0].floats_up) == num_kernel + 2 + triangle + q + 2
  assert int(infos[0].floats_down) == num_kernel + 2 + triangle + q


def test_floats_of_distillation_are_those_of_a_gram_on_the_servers_rows():
  data = _federation()
  state, infos = _run(_algorithm("fedbnr-kd"), data, 1)
  num_rows, q = data.server.y.shape[0], state.stats.moment.shape[0]
  gram, phase_two = num_rows * (num_rows + 1) // 2, q * (q + 1) // 2 + q
  assert int(infos[0].floats_up) == gram + phase_two + 2
  assert int(infos[0].floats_down) == state.params.size + phase_two


def test_pooled_rows_need_no_messages():
  _, infos = _run(_algorithm("central"), _federation(), 1)
  assert int(infos[0].floats_up) == int(infos[0].floats_down) == 0


# ------------------------------------------------------------------- the registry


@pytest.mark.parametrize(
  "typo, meant", [("fedbrn", "fedbnr"), ("fedbnr-dk", "fedbnr-kd"), ("CENTRAL", "cent")]
)
def test_misspelt_method_is_answered_with_the_nearest(typo, meant):
  with pytest.raises(InputError, match=f"{typo}.*did you mean '{meant}"):
    algorithms.method(typo)


def _config(**changes):
  config = config_lib.base()
  sizes = {"num_samples": 3, "hidden_size": 5, "latent_size": 2, "num_local_steps": 2}
  config.update({**sizes, **changes})
  config.kd.num_steps = 2
  return config


@pytest.mark.parametrize("name", algorithms.METHODS)
def test_every_method_runs_from_its_config(name):
  config, data = _config(client_batch_size=1), _federation(dtype=jnp.float32)
  method = algorithms.method(name)
  algorithm = method.build(config)
  state = algorithm.init(KEY, data)
  state, info = jax.jit(algorithm.round)(KEY, state, data)
  assert np.isfinite(info.train_nll)
  assert info.client_loss.shape == ((1,) if method.pooled else (5,))
  assert method.pooled == (name == "central")
  assert method.distils == ("kd" in name)


def test_config_reaches_the_method():
  data = _federation(dtype=jnp.float32)
  config = _config(initial_noise_std=0.25, initial_prior_std=2.0, num_samples=4)
  algorithm = algorithms.method("fedbnr").build(config)
  state = algorithm.init(KEY, data)
  np.testing.assert_allclose(state.posterior.noise_std, 0.25, rtol=1e-6)
  np.testing.assert_allclose(state.posterior.prior_std, 2.0, rtol=1e-6)
  assert state.stats.moment.shape == (8,)


@pytest.mark.parametrize(
  "name, value",
  [("num_local_steps", 0), ("initial_noise_std", -1.0)]
  + [("initial_prior_std", float("nan")), ("min_noise_std", 0.0)]
  + [("batch_size", value) for value in (0, -1)]
  + [("participation", value) for value in (0.0, -1.0, 1.5, float("nan"))]
  + [("dropout", value) for value in (1.0, -0.1, float("nan"))],
)
def test_impossible_settings_are_refused_by_name(name, value):
  settings = {"num_local_steps": 1} | {
    "batch_size": {"placement": Placement(value)},
    "participation": {"participation": Participation(fraction=value)},
    "dropout": {"participation": Participation(dropout=value)},
  }.get(name, {name: value})
  with pytest.raises(InputError, match=name):
    fedbnr.fedbnr(FEATURE_MAP, OPTIMIZER, AGGREGATORS["fedbnr"], **settings)
