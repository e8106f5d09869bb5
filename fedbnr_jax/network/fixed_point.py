"""Real numbers as integers modulo 2¹²⁸: sums are the same bits in any order.

A number is 2⁶⁴ times itself, rounded to an integer, in two limbs of 64 bits: [n, 2],
the lower limb first. Integers that wrap can be masked by adding random ones, of which
nothing remains when the same are subtracted. Rounding moves a number by 2⁻⁶⁵ at most.
"""

import numpy as np

from fedbnr_jax.errors import InputError

_LIMIT = 2.0**63  # Sums at or beyond it would change their sign.
_SCALE = 64  # Fractional bits.


def encode(vector: np.ndarray, num_members: int) -> np.ndarray:
  """Writes numbers as integers whose sum over all members cannot overflow.

  Args:
    vector: [n] floats.
    num_members: How many vectors will be added up.

  Returns:
    [n, 2] uint64.

  Raises:
    InputError: If a number is not finite, or so large that the sum may not fit.
  """
  vector = np.asarray(vector)
  if vector.ndim != 1 or vector.dtype.kind != "f":
    raise InputError(
      f"what is masked has the type {vector.dtype} and the shape {vector.shape}: give "
      "a vector of floats."
    )
  vector = vector.astype(np.float64)
  size = np.abs(vector)
  # Written so that NaN is refused too. The product rounds up to the limit or stays
  # below it: rounding keeps the order, and the limit is itself a float.
  refused = np.flatnonzero(~(size * num_members < _LIMIT))
  if refused.size:
    first = refused[0]
    what = (
      f"is so large that a sum of {num_members} may not fit (limit 2⁶³)"
      if np.isfinite(vector[first])
      else "is not finite"
    )
    raise InputError(
      f"number {first} of {vector.size} is {vector[first]}, which {what}: nothing is "
      "sent; look at this site's rows."
    )
  whole = np.floor(size)
  limbs = np.empty((vector.size, 2), np.uint64)
  # The fraction has 53 bits, so 2⁶⁴ times it is below 2⁶⁴, also when it is rounded.
  limbs[:, 0] = np.rint((size - whole) * 2.0**_SCALE).astype(np.uint64)
  limbs[:, 1] = whole.astype(np.uint64)
  _negate(limbs, np.signbit(vector))
  return limbs


def decode(limbs: np.ndarray) -> np.ndarray:
  """Returns the float64 [n] that is nearest to each integer [n, 2] over 2⁶⁴."""
  size = limbs.astype(np.uint64)  # A copy.
  negative = size[:, 1] >> np.uint64(63) == 1
  _negate(size, negative)
  low, high = size[:, 0], size[:, 1]
  # Of the 128 bits, the first 64 that are not zero are taken, and a last bit that says
  # whether something follows: then the one rounding of the conversion is right.
  width = np.frexp(high.astype(np.float64))[1].astype(np.uint64)
  shift = np.uint64(64) - width  # 0 ... 64, and C leaves shifts by 64 open.
  shifted = np.where(width == 0, low, high << np.minimum(shift, np.uint64(63)))
  partly = (width > 0) & (width < 64)
  shifted |= np.where(partly, low >> np.minimum(width, np.uint64(63)), np.uint64(0))
  rest = np.where(partly, low << np.minimum(shift, np.uint64(63)), np.uint64(0))
  rest = np.where(width == 64, low, rest)
  shifted |= (rest != 0).astype(np.uint64)
  exponent = np.where(width == 0, -_SCALE, width.astype(np.int64) - _SCALE)
  value = np.ldexp(shifted.astype(np.float64), exponent)
  return np.where(negative, -value, value)


def add(total: np.ndarray, other: np.ndarray) -> None:
  """Adds `other` [n, 2] to `total` [n, 2] in place, modulo 2¹²⁸."""
  total[:, 0] += other[:, 0]
  carry = total[:, 0] < other[:, 0]
  total[:, 1] += other[:, 1]
  total[:, 1] += carry


def subtract(total: np.ndarray, other: np.ndarray) -> None:
  """Subtracts `other` [n, 2] from `total` [n, 2] in place, modulo 2¹²⁸."""
  borrow = total[:, 0] < other[:, 0]
  total[:, 0] -= other[:, 0]
  total[:, 1] -= other[:, 1]
  total[:, 1] -= borrow


def _negate(limbs: np.ndarray, where: np.ndarray) -> None:
  """Changes the sign of some of the integers in place."""
  ones = np.negative(where.astype(np.uint64))  # All bits, where the sign changes.
  limbs ^= ones[:, None]
  limbs[:, 0] += where
  limbs[:, 1] += where & (limbs[:, 0] == 0)
