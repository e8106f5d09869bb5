"""A method as a trained model uses it: on one device, its prediction compiled once."""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fedbnr_jax import algorithms, precision
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.data import Preprocessor
from fedbnr_jax.federated.federation import Federation, Rows, ServerSet
from fedbnr_jax.gp import urk
from fedbnr_jax.run import input_summary
from fedbnr_jax.run.records import as_json

# Rows predicted at a time: bounds the memory, whatever the table.
_CHUNK = 8192
# The shortest chunk: with powers of two from here on, tables of all lengths share ten
# programs.
_FEWEST = 16
# Config fields of a run that its method is not built from.
_NOT_OF_METHOD = (
  *("seed", "num_seeds", "num_rounds", "patience", "stop_on", "compare_clients"),
  *("num_clients", "partition", "data"),
)


def method_key(config: ml_collections.ConfigDict) -> str:
  """A text that is equal for configs which differ in data, seed or rounds only."""
  fields = {k: v for k, v in as_json(config).items() if k not in _NOT_OF_METHOD}
  return json.dumps(fields, sort_keys=True)


def predict(
  config: ml_collections.ConfigDict, state: Any, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Predicts with one model; what is compiled serves later calls in the process.

  Args:
    config: Names the method and its kernel.
    state: The method's; where it has a model for each client, of one client.
    x: Standardised inputs [N, D].

  Returns:
    Mean [N] and variance [N] of the standardised target, noise included.
  """
  with precision.float64():
    precision.warn_of_float32(precision.PREDICTIONS, once=True)
    jitted = _jitted(method_key(config))
    parts = [
      _predict_chunk(jitted, state, x[start : start + _CHUNK])
      for start in range(0, len(x), _CHUNK)
    ]
  means, variances = zip(*parts, strict=True)
  return np.concatenate(means), np.concatenate(variances)


def padded_size(num_rows: int, most: int) -> int:
  """The next power of two, so that tables of many lengths share few programs."""
  return min(most, max(_FEWEST, 1 << (num_rows - 1).bit_length()))


def feature_map(
  config: ml_collections.ConfigDict, largest_input: float | None = None
) -> urk.FeatureMap:
  """The kernel of a config; the same object for all configs of one `method_key`.

  Args:
    config: Of a run.
    largest_input: The largest size of an input of any row, if it is known and the bound
      of the features' norm matters.
  """
  return _feature_map(method_key(config), largest_input)


@functools.lru_cache(maxsize=16)
def _feature_map(key: str, largest_input: float | None) -> urk.FeatureMap:
  config = ml_collections.ConfigDict(json.loads(key))
  return kernels.of_last_layer(config, largest_input)


@functools.lru_cache(maxsize=16)
def _jitted(key: str) -> Callable[[Any, np.ndarray], tuple[jax.Array, jax.Array]]:
  """The jitted prediction of the method that a `method_key` stands for."""
  return jax.jit(algorithm(ml_collections.ConfigDict(json.loads(key))).predict)


def _predict_chunk(
  jitted: Callable[..., Any], state: Any, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Mean [n] and variance [n] of inputs [n, D], n rounded up for the program."""
  num_rows = len(x)
  size = padded_size(num_rows, _CHUNK)
  padded = np.pad(x, ((0, size - num_rows), (0, 0)))
  mean, variance = jax.device_get(jitted(state, padded))
  # The state of one client, where each has a model, predicts [1, n].
  return mean.reshape(size)[:num_rows], variance.reshape(size)[:num_rows]


def algorithm(config: ml_collections.ConfigDict) -> algorithms.FederatedAlgorithm:
  """Builds the method for one device: a model may be used where there are fewer."""
  here = ml_collections.ConfigDict(config.to_dict())
  here.mesh = 1
  here.with_noise = True  # False is a way to score; a user wants error bars of y.
  return algorithms.method(here.method).build(here)


def state_shapes(
  config: ml_collections.ConfigDict,
  preprocessor: Preprocessor,
  num_clients: int = 1,
  num_rows: int = 1,
) -> Any:
  """Shapes and types of a method's state for K clients of N rows, by no computation."""
  return jax.eval_shape(
    algorithm(config).init,
    jax.random.key(0),
    _empty(config, (num_clients, num_rows, preprocessor.num_inputs)),
  )


def _empty(
  config: ml_collections.ConfigDict, shape: tuple[int, int, int]
) -> Federation:
  """A federation of this shape [K, N, D], from which a method can be initialised."""
  x = jnp.zeros(shape, config.dtype)
  clients = Rows(x, x[:, :, 0], jnp.ones(shape[:2], bool))
  inputs = input_summary.empty(shape[-1]) if needs_inputs(config) else ()
  return Federation(clients, ServerSet(x[0], x[0, :, 0]), inputs)


def needs_inputs(config: ml_collections.ConfigDict) -> bool:
  """Whether the kernel of a method draws from what is known of the inputs."""
  method = algorithms.method(config.method)
  return method.random_features and feature_map(config).needs_inputs
