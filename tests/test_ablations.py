"""Ablations against a loop over clients: whose kernel, whose rows in the last layer."""

import functools

import jax
import numpy as np
import pytest

from fedbnr_jax.algorithms import kernels
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.local_steps import descend, keep_above
from fedbnr_jax.federated.optimizers import adam
from fedbnr_jax.gp.kernel_model import evidence_loss, features_of
from tests import methods, oracles
from tests.methods import NUM_CLIENTS, small

CONFIG = methods.config("local+local")
FEATURE_MAP = kernels.from_config(CONFIG)
X = small().clients.x


@functools.cache
def _features():
  return jax.jit(lambda theta, omega, x: features_of(FEATURE_MAP, theta, omega, x))


def _rows_under(state, params, holders):
  """Features and targets of these clients' rows under a kernel."""
  data = small().clients
  features = _features()(params.theta, state.server.omega, X.reshape(-1, 2))
  chosen = data.mask & np.isin(np.arange(NUM_CLIENTS), holders)[:, None]
  return np.asarray(features)[chosen.ravel()], data.y[chosen]


def _one(tree, k):
  return jax.tree.map(lambda leaf: leaf[k], tree)


def _assert_dense(state, k, params, holders, predictions):
  """Client k predicts as the dense process of these holders' rows does."""
  features, y = _rows_under(state, params, holders)
  query = np.asarray(_features()(params.theta, state.server.omega, X[3]))
  scales = float(params.noise_std), float(params.prior_std)
  wanted = oracles.gp_predict(features, y, query, *scales)
  for got, expected in zip(predictions, wanted, strict=True):
    np.testing.assert_allclose(got[k], expected, rtol=1e-8, atol=1e-9)
  return oracles.gp_nll(features, y, *scales) / len(y)


@pytest.mark.parametrize(
  "method, whole", [("avg+local", "fedbnr"), ("kd+local", "fedbnr-kd")]
)
def test_global_kernel_with_last_layers_of_own_rows(method, whole):
  (*_, state), (*_, info) = methods.two_rounds(method)
  params = state.server.params
  reference = methods.two_rounds(whole).last.server.params
  for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(reference), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
  predictions = methods.compiled(method).predict(state, X[3])
  nll = [_assert_dense(state, k, params, [k], predictions) for k in range(NUM_CLIENTS)]
  np.testing.assert_allclose(info.train_nll, np.mean(nll), rtol=1e-8)
  assert info.client_loss.shape == (NUM_CLIENTS,)
  assert int(state.server.num_clients) == NUM_CLIENTS


@functools.cache
def _local_steps():
  def steps(params, omega, rows):
    return descend(
      lambda params: evidence_loss(
        FEATURE_MAP, params, omega, rows.x, rows.y, rows.mask
      ),
      adam(CONFIG.learning_rate),
      CONFIG.num_local_steps,
      params,
      functools.partial(keep_above, CONFIG.min_noise_std),
    )[0]

  return jax.jit(steps)


def _alone(k, num_rounds=2):
  """The kernel of a client that never hears of the others."""
  start = methods.two_rounds("fedbnr").states[0].server
  params = start.params
  for _ in range(num_rounds):
    params = _local_steps()(params, start.omega, methods.rows_of(small(), k))
  return jax.device_get(params)


@pytest.mark.parametrize("method", ["local+local", "local+global"])
def test_kernels_of_their_own_with_local_and_global_last_layers(method):
  (*_, state), (*_, info) = methods.two_rounds(method)
  predictions = methods.compiled(method).predict(state, X[3])
  everybody, nll = method == "local+global", []
  for k in range(NUM_CLIENTS):
    wanted = _alone(k)
    # The server of local+global holds every kernel, each at its client's number.
    for params in [state.own.params] + [state.server.params] * everybody:
      got = _one(params, k)
      for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11)
    holders = range(NUM_CLIENTS) if everybody else [k]
    nll.append(_assert_dense(state, k, wanted, list(holders), predictions))
  np.testing.assert_allclose(info.train_nll, np.mean(nll), rtol=1e-8)


@pytest.mark.parametrize("method", ["local+local", "local+global"])
def test_those_who_are_not_asked_keep_what_they_have(method):
  states, infos = methods.two_rounds(method, participation=0.6, dropout=0.3)
  for before, after, info in zip(states[:-1], states[1:], infos, strict=True):
    answered = np.asarray(info.answered)
    assert 0 < answered.sum() < NUM_CLIENTS
    kernels_ = [state.own.params.log_noise_std for state in (before, after)]
    np.testing.assert_array_equal(kernels_[0] != kernels_[1], answered)
    # Everybody has a last layer all the same.
    assert int(after.server.num_clients) == NUM_CLIENTS
  posterior = (after.own if method == "local+local" else after.server).posterior
  assert np.all(np.any(posterior.mean != 0, axis=1))
  if method == "local+global":  # Also of kernels that came rounds ago.
    for a, b in zip(
      jax.tree.leaves(after.server.params),
      jax.tree.leaves(after.own.params),
      strict=True,
    ):
      np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("method", ["avg+local", "local+global", "pfedgp", "fedloc"])
def test_statistics_of_those_who_answer_are_refused_where_all_have_models(method):
  with pytest.raises(InputError, match=r"config\.statistics_from"):
    methods.built(method, participation=0.4, statistics_from="answering")
