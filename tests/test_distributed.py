"""One training by two real processes: the same as by one, stopped, and refused."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from configs import default
from fedbnr_jax import model, workflow
from fedbnr_jax.errors import InputError
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import joining, local_processes, processes, training
from fedbnr_jax.run.local_processes import free_port
from fedbnr_jax.run.records import RunFolder
from launch import distributed
from tests.runs import assert_refused, assert_same_bits, timeless

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIMIT = 120  # Seconds after which a process counts as hanging.
FIELDS = {
  "method": "fedbnr",
  "kernel": "gaussian",
  "num_samples": 4,
  "num_rounds": 10,
  "patience": 10,
  "num_local_steps": 2,
  "num_clients": 3,  # Shares of two: one is padding.
  "data.num_rows": 40,
  "dtype": "float64",
  "compare_clients": False,
}


def _start(workdir, *arguments, **fields) -> subprocess.Popen[str]:
  """A training as from the shell."""
  command = [sys.executable, "-m", "launch.train", "--config=configs/default.py"]
  command += [f"--workdir={workdir}", *arguments]
  command += [f"--config.{name}={value}" for name, value in (FIELDS | fields).items()]
  return subprocess.Popen(
    command,
    cwd=ROOT,
    env=os.environ | {"NPROC": "8", "OPENBLAS_NUM_THREADS": "1"},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def _start_pair(workdir, *last, **fields) -> list[subprocess.Popen[str]]:
  """Two processes; the second is given a folder of its own, and more flags."""
  meeting = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"]
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
  return training.train(experiment, workflow.program_for(experiment))


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> pathlib.Path:
  """The training by two processes that find each other."""
  workdir = tmp_path_factory.mktemp("together") / "run"
  first, second = _ended(*_start_pair(workdir))
  assert (first[0], second[0]) == (0, 0), (first, second)
  assert first[1].count(f"written to {workdir}") == 1
  assert second[1:] == ("", "")
  assert not pathlib.Path(f"{workdir}-of-process-1").exists()
  return workdir


def _assert_close(records, others) -> None:
  assert len(records) == len(others)
  for record, other in zip(timeless(records), timeless(others), strict=True):
    assert record.keys() == other.keys()
    values = list(record.values())
    np.testing.assert_allclose(values, list(other.values()), rtol=1e-6, atol=1e-9)


def test_two_processes_train_what_one_does(together, alone):
  folder = RunFolder(together)
  _assert_close(folder.metrics(), alone.history)
  assert folder.summary()["best_round"] == alone.best_round
  state = model.load(together).state
  for one, other in zip(
    jax.tree.leaves(state.server), jax.tree.leaves(alone.state.server), strict=True
  ):
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


def test_local_processes_are_killed_together_and_go_on_to_the_same_bits(
  together, tmp_path
):
  """By one command, ended as `timeout` or a batch system does; then given again."""
  workdir = tmp_path / "run"
  command = _start(workdir, "--local_processes=2")
  metrics, deadline = workdir / "metrics.csv", time.monotonic() + LIMIT
  try:
    while command.poll() is None and time.monotonic() < deadline:
      if metrics.exists() and metrics.read_text().count("\n") >= 3:
        break
      time.sleep(0.002)
    children = _children(command.pid)
    assert _coordinator_hosts(children[0]) == {"0100007F"}  # 127.0.0.1.
    command.terminate()
    assert command.wait(LIMIT) == 128 + signal.SIGTERM
    assert len(children) == 2
    assert not any(pathlib.Path(f"/proc/{child}").exists() for child in children)
  finally:
    _kill(command)
  assert 2 <= len(RunFolder(workdir).metrics()) < FIELDS["num_rounds"]

  ((status, said, errors),) = _ended(_start(workdir, "--local_processes", "2"))
  assert status == 0
  (warning,) = errors.splitlines()  # By one process of the two.
  assert warning.startswith("warning: the error bars")
  assert said.count(f"written to {workdir}") == 1
  expected = RunFolder(together).metrics()
  assert timeless(RunFolder(workdir).metrics()) == timeless(expected)
  assert_same_bits(model.load(workdir).state, model.load(together).state)


def _children(pid: int) -> list[int]:
  path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
  if not path.exists():
    pytest.skip("no /proc that tells of children")
  return [int(word) for word in path.read_text().split()]


def _coordinator_hosts(pid: int) -> set[str]:
  """The addresses, as Linux writes them, at which a process's coordinator listens."""
  command = pathlib.Path(f"/proc/{pid}/cmdline").read_text()
  port = int(re.search(r"--coordinator=127.0.0.1:(\d+)", command)[1])
  hosts = set()
  for table in ("tcp", "tcp6"):
    for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
      host, _, number = line.split()[1].partition(":")
      if int(number, 16) == port and line.split()[3] == "0A":
        hosts.add(host.removeprefix("0" * 16 + "FFFF0000"))  # IPv4 in IPv6.
  return hosts


# ----------------------------------------------------------------------- refusals


def test_processes_of_different_configs_are_refused(tmp_path):
  for said in _ended(*_start_pair(tmp_path / "run", ("seed", 9))):
    _assert_one_line(said, "process 1 has another config than process 0")
  assert not (tmp_path / "run").exists()


class _Peers:
  """Pretends to be one of several processes; what the others send is made up."""

  def __init__(self, monkeypatch, number: int, others: list) -> None:
    def allgather(mine):
      rows = [other if other is not None else mine for other in others]
      rows.insert(number, mine)
      return np.stack(rows)

    monkeypatch.setattr(jax, "process_count", lambda: 1 + len(others))
    monkeypatch.setattr(jax, "process_index", lambda: number)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", allgather)


def _refuse():
  raise InputError("there is no file /data/σ.csv.")


def test_what_all_processes_can_do_is_done(monkeypatch):
  _Peers(monkeypatch, 1, [None, None])
  assert processes.all_do(lambda: 7) == 7


@pytest.mark.parametrize("number", [0, 1])
def test_what_one_process_cannot_do_is_told_by_all(monkeypatch, number):
  sent = []

  def keep(mine):
    sent.append(mine)
    return np.stack([mine])

  with monkeypatch.context() as patched:
    _Peers(patched, 0, [None])
    patched.setattr(processes.multihost_utils, "process_allgather", keep)
    assert_refused(lambda: processes.all_do(_refuse), "/data/σ.csv")
  _Peers(monkeypatch, 1 - number, sent)  # The other one, which could.
  prefix = "process 1: " if number else ""
  with pytest.raises(InputError) as caught:
    processes.all_do(lambda: 7)
  assert str(caught.value) == f"{prefix}there is no file /data/σ.csv."


@pytest.fixture
def parsed():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["train"])


@pytest.mark.usefixtures("parsed")
def test_process_that_never_comes_is_named_in_time():
  start = time.monotonic()
  meeting = {"coordinator": f"127.0.0.1:{free_port()}", "num_processes": 2}
  with flagsaver.flagsaver(**meeting, process_id=0, wait_seconds=1):
    assert_refused(distributed.join, "process 1 of 2 did not come", "within 1 s")
  assert time.monotonic() - start < 10
  assert not jax.distributed.is_initialized()


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize("hangs", ["initialize", "sync_global_devices"])
def test_who_comes_but_does_not_connect_is_not_waited_for(monkeypatch, hangs):
  """JAX would wait five minutes, and then end the process with a stack trace."""
  ended = threading.Event()
  utils = joining.multihost_utils
  parts = {"initialize": jax.distributed, "sync_global_devices": utils}
  for name, module in parts.items():
    work = (lambda *_, **__: ended.wait()) if name == hangs else lambda *_, **__: None
    monkeypatch.setattr(module, name, work)
  monkeypatch.setattr(joining.meeting, "meet", lambda *_: None)
  monkeypatch.setattr(joining, "_FIRST_SUM_SECONDS", 1.0)
  start = time.monotonic()
  try:
    with flagsaver.flagsaver(coordinator="here:1", num_processes=2, wait_seconds=1):
      assert_refused(distributed.join, "did not connect in time")
  finally:
    ended.set()
  assert time.monotonic() - start < 5


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize(
  "given, parts",
  [
    ({"process_id": 2, "num_processes": 2}, ("process_id", "0 to 1", "got 2")),
    ({"process_id": -1}, ("process_id", "got -1")),
    ({"process_id": 1}, ("process_id", "num_processes=1")),
    ({"num_processes": 0}, ("num_processes", "at least 1")),
    ({"num_processes": 2}, ("coordinator", "HOST:PORT")),
    ({"num_processes": 2, "coordinator": "here"}, ("HOST:PORT", "'here'")),
    ({"num_processes": 2, "coordinator": "here:"}, ("HOST:PORT", "'here:'")),
    ({"num_processes": 2, "coordinator": "here:99999"}, ("HOST:PORT", "99999")),
    ({"num_processes": 2, "coordinator": ":80"}, ("HOST:PORT", "':80'")),
    ({"wait_seconds": 0}, ("wait_seconds", "at least 1")),
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
STOP = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.fixture
def waited():
  """Starts children, and gives what waiting for them gives: a status, or a refusal."""
  children = []

  def wait(codes, output=None):
    children.extend(_child(code) for code in codes)
    try:
      return local_processes.wait(children, output, grace=0.2)
    except InputError as error:
      return str(error)

  yield wait
  for child in children:
    child.kill()
    child.wait()


@pytest.mark.parametrize(
  "codes, expected",
  [
    (["import time; time.sleep(0.5)", ""], 0),  # One that ends late is waited for.
    (["raise SystemExit(3)", SLEEP], 3),  # The first has told why.
    ([SLEEP, "raise SystemExit(4)"], "process 1 of 2 ended with status 4: the same"),
    (["import os; os.kill(os.getpid(), 9)", SLEEP], "process 0 of 2 ended"),
    # One that only rests is waited for, but not for ever.
    ([SLEEP, STOP], "process 1 of 2 was stopped by a signal"),
    ([STOP, SLEEP], "process 0 of 2 was stopped by a signal"),
    # All refuse, and the first, which speaks, is not the quickest.
    (["import time; time.sleep(0.1); raise SystemExit(2)", "raise SystemExit(2)"], 2),
  ],
)
def test_status_of_all_is_that_of_who_failed_first(codes, expected, waited):
  got = waited(codes)
  assert got == expected if isinstance(expected, int) else expected in got


def test_what_a_silent_process_said_is_passed_on(tmp_path, waited):
  with open(tmp_path / "output", "w+b") as output:
    output.write(b"a warning\nerror: out of luck\n")
    said = waited([SLEEP, "raise SystemExit(4)"], output)
  assert "status 4 (error: out of luck): the same" in said


def test_why_compiled_code_ended_is_passed_on_without_its_stack(tmp_path, waited):
  noise = b"""E1118 04:05:50.246382   23791 agent.cc:289] Polled an error.
F1118 04:05:50.246500   23791 client.h:80] See the logs. absl::Status: ABORTED: two
*** Check failure stack trace: ***
    @     0x7fd481440634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
Extension modules: yaml._yaml (total: 81)
"""
  with open(tmp_path / "output", "w+b") as output:
    output.write(noise)
    said = waited([SLEEP, "import os; os.kill(os.getpid(), 6)"], output)
  assert "ended with status -6 (ABORTED: two): the same" in said


def test_compiled_code_of_the_first_process_is_not_heard():
  """The stack trace with which JAX ends a process whose peer has gone."""
  child = """import os, sys
from fedbnr_jax.run import local_processes
local_processes.follow_parent()
os.write(2, b"F1118 04:05 1 client.h:80] gone\\n  @ 0x7fd481440634\\n")
print("a warning", file=sys.stderr)
os.abort()"""
  # As an argument: from Python 3.13 on a traceback quotes the code of `-c`.
  parent = """import sys
from fedbnr_jax.run import local_processes
local_processes.run([[sys.executable, "-c", sys.argv[1]]])"""
  command = [sys.executable, "-c", parent, child]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.stderr.startswith("a warning\nTraceback")
  assert "0x7fd481440634" not in done.stderr
  assert "process 0 of 1 ended with status -6 (gone): the same" in done.stderr
