"""The real engine: TLS, processes of their own, a death in between; one whole run.

It takes half a minute, and is skipped where NVFLARE is not installed.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest

from fedbnr_jax import files
from fedbnr_jax.network import (
  agreement,
  coordinator,
  engine_files,
  engine_process,
  joining,
  kits,
  serving,
)
from fedbnr_jax.network.site import Site
from fedbnr_jax.network.transport import InProcess
from launch import network_demo
from tests import network_runs

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from fedbnr_jax.network import engine_limits

_ROUNDS = 20  # So many that the run goes on for seconds when its first one is told.


@pytest.fixture
def fed(tmp_path):
  """Kits of a server and three sites, an agreement, and a table at each site."""
  folder = tmp_path / "fed"
  address = f"localhost:{network_demo.free_port()}"
  kits.init(folder, network_runs.NAMES, address, keys_here=True)
  agreed = agreement.make(
    network_runs.config(method="fedbnr-ev", num_rounds=_ROUNDS),
    network_runs.SCHEMA,
    kits.members(folder),
  )
  agreement.write(tmp_path / "federation.json", agreed)
  for name, size in network_runs.SIZES.items():
    frame = network_runs.frame(name, size)[["a", "b", "y"]]
    frame.to_csv(tmp_path / f"{name}.csv", index=False)
  return folder


def _here(tmp_path, fed):
  """Runs the same federation in this process, with the splits of the sites."""
  agreed = agreement.read(tmp_path / "federation.json")
  sites = {}
  for name in network_runs.NAMES:
    kit, own = kits.opened(fed / name), tmp_path / "here" / name
    own.mkdir(parents=True)
    shutil.copy(kit.folder / joining.OWN / "split.json", own)
    table = joining.schema.read_table(agreed.schema, tmp_path / f"{name}.csv")
    sites[name] = Site(own, name, agreed, table, kit.identity()).answer
  coordinator.run(agreed, InProcess(sites), tmp_path / "here" / "run")
  return _summary(tmp_path / "here" / "run")


def _summary(workdir):
  summary = files.read_object(workdir / "summary.json")
  return {
    name: value
    for name, value in summary.items()
    if not name.endswith("seconds") and isinstance(value, int | float)
  }


def test_a_death_in_between_leaves_the_run_as_it_is_in_one_process(tmp_path, fed):
  said, killed = [], []
  with contextlib.ExitStack() as stack:
    engines = {}
    for name in network_runs.NAMES:
      data, approved = tmp_path / f"{name}.csv", tmp_path / "federation.json"
      kit = joining.prepare(fed / name, data, approved, say=said.append)
      engines[name] = stack.enter_context(engine_process.running(kit))

    def say(line):
      said.append(line)
      if line.startswith("round 1,"):
        killed.extend(engines["south"].jobs())
        for pid in killed:
          os.kill(pid, signal.SIGKILL)

    serving.serve(
      fed / "server", tmp_path / "federation.json", tmp_path / "run", say=say, wait=60.0
    )
  print("\n".join(said))
  assert len(killed) == 1
  assert sum(line.startswith("a run begins, or goes on") for line in said) == 2
  assert _summary(tmp_path / "run") == _here(tmp_path, fed)
  for name in network_runs.NAMES:
    own = fed / name / joining.OWN
    assert (own / "model" / "summary.json").exists()
    assert (own / joining.SENT).exists()


def test_a_site_starts_no_job_but_the_one_it_knows(tmp_path):
  for name, text in engine_files.job("federation", ("north",)).items():
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  app = tmp_path / engine_files.SITE_APP
  engine_limits.require_known(app)
  more = app / "custom" / "bad.py"
  more.parent.mkdir()
  more.write_text("")
  with pytest.raises(RuntimeError, match="is not started"):
    engine_limits.require_known(app)
  more.unlink()
  config = app / "config" / "config_fed_client.json"
  config.write_text(config.read_text().replace("engine.SiteSide", "engine.ServerSide"))
  with pytest.raises(RuntimeError, match="is not started"):
    engine_limits.require_known(app)


def test_a_site_keeps_no_request_that_a_run_does_not_need():
  """Restricted in a process of its own, for it lasts as long as the process."""
  script = """
from fedbnr_jax.network import engine_limits
engine_limits.restrict()
from nvflare.private.fed.client.admin_commands import AdminCommands
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
kept = [*AdminCommands.commands, *ClientRequestProcessors.request_processors]
print(*(type(part).__name__ for part in kept))
"""
  done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  for part in ("Shell", "Log", "Env", "Restart", "Shutdown", "Errors", "Delete"):
    assert part not in done.stdout
