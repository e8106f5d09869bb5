"""Each bad input gets one line that names the fault, and nothing is lost."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import jax
import numpy as np
import pandas as pd
import pytest

from configs import csv as csv_config
from configs import uci as uci_config
from fedbnr_jax.data import random_split, uci
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import records
from launch import predict as launch_predict
from launch import train as launch_train
from tests.runs import assert_refused, tiny

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUM_ROWS = 60


def good() -> pd.DataFrame:
  rng = np.random.default_rng(0)
  a, b = rng.normal(size=NUM_ROWS), rng.normal(size=NUM_ROWS)
  site = np.array(["north", "south"])[np.arange(NUM_ROWS) % 2]
  return pd.DataFrame({"a": a, "b": b, "site": site, "price": 5 * a + b})


def contents(folder: pathlib.Path) -> dict[str, bytes | None]:
  return {
    str(path): path.read_bytes() if path.is_file() else None
    for path in sorted(folder.rglob("*"))
  }


@pytest.fixture
def train(tmp_path):
  """Trains on a table, given as a frame or as bytes; the workdir must stay absent."""

  def run(content: pd.DataFrame | bytes | None, name: str = "t.csv", **fields) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
      path.write_bytes(content)
    elif content is not None:
      content.to_csv(path, index=False)
    config = csv_config.get_config()
    config.num_clients = 2
    config.data.path = str(path)
    config.data.target = "price"
    for field, value in fields.items():
      config.update_from_flattened_dict({field.replace("__", "."): value})
    try:
      launch_train.train(config, str(tmp_path / "run"))
    finally:
      assert not (tmp_path / "run").exists()

  return run


# --------------------------------------------------------------------------- tables

HEADER = b"a,b,price\n"
FILES = {
  "missing": (None, "t.csv", ["t.csv", "does not exist"]),
  "empty": (b"", "t.csv", ["t.csv", "empty"]),
  "blank": (b" \n\n", "t.csv", ["t.csv", "empty"]),
  "binary": (b"\x00\x01\x02" * 50, "t.csv", ["t.csv", "binary"]),
  "header only": (HEADER, "t.csv", ["t.csv", "no rows"]),
  "not Parquet": (HEADER, "t.parquet", ["t.parquet", "Parquet"]),
  "ragged": (HEADER + b"1,2,3\n1,2\n", "t.csv", ["line 3", "2 fields"]),
  "unknown suffix": (HEADER, "t.docx", ["t.docx", "suffix"]),
  "two columns of a name": (b"a,a,price\n1,2,3\n", "t.csv", ["'a'", "twice"]),
  "too few rows": (HEADER + b"1,2,3\n4,5,6\n", "t.csv", ["2 rows", "too few"]),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_file(train, case: str):
  content, name, parts = FILES[case]
  assert_refused(lambda: train(content, name), *parts)


@pytest.mark.parametrize(
  "column, cell, shown",
  [
    ("a", "tall", "'tall' is not a number"),
    ("price", "dear", "'dear' is not a number"),
    ("a", "", "empty"),
    ("price", "", "empty"),
    ("b", "nan", "not finite"),
    ("b", "inf", "not finite"),
    ("price", "-inf", "not finite"),
    ("price", "NaN", "not finite"),
    ("site", "", "empty"),
  ],
)
def test_bad_cell_is_named_by_row_and_column(train, column: str, cell: str, shown: str):
  table = good().astype({column: object})
  table.loc[6, column] = cell
  assert_refused(
    lambda: train(table), "t.csv", "row 7 (line 8)", f"column '{column}'", shown
  )


def test_constant_target(train):
  assert_refused(lambda: train(good().assign(price=3.0)), "'price'", "constant")


def test_only_constant_features(train):
  table = good().assign(a=1.0, b=2.0)[["a", "b", "price"]]
  assert_refused(lambda: train(table), "no feature varies", "'a', 'b'")


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"data__path": ""}, ["config.data.path"]),
    ({"data__target": ""}, ["no target", "'price'"]),
    ({"data__target": "prise"}, ["'prise'", "did you mean 'price'"]),
    ({"data__client": "sight"}, ["'sight'", "client", "did you mean 'site'"]),
    ({"data__features": "a,bb"}, ["'bb'", "feature"]),
    ({"data__features": "a,price"}, ["'price'", "feature and as target"]),
    ({"data__categorical": "colour"}, ["'colour'", "categorical"]),
    ({"data__client": "price"}, ["'price'", "target and as client"]),
    ({"method": "fedbrn"}, ["config.method", "did you mean 'fedbnr'"]),
    ({"method": "x"}, ["config.method", "'fedbnr-kd'", "'central'"]),
    (
      {"kernel": "matern", "method": "fedbnr"},
      ["config.kernel", "did you mean 'matern"],
    ),
    ({"method": "fedavg", "kernel": "replicate"}, ["config.kernel", "'fedavg'"]),
    (
      {"method": "fedloc", "fedloc__num_inducing": 99},
      ["config.fedloc.num_inducing", "99", "rows"],
    ),
    (
      {"method": "pfedgp", "pfedgp__num_inducing": 99},
      ["config.pfedgp.num_inducing", "99", "rows"],
    ),
    (
      {"method": "fedloc", "fedloc__rule": "gpeo"},
      ["config.fedloc.rule", "did you mean 'gpoe'"],
    ),
    ({"num_clients": 0}, ["config.num_clients", "0"]),
    ({"num_clients": -2}, ["config.num_clients", "-2"]),
    ({"num_clients": 25}, ["num_clients", "24", "25"]),
    ({"partition": "column"}, ["config.partition", "config.data.client"]),
    ({"num_samples": 1}, ["config.num_samples", "1"]),
    ({"learning_rate": 0.0}, ["config.learning_rate"]),
    ({"learning_rate": -1.0}, ["config.learning_rate"]),
    ({"hidden_size": 0}, ["config.hidden_size"]),
    ({"num_rounds": 0}, ["config.num_rounds"]),
    ({"data__source": "tabel"}, ["config.data.source", "did you mean 'table'"]),
    ({"participation": 0.0}, ["config.participation", "above 0", "0.0"]),
    ({"participation": 1.5}, ["config.participation", "at most 1", "1.5"]),
    ({"participation": -1.0}, ["config.participation", "above 0", "-1.0"]),
    ({"dropout": 1.0}, ["config.dropout", "below 1", "1.0"]),
    ({"dropout": -0.1}, ["config.dropout", "at least 0", "-0.1"]),
    (
      {"statistics_from": "answring"},
      ["config.statistics_from", "did you mean 'answering'"],
    ),
    ({"statistics_from": "x"}, ["config.statistics_from", "'all'", "'answering'"]),
    ({"client_batch_size": -1}, ["config.client_batch_size", "0 to choose", "-1"]),
    ({"mesh": -1}, ["config.mesh", "0 for all devices", "-1"]),
    ({"stream_clients": -1}, ["config.stream_clients", "0 to keep", "-1"]),
    ({"num_seeds": 0}, ["config.num_seeds", "at least 1", "0"]),
    (
      {"num_seeds": 2, "compare_clients": True},
      ["config.num_seeds", "config.compare_clients", "launch.sweep"],
    ),
    (
      {"num_seeds": 2, "stream_clients": 1, "compare_clients": False},
      ["config.num_seeds", "config.stream_clients", "launch.sweep"],
    ),
  ],
)
def test_bad_field(train, fields: dict[str, object], parts: list[str]):
  assert_refused(lambda: train(good(), **fields), *parts)


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_more_devices_than_there_are(train, num_seeds: int):
  there = jax.device_count()
  assert_refused(
    lambda: train(good(), mesh=there + 1, num_seeds=num_seeds, method="fedbnr-ev"),
    f"config.mesh is {there + 1}",
    f"{there} device",
    "0 for all",
  )


def test_client_without_training_rows(train):
  # As experiment.build splits with seed 0; else the run would begin, and fail below.
  split = random_split(np.random.default_rng([0, 1]), NUM_ROWS)
  lone = np.arange(NUM_ROWS) == split.test[0]
  table = good().assign(site=np.where(lone, "tiny", "big"))
  assert_refused(lambda: train(table, data__client="site"), "tiny", "no training rows")


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"data__name": "two-rangs"}, ["'two-rangs'", "did you mean 'two-ranges'"]),
    ({"data__num_rows": 3}, ["num_rows", "3"]),
    ({"data__noise_std": -1.0}, ["noise_std", "-1"]),
    ({"num_clients": 39}, ["39"]),
  ],
)
def test_bad_synthetic_task(tmp_path, fields: dict[str, object], parts: list[str]):
  assert_refused(
    lambda: launch_train.train(tiny(**fields), str(tmp_path / "run")), *parts
  )
  assert not (tmp_path / "run").exists()


def test_synthetic_clients_are_at_most_half_the_rows():
  config = tiny(data__name="additive", num_clients=30)
  assert_refused(lambda: experiment_lib.build(config), "num_clients")


# ------------------------------------------------------------------------- UCI files


def uci_train(name: str, workdir: pathlib.Path) -> None:
  launch_train.train(uci_config.get_config(name), str(workdir))


def test_unknown_uci_dataset(tmp_path):
  config = uci_config.get_config("sml")
  config.data.name = "ccp"
  assert_refused(
    lambda: launch_train.train(config, str(tmp_path / "run")),
    "'ccp'",
    "did you mean 'ccpp'",
  )


def test_wrong_checksum(data_dir, tmp_path, monkeypatch):
  shutil.copytree(data_dir / "skillcraft", tmp_path / "data" / "skillcraft")
  (file,) = (p for p in (tmp_path / "data" / "skillcraft").iterdir() if p.is_file())
  text = file.read_text().rstrip("\n")
  last = "8" if text[-1] != "8" else "7"
  file.write_text(text[:-1] + last + "\n")
  monkeypatch.setenv("FEDBNR_DATA_DIR", str(tmp_path / "data"))
  assert_refused(
    lambda: uci_train("skillcraft", tmp_path / "run"), file.name, "digest", "again"
  )
  assert not (tmp_path / "run").exists()


def test_absent_from_the_data_folder(tmp_path, monkeypatch):
  monkeypatch.setenv("FEDBNR_DATA_DIR", str(tmp_path))
  assert_refused(
    lambda: uci_train("ccpp", tmp_path / "run"), "ccpp", str(tmp_path / "ccpp")
  )


def test_no_network_says_which_file_to_put_where(tmp_path, monkeypatch):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  monkeypatch.delenv("FEDBNR_DATA_DIR", raising=False)
  monkeypatch.setenv("FEDBNR_CACHE_DIR", str(tmp_path / "cache"))
  monkeypatch.setattr(uci, "ARCHIVE_URL", f"http://127.0.0.1:{port}")
  assert_refused(
    lambda: uci_train("ccpp", tmp_path / "run"),
    f"http://127.0.0.1:{port}",
    str(tmp_path / "cache" / "data" / "ccpp"),
    "FEDBNR_DATA_DIR",
  )
  assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------- workdir


def test_workdir_below_a_file(tmp_path):
  (tmp_path / "file").write_text("precious")
  workdir = str(tmp_path / "file" / "run")
  assert_refused(lambda: launch_train.train(tiny(), workdir), "cannot use", workdir)
  assert (tmp_path / "file").read_text() == "precious"


def test_workdir_that_is_a_file(tmp_path):
  workdir = tmp_path / "file"
  workdir.write_text("precious")
  assert_refused(lambda: launch_train.train(tiny(), str(workdir)), "cannot use", "file")
  assert workdir.read_text() == "precious"


def forbidden(*arguments: object, **options: object) -> None:
  raise PermissionError(13, "Permission denied")


def test_read_only_parent(tmp_path, monkeypatch):
  monkeypatch.setattr(pathlib.Path, "mkdir", forbidden)
  workdir = str(tmp_path / "run")
  assert_refused(
    lambda: launch_train.train(tiny(), workdir), "cannot use", "Permission denied"
  )


def test_read_only_workdir(tmp_path, monkeypatch):
  monkeypatch.setattr(records.os, "replace", forbidden)
  workdir = str(tmp_path / "run")
  assert_refused(
    lambda: launch_train.train(tiny(), workdir), "cannot use", "Permission denied"
  )


def test_unreadable_parent(tmp_path, monkeypatch):
  monkeypatch.setattr(pathlib.Path, "exists", forbidden)
  workdir = str(tmp_path / "run")
  assert_refused(
    lambda: launch_train.train(tiny(), workdir), workdir, "Permission denied"
  )


# ----------------------------------------------------------- what a run has is kept


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
  """A folder with a table and a finished run on it."""
  folder = tmp_path_factory.mktemp("finished")
  good().to_csv(folder / "t.csv", index=False)
  launch_train.train(table_config(folder), str(folder / "run"))
  return folder


def table_config(folder: pathlib.Path, **fields: object):
  return tiny(
    data__source="table",
    data__path=str(folder / "t.csv"),
    data__target="price",
    data__client="site",
    **fields,
  )


def test_workdir_of_another_config(finished):
  before = contents(finished)
  workdir = str(finished / "run")
  assert_refused(
    lambda: launch_train.train(table_config(finished, seed=1), workdir),
    workdir,
    "another config",
    "config.seed",
  )
  assert contents(finished) == before


@pytest.mark.parametrize("column", ["a", "b"])
def test_prediction_table_lacks_a_column(finished, tmp_path, column: str):
  before = contents(finished)
  good().drop(columns=column).to_csv(tmp_path / "new.csv", index=False)
  assert_refused(
    lambda: launch_predict.predict(
      str(finished / "run"), str(tmp_path / "new.csv"), str(tmp_path / "out.csv")
    ),
    "new.csv",
    f"'{column}'",
    "missing",
  )
  assert contents(finished) == before
  assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("name", ["config.json", "preprocessing.json"])
def test_damaged_record(finished, tmp_path, name: str):
  shutil.copytree(finished / "run", tmp_path / "run")
  (tmp_path / "run" / name).write_text("{")
  assert_refused(
    lambda: launch_predict.predict(
      str(tmp_path / "run"), str(finished / "t.csv"), str(tmp_path / "out.csv")
    ),
    name,
  )


def test_constant_feature_is_dropped_with_a_warning(tmp_path):
  good().assign(unit="EUR", year=2020).to_csv(tmp_path / "t.csv", index=False)
  with pytest.warns(UserWarning, match="'unit', 'year'"):
    launch_train.train(table_config(tmp_path), str(tmp_path / "run"))
  assert (tmp_path / "run" / "summary.json").exists()


# ------------------------------------------------------------------ from the shell

TRAIN = ["train", "--config=configs/default.py"]
SHELL = {
  "misspelt field": (
    [*TRAIN, "--workdir={run}", "--config.num_round=3"],
    ["num_round", "'num_rounds'"],
  ),
  "misspelt inner field": (
    [*TRAIN, "--workdir={run}", "--config.data.pth=3"],
    ["pth", "'path'"],
  ),
  "text for a number": (
    [*TRAIN, "--workdir={run}", "--config.num_rounds=many"],
    ["num_rounds", "many"],
  ),
  "positional argument": ([*TRAIN, "--workdir={run}", "fast"], ["'fast'"]),
  "unknown flag": ([*TRAIN, "--wrokdir={run}"], ["wrokdir"]),
  "no config": (["train", "--workdir={run}"], ["--config"]),
  "no workdir": (TRAIN, ["--workdir"]),
  "no such config": (
    ["train", "--config=configs/absent.py", "--workdir={run}"],
    ["configs/absent.py"],
  ),
  "unknown dataset": (
    ["train", "--config=configs/uci.py:smll", "--workdir={run}"],
    ["'smll'", "did you mean 'sml'"],
  ),
  "no clients": (
    [*TRAIN, "--workdir={run}", "--config.num_clients=0"],
    ["config.num_clients"],
  ),
  "config after a space": (
    [
      "train",
      "--config",
      "configs/default.py",
      "--workdir",
      "{run}",
      "--config.num_clients=0",
    ],
    ["config.num_clients"],
  ),
  "no run to predict with": (
    ["predict", "--workdir={run}", "--input=t.csv", "--output=o.csv"],
    ["holds no run"],
  ),
}


# A process imports what is slow to import, once, and then runs each command in a
# copy of itself, which ends with the command's own status and outputs.
DRIVER = """
import json, os, runpy, sys, traceback
import fedbnr_jax.model, fedbnr_jax.report.run, launch.common
for number, (program, *arguments) in enumerate(json.load(sys.stdin)):
  child = os.fork()
  if child == 0:
    for descriptor, name in ((1, "out"), (2, "err")):
      path = f"{sys.argv[1]}/{number}.{name}"
      os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
    sys.argv = [f"launch/{program}.py", *arguments]
    status = 0
    try:
      runpy.run_module(f"launch.{program}", run_name="__main__")
    except SystemExit as end:
      status = end.code or 0
    except BaseException:
      traceback.print_exc()
      status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def spoken(tmp_path_factory) -> dict[str, tuple[int, str, str]]:
  """Status, output and errors of each command of SHELL."""
  folder = tmp_path_factory.mktemp("shell")
  commands = [
    [argument.format(run=folder / "run") for argument in command]
    for command, _ in SHELL.values()
  ]
  done = subprocess.run(
    [sys.executable, "-c", DRIVER, str(folder)],
    cwd=ROOT,
    env={k: v for k, v in os.environ.items() if k != "FEDBNR_CACHE_DIR"},
    input=json.dumps(commands),
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  assert not (folder / "run").exists()
  return {
    case: (
      int(status),
      (folder / f"{number}.out").read_text(),
      (folder / f"{number}.err").read_text(),
    )
    for number, (case, status) in enumerate(
      zip(SHELL, done.stdout.split(), strict=True)
    )
  }


@pytest.mark.parametrize("case", SHELL)
def test_shell_says_one_line(spoken, case: str):
  status, output, errors = spoken[case]
  assert status == 2, errors
  assert output == ""
  assert "Traceback" not in errors
  (line,) = errors.splitlines()
  assert line.startswith("error: ")
  for part in SHELL[case][1]:
    assert part in line, line


@pytest.mark.parametrize(
  "arguments, parts",
  [
    (
      ["predict", "--workdir=größe", "--input=t.csv", "--output=o.csv"],
      ["größe holds no run"],
    ),
    ([*TRAIN, "--workdir=größe", "--config.data.target=Größe"], ["=Größe is not in"]),
  ],
)
def test_names_in_other_letters_are_printed_where_python_has_ascii_only(
  arguments: list[str], parts: list[str]
):
  program, *options = arguments
  done = subprocess.run(
    [sys.executable, "-m", f"launch.{program}", *options],
    cwd=ROOT,
    env=os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0"},
    capture_output=True,
    check=False,
  )
  (line,) = done.stderr.decode().splitlines()
  assert done.returncode == 2
  assert line.startswith("error: ")
  for part in parts:
    assert part in line
