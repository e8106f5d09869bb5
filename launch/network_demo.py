"""A federation on one machine: a server, three sites with tables of their own, TLS."""

import contextlib
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import ml_collections
import numpy as np
import pandas as pd

from fedbnr_jax import model
from fedbnr_jax.data.synthetic import bumps
from fedbnr_jax.errors import InputError
from fedbnr_jax.network import (
  agreement,
  joining,
  kits,
  schema,
  schema_proposal,
  serving,
)
from fedbnr_jax.network.sent import SUM
from fedbnr_jax.run import config as config_lib

Say = Callable[[str], None]
# Where each site measures: none of them knows the whole.
RANGES = {"north": (-5.0, -1.5), "south": (-2.5, 2.0), "west": (1.0, 5.0)}
_ROWS = 120
_NOISE = 0.25
_FIELDS = {
  "method": "fedbnr-ev",
  "kernel": "gaussian",
  "num_rounds": 6,
  "num_local_steps": 20,
  "num_samples": 50,
}
_END_SECONDS = 10.0


def run(workdir: str, say: Say) -> list[str]:
  """Makes tables and kits, trains over three sites, and draws what they have learnt.

  Args:
    workdir: A folder that is not there yet.
    say: Is called with lines for people.

  Returns:
    Lines on what came out.

  Raises:
    InputError: If the folder is there, or the federation fails.
  """
  begun = time.monotonic()
  place = pathlib.Path(workdir).absolute()
  if place.exists():
    raise InputError(f"{workdir} exists: remove it, or name another --workdir.")
  tables = write_tables(place / "tables")
  fed, federation = place / "fed", place / "federation.json"
  say(f"three sites, each with {_ROWS} rows of its own in {workdir}/tables")
  kits.init(fed, list(RANGES), f"localhost:{free_port()}", keys_here=True)
  say(f"certificates, and a kit for the server and for each site, in {workdir}/fed")
  proposed = schema_proposal.propose(tables["north"], "y", name="demo")
  schema.write(place / "schema.json", proposed)
  agreed = agreement.make(config(), proposed, kits.members(fed))
  agreement.write(federation, agreed)
  say(f"{workdir}/federation.json, which each site approves by its digest")
  with sites(fed, tables, federation):
    serving.serve(fed / "server", federation, place / "run", say=say, wait=120.0)
  picture = place / "global.png"
  draw(tables, fed, picture)
  return [
    *serving.results(place / "run"),
    *_told(fed / "north"),
    f"the picture: {picture}",
    f"{time.monotonic() - begun:.0f} seconds in all",
  ]


def config() -> ml_collections.ConfigDict:
  """Returns the config of the demo: small, and without anything that takes long."""
  result = config_lib.base()
  result.data.source = "table"
  result.data.name = ""
  result.data.inputs = "standard"
  result.evidence.noise = "constant"
  result.update(_FIELDS)
  return result


def write_tables(folder: pathlib.Path, rows: int = _ROWS) -> dict[str, pathlib.Path]:
  """Writes a table for each site: the same function, measured at other places."""
  folder.mkdir(parents=True)
  paths = {}
  for number, (name, (low, high)) in enumerate(RANGES.items()):
    rng = np.random.default_rng(number)
    x = rng.uniform(low, high, rows)
    y = bumps(x[:, None]) + _NOISE * rng.normal(size=rows)
    paths[name] = folder / f"{name}.csv"
    pd.DataFrame({"x": x, "y": y}).round(4).to_csv(paths[name], index=False)
  return paths


@contextlib.contextmanager
def sites(
  fed: pathlib.Path, tables: Mapping[str, pathlib.Path], federation: pathlib.Path
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
  """Runs `join` of each site while the block runs, as its people would."""
  with contextlib.ExitStack() as stack:
    started = {}
    for name, table in tables.items():
      # In a folder that others may read, only its own kit is the site's.
      log = stack.enter_context(open(fed / name / "join.txt", "wb"))
      flags = [f"--kit={fed / name}", f"--data={table}", f"--approve={federation}"]
      started[name] = subprocess.Popen(
        [sys.executable, "-m", "launch.network", "join", *flags],
        stdout=log,
        stderr=subprocess.STDOUT,
      )
      stack.callback(_end, started[name])
    yield started


def free_port() -> int:
  """Returns a port of this machine that nobody uses now."""
  with socket.socket() as asked:
    asked.bind(("127.0.0.1", 0))
    return int(asked.getsockname()[1])


def draw(
  tables: Mapping[str, pathlib.Path], fed: pathlib.Path, path: pathlib.Path
) -> None:
  """Draws the model that came back to the sites, over the rows of all three."""
  from fedbnr_jax.report import figures

  grid = np.linspace(-5.0, 5.0, 201)
  model_there = model.load(fed / "north" / joining.OWN / "model")
  found = model_there.predict(pd.DataFrame({"x": grid}))
  figure, (axes,) = figures.new_axes(1, 1, (7.0, 4.0))
  axes.fill_between(grid, found["lower95"], found["upper95"], alpha=0.2, lw=0)
  axes.plot(grid, found["mean"], label="the global model, 95 % band")
  axes.plot(grid, bumps(grid[:, None]), "k:", lw=1, label="the truth")
  for name, table in tables.items():
    rows = pd.read_csv(table)
    axes.plot(
      rows["x"], rows["y"], ".", ms=3, label=f"rows of {name}, which stay there"
    )
  axes.set_xlabel("x")
  axes.set_ylabel("y")
  axes.legend(fontsize="small")
  figures.save(figure, path)


def _told(kit: pathlib.Path) -> list[str]:
  """Says what has left one site, by its own log."""
  path = kit / joining.OWN / joining.SENT
  sent = pd.read_csv(path)
  sums = sent[sent["kind"] == SUM]
  return [
    f"site north has sent {len(sums)} sums of {int(sums['numbers'].sum()):,} numbers, "
    f"{sums['bytes'].sum() / 1e6:.1f} MB, masked: {path}"
  ]


def _end(process: subprocess.Popen[bytes]) -> None:
  process.send_signal(signal.SIGINT)
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(_END_SECONDS)
  process.kill()
  process.wait()
