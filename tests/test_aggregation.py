"""Aggregators against NumPy means and the printed formulas of distillation."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated import aggregation, federation
from fedbnr_jax.federated.exchange import num_floats
from fedbnr_jax.federated.local_steps import descend, keep_above
from fedbnr_jax.gp import urk
from fedbnr_jax.gp.kernel_model import ModelParams
from tests import oracles

KEY = jax.random.key(0)
SIZES = [3, 1, 6]
FLOOR = 1e-3


def _locals():
  """Parameters of three clients, and rows of three sizes."""
  rng = np.random.default_rng(0)
  params = [
    ModelParams(
      {"kernel": rng.normal(size=(2, 3)), "bias": np.array(0.1 * k)},
      np.array(rng.normal()),
      np.array(rng.normal()),
    )
    for k in range(3)
  ]
  parts = np.split(np.arange(10), np.cumsum(SIZES)[:-1])
  inputs, targets = rng.normal(size=(10, 2)), rng.normal(size=10)
  rows = federation.build(
    inputs, targets, parts, dtype=np.float64, on_host=True
  ).clients
  return params, [jax.tree.map(lambda leaf, k=k: leaf[k], rows) for k in range(3)]


def _aggregate(aggregator, params, rows, omega=None, server=None, start=None):
  """The messages of all clients, their sum, and what the server makes of it."""

  @jax.jit
  def aggregate(params, rows, omega, server, start):
    inputs = aggregator.inputs(server)
    messages = [
      aggregator.message(p, omega, r, inputs) for p, r in zip(params, rows, strict=True)
    ]
    total = jax.tree.map(lambda *leaves: sum(leaves), *messages)
    return aggregator.combine(start, omega, total, server)

  start = params[0] if start is None else start
  return aggregate(params, rows, omega, server, start)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("scales", ["arithmetic", "log"])
def test_mean_is_numpys(scales, by_rows):
  params, rows = _locals()
  got = _aggregate(aggregation.mean(scales=scales, by_rows=by_rows), params, rows)
  weights = SIZES if by_rows else None

  def average(leaves):
    return np.average(np.stack(leaves), axis=0, weights=weights)

  for name in ("kernel", "bias"):
    expected = average([p.theta[name] for p in params])
    np.testing.assert_allclose(got.theta[name], expected, rtol=1e-12)
  for name in ("log_noise_std", "log_prior_std"):
    logs = [getattr(p, name) for p in params]
    arithmetic = scales == "arithmetic"
    expected = np.log(average(np.exp(logs))) if arithmetic else average(logs)
    np.testing.assert_allclose(getattr(got, name), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scales", ["arithmetic", "log"])
def test_mean_of_equals_is_the_same(scales):
  params, rows = _locals()
  got = _aggregate(aggregation.mean(scales=scales), [params[0]] * 3, rows)
  chex.assert_trees_all_close(got, params[0], rtol=1e-12)


def test_mean_of_one_keeps_float32(x64_off):
  params, rows = _locals()
  params, rows = jax.tree.map(
    lambda a: a if a.dtype == bool else a.astype(np.float32), (params[0], rows[0])
  )
  got = _aggregate(aggregation.mean(by_rows=True), [params], [rows])
  chex.assert_type(jax.tree.leaves(got), jnp.float32)


# ------------------------------------------------------------------- distillation


def _distillation_case():
  """A small kernel, three clients' parameters and a server set."""
  feature_map = urk.random_fourier(3)
  rng = np.random.default_rng(1)
  server = federation.ServerSet(rng.normal(size=(7, 2)), rng.normal(size=7))
  omega = jax.jit(feature_map.init)(KEY, server.x).omega
  params = [
    ModelParams(
      {"log_length_scale": np.array(0.3 * k)},
      np.array(-0.5 + 0.1 * k),
      np.array(0.2 * k),
    )
    for k in range(3)
  ]
  return feature_map, server, omega, params


def _features(params, omega, x):
  """Of random Fourier features, in NumPy: all cosines, then all sines."""
  angles = (x * np.exp(-params.theta["log_length_scale"])) @ np.asarray(omega).T
  return np.hstack([np.cos(angles), np.sin(angles)]) / np.sqrt(len(omega) - 1)


def _mean_gram(params, omega, x):
  features = [_features(p, omega, x) for p in params]
  return np.mean([f @ f.T for f in features], axis=0)


@pytest.mark.parametrize("alpha", [0.0, 2.5])
def test_distillation_loss_is_the_printed_one(alpha):
  feature_map, server, omega, params = _distillation_case()
  target = _mean_gram(params, omega, server.x)
  loss = jax.jit(
    aggregation.distillation_loss(feature_map, omega, server, target, alpha)
  )
  for p in params:
    features = _features(p, omega, server.x)
    nll = oracles.gp_nll(features, server.y, float(p.noise_std), float(p.prior_std))
    gap = features @ features.T - target
    expected = nll / 7 + alpha / 7**2 * np.sum(gap**2)
    np.testing.assert_allclose(loss(p), expected, rtol=1e-10)


def test_distillation_gradient_is_the_closed_form_pulled_back():
  """What α adds is (4/n²)(ΦΦᵀ − K̄)Φ, carried through the features to θ."""
  _, server, _, params = _distillation_case()
  feature_map = urk.deep(3, 4, latent_size=2)
  start = jax.jit(feature_map.init)(KEY, server.x)
  target = np.eye(7) + 0.3

  def gradient(alpha):
    loss = aggregation.distillation_loss(
      feature_map, start.omega, server, jnp.asarray(target), alpha
    )
    return jax.grad(loss)(params[0].replace(theta=start.theta))

  def apply(theta):
    return feature_map.apply(start.replace(theta=theta), server.x)

  @jax.jit
  def both():
    features, pull_back = jax.vjp(apply, start.theta)
    cotangent = 2.0 * 4 / 7**2 * (features @ features.T - target) @ features
    (expected,) = pull_back(cotangent)
    return jax.tree.map(jnp.subtract, gradient(3.0), gradient(1.0)), expected

  got, expected = both()
  chex.assert_trees_all_close(got.theta, expected, rtol=1e-9, atol=1e-12)
  # σ and λ move through the evidence alone.
  np.testing.assert_allclose(got.log_noise_std, 0, atol=1e-13)
  np.testing.assert_allclose(got.log_prior_std, 0, atol=1e-13)


@pytest.mark.parametrize("warm_start", [False, True])
def test_distillation_descends_to_the_mean_of_the_clients_grams(warm_start):
  feature_map, server, omega, params = _distillation_case()
  _, rows = _locals()
  optimizer = optax.sgd(0.05)
  aggregator = aggregation.distillation(
    feature_map,
    optimizer,
    num_steps=4,
    alpha=2.0,
    min_noise_std=FLOOR,
    start=aggregation.mean() if warm_start else None,
  )
  broadcast = params[2]
  got = _aggregate(aggregator, params, rows, omega, server, broadcast)

  target = jnp.asarray(_mean_gram(params, omega, server.x))
  loss = aggregation.distillation_loss(feature_map, omega, server, target, 2.0)
  start = broadcast
  if warm_start:
    start = _aggregate(aggregation.mean(), params, rows)
  expected, _ = jax.jit(
    lambda start: descend(
      loss, optimizer, 4, start, functools.partial(keep_above, FLOOR)
    )
  )(start)
  chex.assert_trees_all_close(got, expected, rtol=1e-9)
  assert not np.allclose(got.theta["log_length_scale"], start.theta["log_length_scale"])


def test_distillation_message_carries_parameters_only_for_a_warm_start():
  feature_map, server, omega, params = _distillation_case()
  _, rows = _locals()
  leaves = {}
  for warm_start in (False, True):
    aggregator = aggregation.distillation(
      feature_map,
      optax.sgd(0.05),
      num_steps=1,
      alpha=1.0,
      min_noise_std=FLOOR,
      start=aggregation.mean() if warm_start else None,
    )
    message = jax.eval_shape(
      aggregator.message, params[0], omega, rows[0], aggregator.inputs(server)
    )
    leaves[warm_start] = num_floats(message)
  assert leaves[False] == 7 * 8 // 2 + 1
  assert leaves[True] == leaves[False] + num_floats(params[0]) + 1


def test_inputs_are_the_servers_where_clients_need_them():
  _, server, _, _ = _distillation_case()
  assert aggregation.mean().inputs(server) == ()
  assert _distillation().inputs(server) is server.x


def _distillation(**changes):
  settings = {"num_steps": 1, "alpha": 1.0, "min_noise_std": FLOOR, **changes}
  return aggregation.distillation(urk.random_fourier(3), optax.sgd(0.1), **settings)


@pytest.mark.parametrize(
  "build, word",
  [
    (lambda: aggregation.mean(scales="harmonic"), "harmonic"),
    (lambda: _distillation(num_steps=0), "num_steps"),
    (lambda: _distillation(alpha=-1.0), "alpha"),
  ],
)
def test_impossible_aggregators_are_refused_by_name(build, word):
  with pytest.raises(InputError, match=word):
    build()


def test_distillation_needs_a_server_set():
  _, _, omega, params = _distillation_case()
  with pytest.raises(InputError, match="needs a server set"):
    _distillation().inputs(None)
  with pytest.raises(InputError, match="needs a server set"):
    _distillation().combine(params[0], omega, None, None)
