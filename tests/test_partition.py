"""Partitioners deal each row to one client, by their own rule."""

import itertools

import chex
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated import partition


def _table(num_rows, seed=0, num_inputs=3):
  rng = np.random.default_rng(seed)
  inputs = rng.normal(size=(num_rows, num_inputs))
  return inputs, 2 * inputs[:, 1] - 0.3 * inputs[:, 0] + 0.1 * rng.normal(size=num_rows)


@st.composite
def _deals(draw):
  num_clients = draw(st.integers(1, 30))
  return draw(st.integers(2 * num_clients, 4 * num_clients + 40)), num_clients


@pytest.mark.parametrize("name", partition.PARTITIONERS)
@hypothesis.given(_deals(), st.integers(0, 2**32 - 1))
def test_each_row_goes_to_one_client_and_sizes_are_nearly_equal(name, deal, seed):
  num_rows, num_clients = deal
  table = _table(num_rows, seed)
  rng = np.random.default_rng(seed)
  parts = partition.partition(name, rng, *table, num_clients)
  assert len(parts) == num_clients
  assert sorted(np.concatenate(parts)) == list(range(num_rows))
  sizes = [len(part) for part in parts]
  # Two chunks a client, each of a floor or a ceiling.
  assert max(sizes) - min(sizes) <= (2 if name == "sorted" else 1)
  assert min(sizes) >= 1


@pytest.mark.parametrize("name", partition.PARTITIONERS)
def test_seed_decides_the_deal(name):
  table = _table(60)

  def deal(seed):
    rng = np.random.default_rng(seed)
    return partition.partition(name, rng, *table, 5)

  chex.assert_trees_all_equal(deal(1), deal(1))
  assert any(not np.array_equal(a, b) for a, b in zip(deal(1), deal(2), strict=True))


@hypothesis.given(_deals(), st.integers(0, 2**32 - 1))
def test_sorted_clients_hold_two_runs_of_the_sorted_order(deal, seed):
  num_rows, num_clients = deal
  inputs, targets = _table(num_rows, seed)
  rng = np.random.default_rng(seed)
  parts = partition.sorted_chunks(rng, inputs, targets, num_clients)
  column = partition.most_correlated(inputs, targets)
  rank = np.argsort(np.argsort(inputs[:, column]))
  for part in parts:
    breaks = np.sum(np.diff(np.sort(rank[part])) > 1)
    assert breaks <= 1  # Two runs, or one where they are neighbours.


def test_target_clients_hold_disjoint_ranges():
  inputs, targets = _table(50)
  parts = partition.partition("target", np.random.default_rng(0), inputs, targets, 4)
  ranges = sorted((targets[part].min(), targets[part].max()) for part in parts)
  assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


@hypothesis.given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_most_correlated_is_numpys(seed, num_inputs):
  rng = np.random.default_rng(seed)
  inputs = rng.normal(size=(20, num_inputs)) * 10.0 ** rng.integers(-3, 4, num_inputs)
  targets = rng.normal(size=20)
  correlation = [np.corrcoef(column, targets)[0, 1] for column in inputs.T]
  assert partition.most_correlated(inputs, targets) == np.argmax(np.abs(correlation))


def test_constant_columns_correlate_with_nothing():
  inputs, targets = _table(30)
  inputs[:, 0] = 5.0
  assert partition.most_correlated(inputs, targets) == 1
  assert partition.most_correlated(np.ones((30, 2)), targets) == 0


@pytest.mark.parametrize("num_clients", [0, -3, 11, 20, 10**6])
def test_impossible_numbers_of_clients_are_refused(num_clients):
  table = _table(20)
  with pytest.raises(InputError, match=f"between 1 and half .* got {num_clients}"):
    partition.partition("iid", np.random.default_rng(0), *table, num_clients)


def test_half_of_the_rows_is_the_most_clients():
  for name in partition.PARTITIONERS:
    parts = partition.partition(name, np.random.default_rng(0), *_table(20), 10)
    assert [len(part) for part in parts] == [2] * 10


def test_unknown_partition_is_refused_with_the_known():
  with pytest.raises(InputError, match=r"'sorte'.*sorted, iid, target"):
    partition.partition("sorte", np.random.default_rng(0), *_table(20), 2)


def test_column_deals_training_rows_by_label():
  labels = np.array(["b", "a", "b", "c", "a", "b"])
  train = np.array([5, 1, 0, 4])
  parts, names = partition.by_column(labels, train)
  assert names == ["a", "b", "c"]
  chex.assert_trees_all_equal([list(p) for p in parts], [[1, 3], [0, 2], []])
  for part, name in zip(parts, names, strict=True):
    assert set(labels[train[part]]) <= {name}
