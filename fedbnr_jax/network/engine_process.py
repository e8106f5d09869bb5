"""The engine as a process of its own, which ends with who has started it."""

import contextlib
import importlib.metadata
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import cache_folder
from fedbnr_jax.lock import alone_in
from fedbnr_jax.network import engine_files
from fedbnr_jax.network.kits import Kit
from fedbnr_jax.network.primitives import INSTALL

_END_SECONDS = 5.0
# Programs, also small ones: a site compiles anew in each job.
_KEEP_COMPILED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
_SCREEN = "engine.txt"  # What the engine prints; its log is log.txt.


class EngineProcess:
  """The engine of a kit: one process, and one more for a job."""

  def __init__(self, kit: Kit) -> None:
    self.kit = kit
    self._process: subprocess.Popen[bytes] | None = None

  def start(self) -> None:
    """Starts the engine."""
    arguments = engine_files.start_arguments(self.kit.plan, str(self.kit.folder))
    command = [sys.executable, "-u", "-m", "fedbnr_jax.network.started", *arguments]
    environment = _KEEP_COMPILED | os.environ | {"PYTHONPATH": _search_path()}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder() / "xla"))
    # A variable could bring other settings than those of the kit.
    environment = {k: v for k, v in environment.items() if not k.startswith("NVFL")}
    self._end_old_jobs()
    folder = self.kit.folder
    for name, text in engine_files.written_at_start(self.kit.plan, str(folder)).items():
      (folder / name).write_text(text)
    with open(folder / _SCREEN, "ab") as screen:
      self._process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=screen,
        stderr=screen,
        start_new_session=True,  # Ctrl-C is for the program that has started it.
      )

  @property
  def alive(self) -> bool:
    """Whether it runs."""
    return self._process is not None and self._process.poll() is None

  @property
  def pid(self) -> int:
    """Its number; 0 if it was not started."""
    return self._process.pid if self._process else 0

  def jobs(self) -> list[int]:
    """Lists the processes of its jobs."""
    return [pid for pid in _processes_of(self.kit.folder) if pid != self.pid]

  def end(self) -> None:
    """Ends the engine, and the process of its job."""
    if self._process is None:
      return
    for number in (signal.SIGTERM, signal.SIGKILL):
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._process.pid, number)
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(_END_SECONDS)
    self._end_old_jobs()

  def _end_old_jobs(self) -> None:
    """Ends processes of a job whose engine has died: they have this kit's folder."""
    for pid in _processes_of(self.kit.folder):
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def running(kit: Kit) -> Iterator[EngineProcess]:
  """Runs a kit's engine while the block runs; a kit is started once at a time.

  Raises:
    InputError: If the engine is not installed, in the version that kits are made for.
  """
  _require_version()
  with alone_in(kit.folder):
    engine = EngineProcess(kit)
    try:
      engine.start()
      yield engine
    finally:
      engine.end()


def _require_version() -> None:
  """Raises InputError unless the engine is the one whose settings are known."""
  try:
    found = importlib.metadata.version("nvflare")
  except importlib.metadata.PackageNotFoundError as error:
    raise InputError(INSTALL) from error
  if found != engine_files.VERSION:
    raise InputError(
      f"NVFLARE {found} is installed, and kits are made safe for "
      f"{engine_files.VERSION} only: pip install nvflare=={engine_files.VERSION}."
    )


def _search_path() -> str:
  """Lets the engine find what this program finds, such as a clone's package."""
  return os.pathsep.join([os.getcwd(), *filter(None, sys.path)])


def _processes_of(folder: pathlib.Path) -> list[int]:
  """Lists processes of the engine that were started for a folder."""
  found = []
  for place in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError, ValueError):
      words = place.read_bytes().split(b"\0")
      ours = any(b"nvflare.private" in word for word in words)
      if (
        ours and os.fsencode(folder) in words and int(place.parent.name) != os.getpid()
      ):
        found.append(int(place.parent.name))
  return found
