"""The evidence with trace term and prior, against autodiff of the dense formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax.algorithms import kernels
from fedbnr_jax.federated.collectors import map_clients
from fedbnr_jax.gp import urk
from fedbnr_jax.gp.kernel_model import ModelParams
from tests import methods

FIELDS = {
  "kernel": "matern32+linear",
  "ard__basis": "inducing",
  "num_samples": 5,
  "exact__trace": True,
  "exact__optimizer": "lbfgs",
  "ard__spread": 0.6,
}


def _data(parts=None):
  return methods.small(parts, num_padded_rows=12)


def _dense(feature_map, omega, params):
  """-log N(y | 0, λ²ΦΦᵀ + σ²I) + λ²/2σ² Σ (k(x, x) - ‖φ(x)‖²), of pooled rows."""
  x, y = map(jnp.asarray, methods.table())
  own = urk.FeatureParams(omega, params.theta)
  phi = feature_map.apply(own, x)
  noise, prior = params.noise_std, params.prior_std
  covariance = prior**2 * phi @ phi.T + noise**2 * jnp.eye(len(y))
  likelihood = jax.scipy.stats.multivariate_normal.logpdf(
    y, jnp.zeros_like(y), covariance
  )
  # The Matérn part has the amplitude a, and its features are the first five columns.
  amplitude = jnp.exp(params.theta["log_amplitude"][0])
  lost = amplitude**2 - jnp.sum(phi[:, :5] ** 2, axis=1)
  return -likelihood + 0.5 * (prior / noise) ** 2 * jnp.sum(lost)


def _prior(params):
  """-log of normal densities of log ℓ around the start, √D, but for a constant."""
  scales = params.theta["parts"][0]["log_length_scale"]
  return jnp.sum((scales - 0.5 * jnp.log(scales.size)) ** 2) / (2 * 0.6**2)


@pytest.fixture(scope="module")
def algorithm():
  return methods.built("fedbnr-exact", **FIELDS)


def _collect(exchange, server, data):
  down = exchange.broadcast(server, None)
  return map_clients(exchange.answer, down, (), data.clients).total


def test_value_and_gradient_are_those_of_the_dense_formula(algorithm):
  data = _data()
  # Compiled as a whole: operation by operation it takes five times as long.
  state, stepped, expected, slopes, priors = jax.jit(
    lambda data: _one_step(algorithm, data)
  )(data)
  np.testing.assert_allclose(
    state.optimizer.value * methods.NUM_ROWS, expected, rtol=1e-9
  )
  # The first direction is the gradient, scaled. What clients send of it lacks what goes
  # by way of the whitening of inducing features, which the server adds.
  ratio = stepped.log_noise_std / slopes.log_noise_std
  assert ratio < 0
  jax.tree.map(
    lambda step, a, b: np.testing.assert_allclose(step, ratio * (a + b), rtol=1e-6),
    stepped.theta,
    slopes.theta,
    priors.theta,
  )
  np.testing.assert_allclose(stepped.log_prior_std, ratio * slopes.log_prior_std, 1e-7)


def _one_step(algorithm, data):
  """The state after an exchange of statistics, and what a step makes of it."""
  state = algorithm.init(methods.KEY, data).server
  own = {"log_length_scale": jnp.array([0.9, -0.2])}
  theta = {"parts": (own, {}), "log_amplitude": jnp.array([0.4, -0.3])}
  params = ModelParams(theta, jnp.log(0.4), jnp.log(1.3))
  state = state.replace(params=params)
  statistics, gradient = algorithm.exchanges[:2]
  state = statistics.server(state, None, _collect(statistics, state, data))
  feature_map = kernels.from_config(methods.config("fedbnr-exact", **FIELDS))
  expected, slopes = jax.value_and_grad(
    lambda params: _dense(feature_map, state.omega, params)
  )(params)
  prior, priors = jax.value_and_grad(_prior)(params)
  message = _collect(gradient, state, data)
  stepped = gradient.server(state, None, message).optimizer.direction
  return state, stepped, expected + prior, slopes, priors


def test_partitions_do_not_matter(algorithm):
  program = methods.compiled("fedbnr-exact", **FIELDS)
  order = np.random.default_rng(5).permutation(methods.NUM_ROWS)
  dealt = _data(np.array_split(order, 5))
  one = methods.run(program, _data(), 2).last.server
  other = methods.run(program, dealt, 2).last.server
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9),
    (one.params, one.posterior.mean, one.optimizer.value),
    (other.params, other.posterior.mean, other.optimizer.value),
  )
