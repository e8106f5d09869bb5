"""Rows are set aside, and divided into folds, from every owner in proportion."""

import numpy as np
import pytest

from fedbnr_jax.data import held_out

OWNERS = np.repeat(["a", "b", "c", "d", "e"], [50, 20, 2, 1, 27])


def rng(seed: int = 0) -> np.random.Generator:
  return np.random.default_rng(seed)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_every_owner_gives_its_share_and_keeps_a_row(share, seed):
  chosen = held_out.set_aside(rng(seed), np.arange(100), share, OWNERS)
  for owner in "abcde":
    own = chosen[owner == OWNERS]
    assert abs(own.sum() - share * len(own)) <= 1
    assert not own.all()


def test_each_row_is_as_likely_as_any_other():
  times = sum(
    held_out.set_aside(rng(seed), np.arange(40), 0.25, OWNERS[:40].repeat(1))
    for seed in range(2000)
  )
  np.testing.assert_allclose(times / 2000, 0.25, atol=0.05)


@pytest.mark.parametrize("owners", [None, OWNERS])
def test_folds_are_of_equal_size_and_leave_no_owner_without_rows(owners):
  fold = held_out.folds(rng(), np.arange(100), 5, owners)
  sizes = np.bincount(fold[fold >= 0], minlength=5)
  assert np.ptp(sizes) <= 1
  if owners is None:
    assert (fold >= 0).all()
    return
  assert (fold[owners == "d"] == -1).all()
  for number in range(5):
    assert set(owners[fold != number]) == set("abcde")
  assert np.ptp(np.bincount(fold[owners == "a"])) <= 1
