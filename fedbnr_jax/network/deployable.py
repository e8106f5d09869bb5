"""Says which configs real sites can run, and refuses the others in one line.

A config is written for a simulation, which has all rows in one place. What only that
gives a meaning to must be left as it is, or somebody believes that it was done.
"""

from typing import Any

import ml_collections

from fedbnr_jax import algorithms, auto
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing, require_choice
from fedbnr_jax.network.schema import Schema
from fedbnr_jax.network.strict_json import require_fields
from fedbnr_jax.run import config_checks, config_file
from fedbnr_jax.run.config import AUTO, base, get

METHODS = (
  *("fedbnr", "fedbnr-ev", "fedbnr-exact", "fedbnr-ard"),
  *("fedridge", "fedavg", "fedprox", "pfedgp", "fedloc", AUTO),
)
_ROUND = "who takes part in a round is who answers"
_LAYOUT = "each site computes for itself"
_TABLE = "each site names its own table when it joins"
_COLUMNS = "the schema says what columns there are"
# Fields that must keep their usual value, and why.
_SIMULATED = {
  "partition": "each site has the rows that it has",
  "participation": _ROUND,
  "dropout": _ROUND,
  "client_batch_size": _LAYOUT,
  "mesh": _LAYOUT,
  "stream_clients": _LAYOUT,
  "num_seeds": "sites train with one seed at a time",
  "compare_clients": "no site's model is shown to others",
  "data.path": _TABLE,
  "data.directory": _TABLE,
  "data.client": "each site is one client",
  "data.features": _COLUMNS,
  "data.categorical": _COLUMNS,
  "data.bounds": "inputs are standardised by sums over all sites",
  "data.raw_target": "targets are standardised by sums over all sites",
}


def fitted(
  config: ml_collections.ConfigDict, schema: Schema, num_members: int
) -> ml_collections.ConfigDict:
  """Copies a config, with what follows from schema and members filled in.

  Args:
    config: As a file in `configs/` gives it.
    schema: Its target, and what becomes of missing cells, are taken.
    num_members: How many sites there are.

  Raises:
    InputError: If the config says something else about these, or lacks a field.
  """
  usual = base()
  if "method" in config:
    _require_same_fields(config.to_dict(), usual.to_dict(), "config")
  config_checks.validate(config)
  result = ml_collections.ConfigDict(config.to_dict())
  for name, value, why in _consequences(schema, num_members):
    if get(config, name) not in (get(usual, name), value):
      raise _contradiction(name, get(config, name), value, why)
    result.update_from_flattened_dict({name: value})
  return result


def require(
  config: ml_collections.ConfigDict, schema: Schema, num_members: int
) -> None:
  """Raises InputError if sites that have agreed on a schema cannot run a config."""
  _require_method(config.method)
  if config.data.source != "table":
    raise InputError(
      f"config.data.source is {config.data.source!r}, but each site reads a table of "
      "its own: start from configs/csv.py."
    )
  usual = base()
  for name, why in _SIMULATED.items():
    if get(config, name) != get(usual, name):
      raise InputError(
        f"config.{name} is {get(config, name)!r}, but {why}: leave it at "
        f"{get(usual, name)!r}."
      )
  for name, value, why in _consequences(schema, num_members):
    if get(config, name) != value:
      raise _contradiction(name, get(config, name), value, why)
  if config.method == AUTO:
    auto.check_fields(config)
  else:
    algorithms.method(config.method).build(config)  # Raises, for a kernel unknown.


def from_json(content: Any, where: str) -> ml_collections.ConfigDict:
  """Reads a config that has all fields of this version and no others.

  Args:
    content: An object of JSON.
    where: How messages call it.

  Raises:
    InputError: If a field is missing, unknown, or has a value that no run can have.
  """
  _require_same_fields(content, base().to_dict(), where)
  return config_file.from_json(content, where, choice=True)


def _consequences(schema: Schema, num_members: int) -> list[tuple[str, Any, str]]:
  """Lists fields that follow from what else is agreed on, their values, and why."""
  return [
    ("num_clients", num_members, f"there are {num_members} members"),
    ("data.target", schema.target.name, f"the schema has {schema.target.name!r}"),
    ("data.missing", schema.missing, f"the schema has {schema.missing!r}"),
  ]


def _contradiction(name: str, found: Any, value: Any, why: str) -> InputError:
  return InputError(
    f"config.{name} is {found!r}, but {why}: set it to {value!r}, or leave it out."
  )


def _require_method(name: str) -> None:
  require_choice("config.method", name, (*algorithms.METHODS, AUTO))
  if name in METHODS:
    return
  method = algorithms.METHODS[name]
  if method.distils:
    why = "it needs rows at the server, which has none"
  elif method.pooled:
    why = "it needs all rows in one place"
  else:
    why = "no site runs it yet"
  raise InputError(
    f"method {name!r} cannot be deployed: {why}; choose from {listing(METHODS)}."
  )


def _require_same_fields(content: Any, usual: dict[str, Any], where: str) -> None:
  try:
    require_fields(content, usual, where)
  except InputError as error:
    raise InputError(
      f"{error} A config of another version is not run: let all sites have the same."
    ) from error
  for name, value in usual.items():
    if isinstance(value, dict):
      _require_same_fields(content[name], value, f"{where}.{name}")
