"""A sweep's grid: its points, each with the whole config of a training."""

import dataclasses
import importlib.util
import itertools
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_collections

from fedbnr_jax import algorithms
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import suggestion
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import config_checks

_FIELDS = ("base", "arguments", "grid")  # The fields of a sweep's config.


def config(
  base: str, arguments: Iterable[str], fields: Mapping[str, Sequence[Any]]
) -> ml_collections.ConfigDict:
  """Returns the config of a sweep, as the files in configs/ do.

  Args:
    base: Config file of the trainings.
    arguments: What stands behind its colon, each a training of its own; may be none.
    fields: By dotted name, the values that a field takes.
  """
  grid: dict[str, Any] = {}
  for name, values in fields.items():
    *groups, last = name.split(".")
    place = grid
    for group in groups:
      place = place.setdefault(group, {})
    place[last] = tuple(values)
  parts = {"base": base, "arguments": tuple(arguments), "grid": grid}
  return ml_collections.ConfigDict(parts)


@dataclasses.dataclass(frozen=True)
class Run:
  """One point of the grid."""

  base: str  # Config file of the training, with its argument.
  fields: tuple[tuple[str, Any], ...]  # Overridden config fields.
  # Client counts under which it stands; a pooled method is trained once for all.
  counts: tuple[int, ...]

  @property
  def name(self) -> str:
    """Name of the run's folder and logs."""
    parts = [self.base.partition(":")[2]]
    parts += [f"{name.rpartition('.')[2]}={value}" for name, value in self.fields]
    return "_".join(part for part in parts if part).replace("/", "-").replace(",", "-")

  def command(self, workdir: pathlib.Path) -> list[str]:
    """Returns the command that trains this run alone."""
    overrides = [f"--config.{name}={value}" for name, value in self.fields]
    return [
      *(sys.executable, "-m", "launch.train"),
      *(f"--config={self.base}", f"--workdir={workdir}", *overrides),
    ]


def expand(
  config: ml_collections.ConfigDict, root: pathlib.Path | None = None
) -> dict[Run, ml_collections.ConfigDict]:
  """Returns all points of the grid, in order, each with its whole config.

  Args:
    config: What `config` returns.
    root: Folder that `config.base` starts from; None for the current one.

  Raises:
    InputError: If this is no config of a sweep, or a training would refuse a point.
  """
  for name in _FIELDS:
    if name not in config:
      raise InputError(
        f"this config has no field {name!r}, and so is none of a sweep: give "
        "launch.sweep one as configs/paper_table.py, and others launch.train."
      )
  grid = flatten(config.grid)
  bases = [f"{config.base}:{argument}" for argument in config.arguments]
  runs: dict[Run, ml_collections.ConfigDict] = {}
  for base in bases or [config.base]:
    for values in itertools.product(*grid.values()):
      fields = dict(zip(grid, values, strict=True))
      whole = config_of(base, fields, root)
      counts = grid.get("num_clients", (whole.num_clients,))
      if whole.method == config_lib.AUTO or not algorithms.method(whole.method).pooled:
        counts = (whole.num_clients,)
      elif whole.num_clients != counts[0]:
        continue  # The run at the first count stands for all.
      runs[Run(base, tuple(fields.items()), counts)] = whole
  if not runs:
    raise InputError("the grid is empty: give every field of config.grid a value.")
  return runs


def flatten(
  grid: ml_collections.ConfigDict, prefix: str = ""
) -> dict[str, tuple[Any, ...]]:
  """Returns the grid as dotted field names and the values that each takes."""
  fields: dict[str, tuple[Any, ...]] = {}
  for name, values in grid.items():
    if isinstance(values, ml_collections.ConfigDict):
      fields |= flatten(values, f"{prefix}{name}.")
    elif isinstance(values, tuple | list):
      fields[prefix + name] = tuple(values)
    else:
      raise InputError(
        f"config.grid.{prefix}{name} is {values!r}: give a tuple of values, as "
        f"({values!r},)."
      )
  return fields


def config_of(
  base: str, fields: dict[str, Any], root: pathlib.Path | None = None
) -> ml_collections.ConfigDict:
  """Returns the config that a training of this point will see.

  Args:
    base: Config file, with its argument after a colon if it takes one.
    fields: Values of config fields, by dotted name.
    root: Folder that the file's path starts from; None for the current one.
  """
  path, colon, argument = base.partition(":")
  file = (root or pathlib.Path()) / path
  spec = importlib.util.spec_from_file_location("sweep_base", file)
  if spec is None or spec.loader is None or not file.is_file():
    raise InputError(f"config.base {path!r} does not exist: see the files in configs/.")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config(argument) if colon else module.get_config()
  config.lock()
  known = config_lib.field_names(config)
  for name, value in fields.items():
    if name not in known:
      raise InputError(
        f"config.grid.{name} is no field of {base}: {suggestion(name, known)}."
      )
    try:
      config.update_from_flattened_dict({name: value})
    except TypeError as error:
      raise InputError(
        f"config.grid.{name} has {value!r}, which does not fit {base}: {error}."
      ) from error
  config_checks.validate(config)
  return config
