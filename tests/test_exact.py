"""Exact federated gradients against pooled training, and their economical variants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax import algorithms, blr, federation, streaming
from fedbnr_jax import config as config_lib
from fedbnr_jax.errors import InputError
from tests import oracles

KEY = jax.random.key(0)
NUM_ROWS = 60


def _table():
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(NUM_ROWS, 3))
  truth = np.sin(1.5 * inputs[:, 0]) + 0.5 * inputs[:, 1]
  return inputs, truth + 0.1 * rng.normal(size=NUM_ROWS)


def _federation(rule="sorted", num_clients=5, dtype=jnp.float64):
  inputs, targets = _table()
  rng = np.random.default_rng(1)
  parts = federation.partition(rule, rng, inputs, targets, num_clients)
  return federation.build(inputs, targets, parts, dtype=dtype)


@functools.cache
def _built(method="fedbnr-exact", **changes):
  config = config_lib.base()
  sizes = {"num_samples": 4, "hidden_size": 6, "latent_size": 2, "num_local_steps": 10}
  config.update_from_flattened_dict({**sizes, "length_scale": 1.0, **changes})
  config.dtype = "float64"
  return algorithms.method(method).build(config)


@functools.cache
def _jitted(**changes):
  return jax.jit(_built(**changes).round)


def _rounds(data, num_rounds=2, **changes):
  round_ = _jitted(**changes)
  # Not jitted: its parts are compiled once for all variants.
  states, infos = [_built(**changes).init(KEY, data)], []
  for number in range(num_rounds):
    state, info = round_(jax.random.fold_in(KEY, number), states[-1], data)
    states.append(state)
    infos.append(info)
  return states, infos


def _assert_close(one, other, tolerance):
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    gap = np.linalg.norm(np.asarray(a) - np.asarray(b))
    assert gap <= tolerance * np.linalg.norm(np.asarray(b))


# ------------------------------------------------------------------ the plain method


@pytest.mark.parametrize(
  "rule, num_clients", [("sorted", 1), ("sorted", 6), ("iid", 6), ("target", 6)]
)
def test_exact_is_pooled_training_for_any_partition(rule, num_clients):
  data = _federation(rule, num_clients)
  (*_, got), infos = _rounds(data, 5)  # 50 steps.
  (*_, wanted), _ = _rounds(data, 5, method="central")
  _assert_close(got.params, wanted.params, 1e-9)
  _assert_close(got.posterior, wanted.posterior, 1e-9)
  assert infos[-1].client_loss.shape == (num_clients,)


def test_some_clients_follow_the_evidence_of_their_rows():
  data = _federation(num_clients=4)
  changes = {"participation": 0.5, "statistics": "answering"}
  (_, got), (info,) = _rounds(data, 1, **changes)
  answered = np.asarray(info.answered)
  assert answered.sum() == 2
  some = data.replace(clients=jax.tree.map(lambda leaf: leaf[answered], data.clients))
  (_, wanted), _ = _rounds(some, 1, method="central")
  _assert_close(got.params, wanted.params, 1e-10)
  assert int(got.num_clients) == 2
  (_, every), (every_info,) = _rounds(data, 1, participation=0.5)
  # One trip more, to all: statistics up, kernel and posterior down.
  q = 8
  statistics = q * (q + 1) // 2 + q
  assert int(every_info.floats_up) - int(info.floats_up) == statistics + 2
  assert int(every_info.floats_down) - int(info.floats_down) == (
    got.params.size + statistics
  )
  _assert_close(every.params, wanted.params, 1e-10)
  assert float(every.stats.count) == NUM_ROWS


def test_float32_network_takes_the_same_steps():
  data = _federation(dtype=jnp.float32)
  (_, got), _ = _rounds(data, 1)
  (_, wanted), _ = _rounds(data, 1, method="central")
  assert got.params.log_noise_std.dtype == jnp.float32
  for a, b in zip(
    jax.tree.leaves(got.params), jax.tree.leaves(wanted.params), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=2e-3)


def test_without_float64_it_still_learns(x64_off):
  states, infos = _rounds(_federation(dtype=jnp.float32), 3)
  assert infos[-1].train_nll < infos[0].train_nll
  assert states[-1].stats.gram.dtype == jnp.float32


def test_floats_are_those_of_two_trips_a_step():
  states, infos = _rounds(_federation(), 1)
  kernel = sum(leaf.size for leaf in jax.tree.leaves(states[0].params.theta))
  q, steps = 8, 10
  statistics = q * (q + 1) // 2 + q
  assert int(infos[0].floats_up) == (steps + 1) * (statistics + 2) + steps * (
    kernel + 1
  )
  assert int(infos[0].floats_down) == (steps + 1) * (kernel + 2 + statistics)


# ------------------------------------------------------------------------ economical

ECONOMICAL = {
  "lbfgs": {"exact.optimizer": "lbfgs"},
  "majoriser": {"exact.local_steps": 3},
}


@pytest.mark.parametrize("name", ECONOMICAL)
def test_the_evidence_never_falls(name):
  data = _federation()
  _, infos = _rounds(data, 3, **ECONOMICAL[name])
  values = np.array([info.train_nll for info in infos])
  assert np.all(np.diff(values) <= 0)
  assert values[-1] < values[0] - 0.01


def test_a_step_too_long_is_taken_back():
  """With such a rate every trial is worse, and nothing but the step length changes."""
  data = _federation()
  (*_, start), _ = _rounds(data, 3)
  round_ = _jitted(
    **{"exact.local_steps": 3, "learning_rate": 1e3, "num_local_steps": 2}
  )
  state, info = round_(KEY, start, data)
  _assert_close(state.params.theta, start.params.theta, 0.0)
  assert np.isfinite(info.train_nll)
  assert bool(state.memory.failed)
  np.testing.assert_allclose(state.memory.step, 0.25**2)
  # Statistics and posterior go with the parameters that were kept.
  _assert_close(state.stats, start.stats, 1e-12)
  nll = blr.negative_log_marginal_likelihood_from_stats(state.stats, state.posterior)
  np.testing.assert_allclose(info.train_nll, nll / NUM_ROWS, rtol=1e-12)


def test_lbfgs_needs_fewer_steps_than_adam():
  data = _federation()
  _, adam = _rounds(data, 4)
  _, lbfgs = _rounds(data, 4, **ECONOMICAL["lbfgs"])
  assert lbfgs[-1].train_nll < adam[-1].train_nll - 0.1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_warm_start_is_fedbnr_and_then_exact(dtype):
  data = _federation(dtype=dtype)
  (start, warm, after), infos = _rounds(data, 2, **{"exact.warm_start_rounds": 1})
  (_, plain), (plain_info,) = _rounds(data, 1, method="fedbnr")
  tolerance = 1e-12 if dtype == jnp.float64 else 1e-4
  _assert_close(warm.params, plain.params, tolerance)
  assert int(infos[0].floats_up) == int(plain_info.floats_up)
  round_ = _jitted()
  wanted, info = round_(KEY, warm, data)
  _assert_close(after.params, wanted.params, tolerance)
  assert int(infos[1].floats_up) == int(info.floats_up) > int(infos[0].floats_up)
  assert jax.tree.structure(start) == jax.tree.structure(after)


@pytest.mark.parametrize(
  "changes",
  [ECONOMICAL["lbfgs"], {"exact.warm_start_rounds": 1}],
  ids=["lbfgs", "warm"],
)
def test_streamed_rounds_are_the_same(changes):
  data = _federation()
  states, infos = _rounds(data, 2, **changes)
  streamed = streaming.streamed(_built(**changes), 2).jit()
  host, state = jax.tree.map(np.asarray, data), states[0]
  for number, (wanted, wanted_info) in enumerate(zip(states[1:], infos, strict=True)):
    state, info = streamed(jax.random.fold_in(KEY, number), state, host)
    _assert_close(state.params, wanted.params, 1e-9)
    assert int(info.floats_up) == int(wanted_info.floats_up)
    np.testing.assert_allclose(info.client_loss, wanted_info.client_loss, rtol=1e-8)


def test_kernels_without_a_network_have_scales_to_learn():
  _, infos = _rounds(_federation(), 2, kernel="polynomial")
  assert infos[1].train_nll < infos[0].train_nll
  assert np.all(np.isfinite(infos[1].client_loss))


def test_local_steps_and_another_optimiser_do_not_go_together():
  with pytest.raises(InputError, match="exact"):
    _built(**{"exact.optimizer": "lbfgs", "exact.local_steps": 2})


# -------------------------------------------------------------------- the majoriser


def _split(features, targets, num_clients=3):
  return [
    (jnp.asarray(part), jnp.asarray(target))
    for part, target in zip(
      np.array_split(features, num_clients),
      np.array_split(targets, num_clients),
      strict=True,
    )
  ]


def _bound(parts, fitted, covariance):
  return sum(blr.majoriser(*part, fitted, covariance)[0] for part in parts)


@pytest.fixture
def fitted():
  features, targets = oracles.rows(40, 6)
  stats = blr.sufficient_stats(jnp.asarray(features), jnp.asarray(targets))
  posterior = blr.posterior(stats, 0.4, 1.5)
  return features, targets, stats, posterior, blr.covariance(stats.gram, 0.4, 1.5)


def test_majoriser_has_the_gradient_of_the_evidence(fitted):
  features, targets, stats, posterior, covariance = fitted
  by_features, _, by_noise, by_prior = oracles.gp_gradient(features, targets, 0.4, 1.5)
  parts = _split(features, targets)
  got = [
    jax.grad(lambda f, y=y: blr.majoriser(f, y, posterior, covariance)[0])(part)
    for part, y in parts
  ]
  np.testing.assert_allclose(np.concatenate(got), by_features, rtol=1e-9, atol=1e-11)
  squares = sum(blr.majoriser(*part, posterior, covariance)[1] for part in parts)
  got_noise, got_prior = blr.scale_gradient(stats, posterior, covariance, squares)
  np.testing.assert_allclose(got_noise, 0.4 * by_noise, rtol=1e-9)
  np.testing.assert_allclose(got_prior, 1.5 * by_prior, rtol=1e-9)


def test_majoriser_lies_above_the_evidence(fitted):
  features, targets, _, posterior, covariance = fitted
  value = functools.partial(_bound, fitted=posterior, covariance=covariance)
  gap = oracles.gp_nll(features, targets, 0.4, 1.5) - value(_split(features, targets))
  rng = np.random.default_rng(3)
  for scale in np.geomspace(1e-3, 3.0, 60):
    moved = features + scale * rng.normal(size=features.shape)
    nll = oracles.gp_nll(moved, targets, 0.4, 1.5)
    assert nll <= value(_split(moved, targets)) + gap + 1e-9


def test_padding_does_not_count(fitted):
  features, targets, _, posterior, covariance = fitted
  padded = jnp.asarray(np.pad(features, ((0, 5), (0, 0)), constant_values=np.nan))
  mask = jnp.arange(45) < 40
  got = blr.majoriser(
    padded, jnp.asarray(np.pad(targets, (0, 5))), posterior, covariance, mask
  )
  wanted = blr.majoriser(
    jnp.asarray(features), jnp.asarray(targets), posterior, covariance
  )
  np.testing.assert_allclose(got, wanted, rtol=1e-12)
