"""Faults of wrong messages: what a federation does with a site that sends them.

Where the run stops by a line that says that the same command goes on, the site is put
right and the command is given again. Each run without faults is recorded, so that
there is something of another run to send.
"""

import pathlib
import shutil
import time
from collections.abc import Callable

from benchmarks import network_liar
from benchmarks.network_stage import Program, Stage, Told, last, until

_LIAR = "south"
PLAIN = "none, not masked"
_MASKED = "none"
_NAMES = {
  "nan sent": "a site sends NaN, past its own check",
  "nan": "a site's Gram is NaN",
  "million": "a site sends a Gram times a million",
  "indefinite": "a site sends an indefinite Gram",
  "another run": "a site sends its answer to another run",
  "another message": "a site sends its answer to another message",
  "another run, relabelled": "a site relabels its answer to another run",
  "another message, relabelled": "a site relabels its answer to another message",
  "forged": "a site sends numbers of another run with the marks of this one",
}
_UNMASKED = (
  "nan sent",
  "million",
  "indefinite",
  "another run",
  "another message",
  "another message, relabelled",
)
_UNDER_MASKS = (
  "million",
  "indefinite",
  "another run, relabelled",
  "another message, relabelled",
  "nan",
  "forged",
)


def reference(name: str) -> str:
  """Names the run without faults that a fault is compared with."""
  return PLAIN if name.endswith(", not masked") else _MASKED


def nothing(stage: Stage, masked: bool = True) -> Told:
  """Nothing goes wrong, with sums that are masked, or not; it is recorded."""
  stage.agree(masking=masked)
  server, _ = stage.start()
  _lie(stage, "", _recorded(stage, masked))
  assert server.wait() == 0, server.text()
  return "", 0.0


def nothing_plain(stage: Stage) -> Told:
  """Nothing goes wrong, with sums that are not masked; it is recorded."""
  return nothing(stage, masked=False)


def faults() -> dict[str, Callable[[Stage], Told]]:
  """Returns all faults of wrong messages by name."""
  plain = {f"{_NAMES[how]}, not masked": _fault(how, False) for how in _UNMASKED}
  masked = {f"{_NAMES[how]}, masked": _fault(how, True) for how in _UNDER_MASKS}
  return {PLAIN: nothing_plain, **plain, **masked}


def _fault(how: str, masked: bool) -> Callable[[Stage], Told]:
  def fault(stage: Stage) -> Told:
    stage.agree(masking=masked)
    server, _ = stage.start()
    folder = stage.folder.parent / "lie"
    shutil.rmtree(folder, ignore_errors=True)
    put_right = _lie(stage, how, folder)
    code = server.wait()
    lied = network_liar.lied_at(folder)
    if code == 0:
      return "nothing: it was believed", float("nan")
    line, seconds = _noticed(server, lied)
    if "the same command goes on" not in line:
      return line, seconds
    put_right()
    time.sleep(2.0)  # The sites' engines find that the server is gone.
    again = stage.serve()
    code = again.wait()
    return f"{line} [the site put right, serve ended with {code}]", seconds

  return fault


def _noticed(server: Program, lied: float) -> Told:
  """Finds the first line after a lie that tells of no round."""
  lines = [(when, line) for when, line in server.lines if when >= lied]
  found = [one for one in lines if not one[1].startswith("round ")]
  assert found, server.text()
  when, line = found[0]
  more = "" if line == last(server) else f" [then: {last(server)}]"
  return line + more, when - lied


def _lie(stage: Stage, how: str, folder: pathlib.Path) -> Callable[[], None]:
  """Lets the site lie as soon as its program is written."""
  kit = stage.fed / _LIAR
  until((kit / "side.json").exists)
  return network_liar.lie_at(kit, how, folder)


def _recorded(stage: Stage, masked: bool) -> pathlib.Path:
  """Names the folder of what is recorded of a run without faults; it outlives that."""
  return stage.folder.parent / network_liar.recorded(masked)
