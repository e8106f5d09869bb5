"""What a side runs inside the engine, said by a file that it has written for itself.

Programs are functions of this installation, named as module:function; no job names one.
"""

import contextlib
import hashlib
import importlib
import json
import logging
import pathlib
import traceback
from collections.abc import Mapping, Set
from typing import Any

from fedbnr_jax import files
from fedbnr_jax.errors import InputError
from fedbnr_jax.network.transport import Answer, Transport
from fedbnr_jax.run.journal import NonFiniteError

_LOG = logging.getLogger(__name__)
_SIDE = "side.json"
_CONNECTED = "connected.json"
_OUTCOME = "outcome.json"
_STATE = "state.json"
CONNECTED = "connected to the server"
IN_A_RUN = "in a run"
# How the coordinator's program has ended: LOST if it stopped, and sites were lost.
FINISHED, REFUSED, LOST, FAILED = "finished", "refused", "lost", "failed"


def write(folder: pathlib.Path, program: str, arguments: Mapping[str, Any]) -> None:
  """Says what a side runs in the jobs to come.

  Args:
    folder: Of the kit.
    program: At the server, called with a transport and the arguments. At a site, called
      with the arguments; it returns the function that answers.
    arguments: Of JSON types.
  """
  (folder / _OUTCOME).unlink(missing_ok=True)
  content = {"program": program, "arguments": dict(arguments)}
  files.write_json(folder / _SIDE, content)


def site_program(folder: pathlib.Path) -> Answer:
  """Makes a site's answering function."""
  program, arguments = _read(folder)
  return program(**arguments)


def run_server_program(
  folder: pathlib.Path, transport: Transport, lost: Set[str]
) -> None:
  """Runs the coordinator's program, and notes how it ended, whatever happens.

  Args:
    folder: Of the kit.
    transport: Is given to the program.
    lost: Is looked at when the program has ended: the sites that were lost meanwhile.
  """
  outcome = {"status": FINISHED, "text": ""}
  try:
    program, arguments = _read(folder)
    program(transport, **arguments)
  except (InputError, NonFiniteError) as error:
    outcome = {"status": LOST if lost else REFUSED, "text": str(error)}
  except BaseException as error:
    _LOG.exception("the coordinator's program has failed")
    text = "".join(traceback.format_exception(error))
    outcome = {"status": FAILED, "text": f"{type(error).__name__}: {error}\n{text}"}
  files.write_json(folder / _OUTCOME, outcome)


def outcome(folder: pathlib.Path) -> dict[str, str] | None:
  """Reads how the coordinator's program ended, if it has."""
  path = folder / _OUTCOME
  return files.read_object(path) if path.exists() else None


def forget_outcome(folder: pathlib.Path) -> None:
  """Removes what an earlier job left."""
  (folder / _OUTCOME).unlink(missing_ok=True)


def note_state(folder: pathlib.Path, state: str) -> None:
  """Notes what a site's engine does, for people to be told."""
  with contextlib.suppress(OSError):  # Not worth an end.
    files.write_json(folder / _STATE, {"state": state})


def state(folder: pathlib.Path) -> str:
  """Reads what a site's engine does."""
  try:
    return str(json.loads((folder / _STATE).read_text())["state"])
  except (OSError, ValueError, KeyError):
    return ""


def note_connected(folder: pathlib.Path, marks: Mapping[str, str]) -> None:
  """Notes which sites are connected, for the coordinator's program to see."""
  if connected(folder) != dict(marks) or not (folder / _CONNECTED).exists():
    files.write_json(folder / _CONNECTED, dict(marks))


def connected(folder: pathlib.Path) -> dict[str, str]:
  """Reads which sites are connected."""
  try:
    return dict(json.loads((folder / _CONNECTED).read_text()))
  except (OSError, ValueError):
    return {}


def mark(token: str) -> str:
  """Makes a mark of a connection that is no secret."""
  return hashlib.sha256(token.encode()).hexdigest()[:16]


def _read(folder: pathlib.Path) -> tuple[Any, dict[str, Any]]:
  content = files.read_object(folder / _SIDE)
  module, _, name = content["program"].partition(":")
  return getattr(importlib.import_module(module), name), content["arguments"]
