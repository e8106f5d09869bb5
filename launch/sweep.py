"""Runs a grid of trainings, one pinned process a core, into one table.

python -m launch.sweep --config=configs/paper_table.py --workdir=runs/paper_table

Every run has its own folder under `workdir/runs`; a second start skips what is
finished and takes up what was stopped. `results.csv` is rewritten after every run.
"""

import concurrent.futures
import dataclasses
import importlib.util
import itertools
import os
import pathlib
import queue
import subprocess
import sys
from typing import Any

import ml_collections
import pandas as pd
from absl import flags
from tqdm import tqdm

from fedbnr_jax import algorithms
from fedbnr_jax import config as config_lib
from fedbnr_jax.errors import InputError
from fedbnr_jax.records import RunFolder, usable
from launch import common

_WORKERS = flags.DEFINE_integer("workers", 0, "Runs at a time; 0: one a core.")

_ROOT = pathlib.Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Run:
  """One point of the grid."""

  base: str  # Config file of the training, with its argument.
  fields: tuple[tuple[str, Any], ...]  # Overridden config fields.
  # Client counts under which it stands; a pooled method is trained once for all.
  counts: tuple[int, ...]

  @property
  def name(self) -> str:
    parts = [self.base.partition(":")[2]]
    parts += [f"{name.rpartition('.')[2]}={value}" for name, value in self.fields]
    return "_".join(part for part in parts if part).replace("/", "-").replace(",", "-")

  def command(self, workdir: pathlib.Path) -> list[str]:
    overrides = [f"--config.{name}={value}" for name, value in self.fields]
    return [
      *(sys.executable, "-m", "launch.train"),
      *(f"--config={self.base}", f"--workdir={workdir}", *overrides),
    ]


def flatten(
  grid: ml_collections.ConfigDict, prefix: str = ""
) -> dict[str, tuple[Any, ...]]:
  """The grid as dotted field names and the values that each takes."""
  fields: dict[str, tuple[Any, ...]] = {}
  for name, values in grid.items():
    if isinstance(values, ml_collections.ConfigDict):
      fields |= flatten(values, f"{prefix}{name}.")
    else:
      fields[prefix + name] = tuple(values)
  return fields


def config_of(base: str, fields: dict[str, Any]) -> ml_collections.ConfigDict:
  """The config that a training of this point will see."""
  path, colon, argument = base.partition(":")
  spec = importlib.util.spec_from_file_location("sweep_base", _ROOT / path)
  if spec is None or spec.loader is None or not (_ROOT / path).is_file():
    raise InputError(f"config.base {path!r} does not exist: see the files in configs/.")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config(argument) if colon else module.get_config()
  try:
    config.lock().update_from_flattened_dict(fields)
  except (AttributeError, KeyError, TypeError) as error:
    raise InputError(f"config.grid does not fit {base}: {error}.") from error
  config_lib.validate(config)
  return config


def expand(config: ml_collections.ConfigDict) -> dict[Run, ml_collections.ConfigDict]:
  """All points of the grid, in order, each with its whole config."""
  grid = flatten(config.grid)
  bases = [f"{config.base}:{argument}" for argument in config.arguments]
  runs: dict[Run, ml_collections.ConfigDict] = {}
  for base in bases or [config.base]:
    for values in itertools.product(*grid.values()):
      fields = dict(zip(grid, values, strict=True))
      whole = config_of(base, fields)
      counts = grid.get("num_clients", (whole.num_clients,))
      if not algorithms.method(whole.method).pooled:
        counts = (whole.num_clients,)
      elif whole.num_clients != counts[0]:
        continue  # The run at the first count stands for all.
      runs[Run(base, tuple(fields.items()), counts)] = whole
  if not runs:
    raise InputError("the grid is empty: give every field of config.grid a value.")
  return runs


def write_results(
  path: pathlib.Path,
  runs: dict[Run, ml_collections.ConfigDict],
  folders: dict[str, RunFolder],
  failures: dict[str, str],
) -> None:
  """Rewrites the table from the folders of all runs, at one stroke."""
  rows: list[dict[str, Any]] = []
  for run, config in runs.items():
    known = {
      "dataset": config.data.name,
      "method": config.method,
      "num_clients": config.num_clients,
      "seed": config.seed,
    }
    summary = folders[run.name].summary()
    if summary is None and run.name not in failures:
      continue
    state = {"status": "done", "reason": ""}
    if summary is None:
      state = {"status": "failed", "reason": failures[run.name]}
    fields = {f"config.{name}": v for name, v in run.fields if name not in known}
    row = known | (summary or {}) | fields | state
    if len(run.counts) > 1:
      rows += [row | {"num_clients": count} for count in run.counts]
    else:
      rows.append(row)
  if rows:
    part = path.with_suffix(".tmp")
    pd.DataFrame(rows).to_csv(part, index=False)
    os.replace(part, path)


def execute(run: Run, folder: RunFolder, cores: "queue.Queue[int]") -> str | None:
  """Trains in a process of its own on a free core; returns why it failed, if it did."""
  core = cores.get()
  try:
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
      run.command(folder.path),
      capture_output=True,
      text=True,
      env=os.environ | {"FEDBNR_CORE": str(core)},  # See launch/__init__.py.
      cwd=_ROOT,
      check=False,
    )
    if done.returncode == 0:
      return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"
  finally:
    cores.put(core)


def available_cores() -> list[int]:
  """The cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):  # Linux.
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))


def main() -> None:
  sweep(common.config(), pathlib.Path(common.workdir()).absolute(), _WORKERS.value)


def sweep(
  config: ml_collections.ConfigDict, workdir: pathlib.Path, num_workers: int
) -> None:
  """Runs what is left of the grid and keeps `results.csv` up to date."""
  runs = expand(config)
  folders = {run.name: RunFolder(workdir / "runs" / run.name) for run in runs}
  if len(folders) < len(runs):
    raise InputError("two points of the grid have the same name: see config.grid.")
  for run, whole in runs.items():
    folders[run.name].check(whole)
  available = available_cores()
  cores: queue.Queue[int] = queue.Queue()
  for index in range(num_workers or len(available)):
    cores.put(available[index % len(available)])
  failures: dict[str, str] = {}
  waiting = [run for run in runs if folders[run.name].summary() is None]
  results = workdir / "results.csv"
  with usable(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
    write_results(results, runs, folders, failures)
  pool = concurrent.futures.ThreadPoolExecutor(cores.qsize())
  bar = tqdm(total=len(runs), initial=len(runs) - len(waiting), unit="run")
  futures = {
    pool.submit(execute, run, folders[run.name], cores): run for run in waiting
  }
  try:
    for future in concurrent.futures.as_completed(futures):
      name = futures[future].name
      failure = future.result()
      if failure is not None:
        failures[name] = failure
        tqdm.write(f"{name} failed: {failure}")
      write_results(results, runs, folders, failures)
      bar.update()
  finally:
    # On an interrupt, which the trainings under way get too, start no other.
    pool.shutdown(cancel_futures=True)
    bar.close()
  print(f"{len(runs) - len(failures)} of {len(runs)} runs done; see {results}")
  if failures:
    raise InputError(f"{len(failures)} runs failed: {', '.join(failures)}.")


if __name__ == "__main__":
  common.run(main)
