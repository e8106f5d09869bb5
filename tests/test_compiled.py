"""Compiled programs on disk: one that was cut short is made anew, once."""

import pathlib
import subprocess
import sys
import zlib

import pytest

from launch import compiled

ROOT = pathlib.Path(__file__).resolve().parents[1]

PROGRAM = """
import jax
from launch import common
common.set_up_jax()
print(jax.jit(lambda x: x + 1)(1))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.setenv("FEDBNR_CACHE_DIR", str(tmp_path))
  return tmp_path / "xla"


def compile_once() -> None:
  command = [sys.executable, "-c", PROGRAM]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
  assert (done.stdout, done.stderr) == ("2\n", "")


def test_a_program_that_was_cut_short_is_written_again(folder):
  compile_once()
  (path,) = folder.glob("jit__lambda*-cache")
  whole = path.read_bytes()
  path.write_bytes(whole[: len(whole) // 2])
  compile_once()
  assert zlib.decompress(path.read_bytes())


def test_only_damaged_files_of_the_program_are_removed(folder):
  folder.mkdir()
  whole = zlib.compress(b"program")
  names = {"jit_a-1-cache": whole, "jit_a-2-cache": whole[:5], "jit_a-3-cache": b""}
  for name, content in (names | {"jit_ab-1-cache": b""}).items():
    (folder / name).write_bytes(content)
  text = "Error reading persistent compilation cache entry for 'jit_a': zlib.error: ..."
  assert compiled.mend(text)
  assert {path.name for path in folder.iterdir()} == {"jit_a-1-cache", "jit_ab-1-cache"}
  assert not compiled.mend("another warning")
