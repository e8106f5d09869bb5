"""A server that keeps every message of a whole run learns one sum of each question.

The run has all faults at once: sites drop before their mask, between mask and reveal
and after others have revealed, answer late, and are started again; so is the server,
which then asks whatever it likes. The searches are those of `test_network_attacks`.
"""

import itertools
import random
from typing import Any, NamedTuple

import numpy as np
import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import fixed_point, masks, protocol, vectors
from fedbnr_jax.network.attempt import FEWEST, Attempt, Broadcast
from tests import faulty_transport
from tests.test_network_attacks import CuriousServer, as_sets
from tests.test_network_faults import EVERYBODY, Rule, Run

FAULTS = [
  # Round 1: attempt 2 is without south, whose answer to attempt 1 comes late.
  Rule("south", "delay", question="exchange", number=0, round=1),
  # Round 2: north's answer is lost after it has noted it.
  Rule("north", "lose_answer", question="exchange", number=1, round=2),
  # Round 3: two drop after others have revealed, and one is started again in between.
  Rule("east", "kill", kind="reveal", round=3),
  Rule("west", "kill_after", kind="reveal", round=3),
  Rule("south", "restart", kind="reveal", round=3),
  # Round 4: before its mask, and the same site between mask and reveal.
  Rule("west", "kill", question="exchange", number=0, round=4),
  Rule("east", "restart", question="exchange", number=0, round=4),
]


class Seen(NamedTuple):
  """All that is about one question: as `CuriousServer` has it, names as letters."""

  message: protocol.Message  # One that asks it.
  messages: dict[tuple[Attempt, str], bytes]
  seeds: dict[tuple[Attempt, str], bytes]


class Names(NamedTuple):
  names: str


class Watcher:
  """A run's server, and what the sites' rows say, which it does not know."""

  def __init__(self, folder, faults, num_rounds):
    self.run = Run(folder, faults, num_rounds, masking=True, min_sites=3)
    self.parts: dict[tuple[str, str], np.ndarray] = {}  # By question and site.
    for name in EVERYBODY:
      self.run.federation.lies[name] = self.listener(name)
      self.run.transport.restart(name)

  def listener(self, name):
    """What a site would have sent without masks; it says nothing else than that."""

    def listen(asked, tree):
      self.parts[asked.digest(), name] = vectors.to_vector(tree)
      return tree

    return listen

  def seen(self) -> dict[str, Seen]:
    """What the server has kept, by question."""
    found: dict[str, Seen] = {}
    for name, message, answer in self.run.transport.seen:
      try:
        asked, told = protocol.decode(message), protocol.decode(answer)
      except InputError:
        continue
      if "attempt" not in asked.head or told.head["kind"] == "refusal":
        continue
      attempt = Attempt.from_note(asked.head["attempt"])
      own = found.setdefault(attempt.broadcast.question, Seen(asked, {}, {}))
      kept = own.messages if asked.head["kind"] == "ask" else own.seeds
      kept[attempt, name] = told.arrays[0].tobytes()
    return found


class Curious(CuriousServer):
  """The searches, over what was seen of one question."""

  def __init__(self, seen: Seen, secrets: dict[str, Any], place: int):
    self.sites, self.restarting = Names(EVERYBODY), False
    self.messages, self.seeds, self.place = seen.messages, seen.seeds, place
    self.secrets = {n: secrets[n][place : place + 1] for n in secrets}

  def atoms(self):
    held = []
    for (which, name), message in self.messages.items():
      limbs = masks.MaskedMessage.from_bytes(message, which, name).limbs
      held.append(limbs[self.place, 0])
    for (which, name), seed in self.seeds.items():
      mask = np.zeros((self.place + 1, 2), np.uint64)
      masks.add_own_mask(mask, seed, which, name)
      held.append(mask[self.place, 0])
    return held


@pytest.fixture(scope="module")
def watcher(tmp_path_factory):
  made = Watcher(tmp_path_factory.mktemp("watched"), FAULTS, 4)
  # It stops at the deaths around reveals, and where a site is not there in the end.
  assert made.run.go_on() == 2
  return made


def _learnt(watcher):
  """By question, the sets of sites whose sums follow by algebra."""
  found = {}
  for question, seen in watcher.seen().items():
    server = Curious(seen, {n: np.zeros(1) for n in EVERYBODY}, 0)
    found[question] = as_sets(server.learnt(), EVERYBODY)
  return found


def _joined(names):
  return "".join(sorted(names))


def test_of_each_question_of_a_run_one_sum_is_learnt(watcher):
  learnt = _learnt(watcher)
  assert len(learnt) > 15
  assert all(len(sets) <= 1 for sets in learnt.values())
  everybody = [sets == {_joined(EVERYBODY)} for sets in learnt.values()]
  assert sum(everybody) > 8
  without_one = [s for s in learnt.values() if s and s != {_joined(EVERYBODY)}]
  assert {next(iter(s)) for s in without_one} == {
    _joined(set(EVERYBODY) - {name}) for name in ("south", "north", "west")
  }


def test_what_is_learnt_is_the_sum_of_the_sites_rows(watcher):
  """The algebra is about these very bytes."""
  for question, seen in watcher.seen().items():
    by_attempt = {which for which, _ in seen.messages}
    for which in by_attempt:
      if any((which, n) not in seen.seeds for n in which.members):
        continue
      total = np.zeros((len(watcher.parts[question, "east"]) + 1, 2), np.uint64)
      for name in which.members:
        content = masks.MaskedMessage.from_bytes(
          seen.messages[which, name], which, name
        )
        fixed_point.add(total, content.limbs)
        masks.add_own_mask(total, seen.seeds[which, name], which, name, sign=-1)
      parts = [watcher.parts[question, name] for name in which.members]
      np.testing.assert_allclose(
        fixed_point.decode(total)[:-1], np.sum(parts, axis=0), rtol=1e-12, atol=1e-15
      )


def _place(parts):
  """A number that is a whole one at no site, so that its fraction is not zero."""
  whole = np.any([part == np.rint(part) for part in parts.values()], axis=0)
  return int(np.argmin(whole)) if not whole.all() else None


def test_no_difference_of_kept_messages_is_a_part(watcher):
  tried = 0
  for question, seen in watcher.seen().items():
    # Of sites that were not asked there is no part.
    asked = [name for name in EVERYBODY if (question, name) in watcher.parts]
    parts = {name: watcher.parts[question, name] for name in asked}
    place = _place(parts)
    server = Curious(seen, parts, place or 0)
    if place is None or len(seen.messages) + len(seen.seeds) > 13:
      continue
    tried += 1
    opened = as_sets(server.learnt(), EVERYBODY)
    expected = {f"+{'+'.join(n for n in EVERYBODY if n in s)}" for s in opened}
    assert server.found() == expected
  assert tried >= 10


def test_a_server_that_asks_on_after_the_run_learns_no_more(watcher):
  """Every question again, of every three sites, at later attempts and steps."""
  before = _learnt(watcher)
  transport = watcher.run.transport
  transport.restart(*EVERYBODY)
  # After a restart sites must be told of run and training: the old messages do that.
  for kind in ("keys", "begin"):
    message = next(m for _, m, _ in transport.seen if _kind(m) == kind)
    for name in EVERYBODY:
      transport.running[name](message)
  for question, seen in watcher.seen().items():
    if (seen.message.head["question"], seen.message.head["number"]) != ("exchange", 1):
      continue
    for members in itertools.combinations(EVERYBODY, FEWEST):
      _ask_everything(transport, seen, members, question)
  assert _learnt(watcher) == before


def _ask_everything(transport, seen, members, question):
  """Asks some sites an old question, at another attempt and at another step."""
  known = next(iter(seen.messages))[0].broadcast
  for broadcast, number in ((known, 9), (Broadcast(known.run, 10**6, question), 1)):
    which = Attempt(broadcast, number, members)
    head = {**seen.message.head, "attempt": which.as_note()}
    for name in members:
      _send(transport, name, head, seen.message.arrays)
    receipts = {
      name: masks.receipt(seen_message)
      for (attempt, name), seen_message in _of(transport, which).items()
    }
    told_of_all = {name: receipts.get(name, "0" * 64) for name in members}
    reveal = {
      **{key: head[key] for key in ("federation", "run")},
      **{"kind": "reveal", "attempt": which.as_note(), "receipts": told_of_all},
    }
    for name in members:
      _send(transport, name, reveal, ())


def _kind(message):
  return protocol.decode(message).head["kind"]


def _send(transport, name, head, arrays):
  message = protocol.encode(head, arrays)
  transport.seen.append((name, message, transport.running[name](message)))


def _of(transport, which):
  """The answers to an attempt that the server has kept."""
  found = {}
  for name, message, answer in transport.seen:
    asked, told = protocol.decode(message), protocol.decode(answer)
    if asked.head.get("attempt") == which.as_note() and told.head["kind"] == "answer":
      found[which, name] = told.arrays[0].tobytes()
  return found


def test_the_searches_would_find_a_part(watcher):
  """If sites revealed what they must not: own masks of an attempt that was given up."""
  seen, given_up = next(
    (seen, which)
    for seen in watcher.seen().values()
    for which, _ in seen.messages
    if len(which.members) == len(EVERYBODY)
    and not any((which, name) in seen.seeds for name in EVERYBODY)
    and all((which, name) in seen.messages for name in EVERYBODY)  # One came late.
  )
  # Algebra asks only whether a mask is known.
  seeds = seen.seeds | {(given_up, name): bytes(32) for name in EVERYBODY}
  leaking = Curious(seen._replace(seeds=seeds), {n: np.zeros(1) for n in EVERYBODY}, 0)
  assert "south" in as_sets(leaking.learnt(), EVERYBODY)


def _random_faults(draw):
  """Faults of some messages, whichever they are."""
  return [
    Rule(
      draw.choice(EVERYBODY),
      draw.choice(faulty_transport.FAULTS),
      kind=draw.choice(("ask", "reveal", "")),
      round=draw.choice((0, 1, 1, 2, 2)),
      times=draw.choice((1, 2)),
    )
    for _ in range(draw.randint(3, 12))
  ]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_goes_wrong_a_run_comes_to_its_end_and_shows_no_part(tmp_path, seed):
  draw = random.Random(seed)
  watcher = Watcher(tmp_path, _random_faults(draw), 2)
  watcher.run.transport.deadly = draw.random() < 0.3
  watcher.run.go_on()
  assert len(watcher.run.rounds()) == 2
  for sets in _learnt(watcher).values():
    assert len(sets) <= 1
    assert all(sum(name in one for name in EVERYBODY) >= FEWEST for one in sets)
