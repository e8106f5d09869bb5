"""What the real engine costs: start, an exchange, bytes, and idling.

python -m benchmarks.network_speed [--sites=3,5,10] [--output=FILE.csv]

All sites are processes of this machine. An exchange asks every site for as many bytes
as the masked statistics of a model of M features have, 16 a number, and sends as many
as its posterior has, 8 a number. Seconds are medians of five; the first, in which the
engine makes its connections, is told apart. Idle cost is that of all processes of a
site, in percent of a core: without a job, and in one that waits.
"""

import argparse
import contextlib
import csv
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from fedbnr_jax.network import engine, engine_process, kits, side
from fedbnr_jax.network.engine_process import EngineProcess
from fedbnr_jax.network.transport import Answer, Failure, Transport
from launch import network_demo

_COLUMNS = ("sites", "what", "M", "bytes up", "bytes down", "value", "unit")
_FEATURES = (100, 2000)
_REPEATS = 5
_IDLE_SECONDS = 20.0
_TICKS = os.sysconf("SC_CLK_TCK")


def answering() -> Answer:
  """Makes the answers of a site: as many bytes as it is asked for."""
  return lambda message: bytes(int(message[:20]))


def ask(transport: Transport, output: str, idle: float) -> None:
  """Asks all sites, and writes how long it took."""
  begun = time.time()
  time.sleep(idle)
  rows: list[dict[str, Any]] = [{"what": "begun", "value": begun}]
  for num_features in _FEATURES:
    up, down = sizes(num_features)
    seconds = []
    for _ in range(_REPEATS + 1):
      message = f"{up:<20}".encode() + bytes(down)
      start = time.monotonic()
      answers = transport.ask(dict.fromkeys(transport.sites, message), 600.0)
      seconds.append(time.monotonic() - start)
      lost = {
        n: a for n, a in answers.items() if isinstance(a, Failure) or len(a) != up
      }
      assert not lost, lost
    known = {"M": num_features, "bytes up": up, "bytes down": down}
    rows.append({"what": "first exchange", **known, "value": seconds[0]})
    middle = statistics.median(seconds[1:])
    rows.append({"what": "an exchange", **known, "value": middle})
  pathlib.Path(output).write_text(json.dumps(rows))


def sizes(num_features: int) -> tuple[int, int]:
  """Returns the bytes of a masked message of statistics, and of a posterior."""
  triangle = num_features * (num_features + 1) // 2 + num_features
  return 16 * (triangle + 3), 8 * triangle


def measure(num_sites: int, folder: pathlib.Path) -> list[dict[str, Any]]:
  """Starts a federation, and measures it."""
  names = tuple(f"site{number}" for number in range(num_sites))
  address = f"localhost:{network_demo.free_port()}"
  start = time.monotonic()
  kits.init(folder / "fed", names, address, keys_here=True)
  rows = [_row("kits made", time.monotonic() - start)]
  output = folder / "asked.json"
  with contextlib.ExitStack() as stack:
    start = time.monotonic()
    server = kits.opened(folder / "fed" / "server")
    arguments = {"output": str(output), "idle": _IDLE_SECONDS + 5.0}
    side.write(server.folder, f"{_MODULE}:ask", arguments)
    stack.enter_context(engine_process.running(server))
    for name in names:
      kit = kits.opened(folder / "fed" / name)
      side.write(kit.folder, f"{_MODULE}:answering", {})
      site = stack.enter_context(engine_process.running(kit))
    control = stack.enter_context(engine.control(server, 300.0))
    _until(lambda: len(control.connected()) == num_sites)
    rows.append(_row("all connected", time.monotonic() - start))
    rows.append(_row("idle, without a job", _idle(site), "% of a core"))
    side.note_connected(server.folder, control.connected())
    submitted = time.time()
    job = control.submit(names, num_sites)
    _until(lambda: bool(site.jobs()))
    _until(lambda: side.state(site.kit.folder) == side.IN_A_RUN)
    rows.append(_row("idle, in a job that waits", _idle(site), "% of a core"))
    _until(lambda: side.outcome(server.folder) is not None)
    ended = time.monotonic()
    found = side.outcome(server.folder)
    assert found is not None
    assert found["status"] == side.FINISHED, found["text"]
    _until(lambda: control.status(job).startswith("FINISHED"))
    rows.append(_row("job's end to engine's end", time.monotonic() - ended))
  asked = json.loads(output.read_text())
  rows.append(_row("job submitted to begun", asked[0]["value"] - submitted))
  rows += [{"unit": "s", **row} for row in asked[1:]]
  return [{"sites": num_sites, **row} for row in rows]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--sites", default="3,5,10", help="Numbers of sites.")
  parser.add_argument("--output", default="benchmarks/results/network_speed.csv")
  arguments = parser.parse_args()
  rows: list[dict[str, Any]] = []
  for number in map(int, arguments.sites.split(",")):
    with tempfile.TemporaryDirectory() as folder:
      rows += measure(number, pathlib.Path(folder))
    for row in rows:
      row["value"] = float(f"{row['value']:.3g}")
    print(*rows, sep="\n", flush=True)
    with open(arguments.output, "w", newline="") as file:
      writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
      writer.writeheader()
      writer.writerows(rows)


_MODULE = "benchmarks.network_speed"  # Also where it is __main__.


def _row(what: str, value: float, unit: str = "s") -> dict[str, Any]:
  return {"what": what, "value": value, "unit": unit}


def _idle(site: EngineProcess) -> float:
  """Measures what a site's processes take while nobody asks anything."""
  pids = [site.pid, *site.jobs()]
  before = sum(map(_cpu_seconds, pids))
  time.sleep(_IDLE_SECONDS)
  return 100 * (sum(map(_cpu_seconds, pids)) - before) / _IDLE_SECONDS


def _cpu_seconds(pid: int) -> float:
  fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / _TICKS


def _until(condition: Callable[[], bool], seconds: float = 600.0) -> None:
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "this takes too long"
    time.sleep(0.05)


if __name__ == "__main__":
  main()
