"""Rows and their sums as integers, on which the influence of one row is exact.

In floating point a sum depends on the order of its rows in its last digits, and so a
row may change it by more than its own size. Here every row becomes a vector of integers
by itself, its norm is checked in integers, and sums of integers are exact. A row counts
in the Gram matrix of these vectors, and as a constant in the number of rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedbnr_jax.gp import urk
from fedbnr_jax.gp.kernel_model import features_of

_CHUNK = 256  # Rows that go through the device together.
_EXACT = 2**53  # Integers below it are exact in float64.


@dataclasses.dataclass(frozen=True, eq=False)  # Arrays do not compare to one truth.
class IntegerSums:
  """Sums over rows: integers, hence exact."""

  gram: np.ndarray  # [M + 1, M + 1] int64, Σ vvᵀ of the rows' integer vectors.
  count: int  # The number of rows times the grid's `count_unit`.


@dataclasses.dataclass(frozen=True)
class Grid:
  """The scale on which rows are rounded to integers, and what one of them can change.

  The vector of a row is v = round(r·[φ/√(2c); y/(√2·Y)]), of norm at most r before it
  is rounded.

  Attributes:
    squared_norm: c, which the squared norm of no row's features exceeds.
    target_bound: Y, to which targets are clipped.
    num_features: M.
    resolution: r.
  """

  squared_norm: float
  target_bound: float
  num_features: int
  resolution: int = 2**16

  @property
  def row_bound(self) -> int:
    """The largest ‖v‖², rounding included: an entry moves by at most one half."""
    # (r + √L/2)² = r² + r√L + L/4, and 2 for what the roundings down leave out.
    length, squared = self.num_features + 1, self.resolution**2
    return squared + math.isqrt(squared * length) + length // 4 + 2

  @property
  def count_unit(self) -> int:
    """What a row adds to the count: small beside `row_bound`, and so nearly free."""
    return self.row_bound // 8

  @property
  def squared_sensitivity(self) -> int:
    """The square of the most that one row changes Gram matrix and count, in L2 norm."""
    return self.row_bound**2 + self.count_unit**2

  @property
  def unit(self) -> float:
    """The size of one step of the grid in the Gram matrix of [φ; y·√c/Y]."""
    return 2.0 * self.squared_norm / self.resolution**2

  def integers(self, features: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Rounds rows to integers [n, M + 1], each by itself.

    Args:
      features: [n, M]; a row whose norm is too large after all is shrunk.
      targets: [n]; clipped to ±Y.
    """
    bound = self.target_bound
    targets = np.clip(targets, -bound, bound) / bound
    unit = np.concatenate(
      [features / math.sqrt(self.squared_norm), targets[:, None]], axis=1
    )
    # A feature that is not finite must not reach the sum, where it would be seen.
    unit = np.clip(np.nan_to_num(unit / math.sqrt(2.0)), -1.0, 1.0)
    rows = np.rint(self.resolution * unit).astype(np.int64)
    norms = np.sum(rows**2, axis=1)
    large = norms > self.row_bound
    if large.any():
      shrink = np.sqrt(self.resolution**2 / norms[large])
      rows[large] = np.trunc(rows[large] * shrink[:, None]).astype(np.int64)
      assert np.all(np.sum(rows**2, axis=1) <= self.row_bound)
    return rows

  def sums(
    self,
    features_of_rows: Callable[[np.ndarray], np.ndarray],
    x: np.ndarray,
    y: np.ndarray,
  ) -> IntegerSums:
    """Sums rows x [N, D], y [N] exactly, in any order the same.

    Args:
      features_of_rows: Maps inputs [256, D] to features [256, M], each row by itself,
        as `row_features` does.
      x: Standardised inputs.
      y: Standardised targets.
    """
    assert _CHUNK * self.row_bound < _EXACT
    size = self.num_features + 1
    gram = np.zeros((size, size), np.int64)
    for start in range(0, len(y), _CHUNK):
      inputs, targets = x[start : start + _CHUNK], y[start : start + _CHUNK]
      padded = np.pad(inputs, ((0, _CHUNK - len(targets)), (0, 0)))
      features = np.asarray(features_of_rows(padded), np.float64)[: len(targets)]
      # Products of integers below 2⁵³ are exact in float64, which is far faster.
      rows = self.integers(features, np.asarray(targets, np.float64)).astype(float)
      gram += (rows.T @ rows).astype(np.int64)
    return IntegerSums(gram, len(y) * self.count_unit)


def row_features(
  feature_map: urk.FeatureMap, theta: Any, omega: Any
) -> Callable[[np.ndarray], np.ndarray]:
  """Makes the jitted function of inputs [n, D] to features [n, M], one row at a time.

  A product of all rows at once may round a row differently by where it stands among
  others, so that another row's presence would show.
  """

  def of_row(theta: Any, omega: Any, row: jax.Array) -> jax.Array:
    return features_of(feature_map, theta, omega, row[None])[0]

  @jax.jit
  def of_rows(theta: Any, omega: Any, x: jax.Array) -> jax.Array:
    return jax.lax.map(functools.partial(of_row, theta, omega), x)

  return lambda x: np.asarray(of_rows(theta, omega, x))
