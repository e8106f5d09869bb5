"""Events: every number of every record, once, also after an interruption."""

import importlib.util

import pytest
from tensorboardX.proto import event_pb2

from fedbnr_jax import workflow
from fedbnr_jax.events import FOLDER, EventWriter
from fedbnr_jax.run.records import RunFolder
from tests.runs import StopError, assert_refused, tiny


class Stopper:
  """Ends a run after a round."""

  def __init__(self, number):
    self._number = number

  def trying(self, name):
    pass

  def start(self, experiment, rounds_done, num_runs):
    pass

  def update(self, record):
    if record["round"] == self._number:
      raise StopError

  def calibrating(self, fold, num_folds):
    pass

  def close(self):
    pass


def _read(folder):
  """The values by (tag, step), and the steps from which files began anew."""
  found, begun = {}, []
  for path in sorted((folder / FOLDER).iterdir()):
    content, place = path.read_bytes(), 0
    while place < len(content):
      # Eight bytes of length and four to check them; after the event four more.
      length = int.from_bytes(content[place : place + 8], "little")
      event = event_pb2.Event.FromString(content[place + 12 : place + 12 + length])
      if event.session_log.status == event_pb2.SessionLog.START:
        begun.append(event.step)
      for value in event.summary.value:
        key = value.tag, event.step
        assert key not in found
        found[key] = value.simple_value
      place += 16 + length
  return found, begun


def test_events_are_the_records_also_after_an_interruption(tmp_path):
  config = tiny(kernel="gaussian", num_rounds=2)
  with pytest.raises(StopError):
    workflow.train(
      config, tmp_path, workflow.Watchers(EventWriter(tmp_path), Stopper(1))
    )
  workflow.train(config, tmp_path, workflow.Watchers(EventWriter(tmp_path)))
  found, begun = _read(tmp_path)
  records = RunFolder(tmp_path).metrics()
  assert begun == [1, 2]
  expected = {
    (name.replace("_", "/", 1), record["round"]): value
    for record in records
    for name, value in record.items()
    if name != "round"
  }
  assert set(found) == set(expected)
  assert found["val/rmse", 2] == pytest.approx(records[1]["val_rmse"])
  assert found["floats/up", 1] == pytest.approx(records[0]["floats_up"])


def test_events_of_several_seeds_are_refused(tmp_path):
  config = tiny(kernel="gaussian", num_rounds=1, num_seeds=2)
  watcher = EventWriter(tmp_path)
  assert_refused(lambda: workflow.train(config, tmp_path, watcher), "num_seeds")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  assert_refused(lambda: EventWriter(tmp_path), "tensorboardX", "pip install")
