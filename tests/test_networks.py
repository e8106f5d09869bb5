"""The two networks: shapes, and the structure that the kernel relies on."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax.gp import networks

KEY = jax.random.key(0)


def _params(module, x):
  """Random parameters of the module's shapes and types, which compiles nothing."""
  rng = np.random.default_rng(1)
  shapes = jax.eval_shape(module.init, KEY, x)["params"]
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), shapes)


def _init(module, x):
  return jax.tree.map(np.asarray, jax.jit(module.init)(KEY, x)["params"])


def _apply(module, params, x):
  return jax.jit(module.apply)({"params": params}, x)


@pytest.mark.parametrize("num_hidden_layers", [1, 2])
def test_extractor_is_relu_layers_and_an_unbiased_linear_one(num_hidden_layers):
  module = networks.Extractor(7, 3, num_hidden_layers, param_dtype=jnp.float64)
  x = np.random.default_rng(0).normal(size=(5, 4))
  params = _params(module, x)
  shapes = jax.tree.map(np.shape, params)
  widths = [4] + [7] * num_hidden_layers
  expected = {
    f"Dense_{i}": {"kernel": (widths[i], 7), "bias": (7,)}
    for i in range(num_hidden_layers - 1)
  }
  expected |= {"kernel": (widths[-2], 7), "bias": (7,), "output": (3, 7)}
  assert shapes == expected

  slow = x
  layers = [params[f"Dense_{i}"] for i in range(num_hidden_layers - 1)]
  for layer in [*layers, params]:
    slow = np.maximum(slow @ layer["kernel"] + layer["bias"], 0)
  slow = slow @ params["output"].T
  np.testing.assert_allclose(_apply(module, params, x), slow, rtol=1e-12)


def test_extractor_starts_with_the_variance_of_its_fan_in():
  """Each layer keeps the scale of what it sees, however the weights are stored."""
  module, x = networks.Extractor(400, 300, 2), np.ones((1, 200), np.float32)
  params = _init(module, x)
  for leaf, fan_in in (
    (params["Dense_0"]["kernel"], 200),
    (params["kernel"], 400),
    (params["output"], 400),
  ):
    np.testing.assert_allclose(np.std(leaf), fan_in**-0.5, rtol=0.02)
  for bias in (params["Dense_0"]["bias"], params["bias"]):
    np.testing.assert_array_equal(bias, np.zeros(400))


def test_latent_offset_cannot_change_the_fourier_kernel():
  """Why the last layer has no bias: the offset cancels in every inner product."""
  rng = np.random.default_rng(0)
  omega, latent, offset = (rng.normal(size=s) for s in [(6, 3), (5, 3), (3,)])

  def gram(latent):
    phase = latent @ omega.T
    features = np.concatenate([np.cos(phase), np.sin(phase)], 1)
    return features @ features.T

  np.testing.assert_allclose(gram(latent), gram(latent + offset), atol=1e-12)


def test_shifter_is_the_scaled_identity_plus_mlp():
  module = networks.Shifter(6, 0.25, param_dtype=jnp.float64)
  omega = np.random.default_rng(0).normal(size=3)
  params = _init(module, omega)
  assert float(params["scale"]) == 0.25
  first, second = params["Dense_0"], params["Dense_1"]
  hidden = np.tanh(omega @ first["kernel"] + first["bias"])
  shift = hidden @ second["kernel"] + second["bias"]
  slow = 0.25 * (omega + shift)
  np.testing.assert_allclose(_apply(module, params, omega), slow, rtol=1e-12)
  assert np.linalg.norm(shift) > 1e-3  # The MLP takes part from the start.


def test_shifter_contains_the_identity():
  module = networks.Shifter(6, 1.0, param_dtype=jnp.float64)
  omega = np.random.default_rng(0).normal(size=3)
  params = jax.tree.map(np.zeros_like, _params(module, omega))
  params["scale"] = np.ones(())
  np.testing.assert_array_equal(_apply(module, params, omega), omega)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_parameters_and_outputs_take_the_given_dtype(dtype):
  extractor = networks.Extractor(4, 2, 2, param_dtype=dtype)
  shifter = networks.Shifter(4, 1.0, param_dtype=dtype)
  regressor = networks.Regressor(4, 2, param_dtype=dtype)
  for module, shape in ((extractor, (5, 3)), (regressor, (5, 3)), (shifter, (3,))):
    x = jax.ShapeDtypeStruct(shape, dtype)
    params = jax.eval_shape(module.init, KEY, x)
    output = jax.eval_shape(module.apply, params, x)
    chex.assert_type([*jax.tree.leaves(params), output], dtype)


def test_regressor_is_a_linear_head_on_the_extractor():
  module = networks.Regressor(7, 3, param_dtype=jnp.float64)
  x = np.random.default_rng(0).normal(size=(5, 4))
  params = _params(module, x)
  below, head = params["Extractor_0"], params["Dense_0"]
  latent = _apply(networks.Extractor(7, 3, param_dtype=jnp.float64), below, x)
  slow = np.asarray(latent) @ head["kernel"][:, 0] + head["bias"]
  np.testing.assert_allclose(_apply(module, params, x), slow, rtol=1e-12)
