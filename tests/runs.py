"""What several tests share: tiny runs, and checks of what they leave behind."""

import contextlib
import json
import os
import pathlib
import time

import jax
import ml_collections
import numpy as np
import pandas as pd
import pytest

from fedbnr_jax import workflow
from fedbnr_jax.data import Dataset
from fedbnr_jax.errors import InputError
from fedbnr_jax.run import checkpoints
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import seal as seal_lib
from fedbnr_jax.run.records import RunFolder


def once(tmp_path_factory, name: str, make):
  """What `make` returns, as JSON carries it: made by one test process for all."""
  base = tmp_path_factory.getbasetemp()
  if os.environ.get("PYTEST_XDIST_WORKER"):
    base = base.parent
  result = base / f"{name}.json"
  try:
    (base / name).mkdir()
  except FileExistsError:
    for _ in range(3000):  # Another process is at it.
      if result.exists():
        break
      time.sleep(0.1)
  else:
    part = base / f"{name}.part"
    part.write_text(json.dumps(make()))
    os.replace(part, result)
  return json.loads(result.read_text())


def tiny(**fields: object) -> ml_collections.ConfigDict:
  """A run of three rounds that takes seconds; `data__path` sets `data.path`."""
  config = config_lib.base()
  config.hidden_size = 8
  config.num_samples = 4
  config.num_rounds = 3
  config.num_local_steps = 2
  config.num_clients = 2
  config.data.num_rows = 40
  config.sparse.kernel = "matern32+linear"
  config.sparse.num_samples, config.sparse.posterior_samples = 4, 6
  config.sparse.start_samples, config.sparse.start_steps = 3, 2
  config.sparse.num_steps = 2
  config.ridge.num_samples = 4
  for name, value in fields.items():
    config.update_from_flattened_dict({name.replace("__", "."): value})
  return config


def table(num_rows: int = 60, **fields) -> Dataset:
  """Rows with two features, a target far from unit scale, and no split."""
  rng = np.random.default_rng(5)
  features = pd.DataFrame(rng.normal(size=(num_rows, 2)), columns=["a", "b"])
  noise = rng.normal(size=num_rows)
  targets = 100.0 + 30.0 * features["a"].to_numpy() + 3.0 * noise
  return Dataset("made", features, targets, "y", **fields)


def sites(num_rows: int, seed: int = 0) -> pd.DataFrame:
  """Rows of two sites, whose targets are far from unit scale."""
  rng = np.random.default_rng(seed)
  a, b = rng.normal(size=(2, num_rows))
  site = np.array(["north", "south"])[rng.integers(2, size=num_rows)]
  y = 100 + 30 * np.sin(a) + 5 * b + 3 * rng.normal(size=num_rows)
  return pd.DataFrame({"a": a, "b": b, "site": site, "y": y})


def train_sites(folder: pathlib.Path, **fields: object) -> pd.DataFrame:
  """Trains a model of two sites in `folder/run`; returns its table."""
  table = sites(80)
  table.to_csv(folder / "table.csv", index=False)
  config = tiny(
    kernel="gaussian",
    num_rounds=2,
    data__source="table",
    data__path=str(folder / "table.csv"),
    data__target="y",
    data__client="site",
    **fields,
  )
  workflow.train(config, folder / "run")
  return table


SUMMARY = {  # Of design.md.
  "dataset", "method", "num_clients", "seed", "rounds", "best_round", "test_rmse",
  "min_test_rmse", "test_ece", "test_mce", "test_bri", "test_nll", "test_crps",
  "noise_std", "prior_std", "rmse_unit", "seconds",
}  # fmt: skip


class StopError(Exception):
  """Stands for whatever ends a run early."""


def claimed(path: pathlib.Path, experiment) -> RunFolder:
  folder = RunFolder(path)
  folder.claim_task(experiment)
  return folder


def seal_anew(folder: RunFolder) -> None:
  """Lets the files of a folder belong together, as if its run had written them so."""
  for path in folder.checkpoints.iterdir():
    content = checkpoints.read(path)
    seal = seal_lib.of_folder(folder, content.round)
    checkpoints.write(path, content._replace(seal=seal))


def stop_after(number: int):
  """A callback that ends the run after a round."""

  def on_round(record) -> None:
    if record["round"] == number:
      raise StopError

  return on_round


@contextlib.contextmanager
def quick_compiler():
  """Has XLA compile fast to slow code, for programs that run for milliseconds."""
  name = "jax_disable_most_optimizations"
  before = jax.config.values[name]
  jax.config.update(name, True)
  try:
    yield
  finally:
    jax.config.update(name, before)


def timeless(history) -> list[dict]:
  """Records without what may differ between two runs."""
  return [
    {name: value for name, value in record.items() if not name.endswith("seconds")}
    for record in history
  ]


def assert_same_bits(one, other) -> None:
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


def assert_refused(call, *parts: str) -> None:
  """Checks for one InputError, in one line, that has all the parts."""
  with pytest.raises(InputError) as caught:
    call()
  message = str(caught.value)
  assert "\n" not in message
  for part in parts:
    assert part in message, message
