"""From a config to a federation: what depends on the seed, and what on the clients."""

import itertools

import jax
import numpy as np
import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.run import experiment as experiment_lib
from tests.runs import table, tiny


def initial(**fields):
  """Where the server of a training starts."""
  experiment = experiment_lib.build(tiny(**(fields | {"mesh": 1})), table())
  init = jax.jit(experiment.algorithm.init)
  return init(experiment.key_init, experiment.federation).server


def leaves(tree) -> list[np.ndarray]:
  return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def same(one, other) -> bool:
  pairs = zip(leaves(one), leaves(other), strict=True)
  return all(np.array_equal(a, b) for a, b in pairs)


# ------------------------------------------------------------------------- seeds


def test_start_and_split_do_not_depend_on_the_number_of_clients():
  two = experiment_lib.build(tiny(num_clients=2), table())
  four = experiment_lib.build(tiny(num_clients=4), table())
  for part, other in zip(two.split, four.split, strict=True):
    np.testing.assert_array_equal(part, other)
  start, other = initial(num_clients=2), initial(num_clients=4)
  assert same((start.omega, start.params), (other.omega, other.params))
  assert four.federation.num_clients == 4


def test_pooled_method_starts_where_the_federated_one_does():
  one = experiment_lib.build(tiny(method="fedbnr"), table())
  other = experiment_lib.build(tiny(method="central"), table())
  assert same(one.split, other.split)
  start, other_start = initial(method="fedbnr"), initial(method="central")
  assert same(start.params, other_start.params)
  assert same(start.omega, other_start.omega)


def test_synthetic_rows_do_not_depend_on_the_number_of_clients():
  two = experiment_lib.build(tiny(num_clients=2)).dataset
  four = experiment_lib.build(tiny(num_clients=4)).dataset
  assert two.features.equals(four.features)
  np.testing.assert_array_equal(two.targets, four.targets)


def test_other_seed_gives_other_split_start_and_partition():
  one = experiment_lib.build(tiny(seed=1, partition="iid"), table())
  other = experiment_lib.build(tiny(seed=2, partition="iid"), table())
  assert not same(one.split, other.split)
  start, other_start = initial(seed=1), initial(seed=2)
  assert not same(start.omega, other_start.omega)
  assert not same(start.params.theta, other_start.params.theta)


def test_same_seed_builds_the_same_experiment():
  one = experiment_lib.build(tiny(method="fedbnr-kd"), table())
  other = experiment_lib.build(tiny(method="fedbnr-kd"), table())
  assert same(one.federation, other.federation)
  assert same((one.validation, one.test), (other.validation, other.test))


def test_split_is_eight_one_one_and_complete():
  split = experiment_lib.build(tiny(), table()).split
  assert [len(part) for part in split] == [48, 6, 6]
  np.testing.assert_array_equal(np.sort(np.concatenate(split)), np.arange(60))


# ------------------------------------------------------------- who holds what


def test_distillation_set_is_four_fifths_of_validation_and_apart_from_it():
  made = experiment_lib.build(tiny(method="fedbnr-kd"), table(100))
  rows = made.preprocessor.transform(made.dataset.features.iloc[made.split.validation])
  server = np.asarray(made.federation.server.x)
  rest = np.asarray(made.validation.x)
  assert (len(server), len(rest)) == (8, 2)
  held = np.concatenate([server, rest])
  np.testing.assert_allclose(
    held[np.lexsort(held.T)], rows[np.lexsort(rows.T)], rtol=1e-6
  )
  assert not (server[:, None] == rest[None]).all(axis=2).any()


@pytest.mark.parametrize("method", ["fedbnr", "central"])
def test_other_methods_keep_all_validation_rows(method: str):
  made = experiment_lib.build(tiny(method=method), table(100))
  assert made.validation.y.shape == (10,)
  assert made.federation.server is None


def test_test_rows_are_the_split_whatever_the_method():
  tests = [
    experiment_lib.build(tiny(method=method), table()).test
    for method in ("fedbnr", "fedbnr-kd", "central")
  ]
  assert same(tests[0], tests[1])
  assert same(tests[0], tests[2])


def test_central_has_one_client_but_stands_for_many():
  made = experiment_lib.build(tiny(method="central", num_clients=7), table())
  assert made.federation.num_clients == 1
  assert made.client_names == ("pooled",)
  np.testing.assert_array_equal(made.client_rows[0], made.split.train)
  assert made.num_clients == 7


@pytest.mark.parametrize("rule", ["sorted", "iid", "target", "column"])
def test_every_training_row_has_one_owner(rule: str):
  owners = np.array(list("xyz"))[np.arange(60) % 3]
  made = experiment_lib.build(
    tiny(partition=rule, num_clients=3), table(clients=owners)
  )
  dealt = np.concatenate(made.client_rows)
  np.testing.assert_array_equal(np.sort(dealt), np.sort(made.split.train))
  assert made.federation.num_clients == made.num_clients == 3
  # And the arrays hold those rows.
  for index, rows in enumerate(made.client_rows):
    mask = np.asarray(made.federation.clients.mask[index])
    held = np.asarray(made.federation.clients.y[index])[mask]
    expected = made.preprocessor.standardise(made.dataset.targets[rows])
    np.testing.assert_allclose(held, expected, rtol=1e-6, atol=1e-6)


def test_column_partition_follows_the_labels_and_ignores_num_clients():
  owners = np.array(list("zxy"))[np.arange(60) % 3]
  config = tiny(partition="column", num_clients=17)
  made = experiment_lib.build(config, table(clients=owners))
  assert made.client_names == ("x", "y", "z")
  assert made.num_clients == 3
  for name, rows in zip(made.client_names, made.client_rows, strict=True):
    assert set(owners[rows]) == {name}


def test_auto_is_column_with_labels_and_sorted_without():
  owners = np.array(list("xy"))[np.arange(60) % 2]
  with_labels = experiment_lib.build(tiny(), table(clients=owners))
  assert with_labels.client_names == ("x", "y")
  auto = experiment_lib.build(tiny(num_clients=3), table())
  explicit = experiment_lib.build(tiny(num_clients=3, partition="sorted"), table())
  assert auto.client_names == ("client 1", "client 2", "client 3")
  assert same(auto.federation, explicit.federation)


def test_target_partition_gives_ranges_that_do_not_overlap():
  made = experiment_lib.build(tiny(partition="target", num_clients=3), table())
  ranges = sorted(
    (made.dataset.targets[rows].min(), made.dataset.targets[rows].max())
    for rows in made.client_rows
  )
  assert all(low[1] < high[0] for low, high in itertools.pairwise(ranges))


def test_standardisation_sees_training_rows_only():
  dataset = table()
  before = experiment_lib.build(tiny(), dataset)
  dataset.targets[before.split.test] += 1e6
  dataset.features.iloc[before.split.test] *= 1e3
  after = experiment_lib.build(tiny(), dataset)
  assert before.preprocessor == after.preprocessor
  assert same(before.federation, after.federation)


def test_errors_are_in_the_targets_unit_unless_the_dataset_says_otherwise():
  raw = experiment_lib.build(tiny(), table())
  assert raw.error_scale == raw.preprocessor.target_std
  assert 20 < raw.error_scale < 40
  scaled = experiment_lib.build(tiny(), table(standardised_error=True))
  assert scaled.error_scale == 1.0


def test_raw_targets_are_neither_centred_nor_scaled():
  fields = {"data__raw_target": True, "dtype": "float64"}
  raw = experiment_lib.build(tiny(**fields), table())
  clients = raw.federation.clients
  mask = np.asarray(clients.mask)
  train = table().targets[raw.split.train]
  np.testing.assert_allclose(np.sort(clients.y[mask]), np.sort(train), rtol=1e-14)
  assert (raw.error_scale, raw.preprocessor.target_mean) == (1.0, 0.0)
  # Where errors are told in standard deviations there is no other unit.
  scaled = experiment_lib.build(tiny(**fields), table(standardised_error=True))
  assert abs(np.mean(scaled.federation.clients.y[mask])) < 1e-12


def test_evaluation_targets_are_float64_and_inputs_as_configured():
  made = experiment_lib.build(tiny(dtype="float32"), table())
  assert made.test.x.dtype == np.float32
  assert made.test.y.dtype == np.float64
  assert made.federation.clients.x.dtype == np.float32


# ------------------------------------------------------------------------ errors


def test_column_partition_without_labels_is_refused():
  with pytest.raises(InputError, match=r"config\.data\.client"):
    experiment_lib.build(tiny(partition="column"), table())


def test_too_few_rows_to_distil_are_refused():
  with pytest.raises(InputError, match="5 validation rows are too few"):
    experiment_lib.build(tiny(method="fedbnr-kd"), table(50))


def test_client_without_training_rows_is_named():
  made = experiment_lib.build(tiny(), table())
  owners = np.full(60, "big")
  owners[made.split.test[0]] = "tst"
  with pytest.raises(InputError, match="client tst has no training rows"):
    experiment_lib.build(tiny(), table(clients=owners))


def test_unknown_kernel_is_refused_with_the_nearest():
  with pytest.raises(InputError, match="did you mean 'deep'"):
    experiment_lib.build(tiny(kernel="dep"), table())


# --------------------------------------------------------------------- patience


def test_patience_is_the_methods_own_unless_given():
  for method, patience in (("fedbnr", 5), ("central", 20), ("fedbnr-ev", 30)):
    assert experiment_lib.build(tiny(method=method), table()).patience == patience
  given = experiment_lib.build(tiny(method="fedbnr-ev", patience=2), table())
  assert given.patience == 2
