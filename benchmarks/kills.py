"""Programs are killed at random instants, started again, and compared bit for bit.

python -m benchmarks.kills [--kills=20] [--seed=0]

Trainings, sweeps (themselves, or one of their workers) and changes of a posterior are
killed by SIGKILL at an instant drawn from the time between their folder's lock and the
last file that they write. The same command is given again until it ends well; a sweep
that loses a worker must do without. Then every file must have the bytes of a run that
nobody disturbed, but for what is named `...seconds`.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from benchmarks import tools
from fedbnr_jax import ledger_file
from fedbnr_jax.lock import NAME

_FIELDS = {
  "method": "fedbnr-ev",
  "kernel": "gaussian",
  "num_samples": 8,
  "num_local_steps": 1,
  "num_rounds": 300,
  "patience": 300,
  # Random, so that the best round is seldom the last.
  "participation": 0.5,
}
_MOST_STARTS = 5
_SWEEP = """
from fedbnr_jax.sweep import grid
def get_config():
  return grid.config("configs/csv.py", (), %r)
"""


@dataclasses.dataclass(frozen=True)
class Case:
  """A program that is killed.

  Attributes:
    name: What the table calls it.
    arguments: What stands after `python -m`, for a folder.
    prepare: Makes the folder as it is before the program is started.
    is_done: Says whether a folder has what the program is to leave.
    kills_worker: Whether one of its workers is killed, and not the program itself.
  """

  name: str
  arguments: Callable[[pathlib.Path], list[str]]
  prepare: Callable[[pathlib.Path], None] = lambda folder: None
  is_done: Callable[[pathlib.Path], bool] = lambda folder: False
  kills_worker: bool = False


def cases(home: pathlib.Path) -> list[Case]:
  """The programs that are killed, on a table that is written to a folder."""
  rng = random.Random(0)
  rows = [(rng.gauss(0, 1), rng.gauss(0, 1), "abcd"[i % 4]) for i in range(80)]
  table = pd.DataFrame(rows, columns=["x", "z", "site"])
  table["y"] = 3 * table.x + table.z
  table.to_csv(home / "table.csv", index=False)
  table[table.site == "b"].to_csv(home / "leaving.csv", index=False)
  data = {"path": str(home / "table.csv"), "target": "y", "client": "site"}
  fields = _FIELDS | {f"data.{name}": value for name, value in data.items()}
  grid = {name: (value,) for name, value in fields.items()} | {"seed": (0, 1)}
  (home / "sweep.py").write_text(_SWEEP % grid, encoding="utf-8")

  def train(folder: pathlib.Path) -> list[str]:
    given = {f"config.{name}": value for name, value in fields.items()}
    options = tools.flags(config="configs/csv.py", workdir=folder, **given)
    return ["launch.train", *options]

  def sweep(folder: pathlib.Path) -> list[str]:
    options = tools.flags(config=home / "sweep.py", workdir=folder, workers=1)
    return ["launch.sweep", *options]

  def leave(folder: pathlib.Path) -> list[str]:
    return [
      "launch.posterior",
      *tools.flags(workdir=folder, remove=home / "leaving.csv"),
    ]

  def trained(folder: pathlib.Path) -> None:
    if not (home / "trained").exists():
      start(train(home / "trained")).wait()
    shutil.copytree(home / "trained", folder)

  def has_left(folder: pathlib.Path) -> bool:
    return bool(ledger_file.changes(folder / "posterior.npz"))

  return [
    Case("train", train),
    Case("sweep", sweep),
    Case("sweep, its worker", sweep, kills_worker=True),
    Case("posterior", leave, trained, has_left),
  ]


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
  """Starts `python -m ...`, whose output is kept for when it fails."""
  return subprocess.Popen(
    [sys.executable, "-m", *arguments],
    cwd=tools.ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def undisturbed(case: Case, home: pathlib.Path) -> float:
  """Lets a program do its work, in a folder of its own.

  Returns:
    The seconds from the folder's lock to the last file; by a second run, which has
    nothing to compile, as those that are killed.
  """
  for name in (f"{case.name}, first", case.name):
    case.prepare(home / name)
    process = start(case.arguments(home / name))
    output, _ = process.communicate()
    if process.returncode:
      sys.exit(f"error: a program that nobody disturbed failed: {output}")
  times = [path.stat().st_mtime for path in (home / case.name).rglob("*")]
  return max(times) - (home / case.name / NAME).stat().st_mtime


def wait_for_lock(process: subprocess.Popen[str], folder: pathlib.Path) -> None:
  """Returns when a program holds the lock of its folder, or has ended."""
  while process.poll() is None:
    with contextlib.suppress(OSError):
      if (folder / NAME).read_text() == str(process.pid):
        return
    time.sleep(0.001)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
  """Numbers of the processes that a sweep has spawned (Linux)."""
  found = []
  for entry in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):
      parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
      if parent == process.pid and b"spawn_main" in (entry / "cmdline").read_bytes():
        found.append(int(entry.name))
  return found


def kill(case: Case, folder: pathlib.Path, delay: float) -> tuple[int | None, bool]:
  """Starts a program and kills it so many seconds after it took its folder's lock.

  Returns:
    The rounds in its folder at that instant, None if it had ended before; and whether
    it ended well all the same, as a sweep does without one of its workers.
  """
  process = start(case.arguments(folder))
  wait_for_lock(process, folder)
  time.sleep(delay)
  victims = workers_of(process) if case.kills_worker else [process.pid]
  alive = process.poll() is None and bool(victims)
  if alive:
    with contextlib.suppress(ProcessLookupError):
      os.kill(victims[0], signal.SIGKILL)
  rounds = [path.read_text().count("\n") - 1 for path in folder.rglob("metrics.csv")]
  process.communicate()
  return sum(rounds) if alive else None, process.returncode == 0


def finish(case: Case, folder: pathlib.Path) -> tuple[int, str]:
  """Starts a program again until it ends well.

  Returns:
    How many starts that took, and what the last one printed if it failed as well.
  """
  output = ""
  for number in range(1, _MOST_STARTS + 1):
    process = start(case.arguments(folder))
    output, _ = process.communicate()
    if process.returncode == 0:
      return number, ""
  return _MOST_STARTS, output.strip()


# Matches the tile of a page that says how long a run took.
_SECONDS = re.compile(rb"<small>seconds</small><b>[^<]*</b>")


def differences(one: pathlib.Path, other: pathlib.Path) -> list[str]:
  """Names of files in which two folders differ, but for seconds, logs and locks."""
  contents = [_contents(folder) for folder in (one, other)]
  names = sorted(contents[0].keys() | contents[1].keys())
  return [name for name in names if contents[0].get(name) != contents[1].get(name)]


def _contents(folder: pathlib.Path) -> dict[str, Any]:
  found = {}
  for path in folder.rglob("*"):
    name = str(path.relative_to(folder))
    if path.is_file() and path.name != NAME and not name.startswith("logs"):
      found[name] = _timeless(path)
  return found


def _timeless(path: pathlib.Path) -> Any:
  """The bytes of a file; of a table, a summary or a page all but what it took."""
  if path.suffix == ".csv":
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    return table.loc[:, [not name.endswith("seconds") for name in table]].to_csv()
  if path.name == "summary.json":
    content = json.loads(path.read_text(encoding="utf-8"))
    return {k: v for k, v in content.items() if not k.endswith("seconds")}
  if path.name == "report.html":
    return _SECONDS.sub(b"", path.read_bytes())
  return path.read_bytes()


def trial(
  case: Case, home: pathlib.Path, delay: float
) -> tuple[dict[str, Any] | None, list[str]]:
  """Kills a program once.

  Returns:
    A row of the table, or None if the program was too quick; and what went wrong.
  """
  folder = home / "killed"
  case.prepare(folder)
  rounds, ended_well = kill(case, folder, delay)
  done = ended_well or case.is_done(folder)
  starts, message = (0, "") if done else finish(case, folder)
  different = differences(home / case.name, folder)
  shutil.rmtree(folder)
  row = {
    "killed": case.name,
    "after seconds": delay,
    "rounds then": rounds,
    "further starts": starts,
    "files": len(_contents(home / case.name)),
    "that differ": len(different),
  }
  return None if rounds is None else row, [message] * bool(message) + different


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  rng = random.Random(options.seed)
  with tempfile.TemporaryDirectory() as folder:
    home = pathlib.Path(folder)
    programs = cases(home)
    lasts = {case.name: undisturbed(case, home) for case in programs}
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    while len(rows) < options.kills:
      case = programs[len(rows) % len(programs)]
      row, faults = trial(case, home, rng.uniform(0, lasts[case.name]))
      wrong += faults
      if row is not None and case.kills_worker and row["further starts"]:
        wrong.append("a sweep did not do without one of its workers")
      if row is not None:
        rows.append(row)
        print(tools.markdown(rows[-1:]).splitlines()[-1], flush=True)
  print(tools.markdown(rows))
  tools.write("kills", rows)
  if wrong:
    sys.exit(f"error: {len(wrong)} faults: {'; '.join(wrong)}")
  print("every folder is as if nobody had disturbed it")


if __name__ == "__main__":
  main()
