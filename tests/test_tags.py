"""Tags of rows: equal for equal rows only, and paired one by one."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedbnr_jax.tags import OwnedRows, paired, row_tags, without

_TAGS = st.lists(st.integers(0, 4), max_size=8)


def test_tags_are_equal_for_equal_rows_only():
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(50_000, 3)), rng.normal(size=50_000)
  owners = np.array(["north", "south"])[rng.integers(2, size=50_000)]
  rows = OwnedRows(x, y, owners)
  tags = row_tags(rows)
  assert len(set(tags.tolist())) == len(tags)
  order = rng.permutation(len(tags))
  shuffled = rows.where(order)._replace(x=x[order].astype(np.float32))
  np.testing.assert_array_equal(row_tags(shuffled), tags[order])
  others = [
    rows._replace(x=x[:, ::-1]),
    rows._replace(owners=None),
    rows._replace(owners=np.array(["south", "north"])[(owners == "south") * 1]),
  ]
  for other in others:
    assert not np.isin(row_tags(other), tags).any()
  zeros = OwnedRows(np.zeros((1, 2)), np.zeros(1))
  minus = OwnedRows(-zeros.x, -zeros.y)
  assert row_tags(zeros) == row_tags(minus)


@given(_TAGS, _TAGS)
def test_tags_are_paired_one_by_one(some, others):
  some, others = (np.array(tags, np.uint64) for tags in (some, others))
  wanted, left = [], Counter(others.tolist())
  for tag in some.tolist():  # A loop that crosses off what it finds.
    wanted.append(left[tag] > 0)
    left[tag] -= 1
  np.testing.assert_array_equal(paired(some, others), np.array(wanted, bool))
  kept = Counter(some.tolist()) - Counter(others.tolist())
  assert Counter(without(some, others).tolist()) == kept
