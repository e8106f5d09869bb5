"""Exact federated gradients against pooled training, and their economical variants."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated import partition
from fedbnr_jax.federated.host_chunks import streamed
from fedbnr_jax.gp import blr
from tests import methods, oracles
from tests.methods import KEY, NUM_CLIENTS, NUM_ROWS, small

LBFGS = {"exact__optimizer": "lbfgs"}
BOUND = {"exact__local_steps": 3}
# The paper's kernel, and steps that are not so long that rounding grows.
NETWORK = {"kernel": "deep", "num_local_steps": 10, "learning_rate": 0.01}
WARM = LBFGS | {"exact__warm_start_rounds": 1}


def _dealt(rule, num_clients=NUM_CLIENTS):
  """The rows of `small`, dealt by a rule, in arrays of the same shape."""
  rng = np.random.default_rng(1)
  parts = partition.partition(rule, rng, *methods.table(), num_clients)
  return small(parts, num_padded_rows=12 if num_clients == NUM_CLIENTS else None)


def _run(method="fedbnr-exact", data=None, num_rounds=2, start=None, **fields):
  program = methods.compiled(method, **fields)
  return methods.run(program, small() if data is None else data, num_rounds, start)


def _assert_close(one, other, tolerance):
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    gap = np.linalg.norm(np.asarray(a) - np.asarray(b))
    assert gap <= tolerance * np.linalg.norm(np.asarray(b))


# ------------------------------------------------------------------ the plain method


@functools.cache
def _pooled(num_rounds):
  """Pooled training, of which it does not matter who held which row."""
  return _run("central", num_rounds=num_rounds).last.server


@pytest.mark.parametrize(
  "rule, num_clients", [("sorted", 1), ("sorted", 5), ("iid", 5), ("target", 5)]
)
def test_exact_is_pooled_training_for_any_partition(rule, num_clients):
  (*_, got), infos = _run(data=_dealt(rule, num_clients), num_rounds=10)
  _assert_close(got.server.params, _pooled(10).params, 1e-9)
  _assert_close(got.server.posterior, _pooled(10).posterior, 1e-9)
  assert infos[-1].client_loss.shape == (num_clients,)


def test_exact_is_pooled_training_through_a_network():
  (*_, got), _ = _run(num_rounds=5, **NETWORK)  # 50 steps.
  (start, *_, wanted), _ = _run("central", num_rounds=5, **NETWORK)
  _assert_close(got.server.params, wanted.server.params, 1e-9)
  _assert_close(got.server.posterior, wanted.server.posterior, 1e-9)
  moved = jax.tree.map(
    lambda a, b: np.max(np.abs(a - b)), start.server.params, wanted.server.params
  )
  assert min(jax.tree.leaves(moved)) > 0.01


def test_some_clients_follow_the_evidence_of_their_rows():
  some = {"participation": 0.4}
  (_, got), (info,) = _run(num_rounds=1, statistics_from="answering", **some)
  answered, data = np.asarray(info.answered), small()
  assert answered.sum() == 2
  mask = data.clients.mask & answered[:, None]
  theirs = data.replace(clients=data.clients.replace(mask=mask))
  (_, wanted), _ = _run("central", theirs, 1)
  _assert_close(got.server.params, wanted.server.params, 1e-10)
  assert int(got.server.num_clients) == 2
  (_, every), (every_info,) = _run(num_rounds=1, **some)
  # One trip more, to all. Down: a seed of two numbers and θ. Up: of M = 6 features the
  # triangle of the Gram, the moment, energy, count and one for the client.
  assert int(every_info.floats_down) - int(info.floats_down) == 2 + 2
  assert int(every_info.floats_up) - int(info.floats_up) == 21 + 6 + 3
  _assert_close(every.server.params, wanted.server.params, 1e-10)
  assert float(every.server.stats.count) == NUM_ROWS


def test_float32_kernel_takes_the_same_steps():
  data, fields = small(dtype=np.float32), {"dtype": "float32", "num_rounds": 1}
  (_, got), _ = _run(data=data, **fields)
  (_, wanted), _ = _run("central", data, **fields)
  assert got.server.params.log_noise_std.dtype == np.float32
  chex.assert_trees_all_close(got.server.params, wanted.server.params, atol=2e-3)


def test_without_float64_it_still_learns(x64_off):
  states, infos = _run(data=small(dtype=np.float32), num_rounds=3, dtype="float32")
  assert infos[-1].train_nll < infos[0].train_nll
  assert states[-1].server.stats.gram.dtype == np.float32


# ------------------------------------------------------------------------ economical


@pytest.mark.parametrize("fields", [LBFGS, BOUND], ids=["lbfgs", "bound"])
def test_the_evidence_never_falls(fields):
  _, infos = _run(num_rounds=3, **NETWORK, **fields)
  values = np.array([info.train_nll for info in infos])
  assert np.all(np.diff(values) <= 0)
  assert values[-1] < values[0] - 0.01


def test_a_step_too_long_is_taken_back():
  """Every trial is worse, and nothing but the length of the step changes."""
  start = _run(num_rounds=3).last
  long = np.asarray(1e5)
  server = start.server.replace(optimizer=start.server.optimizer.replace(step=long))
  (_, state), (info,) = _run(num_rounds=1, start=start.replace(server=server), **BOUND)
  got = state.server
  _assert_close(got.params.theta, start.server.params.theta, 0.0)
  assert np.isfinite(info.train_nll)
  assert bool(got.optimizer.failed)
  np.testing.assert_allclose(got.optimizer.step, 0.25**2 * long)  # Two trials.
  # Statistics and posterior go with the parameters that were kept.
  _assert_close(got.stats, start.server.stats, 1e-12)
  nll = jax.jit(blr.negative_log_marginal_likelihood_from_stats)
  np.testing.assert_allclose(
    info.train_nll, nll(got.stats, got.posterior) / NUM_ROWS, rtol=1e-12
  )


def _another_table(seed):
  """Other rows in the arrays of `small`."""
  rng, data = np.random.default_rng(seed), small()
  x = rng.normal(size=data.clients.x.shape)
  y = np.sin(1.5 * x[..., 0]) + 0.5 * x[..., 1] + 0.1 * rng.normal(size=x.shape[:-1])
  return data.replace(clients=data.clients.replace(x=x, y=y))


def test_lbfgs_needs_fewer_steps_than_adam():
  """After 4 rounds of 10 steps, of most tables: one may end in a worse optimum."""
  gaps = []
  for seed in range(20):
    data = _another_table(seed)
    adam, lbfgs = (
      _run(data=data, num_rounds=4, **NETWORK, **fields).infos[-1].train_nll
      for fields in ({}, LBFGS)
    )
    gaps.append(float(adam - lbfgs))
  assert np.quantile(gaps, 1 / 3) > 0.1


def test_warm_start_is_fedbnr_and_then_exact():
  (start, warm, after), infos = methods.two_rounds("fedbnr-exact", **WARM)
  plain, (plain_info, _) = methods.two_rounds("fedbnr")
  _assert_close(warm.server.params, plain[1].server.params, 1e-12)
  assert int(infos[0].floats_up) == int(plain_info.floats_up)
  wanted, info = methods.compiled("fedbnr-exact", **LBFGS).round(KEY, warm, small())
  _assert_close(after.server.params, wanted.server.params, 1e-12)
  assert int(infos[1].floats_up) == int(info.floats_up) > int(infos[0].floats_up)
  assert jax.tree.structure(start) == jax.tree.structure(after)


def test_streamed_rounds_are_the_same():
  """A warm start and what follows it, with what the server remembers of its steps."""
  states, infos = methods.two_rounds("fedbnr-exact", **WARM)
  in_chunks = streamed(methods.built("fedbnr-exact", **WARM), 2, jax.jit)
  state = states[0]
  for number, (wanted, wanted_info) in enumerate(zip(states[1:], infos, strict=True)):
    state, info = in_chunks(jax.random.key(number), state, small())
    _assert_close(state.server.params, wanted.server.params, 1e-9)
    assert int(info.floats_up) == int(wanted_info.floats_up)
    np.testing.assert_allclose(info.client_loss, wanted_info.client_loss, rtol=1e-8)


def test_kernels_without_parameters_have_scales_to_learn():
  _, infos = _run(num_rounds=2, kernel="polynomial")
  assert infos[1].train_nll < infos[0].train_nll
  assert np.all(np.isfinite(infos[1].client_loss))


def test_local_steps_and_another_optimiser_do_not_go_together():
  with pytest.raises(InputError, match="exact"):
    methods.built("fedbnr-exact", **LBFGS, **BOUND)


# -------------------------------------------------------------------- the majoriser


NUM_PARTS = 4  # Of 40 rows, ten each.


@jax.jit
def _bound(features, targets, fitted, covariance):
  """Value [], gradient [N, M] and squared residuals [], summed over four clients."""

  def one(features, targets):
    value_and_gradient = jax.value_and_grad(
      lambda features: blr.majoriser(features, targets, fitted, covariance),
      has_aux=True,
    )
    return value_and_gradient(features)

  parts = features.reshape(NUM_PARTS, -1, 6), targets.reshape(NUM_PARTS, -1)
  (values, squares), gradients = jax.vmap(one)(*parts)
  return jnp.sum(values), gradients.reshape(-1, 6), jnp.sum(squares)


@pytest.fixture(scope="module")
def fitted():
  features, targets = oracles.rows(40, 6)

  @jax.jit
  def fit(features, targets):
    stats = blr.sufficient_stats(features, targets)
    return stats, blr.posterior(stats, 0.4, 1.5), blr.covariance(stats.gram, 0.4, 1.5)

  return features, targets, *fit(features, targets)


def test_majoriser_has_the_gradient_of_the_evidence(fitted):
  features, targets, stats, posterior, covariance = fitted
  by_features, _, by_noise, by_prior = oracles.gp_gradient(features, targets, 0.4, 1.5)
  _, got, squares = _bound(features, targets, posterior, covariance)
  np.testing.assert_allclose(got, by_features, rtol=1e-9, atol=1e-11)
  got_noise, got_prior = blr.scale_gradient(stats, posterior, covariance, squares)
  np.testing.assert_allclose(got_noise, 0.4 * by_noise, rtol=1e-9)
  np.testing.assert_allclose(got_prior, 1.5 * by_prior, rtol=1e-9)


def test_majoriser_lies_above_the_evidence(fitted):
  features, targets, _, posterior, covariance = fitted

  def value(features):
    return float(_bound(features, targets, posterior, covariance)[0])

  gap = oracles.gp_nll(features, targets, 0.4, 1.5) - value(features)
  rng = np.random.default_rng(3)
  for scale in np.geomspace(1e-3, 3.0, 60):
    moved = features + scale * rng.normal(size=features.shape)
    nll = oracles.gp_nll(moved, targets, 0.4, 1.5)
    assert nll <= value(moved) + gap + 1e-9


def test_padding_does_not_count(fitted):
  features, targets, _, posterior, covariance = fitted
  padded = np.pad(features, ((0, 5), (0, 0)), constant_values=np.nan)
  mask = np.arange(45) < 40
  value, squares = jax.jit(blr.majoriser)(
    padded, np.pad(targets, (0, 5)), posterior, covariance, mask
  )
  wanted, _, wanted_squares = _bound(features, targets, posterior, covariance)
  np.testing.assert_allclose((value, squares), (wanted, wanted_squares), rtol=1e-12)
