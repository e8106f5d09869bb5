"""The files of a run's folder: whole, its own, and safe against a kill."""

import json
import pathlib
import shutil

import ml_collections
import pytest

from fedbnr_jax import files, lock
from fedbnr_jax.errors import InputError
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import records
from fedbnr_jax.run.records import RunFolder
from tests.runs import assert_refused, table, tiny

ROWS = [
  {"round": 1, "val_rmse": 0.1 + 0.2, "floats_up": 220, "seconds": 1.5},
  {"round": 2, "val_rmse": 1e-17, "floats_up": 220, "seconds": 2.0},
  {"round": 3, "val_rmse": -2.5, "floats_up": 220, "seconds": 0.125},
]


@pytest.fixture
def folder(tmp_path) -> RunFolder:
  made = RunFolder(tmp_path / "run")
  made.claim(tiny())
  return made


@pytest.fixture
def metrics(folder) -> pathlib.Path:
  for row in ROWS:
    folder.append_metrics(row)
  return folder.path / "metrics.csv"


# ------------------------------------------------------------------------- config


def test_claim_makes_the_folder_and_keeps_the_config(tmp_path):
  folder = RunFolder(tmp_path / "a" / "b")
  folder.claim(tiny(seed=7))
  assert folder.config().to_dict() == tiny(seed=7).to_dict()
  folder.claim(tiny(seed=7))  # Again is no offence.


@pytest.mark.parametrize(
  "fields, named",
  [({"seed": 1}, "config.seed"), ({"kd__alpha": 2.0}, "config.kd.alpha")],
)
def test_other_config_is_refused_by_field(folder, fields, named: str):
  before = (folder.path / "config.json").read_bytes()
  with pytest.raises(InputError) as caught:
    folder.claim(tiny(**fields))
  assert f"{named} differs)" in str(caught.value)
  assert str(folder.path) in str(caught.value)
  assert (folder.path / "config.json").read_bytes() == before


def test_several_differences_are_counted(folder):
  with pytest.raises(InputError, match=r"config\.num_rounds differs, and 1 more"):
    folder.check(tiny(seed=1, num_rounds=9))


def test_folder_of_something_else_is_refused(tmp_path):
  (tmp_path / "thesis.tex").write_text("precious")
  with pytest.raises(InputError, match="not empty and holds no run"):
    RunFolder(tmp_path).claim(tiny())
  assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_empty_folder_is_taken(tmp_path):
  RunFolder(tmp_path).claim(tiny())
  assert (tmp_path / "config.json").exists()


def test_check_writes_nothing(tmp_path):
  RunFolder(tmp_path / "run").check(tiny())
  assert not (tmp_path / "run").exists()


def test_folder_without_run_has_no_config(tmp_path):
  with pytest.raises(InputError, match="holds no run"):
    RunFolder(tmp_path).config()


def test_config_with_a_reference_is_written_as_its_value(tmp_path):
  config = ml_collections.ConfigDict({"a": 2})
  config.b = config.get_ref("a") * 3
  folder = RunFolder(tmp_path / "run")
  folder.claim(config)
  assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"a": 2, "b": 6}
  folder.check(config)


def test_frozen_config_is_the_same_config(folder):
  folder.check(ml_collections.FrozenConfigDict(tiny()))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00"])
def test_damaged_config_is_one_line(folder, content: bytes):
  (folder.path / "config.json").write_bytes(content)
  with pytest.raises(InputError, match=r"config\.json is not readable") as caught:
    folder.check(tiny())
  assert "\n" not in str(caught.value)


def test_config_that_is_no_object_is_one_line(folder):
  (folder.path / "config.json").write_text("[]")
  with pytest.raises(InputError, match=r"config\.json"):
    folder.check(tiny())


# ------------------------------------------------------------------------ metrics


def test_metrics_read_back_bit_for_bit(folder, metrics):
  assert folder.metrics() == ROWS
  assert [type(value) for value in folder.metrics()[0].values()] == [
    int, float, int, float,
  ]  # fmt: skip
  assert list(folder.metrics_frame().columns) == list(ROWS[0])


def test_no_metrics_is_no_rows(folder):
  assert folder.metrics() == []


def test_row_cut_anywhere_is_dropped(folder, metrics):
  text = metrics.read_text()
  lines = text.splitlines(keepends=True)
  start = len("".join(lines[:3]))
  for end in range(start, len(text)):
    metrics.write_text(text[:end])
    assert folder.metrics() == ROWS[:2], text[start:end]


def test_header_cut_anywhere_is_no_rows(folder, metrics):
  header = metrics.read_text().splitlines(keepends=True)[0]
  for end in range(len(header) + 1):
    metrics.write_text(header[:end])
    assert folder.metrics() == []


def test_rows_after_a_cut_one_are_not_trusted(folder, metrics):
  lines = metrics.read_text().splitlines(keepends=True)
  metrics.write_text(lines[0] + lines[1] + "2,0.5\n" + lines[3])
  assert folder.metrics() == ROWS[:1]


def test_gap_in_the_rounds_ends_the_list(folder, metrics):
  lines = metrics.read_text().splitlines(keepends=True)
  metrics.write_text(lines[0] + lines[1] + lines[3])
  assert folder.metrics() == ROWS[:1]


@pytest.mark.parametrize("content", [b"2,0.5,x,1.0\n", b"2,0.\xff,3,1.0\n"])
def test_damaged_row_ends_the_list(folder, metrics, content: bytes):
  lines = metrics.read_bytes().splitlines(keepends=True)
  metrics.write_bytes(lines[0] + lines[1] + content + lines[3])
  assert folder.metrics() == ROWS[:1]


def test_damaged_header_is_no_rows(folder, metrics):
  lines = metrics.read_text().splitlines(keepends=True)
  metrics.write_text("rou" + lines[0][4:] + "".join(lines[1:]))
  assert folder.metrics() == []


def test_kept_rows_replace_the_file_and_can_be_added_to(folder, metrics):
  folder.keep_metrics(ROWS[:1])
  assert folder.metrics() == ROWS[:1]
  folder.append_metrics(ROWS[1])
  assert folder.metrics() == ROWS[:2]
  assert metrics.read_text().count("round") == 1
  folder.keep_metrics([])
  assert not metrics.exists()


def test_nothing_temporary_is_left(folder, metrics):
  folder.keep_metrics(ROWS)
  folder.write_summary({"a": 1})
  left = {path.name for path in folder.path.iterdir()}
  assert left == {"config.json", "metrics.csv", "summary.json"}


# -------------------------------------------------------------------------- copies


def test_a_copy_starts_with_the_config_and_ends_with_the_summary(
  folder, metrics, tmp_path, monkeypatch
):
  folder.write_summary({"test_rmse": 1.0})
  (folder.path / "posterior.npz.tmp").write_text("half")
  copied, plain = [], shutil.copyfile
  monkeypatch.setattr(
    records.shutil, "copyfile", lambda a, b: copied.append(a.name) or plain(a, b)
  )
  folder.copy_to(RunFolder(tmp_path / "copy"))
  assert copied == ["config.json", "metrics.csv", "summary.json"]


def test_a_copy_does_not_undo_rounds(folder, metrics, tmp_path):
  target = RunFolder(tmp_path / "copy")
  folder.copy_to(target)
  folder.keep_metrics(ROWS[:1])
  assert_refused(lambda: folder.copy_to(target), "more rounds", "another folder")
  assert target.metrics() == ROWS


def test_a_folder_that_is_written_to_is_not_copied(folder, metrics, tmp_path):
  with lock.alone_in(folder.path):
    assert_refused(
      lambda: folder.copy_to(RunFolder(tmp_path / "copy")), "is writing in"
    )
  assert not (tmp_path / "copy").exists()
  with lock.alone_in(folder.path, shared=True):
    folder.copy_to(RunFolder(tmp_path / "copy"))


# ----------------------------------------------------------- summary, preprocessing


def test_summary_is_none_until_written(folder):
  assert folder.summary() is None
  folder.write_summary({"test_rmse": 0.1 + 0.2})
  assert folder.summary() == {"test_rmse": 0.1 + 0.2}


def test_file_is_written_whole_or_not_at_all(folder, monkeypatch):
  folder.write_summary({"old": 1})

  def fail(*arguments: object) -> None:
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(files.os, "replace", fail)
  with pytest.raises(OSError, match="No space"):
    folder.write_summary({"new": 2})
  assert folder.summary() == {"old": 1}


def test_preprocessing_survives_the_file(folder):
  preprocessor = experiment_lib.build(tiny(), table()).preprocessor
  folder.write_preprocessing(preprocessor)
  assert folder.preprocessing() == preprocessor


def test_no_preprocessing_is_no_model(folder):
  with pytest.raises(InputError, match="no trained model"):
    folder.preprocessing()


@pytest.mark.parametrize(
  "content, part",
  [
    ({"num_rows": 3}, "names"),
    ({"names": "x"}, "names"),
    ({"names": [1]}, "names"),
    ({"names": ["x"], "num_rows": "many"}, "num_rows is 'many'"),
    ([], "object"),
  ],
)
def test_clients_that_are_none_are_one_line(folder, content, part: str):
  files.write_json(folder.path / "clients.json", content)
  assert_refused(folder.clients, "clients.json", part, "restore it")


def test_preprocessing_that_lacks_a_field_names_the_file(folder):
  files.write_json(folder.path / "preprocessing.json", {"target_std": 1.0})
  assert_refused(folder.preprocessing, "preprocessing.json", "numeric_columns")


@pytest.mark.parametrize("name", ["summary.json", "preprocessing.json"])
def test_damaged_json_names_the_file(folder, name: str):
  (folder.path / name).write_text('{"a": ')
  read = folder.summary if name == "summary.json" else folder.preprocessing
  with pytest.raises(InputError, match=name):
    read()


def test_a_closed_pipe_is_not_taken_for_a_folder_that_cannot_be_used(tmp_path):
  with pytest.raises(BrokenPipeError), files.explain_os_errors(tmp_path):
    raise BrokenPipeError
  refused = pytest.raises(InputError, match="cannot use --output")
  with refused, files.explain_os_errors(tmp_path, "--output"):
    raise PermissionError(13, "Permission denied")
