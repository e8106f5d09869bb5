"""Which devices, how many clients at a time, and what each device gets."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbnr_jax.federated import placement
from fedbnr_jax.federated.placement import Placement
from tests import methods
from tests.runs import assert_refused, assert_same_bits


def test_mesh_of_more_devices_than_there_are_is_refused():
  available = len(jax.devices())
  assert_refused(
    lambda: placement.client_mesh(available + 1),
    "config.mesh",
    str(available + 1),
    f"{available} devices",
  )


@pytest.mark.skipif(len(jax.devices()) > 1, reason="of one device")
@pytest.mark.parametrize("num_devices", [0, 1])
def test_one_device_needs_no_mesh(num_devices):
  assert placement.client_mesh(num_devices) is None
  assert Placement().num_devices == 1


# --------------------------------------------------------------- clients at a time


@given(*[st.integers(1, 10**6)] * 3, st.integers(0, 2), st.integers(1, 10**6))
def test_automatic_batch_is_smaller_for_larger_clients(
  num_params, num_rows, num_inputs, which, more
):
  size = placement.automatic_batch_size(num_params, num_rows, num_inputs)
  assert size >= 1
  larger = [num_params, num_rows, num_inputs]
  larger[which] += more
  other = placement.automatic_batch_size(*larger)
  if which == 2:  # More inputs: of as many parameters, fewer are hidden units.
    assert other >= size
  else:
    assert 1 <= other <= size


def test_automatic_batch_of_small_clients_is_many_and_of_huge_ones_one():
  assert placement.automatic_batch_size(100, 10, 5) > 10
  assert placement.automatic_batch_size(10**8, 10**4, 5) == 1


def test_a_batch_size_that_is_given_stays():
  rows = methods.small().clients
  assert Placement(3).sized(10**8, rows) == Placement(3)
  # Long messages are not kept for many clients at once.
  assert Placement().sized(10, rows, 10**7) == Placement(1)
  chosen = placement.automatic_batch_size(10, *rows.x.shape[1:])
  assert Placement().sized(10, rows) == Placement(chosen)


# -------------------------------------------------------------- arrays onto devices


@given(st.integers(1, 1000), st.integers(1, 50))
def test_rounding_up_is_to_the_next_multiple(number, multiple):
  up = placement.round_up(number, multiple)
  assert up % multiple == 0
  assert number <= up < number + multiple


@pytest.mark.parametrize("array", [np.asarray, jax.numpy.asarray])
def test_padding_adds_zeros_at_the_end_of_the_client_axis(array):
  tree = {"a": array(np.arange(6.0).reshape(3, 2)), "b": array([True, True, True])}
  assert_same_bits(placement.pad_clients(tree, 3), tree)
  padded = placement.pad_clients(tree, 5)
  assert_same_bits(jax.tree.map(lambda leaf: leaf[:3], padded), tree)
  assert not any(np.any(leaf[3:]) for leaf in padded.values())
  assert [leaf.shape[0] for leaf in padded.values()] == [5, 5]
  assert all(isinstance(leaf, type(tree["a"])) for leaf in padded.values())


def test_one_device_holds_the_federation_as_it_is():
  built = methods.small()
  put = placement.put_federation(built, None)
  assert_same_bits(put, built)
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(put))
  assert (put.num_clients, put.num_padding) == (5, 0)


@pytest.mark.parametrize("put", [placement.share, placement.replicate])
def test_one_device_gets_the_same_arrays(put):
  tree = {"a": np.arange(6.0).reshape(3, 2), "b": np.array([True, False, True])}
  got = put(tree, None)
  assert_same_bits(got, tree)
  assert all(isinstance(leaf, jax.Array) for leaf in got.values())


def test_one_device_gets_the_same_key():
  key = jax.random.key(3)
  assert placement.replicate_key(key, None) is key


def test_five_clients_on_four_devices_are_padded_to_two_each(on_four_devices):
  found = on_four_devices["padding"]
  assert (found["num_clients"], found["num_padding"]) == (5, 3)
  assert found["shares"] == [2, 2, 2, 2]
  assert found["devices"] == 4
  assert found["rows_kept"]
  assert found["padding_admits"] == 0


def test_every_device_has_the_servers_rows_and_the_key(on_four_devices):
  found = on_four_devices["padding"]
  assert found["server_copies"] == [[6, 2]] * 4
  assert found["key_kept"]
