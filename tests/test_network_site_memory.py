"""A site's memory of a long run: old answers are archived, and none is forgotten."""

import json
import shutil

import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import site_memory
from fedbnr_jax.network.attempt import Broadcast
from tests.masked_sites import RUN, Sites, attempt, receipts, vectors

_NUMBERS = vectors("abc")
_STEPS = 12


def _which(step, members="abc", number=1, question=None):
  question = f"question {step}" if question is None else question
  return attempt(members, number, Broadcast(RUN, step, question))


@pytest.fixture
def sites(tmp_path, monkeypatch):
  """Three sites, and a fourth that answers nothing, after some sums."""
  monkeypatch.setattr(site_memory, "_MOST_FINAL", 2)
  made = Sites(tmp_path, "abcd")
  made.told = {}
  for step in range(_STEPS):
    which = _which(step)
    made.told[step] = receipts(made.masked(which, _NUMBERS))
    for name in which.members:
      made.sites[name].reveal(which, made.told[step])
  return made


def _archives(sites):
  path = sites.paths["a"]
  return sorted(path.parent.glob(f"{path.name}.[0-9]*"))


def test_the_file_that_is_written_anew_stays_short(sites):
  assert len(_archives(sites)) == _STEPS // 3
  content = json.loads(sites.paths["a"].read_text().split("\n")[1])
  assert len(content["answers"]) <= 2
  for path in (sites.paths["a"], *_archives(sites)):
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("restarts", [False, True])
def test_the_rules_hold_for_old_answers(sites, restarts):
  if restarts:
    sites.restart("a")
  a = sites.sites["a"]
  for step in range(_STEPS):
    which = _which(step)
    with site_memory.opened(sites.paths["a"]) as memory:
      known = memory.find(which.broadcast)
    assert a.reveal(which, sites.told[step]) == known.seed
    assert receipts({"a": a.mask(which, _NUMBERS["a"])})["a"] == known.receipt
    with pytest.raises(InputError, match="is revealed: only its members"):
      a.mask(_which(step, "abd", 2), _NUMBERS["a"])
    later = _which(_STEPS + step, "abd", 1, f"question {step}")
    with pytest.raises(InputError, match="differ by single sites"):
      a.mask(later, _NUMBERS["a"])
    with pytest.raises(InputError, match="answered with other numbers"):
      a.mask(which, _NUMBERS["b"])


def test_what_is_not_final_is_not_archived(sites):
  open_one, taken_back = _which(50), _which(51)
  a = sites.sites["a"]
  a.mask(open_one, _NUMBERS["a"])
  a.mask(taken_back, _NUMBERS["a"])
  with site_memory.opened(sites.paths["a"]) as memory:
    seed = memory.find(taken_back.broadcast).seed
  for step in range(60, 64):
    which = _which(step)
    told = receipts(sites.masked(which, _NUMBERS))
    a.reveal(which, told)
  a.mask(_which(51, "abcd", 2), _NUMBERS["a"])
  told = receipts(sites.masked(open_one, _NUMBERS))
  assert a.reveal(open_one, told)
  with pytest.raises(InputError, match="stays hidden from now on"):
    a.reveal(taken_back, told)
  for path in (sites.paths["a"], *_archives(sites)):
    assert seed.hex() not in path.read_text()


@pytest.mark.parametrize("damage", ["cut", "flipped", "another", "missing"])
def test_a_damaged_archive_is_refused(sites, damage):
  first, second, *_ = _archives(sites)
  text = first.read_text()
  if damage == "missing":
    first.unlink()
  elif damage == "another":
    shutil.copyfile(second, first)
  else:
    changed = text.replace('"a"', '"A"', 1)
    first.write_text(text[: len(text) // 2] if damage == "cut" else changed)
  for call in (
    lambda: sites.new("a"),
    lambda: sites.sites["a"].mask(_which(70), _NUMBERS["a"]),
  ):
    with pytest.raises(InputError, match=r"is damaged .* new run|put it back"):
      call()


def test_a_stop_between_the_archive_and_the_memory_loses_nothing(sites, monkeypatch):
  """The archive that was written is not read by anybody, and written again."""
  write, calls = site_memory.secret_file.write, []

  def stops(path, content):
    calls.append(path)
    if len(calls) == 2:  # The first is the archive.
      raise OSError("the machine stops")
    return write(path, content)

  which = [_which(step) for step in (80, 81, 82)]
  told = [receipts(sites.masked(one, _NUMBERS)) for one in which]
  a = sites.sites["a"]
  a.reveal(which[0], told[0])
  a.reveal(which[1], told[1])
  before = _archives(sites)
  with monkeypatch.context() as patch:
    patch.setattr(site_memory.secret_file, "write", stops)
    with pytest.raises(OSError, match="the machine stops"):
      a.reveal(which[2], told[2])
  sites.restart("a")
  assert len(sites.sites["a"].reveal(which[2], told[2])) == 32
  assert len(_archives(sites)) == len(before) + 1
  sites.restart("a")
  for one, receipt in zip(which, told, strict=True):
    assert sites.sites["a"].reveal(one, receipt)
