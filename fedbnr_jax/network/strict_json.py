"""JSON that has one reading: no key twice, no field unknown, no number not finite.

People agree on a file by its digest. So nothing in it may be passed over, or be read in
another way by another program.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors, write_json
from fedbnr_jax.names import listing, suggestion


def read(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
  """Reads a file that must hold one JSON object.

  Args:
    path: The file.
    what: How messages call it, such as "schema".

  Raises:
    InputError: If it is missing, damaged, or can be read in two ways.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    raise InputError(f"{path} is a folder: name the {what} in it.")
  try:
    content = json.loads(
      path.read_bytes().decode("utf-8"),
      object_pairs_hook=_once_each,
      parse_float=_finite,
      parse_constant=_finite,
    )
  except FileNotFoundError as error:
    raise InputError(f"{path} does not exist: check the path of the {what}.") from error
  except OSError as error:
    raise InputError(
      f"{path} cannot be read ({error.strerror}): check its permissions."
    ) from error
  except (ValueError, RecursionError) as error:  # Of json and of the hooks below.
    reason = str(error).splitlines()[0]
    raise InputError(
      f"{path} is no readable {what} ({reason}): correct it, or get it anew."
    ) from error
  if not isinstance(content, dict):
    raise InputError(f"{path} holds no JSON object, and so no {what}: get it anew.")
  return content


def write(path: str | os.PathLike[str], content: Any, what: str) -> None:
  """Writes what `read` reads, indented, so that people can look it over.

  Raises:
    InputError: If the file cannot be written.
  """
  with explain_os_errors(path, f"the {what}"):
    write_json(path, content)


def canonical(content: Any) -> str:
  """Writes content as the one text that stands for it in a digest."""
  return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def require_fields(content: Any, fields: Iterable[str], where: str) -> None:
  """Raises InputError unless an object has exactly these fields."""
  fields = tuple(fields)
  if not isinstance(content, dict):
    raise InputError(f"{where} is no object with the fields {listing(fields)}.")
  absent = [field for field in fields if field not in content]
  if absent:
    raise InputError(f"{where} lacks {listing(absent)}: add it.")
  strange = [field for field in content if field not in fields]
  if strange:
    raise InputError(
      f"{where} has an unknown field {strange[0]!r}: {suggestion(strange[0], fields)}."
    )


def require_text(value: Any, where: str) -> None:
  """Raises InputError unless a value is text, without blanks around it."""
  if not isinstance(value, str) or not value or value != value.strip():
    raise InputError(
      f"{where} is {value!r}: give it a text without blanks before or behind it."
    )


def require_whole(value: Any, least: int, most: int, where: str) -> None:
  """Raises InputError unless a value is a whole number from `least` to `most`."""
  number = isinstance(value, int) and not isinstance(value, bool)
  if not (number and least <= value <= most):
    raise InputError(
      f"{where} is {value!r}: give a whole number from {least} to {most}."
    )


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  content = dict(pairs)
  if len(content) < len(pairs):
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f"{twice!r} occurs twice")
  return content


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"{text} is not a finite number")
  return value
