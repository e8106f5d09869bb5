"""Partitioners are partitions; the arrays hold each row once, where it belongs."""

import itertools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fedbnr_jax import federation
from fedbnr_jax.errors import InputError


def _table(num_rows, seed=0, num_inputs=3):
  rng = np.random.default_rng(seed)
  inputs = rng.normal(size=(num_rows, num_inputs))
  return inputs, 2 * inputs[:, 1] - 0.3 * inputs[:, 0] + 0.1 * rng.normal(size=num_rows)


@st.composite
def _deals(draw):
  num_clients = draw(st.integers(1, 30))
  return draw(st.integers(2 * num_clients, 4 * num_clients + 40)), num_clients


@pytest.mark.parametrize("name", federation.PARTITIONERS)
@hypothesis.given(_deals(), st.integers(0, 2**32 - 1))
def test_each_row_goes_to_one_client_and_sizes_are_nearly_equal(name, deal, seed):
  num_rows, num_clients = deal
  table = _table(num_rows, seed)
  rng = np.random.default_rng(seed)
  parts = federation.partition(name, rng, *table, num_clients)
  assert len(parts) == num_clients
  assert sorted(np.concatenate(parts)) == list(range(num_rows))
  sizes = [len(part) for part in parts]
  # Two chunks a client, each of a floor or a ceiling.
  assert max(sizes) - min(sizes) <= (2 if name == "sorted" else 1)
  assert min(sizes) >= 1


@pytest.mark.parametrize("name", federation.PARTITIONERS)
def test_seed_decides_the_deal(name):
  table = _table(60)

  def deal(seed):
    rng = np.random.default_rng(seed)
    return federation.partition(name, rng, *table, 5)

  chex.assert_trees_all_equal(deal(1), deal(1))
  assert any(not np.array_equal(a, b) for a, b in zip(deal(1), deal(2), strict=True))


@hypothesis.given(_deals(), st.integers(0, 2**32 - 1))
def test_sorted_clients_hold_two_runs_of_the_sorted_order(deal, seed):
  num_rows, num_clients = deal
  inputs, targets = _table(num_rows, seed)
  rng = np.random.default_rng(seed)
  parts = federation.sorted_chunks(rng, inputs, targets, num_clients)
  column = federation.most_correlated(inputs, targets)
  rank = np.argsort(np.argsort(inputs[:, column]))
  for part in parts:
    breaks = np.sum(np.diff(np.sort(rank[part])) > 1)
    assert breaks <= 1  # Two runs, or one where they are neighbours.


def test_target_clients_hold_disjoint_ranges():
  inputs, targets = _table(50)
  parts = federation.partition("target", np.random.default_rng(0), inputs, targets, 4)
  ranges = sorted((targets[part].min(), targets[part].max()) for part in parts)
  assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


@hypothesis.given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_most_correlated_is_numpys(seed, num_inputs):
  rng = np.random.default_rng(seed)
  inputs = rng.normal(size=(20, num_inputs)) * 10.0 ** rng.integers(-3, 4, num_inputs)
  targets = rng.normal(size=20)
  correlation = [np.corrcoef(column, targets)[0, 1] for column in inputs.T]
  assert federation.most_correlated(inputs, targets) == np.argmax(np.abs(correlation))


def test_constant_columns_correlate_with_nothing():
  inputs, targets = _table(30)
  inputs[:, 0] = 5.0
  assert federation.most_correlated(inputs, targets) == 1
  assert federation.most_correlated(np.ones((30, 2)), targets) == 0


@pytest.mark.parametrize("num_clients", [0, -3, 11, 20, 10**6])
def test_impossible_numbers_of_clients_are_refused(num_clients):
  table = _table(20)
  with pytest.raises(InputError, match=f"between 1 and half .* got {num_clients}"):
    federation.partition("iid", np.random.default_rng(0), *table, num_clients)


def test_half_of_the_rows_is_the_most_clients():
  for name in federation.PARTITIONERS:
    parts = federation.partition(name, np.random.default_rng(0), *_table(20), 10)
    assert [len(part) for part in parts] == [2] * 10


def test_unknown_partition_is_refused_with_the_known():
  with pytest.raises(InputError, match=r"'sorte'.*sorted, iid, target"):
    federation.partition("sorte", np.random.default_rng(0), *_table(20), 2)


def test_column_deals_training_rows_by_label():
  labels = np.array(["b", "a", "b", "c", "a", "b"])
  train = np.array([5, 1, 0, 4])
  parts, names = federation.by_column(labels, train)
  assert names == ["a", "b", "c"]
  chex.assert_trees_all_equal([list(p) for p in parts], [[1, 3], [0, 2], []])
  for part, name in zip(parts, names, strict=True):
    assert set(labels[train[part]]) <= {name}


# ------------------------------------------------------------------------- arrays


def test_client_without_rows_is_named():
  inputs, targets = _table(6)
  parts = [np.array([0, 1]), np.array([], int)]
  with pytest.raises(InputError, match="client number 1 has no training rows"):
    federation.build(inputs, targets, parts)
  with pytest.raises(InputError, match="client ward 7 has no training rows"):
    federation.build(inputs, targets, parts, names=["ward 2", "ward 7"])


@pytest.mark.parametrize("num_padded_rows", [None, 5])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_build_places_each_clients_rows_before_zeros(num_padded_rows, dtype):
  inputs, targets = _table(9)
  parts = [np.array([3, 1, 8]), np.array([0]), np.array([2, 7])]
  built = federation.build(
    inputs, targets, parts, num_padded_rows=num_padded_rows, dtype=dtype
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
  built = federation.build(*_table(9), parts, dtype=jnp.float64)
  server = federation.ServerSet(jnp.ones((2, 3)), jnp.ones(2))
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
    lambda leaf: jnp.concatenate([leaf, jnp.zeros_like(leaf[:2])]), built.clients
  )
  padded = built.replace(clients=filled, num_padding=2)
  assert padded.num_clients == 3
  one = federation.pooled(padded)
  assert one.num_clients == 1
  assert np.sum(one.clients.mask) == sum(map(len, parts))
  expected = federation.single_client(built, 2)
  chex.assert_trees_all_equal(federation.single_client(padded, 2), expected)
