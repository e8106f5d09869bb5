"""Fixed point: what Python's own integers and fractions say, bit for bit."""

import math
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import fixed_point

_MODULUS = 1 << 128
_numbers = (
  st.floats(-(2.0**61), 2.0**61) | st.floats(-1.0, 1.0) | st.floats(-1e-18, 1e-18)
)
_near_powers = st.builds(  # Where a limb, the sign or a float's exponent changes.
  lambda power, offset: (2**power + offset) % _MODULUS,
  st.integers(0, 128),
  st.integers(-(2**12), 2**12),
)
_near_ties = st.builds(  # Halfway between two floats, or one integer beside it.
  lambda float_bits, shift, beside: (float_bits * 2 + 1 << shift) + beside,
  st.integers(2**52, 2**53 - 1),
  st.integers(0, 73),
  st.integers(-1, 1),
)
_integers = st.integers(0, _MODULUS - 1) | _near_powers | _near_ties


def to_integers(limbs):
  """The same numbers as Python's integers, with a sign."""
  whole = [int(low) | int(high) << 64 for low, high in limbs]
  return [value - _MODULUS if value >> 127 else value for value in whole]


def to_limbs(integers):
  mask = (1 << 64) - 1
  pairs = [[value & mask, value % _MODULUS >> 64] for value in integers]
  return np.array(pairs, np.uint64).reshape(-1, 2)


@hypothesis.given(st.lists(_numbers, max_size=20))
@hypothesis.example(
  [0.0, -0.0, 2.0**-65, -(2.0**-65), 3 * 2.0**-65, -(2.0**-64), 5e-324]
)
@hypothesis.example([1 - 2.0**-53, 2.0**-53 - 1, 2.0**61, -(2.0**61), 2.0**52 + 0.5])
@hypothesis.settings(max_examples=200)
def test_encode_is_the_nearest_integer(numbers):
  limbs = fixed_point.encode(np.array(numbers, np.float64), 2)
  assert limbs.dtype == np.uint64
  assert to_integers(limbs) == [round(Fraction(x) * 2**64) for x in numbers]


@hypothesis.given(st.lists(_integers, min_size=1, max_size=20))
@hypothesis.settings(max_examples=300)
def test_decode_is_the_nearest_float(integers):
  limbs = to_limbs(integers)
  # Python divides integers with one rounding, to the nearest float.
  expected = [value / 2**64 for value in to_integers(limbs)]
  np.testing.assert_array_equal(fixed_point.decode(limbs), expected, strict=True)


@hypothesis.given(st.lists(_integers, min_size=1, max_size=9), st.data())
@hypothesis.settings(max_examples=100)
def test_sums_wrap_as_integers_do(integers, data):
  others = data.draw(
    st.lists(_integers, min_size=len(integers), max_size=len(integers))
  )
  left, right = to_limbs(integers), to_limbs(others)
  total = left.copy()
  fixed_point.add(total, right)
  expected = to_limbs(
    [(a + b) % _MODULUS for a, b in zip(integers, others, strict=True)]
  )
  np.testing.assert_array_equal(total, expected)
  fixed_point.subtract(total, right)
  np.testing.assert_array_equal(total, left)


@hypothesis.given(st.lists(_numbers, min_size=3, max_size=8), st.randoms())
@hypothesis.settings(max_examples=100)
def test_a_sum_has_the_same_bits_in_any_order(numbers, random):
  def total(order):
    limbs = np.zeros((1, 2), np.uint64)
    for number in order:
      fixed_point.add(limbs, fixed_point.encode(np.array([number]), len(numbers)))
    return fixed_point.decode(limbs)[0]

  limited = [number / 4 for number in numbers]  # Eight of them fit.
  shuffled = random.sample(limited, len(limited))
  assert total(shuffled) == total(limited)
  error = abs(Fraction(total(limited)) - sum(map(Fraction, limited)))
  rounding = Fraction(math.ulp(total(limited))) / 2
  assert error <= rounding + Fraction(len(limited), 2**65)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_by_their_place(bad):
  with pytest.raises(
    InputError, match=r"number 1 of 3 is -?(nan|inf), which is not fin"
  ):
    fixed_point.encode(np.array([0.0, bad, 1.0]), 3)


@pytest.mark.parametrize("members", [1, 3, 7, 50])
def test_what_could_overflow_is_refused_and_nothing_below(members):
  largest = np.nextafter(2.0**63 / members, 0.0)
  for sign in (1.0, -1.0):
    limbs = fixed_point.encode(np.array([sign * largest]), members)
    total = np.zeros_like(limbs)
    for _ in range(members):
      fixed_point.add(total, limbs)
    assert fixed_point.decode(total)[0] == float(Fraction(sign * largest) * members)
    for beyond in (np.nextafter(2.0**63 / members, np.inf), 1e300):
      with pytest.raises(InputError, match="may not fit"):
        fixed_point.encode(np.array([sign * beyond]), members)


def test_exactly_at_the_limit_is_refused():
  with pytest.raises(InputError, match="may not fit"):
    fixed_point.encode(np.array([2.0**61]), 4)


@pytest.mark.parametrize(
  "vector", [np.ones((2, 2)), np.array([1, 2]), np.array([1j]), np.array(["1"])]
)
def test_other_arrays_are_refused(vector):
  with pytest.raises(InputError, match="give a vector of floats"):
    fixed_point.encode(vector, 3)


def test_float32_is_taken_exactly():
  numbers = np.array([0.1, -3.7e5, 1e-9], np.float32)
  limbs = fixed_point.encode(numbers, 3)
  np.testing.assert_array_equal(
    limbs, fixed_point.encode(numbers.astype(np.float64), 3)
  )


def test_an_empty_vector_stays_one():
  assert fixed_point.decode(fixed_point.encode(np.zeros(0), 3)).shape == (0,)
