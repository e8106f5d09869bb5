"""The server's part: the sum is exact, who is missing is named, retries are safe."""

from fractions import Fraction

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import (
  fixed_point,
  keys,
  masked_site,
  masks,
  primitives,
  site_memory,
)
from fedbnr_jax.network.attempt import Attempt, Broadcast
from fedbnr_jax.network.masked_sum import MaskedSum, collect
from tests.masked_sites import BROADCAST, RUN, Sites, attempt, receipts, vectors

_NUMBERS = vectors("abcdef")


def exact(vectors, members):
  """The sum in rational numbers, as floats."""
  columns = zip(*(vectors[name] for name in members), strict=True)
  return np.array([float(sum(map(Fraction, column))) for column in columns])


@pytest.fixture
def sites(tmp_path):
  return Sites(tmp_path)


@pytest.mark.parametrize("num_sites", [3, 4, 10])
def test_the_sum_is_the_pooled_one(tmp_path, num_sites):
  names = "abcdefghij"[:num_sites]
  numbers = vectors(names, size=300)
  total = Sites(tmp_path, names).summed(attempt(names), numbers)
  np.testing.assert_allclose(total, exact(numbers, names), rtol=1e-15, atol=2.0**-60)


@hypothesis.given(
  st.lists(
    st.lists(st.floats(-1e15, 1e15), min_size=4, max_size=4), min_size=2, max_size=2
  )
)
@hypothesis.settings(max_examples=10)
def test_the_sum_is_exact_for_any_numbers(tmp_path_factory, columns):
  names = "abcd"
  numbers = {n: np.array([c[i] for c in columns]) for i, n in enumerate(names)}
  total = Sites(tmp_path_factory.mktemp("sites")).summed(attempt(names), numbers)
  limbs = sum(  # Python's integers, of each number rounded to 2⁻⁶⁴.
    np.array([round(Fraction(x) * 2**64) for x in numbers[name]], object)
    for name in names
  )
  np.testing.assert_array_equal(total, [int(value) / 2**64 for value in limbs])


def test_order_and_attempt_do_not_change_a_bit(tmp_path):
  """Members, their order, their names' order, and which attempt it is."""
  numbers = vectors("abcd", size=50)
  sums = []
  for number, order in enumerate(("abcd", "dcba", "cadb"), 1):
    sites = Sites(tmp_path / order)
    which = attempt(order, number)
    total = MaskedSum(which, 50)
    messages = sites.masked(which, numbers)
    for name in order:
      total.receive(name, messages[name])
    total.begin_reveals()
    for name in reversed(order):
      total.receive_reveal(name, sites.sites[name].reveal(which, total.receipts))
    sums.append(total.result().tobytes())
  renamed = {"zyxw"["abcd".index(name)]: vector for name, vector in numbers.items()}
  others = Sites(tmp_path / "renamed", "wxyz")
  sums.append(others.summed(attempt("wxyz"), renamed).tobytes())
  assert len(set(sums)) == 1


def test_pair_masks_cancel_alone_and_own_masks_are_all_that_remains(sites):
  which = attempt("abcd")
  messages = sites.masked(which, _NUMBERS)
  total = np.zeros((5, 2), np.uint64)
  for name, message in messages.items():
    fixed_point.add(total, masks.MaskedMessage.from_bytes(message, which, name).limbs)
  plain = np.zeros((5, 2), np.uint64)
  for name in "abcd":
    seed = sites.sites[name].reveal(which, receipts(messages))
    counted = np.append(_NUMBERS[name], 1.0)
    fixed_point.add(plain, fixed_point.encode(counted, 4))
    masks.add_own_mask(plain, seed, which, name)
  np.testing.assert_array_equal(total, plain)


def test_masks_differ_with_everything_that_they_are_made_of(monkeypatch):
  """Run, step, question, attempt, members, pair, keys and secret."""
  keys_used = []
  monkeypatch.setattr(
    primitives, "add_stream", lambda limbs, key, sign: keys_used.append(key)
  )
  public = dict.fromkeys("abcd", b"p" * 32)
  secret = dict.fromkeys("abcd", b"s" * 32)

  def pair_keys(which, public=public, secrets=secret, site="a"):
    """The key of each pair of a site, by the other's name."""
    keys_used.clear()
    masks.add_pair_masks(np.zeros((1, 2), np.uint64), secrets, public, which, site)
    others = [name for name in which.members if name != site]
    return dict(zip(others, keys_used, strict=True))

  base = attempt("abc")
  of_a_and_b = [
    pair_keys(which)["b"]
    for which in (
      base,
      attempt("abc", 2),
      attempt("abd"),
      attempt("abcd"),
      attempt("abc", 1, Broadcast("run", 5, BROADCAST.question)),
      attempt("abc", 1, Broadcast(RUN, 6, BROADCAST.question)),
      attempt("abc", 1, Broadcast(RUN, 5, "question")),
    )
  ]
  of_a_and_b.append(pair_keys(base, public=public | {"a": b"q" * 32})["b"])
  of_a_and_b.append(pair_keys(base, public=public | {"b": b"q" * 32})["b"])
  of_a_and_b.append(pair_keys(base, secrets=secret | {"b": b"t" * 32})["b"])
  others = [pair_keys(base)["c"], pair_keys(base, site="b")["c"]]
  assert len({*of_a_and_b, *others}) == len(of_a_and_b) + len(others)
  assert pair_keys(base, site="b")["a"] == pair_keys(attempt("cba"))["b"]


def test_own_masks_differ_with_seed_site_and_attempt():
  def mask(seed, which, site):
    limbs = np.zeros((1, 2), np.uint64)
    masks.add_own_mask(limbs, seed, which, site)
    return limbs.tobytes()

  base = (b"s" * 32, attempt("abc"), "a")
  others = [
    (b"t" * 32, attempt("abc"), "a"),
    (b"s" * 32, attempt("abc", 2), "a"),
    (b"s" * 32, attempt("abc"), "b"),
  ]
  assert len({mask(*which) for which in (base, *others)}) == 4
  commitments = {masks.commitment(*which) for which in (base, *others)}
  assert len(commitments) == 4


def test_who_is_missing_is_said(sites):
  which = attempt("abcd")
  total = MaskedSum(which, 4)
  messages = sites.masked(which, _NUMBERS)
  assert total.missing == ("a", "b", "c", "d")
  total.receive("c", messages["c"])
  total.receive("a", messages["a"])
  assert total.missing == ("b", "d")
  with pytest.raises(InputError, match="'b', 'd' did not answer attempt 1 at step 5"):
    total.begin_reveals()
  with pytest.raises(InputError, match=r"'a' reveals for .* but was not asked"):
    total.receive_reveal("a", bytes(32))
  for name in "bd":
    total.receive(name, messages[name])
  total.begin_reveals()
  seed = sites.sites["b"].reveal(which, total.receipts)
  total.receive_reveal("b", seed)
  total.receive_reveal("b", seed)  # Again: nothing changes.
  assert total.unrevealed == ("a", "c", "d")
  with pytest.raises(InputError, match="'a', 'c', 'd' did not reveal"):
    total.result()
  for name in "acd":
    total.receive_reveal(name, sites.sites[name].reveal(which, total.receipts))
  np.testing.assert_allclose(total.result(), exact(_NUMBERS, "abcd"), rtol=1e-15)


def test_what_is_no_answer_is_refused(sites, tmp_path):
  which = attempt("abcd")
  total = MaskedSum(which, 4)
  good = sites.masked(which, _NUMBERS)
  another_run = Sites(tmp_path / "other", run="another run")
  foreign = Attempt(Broadcast("another run", 5, BROADCAST.question), 1, tuple("abcd"))
  replayed = another_run.sites["a"].mask(foreign, _NUMBERS["a"])
  late = sites.sites["a"].mask(attempt("abc", 2), _NUMBERS["a"])
  for wrong in (replayed, late, good["b"], b"", good["a"][:20]):
    with pytest.raises(InputError, match="'a' is no answer to attempt 1 at step 5"):
      total.receive("a", wrong)
  for cut in (good["a"][:40], good["a"][:-1]):
    with pytest.raises(InputError, match="is cut off"):
      total.receive("a", cut)
  with pytest.raises(InputError, match="with 3 numbers instead of 4"):
    total.receive("a", good["a"][:-16])
  with pytest.raises(InputError, match="'x' is no member"):
    total.receive("x", good["a"])
  assert total.missing == tuple("abcd")
  total.receive("a", good["a"])
  total.receive("a", good["a"])  # Again: nothing changes.
  with pytest.raises(InputError, match="'a' gives two answers"):
    total.receive("a", good["a"][:-1] + bytes([good["a"][-1] ^ 1]))
  for name in "bcd":
    total.receive(name, good[name])
  total.begin_reveals()
  with pytest.raises(InputError, match="'b' reveals is not the mask of its answer"):
    total.receive_reveal("b", bytes(32))


def test_a_vector_of_another_length_is_refused_by_its_site(sites):
  total = MaskedSum(attempt("abc"), 4)
  message = sites.sites["b"].mask(attempt("abc"), np.ones(7))
  with pytest.raises(InputError, match=r"'b' answers .* with 7 numbers instead of 4"):
    total.receive("b", message)


def test_masks_that_do_not_cancel_are_noticed(sites):
  """One site was told another key of its neighbour, and did not verify the list."""
  wrong = primitives.public_key(primitives.new_private_key())
  public = dict(sites.keys.public) | {"b": wrong}
  path = sites.paths["a"]
  path.unlink()
  public["a"] = site_memory.start(path, RUN, "a")
  sites.sites["a"] = masked_site.MaskedSite(path, keys.RunKeys(RUN, public))
  with pytest.raises(InputError, match="do not cancel"):
    sites.summed(attempt("abc"), _NUMBERS)


def test_a_retry_leaves_out_who_did_not_answer(sites):
  total = MaskedSum(attempt("abcd"), 4)
  for name in "abc":
    total.receive(name, sites.sites[name].mask(total.attempt, _NUMBERS[name]))
  again = total.retry()
  assert again.attempt == attempt("abc", 2)
  assert again.missing == ("a", "b", "c")
  with pytest.raises(InputError, match="'a', 'b', 'c' did not answer attempt 2"):
    again.retry()


def test_no_retry_once_reveals_have_begun(sites):
  which = attempt("abcd")
  total = MaskedSum(which, 4)
  for name, message in sites.masked(which, _NUMBERS).items():
    total.receive(name, message)
  total.begin_reveals()
  with pytest.raises(InputError, match="only its members can finish"):
    total.retry(without=["d"])
  resumed = MaskedSum(which, 4, revealing=True)
  with pytest.raises(InputError, match="only its members can finish"):
    resumed.retry()
  with pytest.raises(InputError, match=r"'a' reveals for .* but was not asked"):
    resumed.receive_reveal("a", bytes(32))  # Its answer has to come again first.


class Network:
  """Carries messages; some calls do not get through, and the server may be killed."""

  def __init__(self, sites, lost=(), killed_at=None):
    self.sites, self.lost = sites, set(lost)  # (kind, attempt number, site, call).
    self.killed_at, self.kept, self.calls = killed_at, [], 0

  def masks(self, which, names):
    return self._ask("mask", which, names, lambda n: (which, _NUMBERS[n]))

  def reveals(self, which, told, names):
    return self._ask("reveal", which, names, lambda n: (which, told))

  def keep(self, which, revealing):
    self.kept.append((which, revealing))

  def _ask(self, kind, which, names, arguments):
    self.calls += 1
    answers = {}
    for name in names:
      if (kind, which.number, name) in self.lost:
        self.lost.discard((kind, which.number, name))
        continue
      self.sites.restart(name)
      answers[name] = getattr(self.sites.sites[name], kind)(*arguments(name))
    if self.killed_at == self.calls:
      raise KeyboardInterrupt
    return answers


def test_collect_goes_on_without_a_site_that_is_gone(sites):
  network = Network(sites, {("mask", 1, "d")})
  total, done = collect(
    MaskedSum(attempt("abcd"), 4), network.masks, network.reveals, network.keep
  )
  np.testing.assert_allclose(total, exact(_NUMBERS, "abc"), rtol=1e-15)
  assert done.attempt == attempt("abc", 2)
  assert network.kept == [
    (attempt("abcd"), False),
    (attempt("abc", 2), False),
    (attempt("abc", 2), True),
  ]


def test_collect_waits_for_a_site_that_was_cut_off_before_its_reveal(sites):
  network = Network(sites, {("reveal", 1, "b"), ("reveal", 1, "d")})
  total, done = collect(MaskedSum(attempt("abcd"), 4), network.masks, network.reveals)
  np.testing.assert_allclose(total, exact(_NUMBERS, "abcd"), rtol=1e-15)
  assert done.attempt == attempt("abcd")


def test_collect_says_who_must_come_back(sites):
  network = Network(sites)
  network._ask = lambda kind, which, names, arguments: Network._ask(
    network, kind, which, [n for n in names if (kind, n) != ("reveal", "d")], arguments
  )
  start = MaskedSum(attempt("abcd"), 4)
  with pytest.raises(
    InputError, match=r"'d' did not reveal .* start these sites again"
  ):
    collect(start, network.masks, network.reveals)
  # The site is back, and a server that remembers where it was finishes the sum.
  back = Network(sites)
  resumed = MaskedSum(start.attempt, 4, revealing=True)
  total, _ = collect(resumed, back.masks, back.reveals)
  np.testing.assert_allclose(total, exact(_NUMBERS, "abcd"), rtol=1e-15)


@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_a_server_that_is_killed_resumes_where_it_was(sites, killed_at):
  network = Network(sites, {("mask", 1, "d")}, killed_at)
  with pytest.raises(KeyboardInterrupt):
    collect(MaskedSum(attempt("abcd"), 4), network.masks, network.reveals, network.keep)
  which, revealing = network.kept[-1]
  again = Network(sites, set(network.lost))
  resumed = MaskedSum(Attempt.from_note(which.as_note()), 4, revealing)
  total, done = collect(resumed, again.masks, again.reveals)
  np.testing.assert_allclose(total, exact(_NUMBERS, done.attempt.members), rtol=1e-15)
  if killed_at == 3:
    assert done.attempt == attempt("abc", 2)


def test_a_server_that_forgot_the_attempt_is_refused_by_the_sites(sites):
  network = Network(sites, {("mask", 1, "d")})
  collect(MaskedSum(attempt("abcd"), 4), network.masks, network.reveals)
  with pytest.raises(
    InputError, match="attempt 2 at step 5 is revealed: only its memb"
  ):
    collect(MaskedSum(attempt("abcd"), 4), network.masks, network.reveals)
