"""One federation on this machine, on which a fault is tried: a server and three sites.

Each is a program of its own, whose lines are kept with when they came.
"""

import contextlib
import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from fedbnr_jax.network import agreement
from launch import network_demo

SITES = tuple(network_demo.RANGES)
_LIMIT = 600.0  # Of one run.
_MESSAGE_SECONDS = 20  # For which the server waits for a message.

# A fault returns what was printed of it, and after how many seconds.
Told = tuple[str, float]


class Program:
  """A program whose lines are kept, with when they came."""

  def __init__(self, *words: str) -> None:
    command = [sys.executable, "-m", "launch.network", *words]
    self.lines: list[tuple[float, str]] = []
    self.process = subprocess.Popen(
      command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def wait_for(self, start: str, since: float = 0.0, seconds: float = _LIMIT) -> str:
    """Waits for a line that starts so; returns it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
      for when, line in list(self.lines):
        if when >= since and line.startswith(start):
          return line
      if self.process.poll() is not None and not self._reader.is_alive():
        break
      time.sleep(0.05)
    raise AssertionError(f"no line starts with {start!r}: {self.text()}")

  def wait(self) -> int:
    """Waits for its end."""
    self.process.wait(_LIMIT)
    self._reader.join(10)
    return self.process.returncode

  def text(self) -> str:
    """Returns all that it has printed."""
    return "\n".join(line for _, line in self.lines)

  def end(self) -> None:
    """Ends it as Ctrl-C does."""
    if self.process.poll() is None:
      self.process.send_signal(signal.SIGINT)
      with contextlib.suppress(subprocess.TimeoutExpired):
        self.process.wait(20)
    self.process.kill()

  def _read(self) -> None:
    assert self.process.stdout is not None
    for line in self.process.stdout:
      self.lines.append((time.monotonic(), line.rstrip()))


@dataclasses.dataclass
class Stage:
  """One federation of its own, on which a fault is tried."""

  folder: pathlib.Path
  programs: list[Program] = dataclasses.field(default_factory=list)

  @property
  def fed(self) -> pathlib.Path:
    return self.folder / "fed"

  def serve(self) -> Program:
    """Starts the server, or starts it again."""
    flags = [f"--kit={self.fed / 'server'}", f"--workdir={self.folder / 'run'}"]
    flags += [f"--federation={self.folder / 'federation.json'}", "--wait=120"]
    return self._start("serve", *flags, f"--message_seconds={_MESSAGE_SECONDS}")

  def join(self, name: str, kit: pathlib.Path | None = None, **given: Any) -> Program:
    """Starts a site, or starts it again."""
    data = given.get("data", self.folder / "tables" / f"{name}.csv")
    approve = given.get("approve", self.folder / "federation.json")
    flags = [
      f"--kit={kit or self.fed / name}",
      f"--data={data}",
      f"--approve={approve}",
    ]
    return self._start("join", *flags)

  def start(self) -> tuple[Program, dict[str, Program]]:
    """Starts the server and all sites."""
    return self.serve(), {name: self.join(name) for name in SITES}

  def agree(self, **changed: Any) -> None:
    """Lets all agree on something else than they did."""
    path = self.folder / "federation.json"
    agreement.write(path, dataclasses.replace(agreement.read(path), **changed))

  def model(self) -> str:
    """Says what became of the model."""
    path = self.folder / "run" / "summary.json"
    if not path.exists():
      return "none: the run stopped"
    return json.dumps(_scores(path))

  def _start(self, *words: str) -> Program:
    self.programs.append(Program(*words))
    return self.programs[-1]


def last(program: Program) -> str:
  lines = [line for _, line in program.lines if line]
  return lines[-1] if lines else ""


def until(condition: Callable[[], bool]) -> None:
  end = time.monotonic() + _LIMIT
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


def _scores(path: pathlib.Path) -> dict[str, float]:
  """Reads what of a summary does not depend on the clock."""
  summary = json.loads(path.read_text())
  return {k: v for k, v in summary.items() if not k.endswith("seconds")}
