"""The two networks: shapes, and the structure that the kernel relies on."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax import networks

KEY = jax.random.key(0)


@pytest.mark.parametrize("num_hidden_layers", [1, 2])
def test_extractor_is_relu_layers_and_an_unbiased_linear_one(num_hidden_layers):
  module = networks.Extractor(7, 3, num_hidden_layers, param_dtype=jnp.float64)
  x = jax.random.normal(KEY, (5, 4))
  params = module.init(KEY, x)["params"]
  shapes = jax.tree.map(jnp.shape, params)
  widths = [4] + [7] * num_hidden_layers
  expected = {
    f"Dense_{i}": {"kernel": (widths[i], 7), "bias": (7,)}
    for i in range(num_hidden_layers - 1)
  }
  expected |= {"kernel": (widths[-2], 7), "bias": (7,), "output": (3, 7)}
  assert shapes == expected

  params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # So that no bias is zero.
  params, slow = jax.tree.map(np.asarray, (params, x))
  layers = [params[f"Dense_{i}"] for i in range(num_hidden_layers - 1)]
  for layer in [*layers, params]:
    slow = np.maximum(slow @ layer["kernel"] + layer["bias"], 0)
  slow = slow @ params["output"].T
  np.testing.assert_allclose(module.apply({"params": params}, x), slow, rtol=1e-12)


def test_extractor_starts_with_the_variance_of_its_fan_in():
  """Each layer keeps the scale of what it sees, however the weights are stored."""
  module, x = networks.Extractor(400, 300, 2), jnp.ones((1, 200), jnp.float32)
  params = module.init(KEY, x)["params"]
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
  omega = jax.random.normal(KEY, (3,))
  params = module.init(KEY, omega)["params"]
  assert float(params["scale"]) == 0.25
  first, second = params["Dense_0"], params["Dense_1"]
  hidden = np.tanh(np.asarray(omega) @ first["kernel"] + first["bias"])
  shift = hidden @ second["kernel"] + second["bias"]
  slow = 0.25 * (np.asarray(omega) + shift)
  np.testing.assert_allclose(module.apply({"params": params}, omega), slow, rtol=1e-12)
  assert np.linalg.norm(shift) > 1e-3  # The MLP takes part from the start.


def test_shifter_contains_the_identity():
  module = networks.Shifter(6, 1.0, param_dtype=jnp.float64)
  omega = jax.random.normal(KEY, (3,))
  params = jax.tree.map(jnp.zeros_like, module.init(KEY, omega)["params"])
  params["scale"] = jnp.ones(())
  np.testing.assert_array_equal(module.apply({"params": params}, omega), omega)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_parameters_and_outputs_take_the_given_dtype(dtype):
  extractor = networks.Extractor(4, 2, 2, param_dtype=dtype)
  shifter = networks.Shifter(4, 1.0, param_dtype=dtype)
  for module, shape in ((extractor, (5, 3)), (shifter, (3,))):
    x = jnp.ones(shape, dtype)
    params = module.init(KEY, x)
    chex.assert_type([*jax.tree.leaves(params), module.apply(params, x)], dtype)
