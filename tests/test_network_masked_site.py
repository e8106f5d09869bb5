"""A site's rules: what it answers and reveals, and that it remembers on its disk."""

import json
import os
import stat
import threading

import numpy as np
import pytest

from fedbnr_jax import files
from fedbnr_jax.errors import InputError
from fedbnr_jax.network import keys, masked_site, masks, primitives, site_memory
from fedbnr_jax.network.attempt import Attempt, Broadcast
from tests.masked_sites import BROADCAST, RUN, Sites, attempt, receipts, vectors

_NUMBERS = vectors("abcdef")


@pytest.fixture(params=[False, True], ids=["runs_on", "restarted"])
def sites(tmp_path, request):
  """Four sites, which forget all that is not on their disks before each call."""
  made = Sites(tmp_path)
  made.fresh = (lambda n: made.new(n)) if request.param else (lambda n: made.sites[n])
  return made


def refused(call, *arguments, match):
  """Asserts that a call is refused in one line."""
  with pytest.raises(InputError, match=match) as caught:
    call(*arguments)
  assert "\n" not in str(caught.value)


def answered(sites, which):
  """Lets all members answer; returns what a server tells them of it."""
  return receipts(
    {name: sites.fresh(name).mask(which, _NUMBERS[name]) for name in which.members}
  )


def test_fewer_than_three_members_are_refused_and_two_are_told_why():
  refused(attempt, "ab", match="of two, each could subtract its own part and read")
  refused(attempt, "a", match="takes 3 members or more")
  refused(attempt, "", match="takes 3 members or more")


@pytest.mark.parametrize(
  "note",
  [
    {"number": 0},
    {"number": True},
    {"number": 1.0},
    {"step": -1},
    {"step": "5"},
    {"members": ["a", "b", "b"]},
    {"members": ["a", "b", ""]},
    {"members": ["a", "b", 3]},
    {"members": ["a", "b"]},
    {"members": None},
    {"run": 7},
  ],
)
def test_a_malformed_attempt_is_refused(note):
  good = attempt("abc").as_note()
  assert Attempt.from_note(json.loads(json.dumps(good))) == attempt("cab")
  refused(Attempt.from_note, good | note, match=".")
  refused(Attempt.from_note, {}, match="does not describe an attempt")


def test_strangers_other_runs_and_sums_without_this_site_are_refused(sites):
  a = sites.fresh("a")
  refused(a.mask, attempt("abx"), _NUMBERS["a"], match="no sites of this run: 'x'")
  refused(a.mask, attempt("bcd"), _NUMBERS["a"], match="'a' is no member")
  other = Broadcast("another run", 5, BROADCAST.question)
  refused(a.mask, attempt("abc", 1, other), _NUMBERS["a"], match="of another run")
  refused(a.reveal, attempt("abc", 1, other), {}, match="of another run")


@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0**62, 1e300])
def test_numbers_that_do_not_fit_leave_no_trace(sites, bad):
  before = sites.paths["a"].read_bytes()
  vector = np.array([1.0, bad])
  refused(sites.fresh("a").mask, attempt("abc"), vector, match="number 1 of 2 is")
  assert sites.paths["a"].read_bytes() == before


def test_the_same_attempt_again_gives_the_same_bytes(sites):
  which = attempt("abc")
  first = sites.fresh("a").mask(which, _NUMBERS["a"])
  assert sites.fresh("a").mask(which, _NUMBERS["a"]) == first
  told = answered(sites, which)
  seed = sites.fresh("a").reveal(which, told)
  assert sites.fresh("a").reveal(which, told) == seed
  assert sites.fresh("a").mask(which, _NUMBERS["a"]) == first  # A server that resumes.


def test_an_attempt_is_not_reused_for_other_members_or_numbers(sites):
  sites.fresh("a").mask(attempt("abc"), _NUMBERS["a"])
  for revealed in (False, True):
    if revealed:
      sites.fresh("a").reveal(attempt("abc"), answered(sites, attempt("abc")))
    a = sites.fresh("a")
    changed = _NUMBERS["a"] + np.array([0.0, 0.0, 0.0, 1e-15])
    refused(a.mask, attempt("abc"), changed, match="answered with other numbers")
    longer = np.append(_NUMBERS["a"], 0.0)
    refused(a.mask, attempt("abc"), longer, match="answered with other numbers")
    refused(a.mask, attempt("abd"), _NUMBERS["a"], match="for other members")
    refused(a.reveal, attempt("abd"), {}, match="for other members")


def test_nothing_is_revealed_until_all_have_answered(sites):
  which = attempt("abcd")
  told = answered(sites, which)
  a = sites.fresh("a")
  for name in which.members:
    fewer = {n: receipt for n, receipt in told.items() if n != name}
    refused(a.reveal, which, fewer, match=f"'{name}' did not answer")
  refused(a.reveal, which, told | {"x": ""}, match="no members of it")
  refused(a.reveal, which, told | {"a": told["b"]}, match="another answer of 'a'")
  a.reveal(which, told)
  refused(a.reveal, which, told | {"b": told["c"]}, match="for other messages")


def test_nothing_is_revealed_that_was_not_answered(sites):
  refused(sites.fresh("a").reveal, attempt("abc"), {}, match="was not answered here")
  answered(sites, attempt("abc"))
  refused(sites.fresh("a").reveal, attempt("abc", 2), {}, match="was not answered here")


def test_after_a_reveal_no_other_attempt_is_answered(sites):
  which = attempt("abcd", 2)
  sites.fresh("a").reveal(which, answered(sites, which))
  for number in (1, 3):
    for members in ("abcd", "abc"):
      refused(
        sites.fresh("a").mask,
        attempt(members, number),
        _NUMBERS["a"],
        match="attempt 2 at step 5 is revealed",
      )


def test_after_a_later_answer_an_earlier_mask_stays_hidden(sites):
  first = attempt("abcd")
  told = answered(sites, first)
  sites.fresh("a").mask(attempt("abc", 2), _NUMBERS["a"])
  refused(sites.fresh("a").reveal, first, told, match="stays hidden from now on")
  refused(sites.fresh("a").mask, first, _NUMBERS["a"], match="an earlier one, is not")


def test_the_forgotten_seed_is_not_on_the_disk(sites):
  sites.fresh("a").mask(attempt("abcd"), _NUMBERS["a"])
  with site_memory.opened(sites.paths["a"]) as memory:
    seed = memory.answers[BROADCAST].seed
  assert seed.hex() in sites.paths["a"].read_text()
  sites.fresh("a").mask(attempt("abc", 2), _NUMBERS["a"])
  assert seed.hex() not in sites.paths["a"].read_text()


def test_the_same_question_at_another_step_is_for_the_same_members(sites):
  later = Broadcast(RUN, 6, BROADCAST.question)
  early = attempt("abc", 1, later)  # Answered before the first sum is revealed.
  told = answered(sites, early)
  sites.fresh("a").reveal(attempt("abcd"), answered(sites, attempt("abcd")))
  refused(sites.fresh("a").reveal, early, told, match="differ by single sites")
  fewer, same = attempt("abc", 2, later), attempt("abcd", 3, later)
  refused(sites.fresh("a").mask, fewer, _NUMBERS["a"], match="differ by single sites")
  sites.fresh("a").reveal(same, answered(sites, same))
  other = attempt("abc", 1, Broadcast.of(RUN, 6, "statistics", b"another kernel"))
  sites.fresh("a").reveal(other, answered(sites, other))


def test_a_question_is_the_exchange_and_the_message():
  same = Broadcast.of(RUN, 5, "statistics", b"kernel")
  assert same == BROADCAST
  assert Broadcast.of(RUN, 5, "scores", b"kernel") != same
  assert Broadcast.of(RUN, 5, "statistics", b"kernel ") != same
  assert Broadcast.of(RUN, 6, "statistics", b"kernel").question == same.question


def test_a_site_keeps_to_the_keys_that_it_began_with(tmp_path):
  """A site that has lost its memory, and so what it has revealed, cannot return."""
  sites = Sites(tmp_path)
  sites.paths["d"].unlink()
  public = site_memory.start(sites.paths["d"], RUN, "d")
  card = keys.signed_card(sites.identities["d"], RUN, "d", public)
  renewed = keys.verified([*sites.cards[:3], card], RUN, sites.known)
  new = masked_site.MaskedSite
  refused(new, sites.paths["a"], renewed, match="keys of 'd' are not those of before")
  fewer = keys.verified(sites.cards[:3], RUN, sites.known)
  refused(new, sites.paths["a"], fewer, match="keys of 'd' are not those of before")
  refused(new, sites.paths["d"], sites.keys, match="told of 'd' is not the one")
  other = keys.RunKeys("another run", sites.keys.public)
  refused(new, sites.paths["a"], other, match="another run than this site's memory")


def test_keys_of_two_sites_are_not_enough(tmp_path):
  with pytest.raises(InputError, match="each could subtract its own part"):
    Sites(tmp_path, "ab")


def test_a_bad_key_is_refused_before_it_is_noted(tmp_path):
  names = "abc"
  own = {n: site_memory.start(tmp_path / n / "memory", RUN, n) for n in names}
  zero = keys.RunKeys(RUN, own | {"c": bytes(32)})
  path = tmp_path / "a" / "memory"
  refused(masked_site.MaskedSite, path, zero, match="no secret can be agreed on")
  masked_site.MaskedSite(path, keys.RunKeys(RUN, own))


def test_a_memory_is_made_once(tmp_path):
  site_memory.start(tmp_path / "memory", RUN, "a")
  before = (tmp_path / "memory").read_bytes()
  refused(site_memory.start, tmp_path / "memory", RUN, "a", match="is not made anew")
  assert (tmp_path / "memory").read_bytes() == before


def test_a_memory_is_for_its_owner_alone(tmp_path):
  previous = os.umask(0)
  try:
    sites = Sites(tmp_path)
    answered_once = sites.sites["a"].mask(attempt("abc"), _NUMBERS["a"])
  finally:
    os.umask(previous)
  assert answered_once
  assert stat.S_IMODE(sites.paths["a"].stat().st_mode) == 0o600


@pytest.mark.parametrize(
  "damage",
  ["empty", "cut", "flipped", "forgetful", "header", "longer", "older", "list"],
)
def test_a_damaged_memory_is_refused_and_kept(sites, damage):
  sites.fresh("a").reveal(attempt("abcd"), answered(sites, attempt("abcd")))
  path = sites.paths["a"]
  good = path.read_text()
  header, content, _ = good.split("\n")
  forgetful = json.dumps(json.loads(content) | {"answers": []})
  bad = {
    "empty": "",
    "cut": good[: len(good) // 2],
    "flipped": good.replace('"a"', '"A"', 1),
    "forgetful": f"{header}\n{forgetful}\n",
    "header": f"{header}\n",
    "longer": f"{good}{content}\n",
    "older": good.replace('"version": 1', '"version": 0'),
    "list": "[]",
  }[damage]
  assert bad != good
  path.write_text(bad)
  refused(sites.new, "a", match="damaged .* start a new run")
  site = sites.sites["a"]
  refused(site.mask, attempt("abc", 2), _NUMBERS["a"], match="damaged")
  refused(site.reveal, attempt("abcd"), {}, match="damaged")
  assert path.read_text() == bad


def test_a_missing_memory_is_not_made_anew(sites):
  sites.paths["a"].unlink()
  refused(sites.new, "a", match="cannot be read at .* put it back")
  site = sites.sites["a"]
  refused(site.mask, attempt("abc"), _NUMBERS["a"], match="cannot be read")
  assert not sites.paths["a"].exists()


@pytest.mark.parametrize("part", ["mask", "reveal"])
def test_nothing_leaves_before_it_is_noted(sites, monkeypatch, part):
  """A disk that fails at the note leaves the site as if it had not been asked."""
  which = attempt("abcd")
  told = answered(sites, which) if part == "reveal" else {}
  before = sites.paths["a"].read_bytes()
  a = sites.fresh("a")
  with monkeypatch.context() as patch:

    def fails(handle):
      raise OSError(28, "No space left on device")

    patch.setattr(files.os, "fsync", fails)
    if part == "mask":
      refused(a.mask, which, _NUMBERS["a"], match="no space is left")
    else:
      refused(a.reveal, which, told, match="no space is left")
  assert sites.paths["a"].read_bytes() == before
  later = attempt("abc", 2)
  sites.fresh("a").reveal(later, answered(sites, later))


def test_a_kill_between_note_and_message_costs_nothing(sites, monkeypatch):
  """What was noted but never left is given, the same, when it is asked for again."""
  which = attempt("abcd")
  told = answered(sites, which)

  class Killed(BaseException):
    pass

  def killed_after(path, memory, write=site_memory.write):
    write(path, memory)
    raise Killed

  with monkeypatch.context() as patch:
    patch.setattr(site_memory, "write", killed_after)
    with pytest.raises(Killed):
      sites.fresh("a").reveal(which, told)
  refused(
    sites.fresh("a").mask,
    attempt("abc", 2),
    _NUMBERS["a"],
    match="is revealed: only its",
  )
  seed = sites.fresh("a").reveal(which, told)
  message = sites.fresh("a").mask(which, _NUMBERS["a"])
  commitment = masks.MaskedMessage.from_bytes(message, which, "a").commitment
  assert masks.commitment(seed, which, "a") == commitment


def test_a_second_process_at_the_same_memory_is_refused_meanwhile(sites):
  with site_memory.opened(sites.paths["a"]):
    other = sites.sites["a"]
    refused(other.mask, attempt("abc"), _NUMBERS["a"], match="another program")


def test_an_object_that_was_overtaken_sees_what_the_other_has_revealed(sites):
  """Two objects on one disk, as when an old process outlives a restart."""
  old, new = sites.new("a"), sites.new("a")
  which = attempt("abcd")
  new.reveal(which, answered(sites, which))
  refused(old.mask, attempt("abc", 2), _NUMBERS["a"], match="is revealed: only its")


def test_threads_wait_for_each_other(sites):
  site, failures = sites.sites["a"], []

  def ask(number):
    try:
      site.mask(attempt("abc", 1, Broadcast(RUN, number, str(number))), _NUMBERS["a"])
    except Exception as error:
      failures.append(error)

  threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert failures == []
  with site_memory.opened(sites.paths["a"]) as memory:
    assert len(memory.answers) == 8


def test_seeds_and_keys_are_never_drawn_twice():
  drawn = [primitives.new_seed() for _ in range(50)]
  drawn += [primitives.new_private_key() for _ in range(50)]
  assert len(set(drawn)) == 100
  assert all(len(value) == 32 for value in drawn)
