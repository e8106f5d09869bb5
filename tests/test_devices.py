"""Arrays onto devices: what one device gets, and what each of four does."""

import jax
import numpy as np
import pytest

from fedbnr_jax import devices, federation
from tests.runs import assert_same_bits


def _federation():
  rng = np.random.default_rng(0)
  parts = np.array_split(np.arange(23), 5)
  inputs, targets = rng.normal(size=(23, 2)), rng.normal(size=23)
  return federation.build(inputs, targets, parts, on_host=True)


def test_one_device_holds_the_federation_as_it_is():
  built = _federation()
  put = devices.put_federation(built, None)
  assert_same_bits(put, built)
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(put))
  assert (put.num_clients, put.num_padding) == (5, 0)


@pytest.mark.parametrize("put", [devices.share, devices.replicate])
def test_one_device_gets_the_same_arrays(put):
  tree = {"a": np.arange(6.0).reshape(3, 2), "b": np.array([True, False, True])}
  got = put(tree, None)
  assert_same_bits(got, tree)
  assert all(isinstance(leaf, jax.Array) for leaf in got.values())


def test_one_device_gets_the_same_key():
  key = jax.random.key(3)
  assert devices.replicate_key(key, None) is key


def test_five_clients_on_four_devices_are_padded_to_two_each(on_four_devices):
  found = on_four_devices["padding"]
  assert (found["num_clients"], found["num_padding"]) == (5, 3)
  assert found["shares"] == [2, 2, 2, 2]
  assert found["devices"] == 4
  assert found["rows_kept"]
  assert found["padding_admits"] == 0


def test_every_device_has_the_servers_rows_and_the_key(on_four_devices):
  found = on_four_devices["padding"]
  assert found["server_copies"] == [[3, 2]] * 4
  assert found["key_kept"]
