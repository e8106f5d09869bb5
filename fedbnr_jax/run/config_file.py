"""A config is read back from its file, and a field that cannot be right is named."""

import os
from typing import Any

import ml_collections

from fedbnr_jax import algorithms
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import read_object
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import config_checks

# Any whole number is a number too; but to Python, `true` is one as well.
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
  bool: ((bool,), "true or false"),
  int: ((int,), "a whole number"),
  float: ((int, float), "a number"),
  str: ((str,), "a text"),
  dict: ((dict,), "a group of fields"),
}


def read(path: str | os.PathLike[str]) -> ml_collections.ConfigDict:
  """Reads the config of a run.

  Raises:
    InputError: If a field is missing, or has a value that no run can have.
  """
  return from_json(read_object(path), path)


def from_json(
  content: dict[str, Any], path: str | os.PathLike[str], *, choice: bool = False
) -> ml_collections.ConfigDict:
  """Checks a config that was read from a file.

  Args:
    content: Its fields.
    path: The file, for messages.
    choice: Whether the method may still be left open, as "auto".

  Raises:
    InputError: If a field is missing, or has a value that no run can have.
  """
  _require_fields(content, config_lib.base().to_dict(), path)
  config = ml_collections.ConfigDict(content)
  try:
    config_checks.validate(config)
    if not (choice and config.method == config_lib.AUTO):
      algorithms.method(config.method)
  except InputError as error:
    raise InputError(f"{path} cannot be right: {error} Restore it.") from error
  return config


def _require_fields(
  content: dict[str, Any],
  base: dict[str, Any],
  path: str | os.PathLike[str],
  prefix: str = "",
) -> None:
  """Raises InputError unless all fields of `base` are there, with values like these."""
  for field, like in base.items():
    name = f"{prefix}{field}"
    if field not in content:
      raise InputError(
        f"{path} has no {name!r}, and so was made by another version: train again."
      )
    value = content[field]
    types, kind = _KINDS[type(like)]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
      raise InputError(f"{path}: {name} is {value!r}, and must be {kind}: restore it.")
    if isinstance(value, dict):
      _require_fields(value, like, path, f"{name}.")
