"""A run over real sites, whole, stopped and resumed, and what it leaves behind."""

import json
import pathlib

import numpy as np
import pytest

import fedbnr_jax as fb
from fedbnr_jax.network import coordinator
from fedbnr_jax.run import checkpoints, journal
from fedbnr_jax.run.records import RunFolder
from tests import network_runs as runs
from tests.runs import SUMMARY, StopError, assert_refused, assert_same_bits, timeless

# One method, so that it is compiled once; its rounds have several exchanges.
FIELDS = {"method": "fedbnr-ev", "num_rounds": 2, "data__calibration": 0.3}


def _federation(folder: pathlib.Path, **options) -> runs.Federation:
  return runs.federation(folder, **(FIELDS | options))


def _run(some: runs.Federation, transport=None, **options):
  reached = some.transport() if transport is None else transport
  return coordinator.run(some.agreement, reached, some.folder.parent / "run", **options)


def _states(some: runs.Federation):
  """The last checkpoint, and the records, of a run's folder."""
  folder = RunFolder(some.folder.parent / "run")
  number = len(folder.metrics())
  arrays = dict(np.load(folder.checkpoints / f"{number}.npz"))
  note = json.loads(arrays.pop("note").tobytes())
  return arrays, note["history"], timeless(folder.metrics())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A federation that has trained, and what came of it."""
  some = _federation(tmp_path_factory.mktemp("finished"))
  return some, _run(some)


def test_it_finds_what_the_simulation_finds(finished):
  some, outcome = finished
  wanted = runs.simulated(some)
  runs.assert_same_scores(outcome.result.history, wanted.history)
  (summary,) = outcome.summaries
  expected = journal.summarise(runs.simulation(some), wanted.history)
  assert {*expected, *SUMMARY} <= {*summary}
  for name, value in expected.items():
    if name != "seconds":
      assert summary[name] == (
        value if isinstance(value, str) else pytest.approx(value, rel=1e-9)
      )
  assert summary["calibration_rows"] == len(runs.pooled(some).calibration)


def test_the_folder_is_that_of_a_run_and_has_no_rows(finished):
  some, outcome = finished
  folder = RunFolder(some.folder.parent / "run")
  assert folder.summary() == outcome.summaries[0]
  assert folder.metrics() == list(outcome.result.history)
  pictures = {path.name for path in folder.figures.iterdir()}
  assert pictures == {"learning_curve.png", "reliability.png"}
  page = folder.report.read_text()
  assert "made of sums over sites" in page
  assert "which kept their rows" in page
  assert not folder.posterior.exists()


def test_the_model_predicts_at_every_site_as_at_the_coordinator(finished):
  some, _ = finished
  new = runs.frame("west", 7)
  model = fb.load(some.folder.parent / "run")
  predicted = model.predict(new, warn=False)
  assert {"lower95", "lower95_conformal"} <= {*predicted.columns}
  assert model.client_names == runs.NAMES
  for name in runs.NAMES:
    at_site = fb.load(some.folder / name / "model").predict(new, warn=False)
    assert at_site.equals(predicted)


def test_of_the_model_sites_get_the_best_round_alone(finished):
  some, _ = finished
  here, there = (
    checkpoints.read(folder / "checkpoint" / "2.npz").arrays
    for folder in (some.folder.parent / "run", some.folder / "north" / "model")
  )
  assert {*there} == {*here}
  for name, array in there.items():
    best = here["best." + name.partition(".")[2]]
    assert array.tobytes() == best.tobytes(), name


def test_a_finished_run_does_nothing(finished):
  some, _ = finished
  before = {n: (some.folder / n / "sent.csv").read_bytes() for n in runs.NAMES}
  assert _run(some).was_finished
  after = {n: (some.folder / n / "sent.csv").read_bytes() for n in runs.NAMES}
  assert before == after


def test_another_agreement_is_refused(finished):
  some, _ = finished
  other = some._replace(agreement=runs.agreement(**FIELDS, seed=1))
  assert_refused(lambda: _run(other), "choose another workdir")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "masked"])
def whole(request, tmp_path_factory):
  """A federation to which nothing has happened, and the states of its run."""
  folder = tmp_path_factory.mktemp("whole")
  some = _federation(folder, sizes=runs.FEW, masking=request.param)
  _run(some)
  return some, _states(some)


def test_a_run_that_is_stopped_anywhere_resumes_to_the_same_bits(whole, tmp_path):
  same, wanted = whole
  # Stopped in its preparation, in and between rounds and at the end; and each time the
  # sites are started anew, too.
  stopped = same._replace(folder=_federation(tmp_path).folder)
  num_stops = 0
  for number in (2, 4, 7, 9, 10, 11, 6, 12, 1000):
    try:
      _run(stopped, runs.StopsAt(stopped.transport(), number))
      break
    except StopError:
      num_stops += 1
  assert num_stops >= 4
  arrays, history, records = _states(stopped)
  assert_same_bits(arrays, wanted[0])
  assert (history, records) == wanted[1:]


def test_a_site_that_is_restarted_during_the_run_goes_on(whole, tmp_path):
  same, wanted = whole
  some = same._replace(folder=_federation(tmp_path).folder)
  _run(some, _RestartsSites(some))
  arrays, history, records = _states(some)
  assert_same_bits(arrays, wanted[0])
  assert (history, records) == wanted[1:]


class _RestartsSites:
  """A transport one of whose sites is started anew, from its folder, now and then."""

  def __init__(self, some: runs.Federation) -> None:
    self.sites = runs.NAMES
    self._some, self._calls = some, 0
    self._running = {name: some.site(name) for name in runs.NAMES}

  def ask(self, messages, seconds):
    self._calls += 1
    if self._calls % 5 == 0:  # It has forgotten what the others know.
      name = runs.NAMES[self._calls % 3]
      self._running[name] = self._some.site(name)
    return {name: self._running[name].answer(told) for name, told in messages.items()}


def test_a_site_with_other_rows_than_before_is_refused(tmp_path):
  some = _federation(tmp_path, sizes=runs.FEW)
  with pytest.raises(StopError):
    _run(some, runs.StopsAt(some.transport(), 4))
  changed = some._replace(tables=some.tables | {"west": runs.tables()["west"]})
  assert_refused(lambda: _run(changed), "site 'west' has other rows than when")
  _run(some)
