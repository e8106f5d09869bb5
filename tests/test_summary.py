"""A summary is what its history says, and lacks nothing that its readers need."""

import pytest

from fedbnr_jax.run import summary
from fedbnr_jax.run.records import RunFolder
from tests.runs import assert_refused, tiny


@pytest.fixture
def folder(tmp_path) -> RunFolder:
  """A finished run of three made-up rounds, of which the second is the best."""
  made = RunFolder(tmp_path / "run")
  made.claim(tiny())
  for number, error in enumerate((3.0, 1.0, 2.0), start=1):
    scores = {"round": number, "val_rmse": error, "test_rmse": 10 - error}
    made.append_metrics(dict.fromkeys(summary.COLUMNS, float(number)) | scores)
  known = {"dataset": "made", "num_clients": 2, "rmse_unit": "target"}
  known |= {"method": "fedbnr", "seed": 0}
  made.write_summary(known | summary.scores(made.metrics()))
  return made


def read(folder: RunFolder) -> dict:
  return summary.read_summary(folder, tiny(), summary.read_history(folder))


def test_scores_are_of_the_best_round(folder):
  found = read(folder)
  assert (found["best_round"], found["rounds"]) == (2, 3)
  assert (found["test_rmse"], found["min_test_rmse"]) == (9.0, 7.0)
  assert (found["test_nll"], found["floats_up"]) == (2.0, 6.0)


@pytest.mark.parametrize("name", ["dataset", "seed", "floats_up", "test_rmse"])
def test_a_missing_field_is_named(folder, name: str):
  content = folder.summary()
  del content[name]
  folder.write_summary(content)
  assert_refused(lambda: read(folder), f"summary.json has no {name!r}", "restore it")


def test_a_field_that_does_not_go_with_the_history_is_named(folder):
  folder.write_summary(folder.summary() | {"seconds": 0.5})  # Nobody's concern.
  read(folder)
  folder.write_summary(folder.summary() | {"test_nll": 0.5})
  assert_refused(lambda: read(folder), "summary.json", "test_nll is 0.5", "be 2.0")


def test_a_summary_that_is_no_object_is_one_line(folder):
  folder.finished.write_text("[1]")
  assert_refused(lambda: read(folder), "summary.json", "object")


@pytest.mark.parametrize("name", ["val_rmse", "clients_answered", "seconds"])
def test_a_column_that_is_missing_is_named(folder, name: str):
  rows = [{k: v for k, v in row.items() if k != name} for row in folder.metrics()]
  folder.keep_metrics(rows)
  assert_refused(lambda: read(folder), "metrics.csv has no column", repr(name))


def test_no_history_at_all_is_one_line(folder):
  folder.keep_metrics([])
  assert_refused(lambda: read(folder), "metrics.csv has no rows")
