"""A site's split: every row once, alike after a restart, and possible for few rows."""

import json
import stat

import hypothesis
import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st

from fedbnr_jax.data import held_out, random_split
from fedbnr_jax.network import site_rows
from fedbnr_jax.network.schema import SiteTable
from tests.runs import assert_refused

_seeds = st.integers(0, 2**128 - 1)


def _table(num_rows):
  return SiteTable(pd.DataFrame({"a": np.zeros(num_rows)}), np.zeros(num_rows))


@hypothesis.given(_seeds, st.integers(1, 300), st.floats(0.0, 0.5))
def test_every_row_is_in_one_part(seed, num_rows, share):
  parts = site_rows.split(seed, _table(num_rows), share)
  np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(num_rows))
  assert len(parts.train) >= 1
  if num_rows < site_rows.FEWEST_TO_SPLIT:
    assert len(parts.train) == num_rows
    return
  expected = random_split(np.random.default_rng(0), num_rows)
  assert len(parts.test) == len(expected.test)
  assert len(parts.validation) == len(expected.validation)
  num_train = len(expected.train)
  assert abs(len(parts.calibration) - share * num_train) < 1.0


@hypothesis.given(_seeds, st.integers(6, 100))
def test_the_seed_decides_and_the_share_moves_training_rows_only(seed, num_rows):
  table = _table(num_rows)
  plain, again = (site_rows.split(seed, table) for _ in range(2))
  for one, other in zip(plain, again, strict=True):
    np.testing.assert_array_equal(one, other)
  assert len(plain.calibration) == 0
  held = site_rows.split(seed, table, 0.3)
  np.testing.assert_array_equal(held.test, plain.test)
  np.testing.assert_array_equal(held.validation, plain.validation)
  left = plain.train[~np.isin(plain.train, held.calibration)]
  np.testing.assert_array_equal(held.train, left)


def test_it_is_the_split_of_a_simulation():
  parts = site_rows.split(7, _table(50), 0.2)
  drawn = random_split(np.random.default_rng([7, 0]), 50)
  chosen = held_out.set_aside(np.random.default_rng([7, 1]), drawn.train, 0.2)
  np.testing.assert_array_equal(parts.calibration, drawn.train[chosen])
  np.testing.assert_array_equal(parts.test, drawn.test)


def test_other_seeds_split_otherwise():
  one, other = (site_rows.split(seed, _table(100)) for seed in (1, 2))
  assert set(one.test) != set(other.test)


def test_no_rows_and_shares_that_leave_nothing_are_refused():
  assert_refused(lambda: site_rows.split(0, _table(0)), "no rows to train on")
  for share in (-0.1, 0.6, np.nan):
    assert_refused(lambda share=share: site_rows.split(0, _table(9), share), "0 to 0.5")


def test_a_seed_is_drawn_once_and_kept(tmp_path):
  path = tmp_path / "site" / "split.json"
  seed = site_rows.kept_seed(path)
  assert site_rows.kept_seed(path) == seed
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert site_rows.kept_seed(tmp_path / "other" / "split.json") != seed


@pytest.mark.parametrize(
  "content, part",
  [
    ("", "no readable seed"),
    ("{}", "lacks 'seed'"),
    (json.dumps({"seed": 3}), "seed is 3"),
    (json.dumps({"seed": "xyz"}), "seed is 'xyz'"),
    (json.dumps({"seed": "-1"}), "seed is '-1'"),
    (json.dumps({"seed": "f" * 33}), "must be hexadecimal digits"),
  ],
)
def test_a_damaged_seed_is_not_drawn_anew(tmp_path, content, part):
  path = tmp_path / "split.json"
  path.write_text(content)
  assert_refused(lambda: site_rows.kept_seed(path), str(path), part)
  assert path.read_text() == content


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  assert_refused(lambda: site_rows.kept_seed(tmp_path / "file" / "split.json"), "file")
