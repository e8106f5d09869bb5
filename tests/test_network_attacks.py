"""A server that keeps every message and tries every difference learns sums alone.

Two searches look for a leak. One is blind: it adds and subtracts all that the server
holds in every combination, and looks for parts among the results. The other is
algebra: it treats every mask as an unknown and finds all that cancels. Both are shown
to find the leaks that there are without the rules.
"""

import contextlib
import itertools
import random

import numpy as np
import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import fixed_point, masks, primitives, site_memory
from fedbnr_jax.network.attempt import Broadcast
from tests.masked_sites import RUN, Sites, attempt, receipts

_PRIME = 2**31 - 1


class CuriousServer:
  """Asks sites for whatever it likes, takes refusals, and throws nothing away."""

  def __init__(self, sites, restarting=True):
    self.sites, self.restarting = sites, restarting
    rng = np.random.default_rng(1)
    # One number a site: 64 bits of it are searched, so nothing is found by chance.
    self.secrets = {name: rng.normal(size=1) * 1e3 for name in sites.names}
    self.messages = {}  # By (attempt, site).
    self.seeds = {}

  def ask_mask(self, which, name):
    """Asks one site to answer; returns whether it did."""
    return self._ask(self.messages, which, name, "mask", self.secrets[name])

  def ask_reveal(self, which, name, lie=False):
    """Asks one site to reveal; with a lie if some members have not answered."""
    told = receipts({n: m for (w, n), m in self.messages.items() if w == which})
    if lie:
      told = {n: told.get(n, "0" * 64) for n in which.members}
    return self._ask(self.seeds, which, name, "reveal", told)

  def _ask(self, kept, which, name, verb, argument):
    if self.restarting:
      self.sites.restart(name)
    try:
      kept[which, name] = getattr(self.sites.sites[name], verb)(which, argument)
    except InputError:
      return False
    return True

  def atoms(self):
    """The lower 64 bits of all that the server holds: messages and revealed masks."""
    held = []
    for (which, name), message in self.messages.items():
      held.append(masks.MaskedMessage.from_bytes(message, which, name).limbs[0, 0])
    for (which, name), seed in self.seeds.items():
      mask = np.zeros((1, 2), np.uint64)
      masks.add_own_mask(mask, seed, which, name)
      held.append(mask[0, 0])
    return held

  def found(self):
    """The sets of sites whose sums and differences are among the combinations."""
    assert len(self.atoms()) <= 14, "five million combinations are enough"
    combinations = np.zeros(1, np.uint64)
    for atom in self.atoms():
      atom = np.array([atom], np.uint64)  # Arrays wrap without a warning.
      combinations = np.concatenate(
        [combinations, combinations + atom, combinations - atom]
      )
    return {
      parts
      for parts, value in self._parts().items()
      if np.any(combinations == np.uint64(value))
    }

  def _parts(self):
    """The lower 64 bits of every ± combination of the sites' numbers."""
    encoded = {n: int(fixed_point.encode(v, 9)[0, 0]) for n, v in self.secrets.items()}
    parts = {}
    for signs in itertools.product((1, 0, -1), repeat=len(encoded)):
      if next((sign for sign in signs if sign), -1) > 0:  # Up to the sign of all.
        label = "".join(
          f"{'+' if sign > 0 else '-'}{name}"
          for name, sign in zip(encoded, signs, strict=True)
          if sign
        )
        value = sum(s * e for s, e in zip(signs, encoded.values(), strict=True))
        parts[label] = value % 2**64
    return parts

  def learnt(self):
    """All sums of sites' numbers that follow by algebra, as rows of coefficients.

    A message is the sum of its site's number, its own mask and a mask for each pair;
    masks are unknowns, other ones for each attempt. A revealed mask is known.
    """
    names = self.sites.names
    columns, rows = {}, []
    for which, name in self.messages:
      row = {("x", name): 1}
      if (which, name) not in self.seeds:
        row["own", which, name] = 1
      for other in which.members:
        if other != name:
          pair = tuple(sorted((name, other)))
          row["pair", which, pair] = 1 if name == pair[0] else -1
      rows.append(row)
      for column in row:
        if column[0] != "x":
          columns.setdefault(column, len(columns))
    matrix = np.zeros((len(rows), len(columns) + len(names)), np.int64)
    for i, row in enumerate(rows):
      for column, value in row.items():
        number = column[0] == "x"
        j = len(columns) + names.index(column[1]) if number else columns[column]
        matrix[i, j] = value
    reduced = _echelon(matrix)
    free = reduced[~reduced[:, : len(columns)].any(axis=1), len(columns) :]
    return [row for row in free if row.any()]


def _echelon(matrix):
  """Gauss's elimination modulo a prime, to the reduced form."""
  matrix, top = matrix % _PRIME, 0
  for column in range(matrix.shape[1]):
    pivots = np.flatnonzero(matrix[top:, column])
    if not pivots.size:
      continue
    pivot = top + pivots[0]
    matrix[[top, pivot]] = matrix[[pivot, top]]
    matrix[top] = matrix[top] * pow(int(matrix[top, column]), -1, _PRIME) % _PRIME
    for row in range(len(matrix)):
      if row != top and matrix[row, column]:
        matrix[row] = (matrix[row] - matrix[row, column] * matrix[top]) % _PRIME
    top += 1
    if top == len(matrix):
      break
  return matrix


def as_sets(rows, names):
  """Learnt rows as sets of names; fails if one is not a plain sum."""
  assert all(set(row.tolist()) <= {0, 1} for row in rows), rows
  return {"".join(n for n, c in zip(names, row, strict=True) if c) for row in rows}


def sums(*sets):
  return {"".join(f"+{name}" for name in members) for members in sets}


@pytest.fixture(params=[False, True], ids=["runs_on", "restarted"])
def server(tmp_path, request):
  return CuriousServer(Sites(tmp_path), request.param)


def tries_everything(server, attempts):
  """Asks everybody for every reveal and every answer again, with every lie."""
  for which in attempts:
    for name in which.members:
      server.ask_mask(which, name)
      server.ask_reveal(which, name)
      server.ask_reveal(which, name, lie=True)


class Unprotected:
  """A site of the plain scheme: pair masks, and none of its own."""

  def __init__(self, site):
    self.site = site

  def mask(self, which, vector):
    limbs = fixed_point.encode(vector, len(which.members))
    site = self.site
    masks.add_pair_masks(limbs, site._secrets, site._keys.public, which, site.name)
    return masks.MaskedMessage(bytes(32), limbs).to_bytes(which, site.name)


class Forgetful(Unprotected):
  """A site with a mask of its own, but without memory: it reveals whatever is asked."""

  def __init__(self, site):
    super().__init__(site)
    self.seeds = {}

  def mask(self, which, vector):
    limbs = fixed_point.encode(vector, len(which.members))
    seed = self.seeds.setdefault(which, primitives.new_seed())
    masks.add_own_mask(limbs, seed, which, self.site.name)
    site = self.site
    masks.add_pair_masks(limbs, site._secrets, site._keys.public, which, site.name)
    return masks.MaskedMessage(bytes(32), limbs).to_bytes(which, site.name)

  def reveal(self, which, told):
    if which not in self.seeds:
      raise InputError("not answered")
    return self.seeds[which]


@pytest.mark.parametrize("kind", [Unprotected, Forgetful])
def test_both_searches_find_the_leak_of_a_plain_retry(tmp_path, kind):
  """The late message of a dropped site: two sums differ by exactly its part."""
  server = CuriousServer(Sites(tmp_path), restarting=False)
  server.sites.sites = {n: kind(s) for n, s in server.sites.sites.items()}
  for which in (attempt("abcd"), attempt("abc", 2)):
    for name in which.members:
      assert server.ask_mask(which, name)
      if kind is Forgetful:
        assert server.ask_reveal(which, name, lie=True)
  if kind is Unprotected:
    # Own masks that are not there are known.
    server.seeds = dict.fromkeys(server.messages, b"")
    known = as_sets(server.learnt(), "abcd")
    server.seeds = {}
  else:
    known = as_sets(server.learnt(), "abcd")
  assert known == {"abc", "d"}
  assert "+d" in server.found()


def test_all_answer_and_reveal(server):
  which = attempt("abcd")
  for name in which.members:
    assert server.ask_mask(which, name)
  assert server.found() == set()
  assert server.learnt() == []
  for name in which.members:
    assert server.found() == set()
    assert server.ask_reveal(which, name)
  assert server.found() == sums("abcd")
  tries_everything(server, [which, attempt("abc", 2), attempt("bcd", 3)])
  assert server.found() == sums("abcd")
  assert as_sets(server.learnt(), "abcd") == {"abcd"}


def test_a_site_drops_before_its_mask_and_answers_late(server):
  first, second = attempt("abcd"), attempt("abc", 2)
  for name in "abc":
    assert server.ask_mask(first, name)
  for name in "abc":
    assert server.ask_mask(second, name)
  assert server.ask_mask(first, "d")  # Late: the server now has all of the first.
  for name in "abc":
    assert server.ask_reveal(second, name)
    assert not server.ask_reveal(first, name)
  assert server.ask_reveal(first, "d")  # It knows of no second attempt.
  assert server.found() == sums("abc")
  tries_everything(server, [first, second])
  assert server.found() == sums("abc")
  assert as_sets(server.learnt(), "abcd") == {"abc"}


def test_a_site_drops_between_mask_and_reveal(server):
  first, second = attempt("abcd"), attempt("abc", 2)
  for name in "abcd":
    assert server.ask_mask(first, name)
  assert server.ask_reveal(first, "a")
  # The server would rather go on without d, but a has revealed.
  assert not server.ask_mask(second, "a")
  assert server.found() == set()
  for name in "bcd":  # d is back.
    assert server.ask_reveal(first, name)
  assert server.found() == sums("abcd")
  tries_everything(server, [second, first])
  assert server.found() == sums("abcd")
  assert as_sets(server.learnt(), "abcd") == {"abcd"}


def test_a_site_drops_after_the_others_have_revealed(server):
  first = attempt("abcd")
  for name in "abcd":
    assert server.ask_mask(first, name)
  for name in "abc":
    assert server.ask_reveal(first, name)
  assert server.found() == set()
  assert server.learnt() == []
  for members in ("abc", "abd", "acd"):
    assert not server.ask_mask(attempt(members, 2), "a")
  assert server.ask_reveal(first, "d")
  assert server.found() == sums("abcd")


def test_a_server_that_lies_about_who_answered_wins_nothing(server):
  """Members reveal early; the missing site's own mask covers its message."""
  first = attempt("abcd")
  for name in "abc":
    assert server.ask_mask(first, name)
    assert server.ask_reveal(first, name, lie=True)
  assert server.found() == set()
  assert server.learnt() == []
  assert server.ask_mask(first, "d")
  assert server.found() == set()
  assert server.learnt() == []
  tries_everything(server, [attempt(m, 2) for m in ("abc", "abd", "acd", "bcd")])
  assert server.learnt() == []


def test_a_server_that_lies_about_members_wins_nothing(server):
  """Each site is told another set of members of the same attempt."""
  for members, name in (("abc", "a"), ("abd", "b"), ("bcd", "c"), ("acd", "d")):
    assert server.ask_mask(attempt(members), name)
    assert server.ask_reveal(attempt(members), name, lie=True)
  assert server.found() == set()
  assert server.learnt() == []


def test_a_server_that_asks_the_question_again_wins_nothing(server):
  """At another step, as after a resume, without one of the members."""
  later = Broadcast(RUN, 9, attempt("abc").broadcast.question)
  first, second = attempt("abcd"), attempt("abc", 1, later)
  for which in (first, second):
    for name in which.members:
      assert server.ask_mask(which, name)
  for which in (first, second):
    for name in which.members:
      assert server.ask_reveal(which, name) == (which is first)
  assert server.found() == sums("abcd")
  assert as_sets(server.learnt(), "abcd") == {"abcd"}


def test_members_who_collude_subtract_their_own_parts_and_no_more(server):
  """What remains: the sum of all other members."""
  which = attempt("abcd")
  for name in "abcd":
    assert server.ask_mask(which, name)
  private = server.sites.sites["d"]
  for name in "abc":
    assert server.ask_reveal(which, name)
  # d hands its message over without pair masks, so the server can take them away.
  plain = fixed_point.encode(server.secrets["d"], 4)
  pairs = np.zeros((1, 2), np.uint64)
  masks.add_pair_masks(pairs, private._secrets, private._keys.public, which, "d")
  atoms = [*server.atoms(), plain[0, 0], pairs[0, 0]]
  server.atoms = lambda: atoms
  assert server.found() == sums("abc", "d") | {"+a+b+c+d", "+a+b+c-d"}


def random_requests(server, names, seed):
  """Asks for answers and reveals in a random order, with lies; returns the attempts."""
  draw = random.Random(seed)
  question = attempt("abc").broadcast.question
  asked = []
  for _ in range(40):
    if not asked or draw.random() < 0.3:
      members = draw.sample(names, draw.randint(3, 5))
      step = Broadcast(RUN, draw.choice((5, 5, 6)), question)
      asked.append(attempt(members, draw.randint(1, 4), step))
    which, verb = draw.choice(asked[-2:]), draw.choice(("mask", "reveal"))
    for name in draw.sample(which.members, len(which.members)):
      if draw.random() < 0.8:  # Others are cut off.
        if verb == "mask":
          server.ask_mask(which, name)
        else:
          server.ask_reveal(which, name, lie=draw.random() < 0.1)
  tries_everything(server, asked)  # At last the server finishes whatever it can.
  return asked


def test_no_order_of_requests_gives_more_than_separate_sums(tmp_path, monkeypatch):
  """Sums of three or more with no site in common, whatever is asked and when."""
  # No other process is about.
  monkeypatch.setattr(site_memory, "alone_in", lambda *path: contextlib.nullcontext())
  names, num_sums, num_unread, num_leaks = "abcdef", 0, 0, 0
  for seed in range(8):
    server = CuriousServer(Sites(tmp_path / f"{seed}", names), restarting=seed < 3)
    asked = random_requests(server, names, seed)
    learnt = as_sets(server.learnt(), names)
    assert all(len(members) >= 3 for members in learnt)
    assert sum(map(len, learnt)) == len(set().union(*learnt))
    assert learnt == {
      "".join(which.members)
      for which in asked
      if all((which, name) in server.seeds for name in which.members)
    }
    num_sums += len(learnt)
    num_unread += len({which for which, _ in server.messages}) - len(learnt)
    # The same requests to sites without rules, to see that they would have told parts.
    careless = CuriousServer(Sites(tmp_path / f"careless {seed}", names), False)
    careless.sites.sites = {n: Forgetful(s) for n, s in careless.sites.sites.items()}
    random_requests(careless, names, seed)
    num_leaks += any(np.count_nonzero(row) < 3 for row in careless.learnt())
  assert num_sums >= 4
  assert num_unread >= 20
  assert num_leaks >= 6


def _chi_square(content):
  """How far the bytes are from uniform: 255 degrees of freedom, deviation 22.6."""
  counts = np.bincount(np.frombuffer(content, np.uint8), minlength=256)
  expected = len(content) / 256
  return float(np.sum((counts - expected) ** 2 / expected))


def _view(limbs):
  """A message as a server would read it, if it took it for numbers."""
  return fixed_point.decode(limbs)


def test_one_message_looks_random_and_has_nothing_of_the_statistics(tmp_path):
  """Seven deviations: chance fails once in 10¹¹, unmasked numbers always do."""
  size = 20_000
  rng = np.random.default_rng(3)
  features = rng.normal(size=(size, 2))
  statistics = features[:, 0] * features[:, 1] * 100 + features[:, 0]
  sites, which = Sites(tmp_path), attempt("abcd")
  messages = {n: sites.sites[n].mask(which, statistics) for n in "abcd"}
  plain = fixed_point.encode(statistics, 4)
  limbs = masks.MaskedMessage.from_bytes(messages["a"], which, "a").limbs
  told = receipts(messages)
  # One that has lost its own mask still has pair masks, and the reverse.
  without_own = limbs.copy()
  seed = sites.sites["a"].reveal(which, told)
  masks.add_own_mask(without_own, seed, which, "a", sign=-1)
  only_own = np.concatenate([plain, fixed_point.encode(np.ones(1), 4)])
  masks.add_own_mask(only_own, seed, which, "a")
  assert _chi_square(plain.tobytes()) > 255 + 1000 * 22.6
  assert np.corrcoef(_view(plain), statistics)[0, 1] > 0.999
  for hidden in (limbs, without_own, only_own):
    view = _view(hidden)[:-1]
    assert abs(_chi_square(hidden.tobytes()) - 255) < 7 * 22.6
    assert abs(np.corrcoef(view, statistics)[0, 1]) < 7 / np.sqrt(size)
    low = hidden[:-1, 0].astype(np.float64)
    assert abs(np.corrcoef(low, plain[:, 0].astype(np.float64))[0, 1]) < 7 / np.sqrt(
      size
    )
  # The count of members, which is one at every site, does not show either.
  assert (
    len(
      {
        masks.MaskedMessage.from_bytes(m, which, n).limbs[-1].tobytes()
        for n, m in messages.items()
      }
    )
    == 4
  )
