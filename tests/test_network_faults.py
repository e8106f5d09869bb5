"""Whole runs in which messages are lost, damaged or wrong, and sites or server die.

A run without faults takes the bits of one that was stopped wherever it could be, and
runs that went on without a site do not depend on why it was out.
"""

import csv

import numpy as np
import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import coordinator, site
from fedbnr_jax.run.records import RunFolder
from tests import site_federation
from tests.faulty_transport import FaultyTransport, Rule, vector_changed
from tests.runs import StopError

MASKING = pytest.mark.parametrize("masking", [False, True], ids=["plain", "masked"])
EVERYBODY = sorted(site_federation.SIZES)


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

  def go_on(self):
    """Runs it again and again, and starts sites that are dead; counts the stops."""
    for stops in range(200):
      try:
        self.go()
        return stops
      except (InputError, StopError):
        self.transport.close()
        self.transport.restart_dead()
    raise AssertionError("the run does not come to an end")

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
        InputError, match=r"the model is finished, in .*, but not there"
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


def test_it_does_not_matter_why_a_site_was_out(faulty):
  """Masked and plain sites are asked by different messages."""
  _assert_near(faulty(False).rounds(), faulty(True).rounds())


@MASKING
def test_why_a_site_was_out_is_noted(faulty, masking):
  notes = faulty(masking).left_out()
  found = {(phase, name): reason for phase, name, reason in notes}
  reasons = {
    "lose": "does not answer",
    "corrupt": "answers another message than the one it was sent",
    "corrupt_answer": "sends what cannot be read",
    "replay_answer": "answers another message than the one it was sent",
    "kill": "cannot be reached",
  }
  for number, (name, fault) in enumerate(_ROUNDS, 1):
    if fault in reasons:
      assert reasons[fault] in found[f"round {number}", name]


@MASKING
def test_the_same_command_delivers_the_model_to_a_site_that_is_back(faulty, masking):
  run = faulty(masking)
  run.transport.restart_dead()
  assert run.go().was_finished
  for name in EVERYBODY:
    model = run.federation.folder / name / site.MODEL
    assert (model / "summary.json").read_bytes() == run.folder.finished.read_bytes()


# ---------------------------------------------------------------------- the run stops


@MASKING
def test_a_server_that_is_killed_at_every_message_loses_nothing(
  tmp_path, masking, sound
):
  run = Run(tmp_path, masking=masking)
  run.transport.deadly = True
  stops = run.go_on()
  assert stops >= 15
  assert run.rounds() == sound(masking)  # To the bit.


@MASKING
def test_a_run_that_needs_all_stops_and_goes_on_where_it_was(tmp_path, masking, sound):
  rules = [
    Rule("south", "lose", question="totals"),
    Rule("north", "kill", question="exchange", number=1, round=1),
    Rule("east", "kill_after", question="exchange", number=0, round=2),
    Rule("west", "corrupt_answer", question="scores", round=2),
    Rule("south", "kill_after", question="conformal"),
    Rule("north", "kill", kind="model"),
  ]
  run = Run(tmp_path, rules, masking=masking)
  with pytest.raises(InputError, match=r"^site 'south' does not answer. So 3 sites"):
    run.go()
  assert run.go_on() == len(rules) - 1
  assert run.rounds() == sound(masking)


def test_sites_that_die_around_a_reveal_lose_nothing(tmp_path, sound):
  """Before it, after the others, after their own, and when they are back."""
  rules = [
    Rule("east", "kill", kind="reveal", round=1),
    Rule("west", "kill", kind="reveal", round=1),
    Rule("south", "kill_after", kind="reveal", round=1),
    Rule("north", "restart", kind="reveal", round=2),
    Rule("south", "lose", kind="reveal", round=2),
    Rule("west", "corrupt_answer", kind="reveal", round=2),
    Rule("east", "repeat", kind="reveal", round=2),
  ]
  run = Run(tmp_path, rules, masking=True, min_sites=3)
  assert run.go_on() == 1  # The first three come together.
  assert all(rule.times == 0 for rule in rules)
  assert run.rounds() == sound(True)


# ------------------------------------------------------------------- wrong messages


def _with(place, factor):
  """Multiplies one number of a vector."""
  return lambda vector: (
    vector * np.where(np.arange(len(vector)) == place % len(vector), factor, 1.0)
  )


# A round each: what the site's statistics become, and what is noted. The Gram's
# triangle comes first; the last are energy, rows and one for the site.
_BAD = [
  (_with(3, np.nan), "it has numbers that are not finite"),
  (lambda v: np.where(np.arange(len(v)) < 21, 1e6 * v, v), "Gram matrix with a trace"),
  (_with(1, 1e2), "is no sum of squares"),
  (_with(-2, 2.0), "rows instead of"),
  (lambda v: v[:-1], "has 29 numbers instead of 30"),
  (lambda v: v.astype(np.float32), "something else than a vector of numbers"),
]


def test_a_wrong_message_leaves_its_site_out_by_name(tmp_path):
  rules = [
    Rule("south", vector_changed(change), question="exchange", number=1, round=number)
    for number, (change, _) in enumerate(_BAD, 1)
  ]
  run = Run(tmp_path, rules, num_rounds=len(_BAD) + 1, masking=False, min_sites=3)
  run.go()
  assert run.out() == [["south"]] * len(_BAD) + [[]]
  for (_, words), (_, name, reason) in zip(_BAD, run.left_out(), strict=True):
    assert name == "south"
    assert reason.startswith("sends for 'statistics' what cannot be right: it has ")
    assert words in reason


def test_a_wrong_message_stops_a_run_that_needs_all(tmp_path):
  rule = Rule("south", vector_changed(_BAD[1][0]), question="exchange", number=1)
  run = Run(tmp_path, [rule], masking=False)
  with pytest.raises(
    InputError,
    match=r"^site 'south' sends for 'statistics' what cannot be right: it has a Gram "
    r"matrix with a trace of [0-9.e+]+, of [0-9.e+]+ at the most. So 3 sites",
  ):
    run.go()
  assert run.rounds() == []


def test_a_resumed_server_knows_still_what_each_site_has_told(tmp_path):
  """Of a run without masks, where sites can be told apart."""
  rules = [
    Rule("east", "kill", question="exchange", number=0),
    Rule("south", vector_changed(_BAD[3][0]), question="exchange", number=1),
  ]
  run = Run(tmp_path, rules, masking=False)
  with pytest.raises(InputError, match="site 'east' cannot be reached"):
    run.go()
  run.transport.restart_dead()
  with pytest.raises(
    InputError, match=r"site 'south' .* it has [0-9]+ rows instead of"
  ):
    run.go()


@pytest.mark.parametrize(
  "lie, words",
  [
    (lambda m: m.replace(gram=m.gram * 1e6), "has a Gram matrix with a trace of"),
    (lambda m: m.replace(count=m.count + 2), r"has [0-9]+ rows instead of [0-9]+\."),
  ],
)
def test_under_masks_the_check_is_named_and_nobody(tmp_path, lie, words):
  run = Run(tmp_path, masking=True)
  run.federation.lies["south"] = lambda asked, tree: (
    lie(tree) if (asked.name, asked.number) == ("exchange", 1) else tree
  )
  run.transport.restart("south")
  for _ in range(2):  # The same sum comes again, and is refused again.
    with pytest.raises(InputError, match=words) as caught:
      run.go()
    assert str(caught.value).startswith("the sum of sites 'east', 'north', 'south',")
    assert "'statistics'" in str(caught.value)
    assert run.rounds() == []


def test_a_masked_message_that_is_no_answer_leaves_its_site_out(tmp_path):
  """What names an attempt and a site, and the length, are seen under masks too."""
  faults = [
    (lambda data: np.roll(data, 1), "is no answer to this question at this attempt"),
    (lambda data: data[:-16], "has 29 numbers instead of 30"),
    (lambda data: np.append(data, data[-16:]), "has 31 numbers instead of 30"),
  ]
  rules = [
    Rule("south", vector_changed(change), question="exchange", number=1, round=number)
    for number, (change, _) in enumerate(faults, 1)
  ]
  # Numbers that were changed on the way are not those that the site knows to be its.
  flip = vector_changed(lambda data: data ^ (np.arange(len(data)) == 100))
  rules.append(Rule("east", flip, question="exchange", number=1, round=4))
  run = Run(tmp_path, rules, num_rounds=5, masking=True, min_sites=3)
  with pytest.raises(InputError, match="'east' did not reveal for attempt 1") as caught:
    run.go()
  assert "site 'east' may not answer this attempt by the rules" in str(caught.value)
  assert run.out() == [["south"]] * 3
  for (_, words), (_, _, reason) in zip(faults, run.left_out(), strict=True):
    assert words in reason
