"""A process with a feature map as its kernel: parameters and the evidence."""

import jax
import numpy as np

from fedbnr_jax.federated.exchange import num_floats
from fedbnr_jax.gp import urk
from fedbnr_jax.gp.kernel_model import evidence_loss, features_of, model_params
from tests import methods, oracles
from tests.methods import KEY, NUM_CLIENTS

FEATURE_MAP = urk.random_fourier(4)


def test_params_give_scales_and_size():
  theta = {"a": np.zeros((2, 3)), "b": np.zeros(4)}
  params = model_params(theta, 0.2, 3.0, np.float64)
  np.testing.assert_allclose(params.noise_std, 0.2, rtol=1e-12)
  np.testing.assert_allclose(params.prior_std, 3.0, rtol=1e-12)
  assert num_floats(params) == 12


def test_loss_is_the_dense_likelihood_per_row():
  data = methods.small()
  start = jax.jit(FEATURE_MAP.init)(KEY, data.clients.x[0])
  params = model_params(start.theta, 0.4, 1.3, np.float64)

  @jax.jit
  def both(rows):
    features = features_of(FEATURE_MAP, params.theta, start.omega, rows.x)
    loss = evidence_loss(FEATURE_MAP, params, start.omega, rows.x, rows.y, rows.mask)
    return features, loss

  for k in range(NUM_CLIENTS):
    rows = methods.rows_of(data, k)
    features, loss = both(rows)
    kept = rows.mask
    nll = oracles.gp_nll(features[kept], rows.y[kept], 0.4, 1.3)
    np.testing.assert_allclose(loss, nll / kept.sum(), rtol=1e-9)
