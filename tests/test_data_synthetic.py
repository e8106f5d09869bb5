"""Synthetic tables: their split, their owners, their truth."""

import numpy as np
import pytest

from fedbnr_jax.data import synthetic
from fedbnr_jax.errors import InputError


def draw(task="two-ranges", seed=0, **options):
  return synthetic.load(task, np.random.default_rng(seed), **options)


@pytest.mark.parametrize(
  "task, columns", [("two-ranges", 1), ("additive", 5), ("step", 1)]
)
def test_sizes_and_names(task, columns):
  data = draw(task)
  names = ["x"] if columns == 1 else [f"x{i}" for i in range(1, 6)]
  assert list(data.features.columns) == names
  assert data.target_name == "y"
  assert [len(part) for part in data.split] == [200, 100, 100]
  assert data.num_rows == 400


@pytest.mark.parametrize("task", synthetic.TASKS)
def test_truth_and_noise_make_the_targets(task):
  data = draw(task, num_rows=4000, noise_std=0.5)
  noise = data.targets - data.truth(data.features.to_numpy())
  assert noise.mean() == pytest.approx(0, abs=0.03)
  assert noise.std() == pytest.approx(0.5, abs=0.02)
  assert 2 < data.targets.std() / noise.std() < 6  # Visible, yet learnable.


def test_two_ranges_is_sorted_and_cut_at_zero():
  data = draw()
  x = data.features["x"].to_numpy()
  assert (np.diff(x[data.split.train]) >= 0).all()
  assert x.min() >= -5
  assert x.max() <= 5
  assert (data.clients == np.where(x < 0, "client 1", "client 2")).all()


def test_more_clients_own_ranges_of_equal_width():
  data = draw(num_clients=5)
  x = data.features["x"].to_numpy()
  expected = [f"client {int((value + 5) // 2) + 1}" for value in x]
  assert data.clients.tolist() == expected


def test_step_has_two_levels_and_the_rows_of_two_ranges():
  data, smooth = draw("step", num_clients=3), draw("two-ranges", num_clients=3)
  assert data.features.equals(smooth.features)
  assert (data.clients == smooth.clients).all()
  grid = np.linspace(-5, 5, 1001)[:, None]
  levels = data.truth(grid)
  assert set(levels) == {-1.5, 1.5}
  (jump,) = np.flatnonzero(np.diff(levels))
  assert grid[jump + 1, 0] == pytest.approx(1.0)


def test_additive_clients_own_equal_shares():
  data = draw("additive", num_clients=4)
  owners, counts = np.unique(data.clients[data.split.train], return_counts=True)
  assert owners.tolist() == [f"client {number}" for number in range(1, 5)]
  assert counts.tolist() == [50] * 4
  assert set(data.clients) == set(owners)


def test_one_client_owns_all():
  assert set(draw(num_clients=1).clients) == {"client 1"}


def test_same_generator_same_table():
  first, same, other = draw(seed=3), draw(seed=3), draw(seed=4)
  assert np.array_equal(first.targets, same.targets)
  assert not np.array_equal(first.targets, other.targets)


@pytest.mark.parametrize(
  "options, expected",
  [
    ({"task": "two-range"}, "no synthetic task 'two-range': did you mean 'two-ranges'"),
    ({"task": "zzz"}, "choose from 'two-ranges', 'additive', 'step'"),
    ({"num_rows": 9}, "num_rows is 9: give at least 10"),
    ({"noise_std": 0.0}, "noise_std is 0.0"),
    ({"noise_std": float("nan")}, "noise_std is nan"),
    ({"num_clients": 0}, "num_clients is 0"),
    ({"num_clients": 60, "num_rows": 20}, "at most half of the 20 rows"),
  ],
)
def test_unusable_arguments(options, expected):
  with pytest.raises(InputError) as caught:
    draw(**options)
  assert expected in str(caught.value)
  assert "\n" not in str(caught.value)
