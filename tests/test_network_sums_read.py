"""No sums that may be read together show a site, or two; algebra is the oracle."""

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from fedbnr_jax.errors import InputError
from fedbnr_jax.network.sums_read import ReadSum, SumsRead, exposed

NAMES = "abcdefghi"
SETS = st.sets(st.sampled_from(NAMES), min_size=3).map(sorted).map(tuple)


def _masked(*sets):
  return [ReadSum(tuple(one), True) for one in sets]


def _row(names):
  return np.isin(list(NAMES), list(names)).astype(np.float64)


def _shown(sums, seen):
  """Sites of which something alone, or with one other, follows by algebra."""
  known = {*seen, *(n for one in sums if not one.masked for n in one.sites)}
  matrix = np.stack([*map(_row, (one.sites for one in sums)), *map(_row, known)])
  rank = np.linalg.matrix_rank(matrix)
  found = set()
  for size in (1, 2):
    # Two of which one is shown alone say nothing of the other.
    hidden = sorted(set(NAMES) - known - found)
    for some in itertools.combinations(hidden, size):
      units = np.stack([_row(name) for name in some])
      # Whether a sum of multiples of these is a sum of multiples of what is read.
      if np.linalg.matrix_rank(np.concatenate([matrix, units])) < rank + size:
        found |= set(some)
  return found


@hypothesis.settings(max_examples=200)
@hypothesis.given(
  st.lists(SETS, min_size=1, max_size=4), st.sets(st.sampled_from(NAMES), max_size=2)
)
def test_what_algebra_finds_is_refused(sets, seen):
  sums = _masked(*sets)
  assert _shown(sums, seen) <= set(exposed(sums, seen))


def test_separate_groups_and_nested_ones_of_three_are_allowed():
  for sets in (["abc", "def"], ["abcdef", "abc"], ["abcdefghi", "abc", "ghi"]):
    assert exposed(_masked(*sets), ()) == []
    assert _shown(_masked(*sets), ()) == set()


@pytest.mark.parametrize(
  "sets, shown",
  [
    (["abcd", "abc"], "d"),
    (["abcde", "abc"], "de"),
    (["abc", "cde"], "abcde"),
    (["abcdefgh", "abc", "def"], "gh"),
  ],
)
def test_differences_are_found(sets, shown):
  assert exposed(_masked(*sets), ()) == sorted(shown)
  assert exposed(_masked(*sets), shown) == []


def test_plain_messages_need_words_only_where_others_are_masked():
  plain = ReadSum(("d",), False)
  assert exposed([*_masked("abc"), plain], ()) == ["d"]
  assert exposed([*_masked("abc"), plain], ["d"]) == []
  assert exposed([ReadSum(("a", "b"), False), plain], ()) == []


def test_what_was_read_is_known_after_a_restart(tmp_path):
  training = ReadSum(tuple("abcdef"), True)
  path = tmp_path / "read.json"
  first = SumsRead(path, training)
  first.require_hidden(ReadSum(tuple("abc"), True), ())
  first.note(ReadSum(tuple("abc"), True))
  again = SumsRead(path, training)
  again.require_hidden(ReadSum(tuple("abc"), True), ())  # The same is no other sum.
  again.require_hidden(ReadSum(tuple("def"), True), ())
  with pytest.raises(InputError, match="would see what 'a', 'b', 'c', 'd', 'e', 'f'"):
    again.require_hidden(ReadSum(tuple("bcd"), True), ())
