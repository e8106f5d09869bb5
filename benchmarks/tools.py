"""What the benchmarks share: a program in a process of its own, its JSON, a table."""

import contextlib
import csv
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from fedbnr_jax.errors import InputError

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def run_json(arguments: Sequence[str], timeout: float = 900.0) -> dict[str, Any]:
  """Runs `python -m ...` and reads the last line that it prints."""
  done = subprocess.run(
    [sys.executable, "-m", *arguments],
    capture_output=True,
    text=True,
    timeout=timeout,
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    check=False,
  )
  if done.returncode:
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    sys.exit(f"error: {' '.join(arguments)} failed: {last[0]}")
  result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
  return result


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
  """Ends the program with one line where its input is wrong."""
  try:
    yield
  except InputError as error:
    sys.exit(f"error: {' '.join(str(error).split())}")


def flags(**values: object) -> list[str]:
  """--name=value, for each."""
  return [f"--{name}={value}" for name, value in values.items()]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
  """Rows of the same fields as a table."""
  names = list(rows[0])
  lines = [names, ["---"] * len(names)]
  lines += [[_text(row[name]) for name in names] for row in rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(value: Any) -> str:
  return f"{value:.3g}" if isinstance(value, float) else str(value)


def write(name: str, rows: Sequence[dict[str, Any]]) -> None:
  """Keeps rows as `results/<name>.csv`."""
  RESULTS.mkdir(exist_ok=True)
  with open(RESULTS / f"{name}.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
