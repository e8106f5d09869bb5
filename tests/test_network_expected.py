"""A run's honest answers pass, of each site and summed; every tampered one is named."""

import functools

import jax
import numpy as np
import pytest

from fedbnr_jax import precision
from fedbnr_jax.errors import InputError
from fedbnr_jax.network import preparation, rounds
from fedbnr_jax.network.expected import Answers
from fedbnr_jax.network.members import Members
from fedbnr_jax.network.sums import Sums
from tests import site_federation
from tests.faulty_transport import FaultyTransport

RUN = "a" * 64


class Recording:
  """Asks two judges about all that comes: one sees parts, the other the sums alone."""

  def __init__(self, agreement):
    names = agreement.members
    self.alone = Answers(agreement.schema, names)
    self.together = Answers(agreement.schema, names)
    self.names = tuple(sorted(names))
    self.heard = []  # (question, {name: vector}), in order.

  def __call__(self, names, vector, question):
    """Hears one site; when all are heard, judges."""
    (name,) = names
    if not self.heard or self.heard[-1][0] is not question:
      self.heard.append((question, {}))
    parts = self.heard[-1][1]
    parts[name] = vector
    self.alone((name,), vector, question)
    if len(parts) == len(self.names):
      self.together(self.names, sum(parts.values()), question)

  def begin_training(self, *training):
    for judge in (self.alone, self.together):
      judge.begin_training(*training)

  def like(self, question):
    return self.alone.like(question)


@functools.cache
def _run(folder, **fields):
  """A round of four sites, every answer of which is judged."""
  federation = site_federation.Federation(
    folder, site_federation.config(**fields), masking=False
  )
  recording = Recording(federation.agreement)
  members = Members(federation.agreement, FaultyTransport(federation.starts()), RUN)
  with precision.float64():
    sums = Sums(members, folder / "coordinator")
    sums.answers = recording
    task = preparation.prepare(federation.agreement.config, sums)
    program = rounds.program_of(task, sums)
    state = program.init(jax.random.key(0), task.inputs)
    program.step(jax.random.key(1), state)
  return recording


METHODS = {
  "evidence": {"evidence__noise": "held-out"},
  "rescaled": {"method": "fedbnr", "noise": "rescaled"},
  "ridge": {"method": "fedridge", "ridge__basis": "inducing", "ridge__num_samples": 3},
  "averaged": {"method": "fedavg", "hidden_size": 3, "latent_size": 2},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  made = {}

  def of(name):
    if name not in made:
      made[name] = _run(tmp_path_factory.mktemp(name), **METHODS[name])
    return made[name]

  return of


@pytest.mark.parametrize("name", METHODS)
def test_honest_answers_pass(run, name):
  heard = run(name).heard
  assert {q.name for q, _ in heard} >= {"counts", "totals", "squares", "bins", "scores"}
  assert all(len(parts) == 4 for _, parts in heard)


# What a site could send instead of its vector [n], by what is said of it.
def _nan(vector):
  return np.where(np.arange(len(vector)) == len(vector) // 2, np.nan, vector)


def _of(run, name, number=None):
  """The first answers to a question of a name, and number if that is given."""
  return next(
    (q, parts)
    for q, parts in run.heard
    if q.name == name and number in (None, q.number)
  )


def _refused(run, question, parts, bad, words):
  """Checks that a site's bad answer is refused, alone and within the sum."""
  name = "south"
  with pytest.raises(InputError, match=words):
    run.alone((name,), bad, question)
  others = [part for n, part in parts.items() if n != name]
  if all(part.shape == bad.shape for part in others):
    with pytest.raises(InputError, match=words):
      run.together(run.names, sum(others) + bad, question)


@pytest.mark.parametrize("name", METHODS)
def test_every_answer_that_is_not_finite_or_of_another_length_is_seen(run, name):
  for question, parts in run(name).heard:
    part = parts["south"]
    _refused(run(name), question, parts, _nan(part), "has numbers that are not finite")
    longer = np.append(part, 0.0)
    _refused(run(name), question, parts, longer, "has [0-9]+ numbers instead of")
    with pytest.raises(InputError, match="numbers instead of"):
      run(name).together(run(name).names, longer, question)


def _add(place, value):
  def changed(vector):
    return np.concatenate(
      [vector[:place], [vector[place] + value], vector[place + 1 :]]
    )

  return changed


TAMPERED = {
  # Question: what is changed, and what is said. Parts are in the order of names.
  "half a row": ("counts", _add(2, 0.5), "no whole numbers"),
  "negative rows": ("counts", _add(0, -100.0), "a negative number of rows"),
  "a cell more": ("totals", _add(0, 1.0), "filled cells"),
  "a cell less": ("totals", _add(0, -1.0), "has empty cells"),
  "a row more": ("totals", _add(5, 1.0), "rows instead of"),
  "negative squares": ("squares", _add(1, -1e9), "a negative sum of squares"),
  "a value more": ("bins", _add(300, 1.0), "values in bins in all instead of"),
  "bins": ("bins", lambda v: np.roll(v, 1), "values"),
  "a score more": ("scores", _add(0, 1.0), "rows instead of"),
  "all inside": ("scores", _add(7, 1e3), "rows inside intervals, of"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_what_sites_tell_of_their_rows_must_fit_what_they_told_before(run, case):
  name, change, words = TAMPERED[case]
  recording = run("evidence")
  question, parts = _of(recording, name)
  _refused(recording, question, parts, change(parts["south"]), words)


STATISTICS = {"evidence": 1, "ridge": 0}  # The number of their exchange.


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize(
  "place, value, words",
  [
    (0, 1e6, "has a Gram matrix with a trace"),
    (1, 1e3, "is no sum of squares: an eigenvalue is negative"),
    (-2, 1.0, "rows instead of"),
    (-1, 1.0, "has the statistics of [0-9] sites instead of"),
    (-3, 1e3, "has squares of targets with a sum of"),
  ],
)
def test_bad_statistics_are_seen_in_a_sum_too(run, name, place, value, words):
  recording = run(name)
  question, parts = _of(recording, "exchange", STATISTICS[name])
  place += len(parts["south"]) * (place < 0)
  bad = _add(place, value)(parts["south"])
  _refused(recording, question, parts, bad, words)


def test_products_of_inputs_are_symmetric_and_no_direction_is_negative(run):
  recording = run("ridge")
  question, parts = _of(recording, "input_products")
  for change, words in ((_add(1, 1.0), "not symmetric"), (_add(0, -1e3), "no sum of")):
    _refused(recording, question, parts, change(parts["south"]), words)


def test_noise_has_sums_that_fit_each_other(run):
  recording = run("rescaled")
  question, parts = _of(recording, "exchange", 2)
  for place, words in ((-1, "a negative sum of squares"), (-2, "a squared sum of")):
    bad = _add(len(parts["south"]) + place, -1e6)(parts["south"])
    _refused(recording, question, parts, bad, words)
  question, parts = _of(recording, "held-out")
  _refused(recording, question, parts, _add(9, 1.0)(parts["south"]), "in all instead")


def test_a_site_that_tells_of_other_rows_than_before_is_refused(run):
  recording = run("evidence")
  question, parts = _of(recording, "counts")
  recording.alone(("south",), parts["south"], question)
  with pytest.raises(InputError, match="another number of rows than it was told"):
    recording.alone(("south",), _add(2, 1.0)(parts["south"]), question)


def test_what_some_sites_have_told_together_bounds_what_each_can_say(run):
  """A resumed coordinator knows the sums, and of a site no more than these."""
  recording = run("evidence")
  question, parts = _of(recording, "exchange", STATISTICS["evidence"])
  later = recording.together
  later(("south",), parts["south"], question)
  later(("north", "south"), parts["north"] + parts["south"], question)
  count = len(parts["south"]) - 2
  with pytest.raises(InputError, match=r"rows, of [0-9]+ at the most"):
    later(("south",), _add(count, 100.0)(parts["south"]), question)
