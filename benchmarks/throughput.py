"""Trainings per minute: one process after another, and one pinned worker a core.

python -m benchmarks.throughput [--runs=8]

Every training is the same small real one (synthetic data, so many rounds), from a
warm compile cache, once as `launch.train` in a shell loop and once by `launch.sweep`.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks import tools

_CONFIG = """
import ml_collections
def get_config():
  config = ml_collections.ConfigDict()
  config.base = "configs/default.py"
  config.arguments = ()
  config.grid = ml_collections.ConfigDict()
  config.grid.seed = tuple(range(200, 200 + {runs}))
  config.grid.num_rounds = ({rounds},)
  config.grid.patience = ({rounds},)
  config.grid.compare_clients = (False,)
  return config
"""


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--runs", type=int, default=8)
  parser.add_argument("--rounds", type=int, default=20)
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    one_by_one(folder / "warm", 1, options.rounds)
    rows = []
    for what, run in (("launch.train in a loop", one_by_one), ("sweep", by_sweep)):
      start = time.perf_counter()
      run(folder / what.split()[0], options.runs, options.rounds)
      minutes = (time.perf_counter() - start) / 60
      rows.append(
        {"how": what, "runs": options.runs, "per_minute": options.runs / minutes}
      )
  tools.write("throughput", rows)
  print(tools.markdown(rows))


def one_by_one(folder: pathlib.Path, runs: int, rounds: int) -> None:
  for seed in range(200, 200 + runs):
    _call(
      "launch.train",
      "--config=configs/default.py",
      f"--workdir={folder}-{seed}",
      f"--config.seed={seed}",
      f"--config.num_rounds={rounds}",
      f"--config.patience={rounds}",
      "--config.compare_clients=False",
    )


def by_sweep(folder: pathlib.Path, runs: int, rounds: int) -> None:
  config = folder.with_suffix(".py")
  config.write_text(_CONFIG.format(runs=runs, rounds=rounds))
  _call("launch.sweep", f"--config={config}", f"--workdir={folder}", "--workers=auto")


def _call(*arguments: str) -> None:
  done = subprocess.run(
    [sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=tools.ROOT
  )
  if done.returncode:
    sys.exit(f"error: {arguments[0]} failed: {done.stderr.strip()[-300:]}")


if __name__ == "__main__":
  main()
