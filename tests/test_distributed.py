"""One training by two real processes: the same as by one, stopped, and refused."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from configs import default
from fedbnr_jax import experiment as experiment_lib
from fedbnr_jax import model, training
from fedbnr_jax.records import RunFolder
from launch import distributed
from tests.runs import assert_refused, assert_same_bits, timeless

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIMIT = 120  # Seconds after which a process counts as hanging.
FIELDS = {
  "kernel": "gaussian",
  "num_samples": 4,
  "num_rounds": 25,
  "patience": 25,
  "num_local_steps": 2,
  "num_clients": 3,  # Shares of two: one is padding.
  "data.num_rows": 40,
  "dtype": "float64",
  "compare_clients": False,
}


def _start(workdir, *arguments, **fields) -> subprocess.Popen[str]:
  """A training as from the shell, which no core is given to."""
  environment = {k: v for k, v in os.environ.items() if k != "FEDBNR_CORE"}
  command = [sys.executable, "-m", "launch.train", "--config=configs/default.py"]
  command += [f"--workdir={workdir}", *arguments]
  command += [f"--config.{name}={value}" for name, value in (FIELDS | fields).items()]
  return subprocess.Popen(
    command,
    cwd=ROOT,
    env=environment | {"NPROC": "8", "OPENBLAS_NUM_THREADS": "1"},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def _start_pair(workdir, *last, **fields) -> list[subprocess.Popen[str]]:
  """Two processes; the second is given a folder of its own, and more flags."""
  meeting = [f"--coordinator=127.0.0.1:{_free_port()}", "--num_processes=2"]
  other = f"{workdir}-of-process-1"
  return [
    _start(workdir, *meeting, "--process_id=0", **fields),
    _start(other, *meeting, "--process_id=1", **fields, **dict(last)),
  ]


def _ended(*children) -> list[tuple[int, str, str]]:
  """Status and output of each; those that hang are killed, and fail the test."""
  deadline = time.monotonic() + LIMIT
  try:
    said = [c.communicate(timeout=deadline - time.monotonic()) for c in children]
  finally:
    _kill(*children)
  return [(c.returncode, *text) for c, text in zip(children, said, strict=True)]


def _kill(*children) -> None:
  for child in children:
    child.kill()
    child.wait()
    child.stdout.close()
    child.stderr.close()


def _assert_one_line(said: tuple[int, str, str], *parts: str) -> None:
  status, _, errors = said
  assert status == 2, said
  assert errors.count("\n") == 1, errors
  assert errors.startswith("error: ")
  for part in parts:
    assert part in errors


# --------------------------------------------------------------------- two processes


@pytest.fixture(scope="module")
def alone():
  """The training by one process."""
  config = default.get_config()
  config.update_from_flattened_dict(FIELDS)
  experiment = experiment_lib.build(config)
  return training.train(experiment, training.jit(training.make_program(experiment)))


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> pathlib.Path:
  """The training by two processes that one command started here."""
  workdir = tmp_path_factory.mktemp("local") / "run"
  ((status, said, errors),) = _ended(_start(workdir, "--local_processes=2"))
  assert (status, errors) == (0, "")
  assert said.count(f"written to {workdir}") == 1
  return workdir


def _assert_close(records, others) -> None:
  assert len(records) == len(others)
  for record, other in zip(timeless(records), timeless(others), strict=True):
    assert record.keys() == other.keys()
    values = list(record.values())
    np.testing.assert_allclose(values, list(other.values()), rtol=1e-6, atol=1e-9)


def test_local_processes_train_what_one_process_does(local, alone):
  folder = RunFolder(local)
  _assert_close(folder.metrics(), alone.history)
  assert folder.summary()["best_round"] == alone.best_round
  for name, leaf in vars(alone.state.params).items():
    if name != "theta":
      np.testing.assert_allclose(
        getattr(model.load(local).state.params, name), leaf, rtol=1e-6
      )


def test_killed_processes_go_on_as_if_they_had_not_been(local, tmp_path):
  """Against the run of `local`: other ports, other pinning, the same bits."""
  workdir = tmp_path / "run"
  children = _start_pair(workdir)
  metrics, deadline = workdir / "metrics.csv", time.monotonic() + LIMIT
  try:
    while all(c.poll() is None for c in children) and time.monotonic() < deadline:
      if metrics.exists() and metrics.read_text().count("\n") >= 4:
        break
      time.sleep(0.002)
  finally:
    _kill(*children)
  assert [c.returncode for c in children] == [-signal.SIGKILL] * 2
  assert 3 <= len(RunFolder(workdir).metrics()) < FIELDS["num_rounds"]

  first, second = _ended(*_start_pair(workdir))
  assert (first[0], second[0]) == (0, 0), (first, second)
  assert f"written to {workdir}" in first[1]
  assert second[1:] == ("", "")
  assert not pathlib.Path(f"{workdir}-of-process-1").exists()
  assert timeless(RunFolder(workdir).metrics()) == timeless(RunFolder(local).metrics())
  assert_same_bits(model.load(workdir).state, model.load(local).state)


def test_second_start_says_it_is_finished(local):
  first, second = _ended(*_start_pair(local))
  assert (first[0], second[0]) == (0, 0)
  assert "this run is finished" in first[1]
  assert second[1] == ""


# ----------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
  "name, value, part",
  [
    ("seed", 9, "process 1 has another config than process 0"),
    ("num_rounds", 0, "process 1: config.num_rounds must be at least 1"),
  ],
)
def test_what_one_process_cannot_do_is_told_by_all(tmp_path, name, value, part):
  for said in _ended(*_start_pair(tmp_path / "run", (name, value))):
    _assert_one_line(said, part)
  assert not (tmp_path / "run").exists()


def test_process_that_never_comes_is_named_in_time(tmp_path):
  start = time.monotonic()
  (said,) = _ended(
    _start(
      tmp_path / "run",
      f"--coordinator=127.0.0.1:{_free_port()}",
      *("--num_processes=2", "--process_id=0", "--wait_seconds=2"),
    )
  )
  _assert_one_line(said, "process 1 of 2 did not come", "within 2 s")
  assert time.monotonic() - start < 60
  assert not (tmp_path / "run").exists()


@pytest.fixture
def parsed():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["train"])


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize(
  "given, parts",
  [
    ({"process_id": 2, "num_processes": 2}, ("--process_id", "0 to 1", "got 2")),
    ({"process_id": -1}, ("--process_id", "got -1")),
    ({"process_id": 1}, ("--process_id", "--num_processes=1")),
    ({"num_processes": 0}, ("--num_processes", "at least 1")),
    ({"num_processes": 2}, ("--coordinator", "HOST:PORT")),
    ({"num_processes": 2, "coordinator": "here"}, ("HOST:PORT", "'here'")),
    ({"num_processes": 2, "coordinator": "here:"}, ("HOST:PORT", "'here:'")),
    ({"num_processes": 2, "coordinator": "here:99999"}, ("HOST:PORT", "99999")),
    ({"num_processes": 2, "coordinator": ":80"}, ("HOST:PORT", "':80'")),
    ({"wait_seconds": 0}, ("--wait_seconds", "at least 1")),
  ],
)
def test_flags_that_make_no_sense_are_refused(given, parts):
  with flagsaver.flagsaver(**given):
    assert_refused(distributed.join, *parts)


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize(
  "given, part",
  [
    ({"local_processes": "0"}, "got '0'"),
    ({"local_processes": "many"}, "got 'many'"),
    ({"local_processes": "-2"}, "got '-2'"),
    ({"local_processes": "2", "num_processes": 2}, "do not go together"),
  ],
)
def test_impossible_number_of_local_processes_is_refused(given, part):
  with flagsaver.flagsaver(**given):
    assert_refused(distributed.num_local, "--local_processes", part)


@pytest.mark.usefixtures("parsed")
def test_one_process_has_nobody_to_meet():
  distributed.join()
  assert distributed.num_local() == 1


@pytest.mark.parametrize(
  "flag", [["--local_processes=2"], ["--local_processes", "2"], ["-local_processes=2"]]
)
def test_children_are_not_told_to_start_children(flag):
  rest = ["--config=local_processes.py", "--workdir", "local_processes"]
  assert distributed._without("local_processes", [rest[0], *flag, *rest[1:]]) == rest


# ------------------------------------------------------------------ children that fail


def _child(code: str) -> subprocess.Popen[bytes]:
  return subprocess.Popen([sys.executable, "-S", "-c", code])


SLEEP = "import time; time.sleep(60)"


@pytest.mark.parametrize(
  "codes, status, part",
  [
    (["", ""], 0, ""),
    (["raise SystemExit(3)", SLEEP], 3, ""),  # The first has told why.
    ([SLEEP, "raise SystemExit(4)"], 2, "process 1 of 2 ended with status 4"),
    (["import os; os.kill(os.getpid(), 9)", SLEEP], 2, "process 0 of 2 ended"),
    (["import time; time.sleep(1)", ""], 0, ""),  # One that ends late is waited for.
  ],
)
def test_status_of_all_is_that_of_who_failed_first(
  codes, status, part, monkeypatch, capsys
):
  monkeypatch.setattr(distributed, "_GRACE", 0.2)
  children = [_child(code) for code in codes]
  try:
    got = distributed._wait(children)
  except SystemExit as end:
    got = end.code
  finally:
    for child in children:
      child.kill()
      child.wait()
  assert got == status
  assert part in capsys.readouterr().err


def test_ended_command_leaves_no_child_behind(tmp_path):
  """As `timeout` or a batch system ends it, while the children are at work."""
  command = _start(tmp_path / "run", "--local_processes=2", num_rounds=10**6)
  try:
    children = _wait_for_children(command.pid, 2)
    command.terminate()
    command.wait(LIMIT)
    deadline = time.monotonic() + 10
    while any(map(_is_running, children)) and time.monotonic() < deadline:
      time.sleep(0.05)
    assert not any(map(_is_running, children))
  finally:
    _kill(command)


def _wait_for_children(pid: int, count: int) -> list[int]:
  path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
  if not path.exists():
    pytest.skip("no /proc that tells of children")
  deadline = time.monotonic() + LIMIT
  while time.monotonic() < deadline:
    children = [int(word) for word in path.read_text().split()]
    if len(children) == count:
      return children
    time.sleep(0.05)
  raise AssertionError("it started no children")


def _is_running(pid: int) -> bool:
  return pathlib.Path(f"/proc/{pid}").exists()
