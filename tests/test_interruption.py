"""Ctrl-C at awkward moments: it ends a program, without a stack trace."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from launch import interruption

ROOT = pathlib.Path(__file__).resolve().parents[1]
# How the programs start and end, without JAX; `work` stands for what they do.
PROGRAM = """
import ctypes, os, signal, sys, time
from launch import interruption

def interrupt():
  os.kill(os.getpid(), signal.SIGINT)

{work}

interruption._GRACE = 1.0
interruption.ends_at_once()
try:
  with interruption.raised():
    work()
except KeyboardInterrupt:
  print("error: stopped.", file=sys.stderr)
  os._exit(interruption.STATUS)
"""
LOST = """
class Thing:
  def __del__(self):  # Python prints what is raised here, and goes on.
    interrupt()
    for _ in range(1000): pass

def work():
  Thing()
  time.sleep(0.5)
  time.sleep(60)
"""
COMPILED = """
def work():
  mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
  lock(mutex)
  os.system(f"(sleep 0.2; kill -INT {os.getpid()}) &")
  lock(mutex)  # For ever, and no signal ends it.
"""
TWICE = """
def work():
  try:
    interrupt()
    time.sleep(60)
  finally:
    interrupt()
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def interruptible():
  """Lets programs be interrupted, also where the shell of the tests ignores that.

  A shell without job control has what runs in its background ignore interruptions, and
  so does nohup; whoever they start inherits it.
  """
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def ended(*command: str, **environment: str) -> tuple[int, str]:
  """The status of a Python program, and what it says."""
  done = subprocess.run(
    [sys.executable, *command],
    cwd=ROOT,
    env=os.environ | environment,
    capture_output=True,
    text=True,
    check=False,
    timeout=30,
  )
  return done.returncode, done.stderr


@pytest.mark.parametrize("work", [LOST, COMPILED, TWICE], ids=["lost", "C", "twice"])
def test_an_interruption_ends_what_is_done(work):
  status, said = ended("-c", PROGRAM.format(work=work))
  assert status == 130
  assert said.startswith("error: stopped.")
  assert said.count("\n") == 1, said


# A program of two local processes, of which the first is interrupted, and the second
# ends; `then` is what a shell does in the background meanwhile.
LOCAL = """
import os, signal, sys, time
from launch import common, distributed, interruption
from fedbnr_jax.run import local_processes

def main():
  if not local_processes.shared_word():
    sys.exit(distributed.run_locally("program", 2))
  if distributed._PROCESS_ID.value:
    {second}
    return
  os.system(f"({then}) &")
  os.kill(os.getpid(), signal.SIGINT)
  time.sleep(60)

interruption.ends_at_once()
common.run(main)
"""
ALONE = {"then": "true", "second": "sys.exit(1)"}
# The program that has started them is interrupted too, when the first has ended.
ALL = {"then": "sleep 1; kill -INT {os.getppid()}", "second": "time.sleep(60)"}


@pytest.mark.parametrize("who", [ALONE, ALL], ids=["alone", "all"])
def test_an_interruption_of_local_processes_is_said_once(tmp_path, who):
  (tmp_path / "program.py").write_text(LOCAL.format(**who))
  path = os.pathsep.join([str(tmp_path), str(ROOT)])
  said = ended("-m", "program", PYTHONPATH=path)
  assert said == (130, f"error: {interruption.MESSAGE}\n")


def test_an_interruption_of_imports_is_quiet(tmp_path):
  words = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
  (tmp_path / "jax.py").write_text(words)
  said = ended("-m", "launch.predict", "--help", PYTHONPATH=str(tmp_path))
  assert said == (-signal.SIGINT, "")


def test_importing_the_programs_leaves_signals_alone():
  code = "import signal, launch; print(signal.getsignal(signal.SIGINT))"
  code += "; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
  assert ended("-c", code) == (0, "")


def test_who_is_to_ignore_interruptions_does(tmp_path):
  """As under nohup, or in the background of a shell without job control."""
  code = """import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from launch import interruption
interruption.ends_at_once()
with interruption.raised():
  signal.raise_signal(signal.SIGINT)"""
  assert ended("-c", code) == (0, "")
