"""Calibration over real sites by folds: its counts are those of the simulation."""

import csv
import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

from fedbnr_jax import calibration, workflow
from fedbnr_jax.errors import InputError
from fedbnr_jax.network import agreement as agreement_lib
from fedbnr_jax.network import coordinator, protocol, site_rows
from fedbnr_jax.network.expected import Answers
from fedbnr_jax.network.question import Question
from fedbnr_jax.network.refusal import SENTENCES
from fedbnr_jax.network.transport import Failure
from fedbnr_jax.run import training
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.records import RunFolder
from tests import network_runs as runs
from tests.runs import StopError, assert_refused

NUM_FOLDS = 3
FIELDS = {
  "method": "fedbnr-ev",
  "num_rounds": 2,
  "sizes": runs.FEW,
  "data__calibration_folds": NUM_FOLDS,
}


@dataclasses.dataclass(frozen=True)
class Dealt(Experiment):
  """A simulation whose clients deal their rows as the sites do."""

  fold_of: Any = None  # By row number.

  def folds(self):
    return [self.fold_of[rows] for rows in self.client_rows]


def _simulated_counts(some: runs.Federation) -> np.ndarray:
  """What the simulation counts, with the sites' splits and folds."""
  fold_of = np.full(sum(runs.FEW.values()), -1)
  first = 0
  for seed, (name, split) in enumerate(some.splits().items()):
    dealt = site_rows.folds(seed, len(split.train), NUM_FOLDS)
    fold_of[split.train + first] = dealt
    first += len(some.tables[name].targets)
  plain = runs.simulation(some)
  fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
  experiment = Dealt(**fields, fold_of=fold_of)
  program = workflow.program_for(experiment)
  result = training.train(experiment, program)
  found = calibration.of_training(experiment, program, result)
  assert found is not None
  assert found.by == "folds"
  return found.counts


def _run(some: runs.Federation, transport=None):
  reached = some.transport() if transport is None else transport
  return coordinator.run(some.agreement, reached, some.folder.parent / "run")


def _calibrated(some: runs.Federation):
  return calibration.read(RunFolder(some.folder.parent / "run"))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
  return _simulated_counts(runs.federation(tmp_path_factory.mktemp("same"), **FIELDS))


@pytest.mark.parametrize("masking", [False, True], ids=["plain", "masked"])
def test_counts_are_those_of_the_simulation_wherever_the_run_stops(
  wanted, tmp_path, masking
):
  some = runs.federation(tmp_path, masking=masking, **FIELDS)
  folds = some.folder.parent / "run" / "network" / "folds"
  in_the_middle = 0
  for number in (30, 12, 17, 12, 24, 10_000):
    try:
      _run(some, runs.StopsAt(some.transport(), number))
      break
    except StopError:
      # Of some folds there is all, of the next one a part.
      done = len(list(folds.glob("*.json")))
      in_the_middle += 0 < done < NUM_FOLDS and (folds / str(done + 1)).exists()
  assert in_the_middle >= 1
  found = _calibrated(some)
  np.testing.assert_array_equal(found.counts, wanted)
  assert found.by == "folds"
  assert found.num_rows == sum(len(split.train) for split in some.splits().values())
  assert not [path for path in folds.iterdir() if path.is_dir()]
  page = RunFolder(some.folder.parent / "run").report.read_text()
  assert "fold by fold" in page


def test_a_site_that_is_out_of_a_round_is_out_of_no_other_fold(tmp_path):
  some = runs.federation(tmp_path, options={"min_sites": 2}, **FIELDS)
  transport = _Drops(some)
  _run(some, transport)
  path = tmp_path / "run" / "network" / "left_out.csv"
  with open(path, newline="") as file:
    phases = {row["phase"] for row in csv.DictReader(file)}
  assert phases == {"without fold 1, round 2", "end"}
  split = some.splits()["south"]
  lost = np.sum(site_rows.folds(1, len(split.train), NUM_FOLDS) == 0)
  everybody = sum(len(split.train) for split in some.splits().values())
  assert _calibrated(some).num_rows == everybody - lost


class _Drops:
  """Reaches south in all but the last round without the first fold."""

  def __init__(self, some: runs.Federation) -> None:
    self.sites = runs.NAMES
    self._inner = some.transport()
    self._folds = some.folder.parent / "run" / "network" / "folds"

  def ask(self, messages, seconds):
    answers = self._inner.ask(messages, seconds)
    number = len(list(self._folds.glob("1/checkpoint/1.npz")))
    if number and not (self._folds / "1.json").exists() and "south" in answers:
      answers |= {"south": Failure("does not answer")}
    return answers


def test_a_fold_that_is_damaged_is_named(tmp_path):
  some = runs.federation(tmp_path, **FIELDS)
  with pytest.raises(StopError):
    _run(some, runs.StopsAt(some.transport(), 4))
  path = some.folder.parent / "run" / "network" / "folds" / "1.json"
  path.parent.mkdir(parents=True)
  path.write_text('{"counts": [1]}')
  assert_refused(lambda: _run(some), str(path), "no count for each bin")


def test_a_fold_that_has_diverged_is_not_tried_again(tmp_path):
  some = runs.federation(tmp_path, **FIELDS)
  with pytest.raises(StopError):
    _run(some, runs.StopsAt(some.transport(), 4))
  path = some.folder.parent / "run" / "network" / "folds" / "1.json"
  path.parent.mkdir(parents=True)
  path.write_text('{"diverged": "the loss was lost"}')
  with pytest.warns(UserWarning, match="one of 3 folds, the loss was lost"):
    _run(some)
  assert _calibrated(some) is None
  assert [entry.name for entry in path.parent.iterdir()] == ["1.json"]


@pytest.mark.parametrize("fold", [-1, NUM_FOLDS, 0.0, True, "0"])
def test_a_site_trains_without_no_other_folds_than_agreed_on(tmp_path, fold):
  some = runs.federation(tmp_path, **FIELDS)
  assert _code(some, fold) == "not-agreed"


def test_a_site_that_sets_a_share_aside_has_no_folds(tmp_path):
  some = runs.federation(tmp_path, data__calibration=0.2, **FIELDS)
  assert _code(some, 0) == "not-agreed"


def _code(some: runs.Federation, fold: object) -> str:
  """Why a site refuses to begin the training without a fold."""
  head = {"federation": some.agreement.digest(), "run": "0" * 64, "kind": "begin"}
  config = some.agreement.config.to_dict()
  begin = {**head, "config": config, "preprocessor": {}, "fold": fold}
  told = protocol.decode(some.site("north").answer(protocol.encode(begin))).head
  assert told["code"] in SENTENCES
  return told["code"]


def test_every_row_is_in_a_fold_and_small_sites_fill_others():
  starts = set()
  for seed in range(20):
    dealt = site_rows.folds(seed, 11, NUM_FOLDS)
    sizes = np.bincount(dealt, minlength=NUM_FOLDS)
    assert sizes.sum() == 11
    assert sizes.max() - sizes.min() <= 1
    np.testing.assert_array_equal(dealt, site_rows.folds(seed, 11, NUM_FOLDS))
    starts |= {*site_rows.folds(seed, 2, NUM_FOLDS)}
  assert starts == set(range(NUM_FOLDS))
  assert site_rows.folds(0, 1, NUM_FOLDS).tolist() == [-1]


def test_a_site_answers_as_many_sums_as_all_trainings_take(tmp_path: pathlib.Path):
  some = runs.federation(tmp_path, **FIELDS)
  most = agreement_lib.MOST_SUMS
  assert some.agreement.most_sums == (1 + NUM_FOLDS) * most


def test_more_rows_than_a_site_has_are_refused():
  answers = Answers(runs.SCHEMA, runs.NAMES)
  # Rows that calibrate, test, train, validate.
  answers(("north",), np.array([0.0, 4.0, 30.0, 4.0]), Question("counts"))
  question = Question("left-out", "0" * 64)
  counts = np.zeros(answers.size(question))
  counts[:2] = 15.0
  answers(("north",), counts, question)
  counts[2] = 1.0
  with pytest.raises(InputError, match="31 rows left out, of 30 at the most"):
    answers(("north",), counts, question)
  with pytest.raises(InputError, match="no whole numbers"):
    answers(("north",), counts / 2, question)
