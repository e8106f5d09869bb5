"""Error by site: told once, in the end, unmasked, and only if that was agreed on."""

import csv
import secrets

import ml_collections
import numpy as np
import pandas as pd
import pytest

from fedbnr_jax import precision, prediction
from fedbnr_jax.errors import InputError
from fedbnr_jax.network import coordinator, finish, preparation, rounds
from fedbnr_jax.network.expected import Answers
from fedbnr_jax.network.members import Members
from fedbnr_jax.network.question import OWN_SCORES, Question
from fedbnr_jax.network.site_training import FEWEST_TO_TELL
from fedbnr_jax.network.sums import END, Sums
from fedbnr_jax.run import training
from fedbnr_jax.run.records import RunFolder
from tests import network_runs as runs

# West has too few test rows to tell.
SIZES = {"north": 120, "south": 105, "west": 30}
FIELDS = {"method": "fedridge", "sizes": SIZES, "masking": True}
AGREED = FIELDS | {"options": {"tell_scores": True}}


def _sent(some: runs.Federation, name: str) -> list[dict[str, str]]:
  """What has left a site, by its own log."""
  with open(some.folder / name / "sent.csv", newline="") as file:
    return [row for row in csv.DictReader(file) if row["kind"] == "sum"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  some = runs.federation(tmp_path_factory.mktemp("told"), **AGREED)
  folder = some.folder.parent / "run"
  return some, folder, coordinator.run(some.agreement, some.transport(), folder)


def _expected(some: runs.Federation, result: training.Result) -> pd.DataFrame:
  """The table, from the pooled rows."""
  experiment = runs.simulation(some)
  dataset, scaler, rows = experiment.dataset, experiment.preprocessor, []
  for name in ("north", "south", "west"):
    test = experiment.split.test
    test = test[dataset.clients[test] == name]
    x = scaler.transform(dataset.features.iloc[test])
    mean, variance = prediction.predict(experiment.config, result.state, x)
    off = np.abs(scaler.standardise(dataset.targets[test]) - mean)
    inside = off <= 1.959964 * np.sqrt(variance)
    rmse = experiment.error_scale * np.sqrt(np.mean(off**2))
    rows.append((name, len(test), rmse, inside.mean()))
  frame = pd.DataFrame(rows, columns=["site", "test rows", "RMSE", "in 95 %"])
  frame = frame[frame["test rows"] >= FEWEST_TO_TELL]
  assert len(frame) == 2
  return frame.sort_values("RMSE", ascending=False, ignore_index=True)


def _trained(some: runs.Federation):
  """A training that is over, and what reaches the sites."""
  members = Members(some.agreement, some.transport(), secrets.token_hex(32))
  cards, _ = members.greet()
  members.hand_out_keys(cards)
  sums = Sums(members, some.folder.parent / "network")
  with precision.float64():
    config = ml_collections.ConfigDict(some.agreement.config.to_dict())
    task = preparation.prepare(config, sums)
    result = training.train(task, rounds.program_of(task, sums))
  sums.begin_round(task.name, END)
  return task, sums, result


def test_the_table_is_that_of_the_pooled_rows(tmp_path):
  some = runs.federation(tmp_path, **AGREED)
  task, sums, result = _trained(some)
  found = finish.ask(task, sums, result).by_site
  pd.testing.assert_frame_equal(found, _expected(some, result), rtol=1e-9)


def test_it_stands_on_the_page_that_sites_get(finished):
  some, folder, _ = finished
  page = (some.folder / "south" / "model" / "report.html").read_text()
  assert page == RunFolder(folder).report.read_text()
  assert "Error by site" in page
  assert "nothing of &#x27;west&#x27;" in page or "nothing of 'west'" in page
  assert (folder / "figures" / "error_by_site.png").exists()


def test_a_site_tells_three_numbers_once_and_masks_all_others(finished):
  some, _, _ = finished
  for name in runs.NAMES:
    sent = _sent(some, name)
    told = [row for row in sent if row["what"] == OWN_SCORES]
    assert [(row["masked"], row["numbers"]) for row in told] == [("no", "3")]
    assert sent[-1] == told[0]  # At the end.
    assert {row["masked"] for row in sent[:-1]} == {"yes"}


def test_sites_that_have_not_agreed_tell_nothing(tmp_path):
  some = runs.federation(tmp_path, **FIELDS)
  task, sums, result = _trained(some)
  assert finish.ask(task, sums, result).by_site is None
  question = _question(task, result)
  assert sums.each(question) == {}
  log = (tmp_path / "network" / "left_out.csv").read_text()
  assert log.count("was not agreed on") == 3
  assert not any(row["what"] == OWN_SCORES for row in _sent(some, "north"))


def test_of_another_model_nothing_is_told(tmp_path):
  some = runs.federation(tmp_path, **AGREED)
  task, sums, result = _trained(some)
  question = _question(task, result)
  first = sums.each(question)
  assert sorted(first) == sorted(runs.NAMES)
  assert sums.each(question) == first  # A coordinator that was stopped asks again.
  halved = (np.asarray(a / 2, a.dtype) for a in question.arrays)
  other = question._replace(arrays=tuple(halved))
  assert sums.each(other) == {}
  assert "another model" in (tmp_path / "network" / "left_out.csv").read_text()


def _question(task, result) -> Question:
  model = rounds.model_arrays(task, result.state)
  return Question(OWN_SCORES, task.name, 0, (), model)


@pytest.mark.parametrize(
  ("inside", "rows", "squares", "part"),
  [
    (11.0, 12.0, 3.0, ""),
    (0.0, 0.0, 0.0, ""),
    (11.0, 13.0, 3.0, "13 test rows, of 12"),
    (12.0, 11.0, 3.0, "12 rows inside, of 11"),
    (11.0, 12.0, -3.0, "negative sum of squares"),
    (11.0, 12.0, np.inf, "not finite"),
  ],
)
def test_what_no_test_rows_can_tell_is_refused(inside, rows, squares, part):
  answers = Answers(runs.SCHEMA, runs.NAMES)
  # Rows that calibrate, test, train, validate.
  answers(("north",), np.array([0.0, 12.0, 96.0, 12.0]), Question("counts"))
  told = np.array([inside, rows, squares])
  question = Question(OWN_SCORES, "0" * 64)
  if not part:
    answers(("north",), told, question)
    return
  with pytest.raises(InputError, match=part):
    answers(("north",), told, question)
