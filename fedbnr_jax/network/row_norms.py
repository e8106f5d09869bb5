"""How long a row of a kernel's features can be, for whoever sees only their sums."""

import functools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from fedbnr_jax import algorithms
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.federated import wire
from fedbnr_jax.gp import urk
from fedbnr_jax.network.checks import Norm
from fedbnr_jax.run import input_summary

Bound = Callable[[Any], float]  # Of θ.


class RowNorm(NamedTuple):
  """The squared norm of one row's features under a kernel."""

  constant: float | None  # Of every row, where all have the same.
  bound: Bound | None  # Of no row exceeded; None where there is no bound.
  # Where inputs have no bound, what the bound is for inputs of size one: a linear part
  # grows with their squares.
  at_one: Bound | None = None

  def of_sum(self, theta: Any, squares: float = math.inf) -> Norm:
    """Bounds what the squared norms of rows add up to.

    Args:
      theta: Of the kernel.
      squares: Σ ‖x‖²/D over these rows, or over more.
    """
    if self.constant is not None:
      return Norm(self.constant, self.constant)
    if self.bound is None:
      return Norm()
    most = self.bound(theta)
    slope = self.at_one(theta) - most if self.at_one else 0.0
    return Norm(0.0, most, slope * squares if slope else 0.0)


@functools.lru_cache(maxsize=8)
def by_number(
  method_key: str, num_inputs: int, largest_input: float | None
) -> dict[int, RowNorm]:
  """Finds the norms of the features of a config's kernels, by how many they are.

  A kernel may be trained with fewer draws than the last layer has, and its number of
  features then tells which it is.

  Args:
    method_key: Stands for the config; see `prediction.method_key`.
    num_inputs: D.
    largest_input: The largest size of an input of any row, if it is known.

  Returns:
    Nothing for a method without random features.
  """
  config = ml_collections.ConfigDict(json.loads(method_key))
  if not algorithms.method(config.method).random_features:
    return {}
  x = wire.empty_rows(num_inputs, config.dtype).x
  inputs = input_summary.empty(num_inputs)
  if largest_input is not None:
    maps = _maps(config, largest_input)
    return {_size(one, x, inputs): _row_norm(one) for one in maps}
  pairs = zip(_maps(config, 0.0), _maps(config, 1.0), strict=True)
  return {
    _size(zero, x, inputs): _row_norm(zero)._replace(at_one=_row_norm(one).bound)
    for zero, one in pairs
  }


def _maps(
  config: ml_collections.ConfigDict, largest_input: float
) -> list[urk.FeatureMap]:
  """Builds the kernel with each number of draws that the method has it with."""
  own = kernels.OWN_GROUPS.get(config.method)
  start = config[own].get("start_samples", 0) if own else 0
  numbers = [None, start] if start else [None]
  trained = [kernels.from_config(config, n, largest_input) for n in numbers]
  return [*trained, kernels.of_last_layer(config, largest_input)]


def _size(feature_map: urk.FeatureMap, x: jax.Array, inputs: Any) -> int:
  return urk.num_features(feature_map, x, inputs if feature_map.needs_inputs else ())


def _row_norm(feature_map: urk.FeatureMap) -> RowNorm:
  if feature_map.norm_bound is None:
    return RowNorm(feature_map.squared_norm, None)
  bound = jax.jit(feature_map.norm_bound)

  def of_theta(theta: Any) -> float:
    # Constants of a bound are of the wide type, and types are not mixed.
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), theta)
    return float(bound(wide))

  return RowNorm(feature_map.squared_norm, of_theta)
