"""The arrays of a federation hold each row once, where it belongs."""

import chex
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated import federation
from tests.runs import assert_same_bits


def _table(num_rows, seed=0, num_inputs=3):
  rng = np.random.default_rng(seed)
  inputs = rng.normal(size=(num_rows, num_inputs))
  return inputs, 2 * inputs[:, 1] - 0.3 * inputs[:, 0] + 0.1 * rng.normal(size=num_rows)


def test_client_without_rows_is_named():
  inputs, targets = _table(6)
  parts = [np.array([0, 1]), np.array([], int)]
  with pytest.raises(InputError, match="client number 1 has no training rows"):
    federation.build(inputs, targets, parts)
  with pytest.raises(InputError, match="client ward 7 has no training rows"):
    federation.build(inputs, targets, parts, names=["ward 2", "ward 7"])


@pytest.mark.parametrize("num_padded_rows", [None, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_build_places_each_clients_rows_before_zeros(num_padded_rows, dtype):
  inputs, targets = _table(9)
  parts = [np.array([3, 1, 8]), np.array([0]), np.array([2, 7])]
  built = federation.build(
    inputs,
    targets,
    parts,
    num_padded_rows=num_padded_rows,
    dtype=dtype,
    on_host=True,
  )
  clients = built.clients
  num_rows = num_padded_rows or 3
  assert built.num_clients == 3
  assert built.server is None
  chex.assert_shape([clients.y, clients.mask], (3, num_rows))
  chex.assert_type([clients.x, clients.y, clients.mask], [dtype, dtype, bool])
  for k, part in enumerate(parts):
    size = len(part)
    np.testing.assert_array_equal(clients.x[k, :size], inputs[part].astype(dtype))
    np.testing.assert_array_equal(clients.y[k, :size], targets[part].astype(dtype))
    np.testing.assert_array_equal(clients.mask[k], np.arange(num_rows) < size)
    assert not np.any(clients.x[k, size:])
    assert not np.any(clients.y[k, size:])


def test_too_little_padding_is_refused():
  with pytest.raises(ValueError, match="num_padded_rows 2"):
    federation.build(*_table(9), [np.arange(3)], num_padded_rows=2)


def _example():
  parts = [np.array([3, 1, 8]), np.array([0]), np.array([2, 7])]
  built = federation.build(*_table(9), parts, dtype=np.float64, on_host=True)
  server = federation.ServerSet(np.ones((2, 3)), np.ones(2))
  return built.replace(server=server), parts


def test_pooling_keeps_every_row_once():
  built, parts = _example()
  one = federation.pooled(built)
  assert one.num_clients == 1
  assert one.server is built.server
  mask = one.clients.mask[0]
  rows = np.concatenate(parts)
  inputs, targets = _table(9)
  np.testing.assert_array_equal(one.clients.x[0][mask], inputs[rows])
  np.testing.assert_array_equal(one.clients.y[0][mask], targets[rows])
  chex.assert_trees_all_equal(federation.pooled(one), one)


def test_single_client_keeps_its_rows_alone():
  built, _ = _example()
  one = federation.single_client(built, 2)
  assert one.num_clients == 1
  expected = jax.tree.map(lambda leaf: leaf[2], built.clients)
  chex.assert_trees_all_equal(jax.tree.map(lambda leaf: leaf[0], one.clients), expected)


def test_clients_that_fill_up_a_device_are_left_out_of_one_client():
  built, parts = _example()
  filled = jax.tree.map(
    lambda leaf: np.concatenate([leaf, np.zeros_like(leaf[:2])]), built.clients
  )
  padded = built.replace(clients=filled, num_padding=2)
  assert padded.num_clients == 3
  one = federation.pooled(padded)
  assert one.num_clients == 1
  assert np.sum(one.clients.mask) == sum(map(len, parts))
  expected = federation.single_client(built, 2)
  chex.assert_trees_all_equal(federation.single_client(padded, 2), expected)


def test_arrays_stay_on_the_host_only_if_they_are_to():
  parts = [np.arange(4), np.arange(4, 9)]
  on_host, on_device = (
    federation.build(*_table(9), parts, on_host=where) for where in (True, False)
  )
  assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(on_host))
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(on_device))
  assert_same_bits(on_host, on_device)


def test_longer_clients_have_the_same_rows():
  built, _ = _example()
  longer = federation.with_rows(built, 7)
  assert longer.clients.x.shape == (3, 7, 3)
  assert_same_bits(
    jax.tree.map(lambda leaf: leaf[:, :3], longer.clients), built.clients
  )
  assert not longer.clients.mask[:, 3:].any()
  assert longer.server is built.server


def test_padding_becomes_zero_whatever_it_held():
  built, _ = _example()
  rows = built.clients
  dirty = rows.replace(
    x=np.where(rows.mask[..., None], rows.x, np.nan), y=np.where(rows.mask, rows.y, 7.0)
  )
  assert_same_bits(jax.jit(federation.zero_padding)(dirty), rows)


SIZES = st.lists(st.integers(1, 3000), min_size=1, max_size=40)


@given(SIZES)
def test_groups_are_all_clients_and_save_padding(sizes):
  groups = federation.groups_of(sizes)
  whole = len(sizes) * max(sizes)
  if not groups:
    return
  assert sorted(k for group in groups for k in group.clients) == [*range(len(sizes))]
  for group in groups:
    assert group.num_rows == max(sizes[k] for k in group.clients)
  padded = sum(group.num_rows * len(group.clients) for group in groups)
  assert whole - padded >= max(1000, 0.3 * whole)


def test_clients_of_like_sizes_are_one_group():
  assert federation.groups_of([700, 698, 701, 640]) == ()
  assert federation.groups_of([40, 3, 2, 5]) == ()  # Not worth compiling for.
  large, small = federation.groups_of([10, 900, 20, 15])
  assert (large, small) == ((900, (1,)), (20, (0, 2, 3)))
