"""Whole runs in which messages are lost, damaged or wrong, and sites or server die.

A run without faults takes the bits of one that was stopped wherever it could be, and
runs that went on without a site do not depend on why it was out.
"""

import csv

import numpy as np
import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import blr
from fedbnr_jax.network import coordinator, protocol, site
from fedbnr_jax.run.records import RunFolder
from tests import site_federation
from tests.faulty_transport import FaultyTransport, Rule, vector_changed
from tests.runs import StopError

MASKING = pytest.mark.parametrize("masking", [False, True], ids=["plain", "masked"])
EVERYBODY = sorted(site_federation.SIZES)
NUM_FEATURES = 6  # M of `site_federation.config`.


class Run:
  """A federation of four, and a folder of its coordinator."""

  def __init__(self, folder, rules=(), num_rounds=2, **options):
    config = site_federation.config(num_rounds=num_rounds, patience=num_rounds)
    self.federation = site_federation.Federation(folder / "sites", config, **options)
    self.transport = FaultyTransport(self.federation.starts(), rules)
    self.folder = RunFolder(folder / "run")

  def go(self):
    """Runs the coordinator, for the first time or again."""
    agreement, transport = self.federation.agreement, self.transport
    return coordinator.run(
      agreement, transport, self.folder.path, progress=transport, pause=0.0
    )

  def rounds(self):
    """What stands in metrics.csv, but for the time that it took."""
    return [
      {k: v for k, v in record.items() if k != "seconds"}
      for record in self.folder.metrics()
    ]

  def out(self):
    """Names of the sites that were out, round by round."""
    return [
      [name for name in EVERYBODY if not record[f"in_{name}"]]
      for record in self.folder.metrics()
    ]

  def left_out(self):
    """Triples (phase, site, reason) that the coordinator has noted."""
    with open(self.folder.network / "left_out.csv", newline="") as file:
      return [(r["phase"], r["site"], r["reason"]) for r in csv.DictReader(file)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
  """The rounds of a run without any fault, plain or masked."""
  made = {}

  def of(masking):
    if masking not in made:
      run = Run(tmp_path_factory.mktemp("sound"), masking=masking)
      run.go()
      made[masking] = run.rounds()
    return made[masking]

  return of


def _assert_near(one, other):
  assert len(one) == len(other)
  for a, b in zip(one, other, strict=True):
    assert a == pytest.approx(b, rel=1e-9)


def test_masked_and_plain_runs_have_the_same_scores(sound):
  _assert_near(sound(False), sound(True))


# ------------------------------------------------------------------ without some sites

# A round each: what befalls a site's answer to the first exchange.
_ROUNDS = [
  ("south", "lose"),
  ("east", "lose_answer"),
  ("north", "delay"),
  ("", ""),  # All are back.
  ("west", "corrupt"),
  ("south", "corrupt_answer"),
  ("east", "replay_answer"),
  ("south", "repeat"),  # Changes nothing.
  ("south", "restart"),  # Nor does this: it is told of its run and training again.
  ("north", "kill"),
]
_HARMLESS = ("", "repeat", "restart")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
  """Runs of a fault a round, and without the last step, plain or masked."""
  made = {}

  def of(masking):
    if masking not in made:
      rules = [
        Rule(name, fault, question="exchange", number=0, round=number)
        for number, (name, fault) in enumerate(_ROUNDS, 1)
      ]
      options = {"masking": masking, "min_sites": 3, "num_rounds": len(_ROUNDS)}
      made[masking] = Run(tmp_path_factory.mktemp("faulty"), rules, **options)
      with pytest.raises(
        InputError, match="the model is finished, in .*, but not there"
      ):
        made[masking].go()
    return made[masking]

  return of


@MASKING
def test_a_round_goes_on_without_a_site_and_takes_it_back(faulty, masking):
  run = faulty(masking)
  assert run.out() == [[n] if f not in _HARMLESS else [] for n, f in _ROUNDS]
  assert [record["clients_answered"] for record in run.rounds()] == [
    4 - len(out) for out in run.out()
  ]
