"""What happens to a federation on the real engine when something goes wrong.

python -m benchmarks.network_faults [--only=masked] [--output=FILE.csv]

A server and three sites, each a program of its own on this machine, train by
`fedbnr-ev` with masked sums over TLS; then it is done again, each time with one fault.
Of wrong messages (`network_lies`) some are sent without masks, so that a site is named.
A row says what was printed of the fault and after how many seconds, and what became of
the model: "the same" has every score of the run without faults, to the last bit. A row
is appended when it is known, and what stands in the file is not done again.
"""

import argparse
import contextlib
import csv
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import network_lies
from benchmarks.network_stage import SITES, Program, Stage, Told, last, until
from fedbnr_jax.network import agreement, certificates, kits, schema, schema_proposal
from fedbnr_jax.network.engine_process import EngineProcess
from launch import network_demo

_COLUMNS = ("fault", "printed", "seconds", "model", "total seconds")
_ROUNDS = 5


def job_killed(stage: Stage) -> Told:
  """SIGKILL of a site's process of the job, amid a round."""
  server, _ = stage.start()
  server.wait_for("round 1,")
  when = _kill(_job_of(stage, "south"))
  return _told(server, when)


def site_killed(stage: Stage) -> Told:
  """SIGKILL of all processes of a site; its people start it again after 5 s."""
  server, sites = stage.start()
  server.wait_for("round 1,")
  when = _kill_all(stage, "south", sites["south"])
  time.sleep(5.0)
  stage.join("south")
  return _told(server, when)


def server_job_killed(stage: Stage) -> Told:
  """SIGKILL of the server's process of the job."""
  server, _ = stage.start()
  server.wait_for("round 1,")
  when = _kill(_job_of(stage, "server"))
  return _told(server, when)


def server_killed(stage: Stage) -> Told:
  """SIGKILL of all processes of the server; the same command again after 5 s."""
  server, sites = stage.start()
  server.wait_for("round 1,")
  when = _kill_all(stage, "server", server)
  time.sleep(5.0)
  again = stage.serve()
  line = again.wait_for("a run begins, or goes on")
  seconds = time.monotonic() - when
  assert again.wait() == 0, again.text()
  assert all(site.process.poll() is None for site in sites.values())
  return f"{line} (sites were not touched)", seconds


def site_hangs(stage: Stage) -> Told:
  """SIGSTOP of a site's process of the job: it is there, and does not answer."""
  server, _ = stage.start()
  server.wait_for("round 1,")
  when = _signal(_job_of(stage, "south"), signal.SIGSTOP)
  return _told(server, when)


def site_late(stage: Stage) -> Told:
  """A site is started 30 s after the others."""
  server = stage.serve()
  for name in SITES[:2]:
    stage.join(name)
  line = server.wait_for("waiting for 'west'")
  time.sleep(30.0)
  when = time.monotonic()
  stage.join("west")
  server.wait_for("a run begins")
  seconds = time.monotonic() - when
  assert server.wait() == 0, server.text()
  return line, seconds


def stranger(stage: Stage) -> Told:
  """Somebody without a certificate, and with one of an authority of their own."""
  server, _ = stage.start()
  server.wait_for("round 1,")
  plan = kits.opened(stage.fed / "server").plan
  own = certificates.new_authority(plan.federation)
  key = certificates.new_key()
  issued = certificates.issue(own, "north", certificates.public_of(key))
  told = [
    f"without a certificate: {_knock(plan.host, plan.port, None)}",
    f"with a stranger's: {_knock(plan.host, plan.port, (key, issued))}",
  ]
  assert server.wait() == 0, server.text()
  return "; ".join(told), 0.0


def copied_kit(stage: Stage) -> Told:
  """A copy of a kit is started elsewhere as a run begins, and ended after 30 s."""
  server, _ = stage.start()
  copy = stage.folder / "copied"
  shutil.copytree(stage.fed / "north", copy, ignore=shutil.ignore_patterns(".lock"))
  server.wait_for("a run begins")
  when = time.monotonic()
  there = stage.join("north", copy)
  time.sleep(30.0)
  there.end()
  return _told(server, when)


def job_with_code(stage: Stage) -> Told:
  """Whoever has the coordinator's key gives the engine a job that brings code."""
  return _bad_job(stage, code=True)


def job_with_a_class(stage: Stage) -> Told:
  """Whoever has the coordinator's key names a class that is not on the sites' list."""
  return _bad_job(stage, code=False)


def logs_with_code(stage: Stage) -> Told:
  """Whoever has the coordinator's key sets a job's log by a text that calls code."""
  marker = stage.folder / "it-ran"
  handler = {"()": "builtins.open", "file": str(marker), "mode": "w"}
  text = json.dumps({"version": 1, "handlers": {"bad": handler}})
  return _ask_engine(
    stage, marker, lambda session, job: session.configure_job_log(job, text, "north")
  )


def reads_files(stage: Stage) -> Told:
  """Whoever has the coordinator's key asks a site's engine for a file of its kit."""
  marker = stage.folder / "never"
  return _ask_engine(
    stage, marker, lambda session, job: session.cat_target("north", file="log.txt")
  )


def another_schema(stage: Stage) -> Told:
  """A site's table lacks a column of the schema."""
  path = stage.folder / "other.csv"
  text = (stage.folder / "tables" / "north.csv").read_text()
  path.write_text(text.replace("x,y", "z,y", 1))
  return _refused(stage.join("north", data=path))


def edited_kit(stage: Stage) -> Told:
  """A kit's settings were edited so that jobs may bring code."""
  path = stage.fed / "north" / "local" / "authorization.json"
  path.write_text(path.read_text().replace('"byoc": "none"', '"byoc": "any"'))
  return _refused(stage.join("north"))


def unapproved(stage: Stage) -> Told:
  """A site has approved another federation.json than the server has."""
  agreed = agreement.read(stage.folder / "federation.json")
  other = stage.folder / "other.json"
  agreement.write(other, dataclasses.replace(agreed, most_sums=77))
  server = stage.serve()
  for name in SITES[:2]:
    stage.join(name)
  stage.join("west", approve=other)
  server.wait_for("a run begins")
  when = time.monotonic()
  server.wait()
  return last(server), time.monotonic() - when


def another_version(stage: Stage) -> Told:
  """A site has another version of the package."""
  server = stage.serve()
  for name in SITES[:2]:
    stage.join(name)
  stage.join("west")
  kit = stage.fed / "west"
  # Its program is replaced by one that says another version.
  until(lambda: (kit / "side.json").exists())
  content = json.loads((kit / "side.json").read_text())
  content["program"] = "benchmarks.network_faults:answering_as_another_version"
  (kit / "side.json").write_text(json.dumps(content))
  server.wait_for("a run begins")
  when = time.monotonic()
  server.wait()
  return last(server), time.monotonic() - when


def answering_as_another_version(**arguments: Any) -> Callable[[bytes], bytes]:
  """Makes the answers of a site that says it has another version."""
  import fedbnr_jax
  from fedbnr_jax.network import joining

  fedbnr_jax.__version__ = "0.0.1"
  return joining.answering(**arguments)


def fewer_sites(stage: Stage) -> Told:
  """A site dies for good, unmasked, and two sites were agreed on to be enough."""
  stage.agree(masking=False, min_sites=2)
  server, sites = stage.start()
  server.wait_for("round 1,")
  when = _kill_all(stage, "south", sites["south"])
  return _told(server, when)


FAULTS: dict[str, Callable[[Stage], Told]] = {
  "none": network_lies.nothing,
  "a site's job process is killed": job_killed,
  "a whole site is killed, and comes back": site_killed,
  "the server's job process is killed": server_job_killed,
  "the whole server is killed, and started again": server_killed,
  "a site hangs": site_hangs,
  "a site comes late": site_late,
  "a site dies, and two are enough": fewer_sites,
  "a stranger knocks": stranger,
  "a copied kit": copied_kit,
  "a job ships code": job_with_code,
  "a job names another class": job_with_a_class,
  "a log setting that calls code": logs_with_code,
  "the coordinator reads a site's file": reads_files,
  "a site with another schema": another_schema,
  "a kit was edited": edited_kit,
  "a site has approved another digest": unapproved,
  "a site has another version": another_version,
  **network_lies.faults(),
}


def main() -> None:
  # Also where it was started in the background, where Ctrl-C is ignored: programs that
  # it starts are ended by it.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--only", default="", help="Words that a fault must have.")
  parser.add_argument("--output", default="benchmarks/results/network_faults.csv")
  arguments = parser.parse_args()
  output = pathlib.Path(arguments.output)
  known = _known(output)
  with tempfile.TemporaryDirectory() as folder:
    base = pathlib.Path(folder) / "base"
    expected: dict[str, str] = {}
    _make(base)
    wanted = [name for name in FAULTS if arguments.only in name and name not in known]
    needed = {network_lies.reference(name) for name in wanted}
    for name in sorted(FAULTS, key=lambda name: name not in needed):
      if name not in wanted and name not in needed:
        continue
      row = _try(pathlib.Path(folder) / "stage", base, name, FAULTS[name])
      if name in needed:
        expected[name] = row["model"]
      elif row["model"] == expected[network_lies.reference(name)]:
        row["model"] = "the same"
      elif row["model"].startswith("{"):
        row["model"] = f"another: {row['model']}"
      print(row, flush=True)
      if name in wanted:
        _append(output, row)


def _make(base: pathlib.Path) -> None:
  """Makes kits, tables, splits and an agreement that all runs have in common."""
  tables = network_demo.write_tables(base / "tables")
  fed = base / "fed"
  kits.init(fed, SITES, f"localhost:{network_demo.free_port()}", keys_here=True)
  config = network_demo.config()
  config.num_rounds = _ROUNDS
  proposed = schema_proposal.propose(tables["north"], "y", name="faults")
  schema.write(base / "schema.json", proposed)
  agreement.write(
    base / "federation.json", agreement.make(config, proposed, kits.members(fed))
  )
  for number, name in enumerate(SITES):
    (fed / name / "own").mkdir(mode=0o700)
    (fed / name / "own" / "split.json").write_text(json.dumps({"seed": f"{number:x}"}))


def _try(
  folder: pathlib.Path, base: pathlib.Path, name: str, fault: Callable[[Stage], Told]
) -> dict[str, Any]:
  shutil.rmtree(folder, ignore_errors=True)
  shutil.copytree(base, folder)
  stage, begun = Stage(folder), time.monotonic()
  try:
    printed, seconds = fault(stage)
  except AssertionError as error:
    printed, seconds = f"NOT AS EXPECTED: {error}", float("nan")
  finally:
    for program in stage.programs:
      program.end()
    for kit in ("server", *SITES):
      for pid in _all_of(stage.fed / kit):
        _signal([pid], signal.SIGKILL)
  return {
    "fault": name,
    "printed": printed.replace(str(folder), "..."),
    "seconds": round(seconds, 1),
    "model": stage.model(),
    "total seconds": round(time.monotonic() - begun, 1),
  }


def _told(server: Program, when: float) -> Told:
  """Finds the first line on a fault, and waits for the server's end."""
  code = server.wait()
  lines = [(t, line) for t, line in server.lines if t >= when]
  found = [(t, line) for t, line in lines if not line.startswith("round ")]
  assert found, f"nothing was said of it: {server.text()}"
  first, line = found[0]
  also = "" if code == 0 else f" [serve ended with {code}: {last(server)}]"
  return line + also, first - when


def _refused(site: Program) -> Told:
  begun = time.monotonic()
  assert site.wait() != 0, site.text()
  return last(site), time.monotonic() - begun


def _job_of(stage: Stage, name: str) -> list[int]:
  """Finds the process of the job, which has its number among its words."""
  found = [pid for pid in _all_of(stage.fed / name) if _is_of_a_job(pid)]
  assert found, "there is no process of a job"
  return found


def _all_of(kit: pathlib.Path) -> list[int]:
  return EngineProcess(kits.Kit(kit, None)).jobs()  # type: ignore[arg-type]


def _is_of_a_job(pid: int) -> bool:
  try:
    words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
  except OSError:
    return False
  return b"worker_process" in words or b"runner_process" in words


def _kill(pids: list[int]) -> float:
  return _signal(pids, signal.SIGKILL)


def _kill_all(stage: Stage, name: str, program: Program) -> float:
  """Kills a program, the engine that it has started, and the job's process."""
  pids = [program.process.pid, *_all_of(stage.fed / name)]
  return _signal(pids, signal.SIGKILL)


def _signal(pids: list[int], number: int) -> float:
  for pid in pids:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, number)
  return time.monotonic()


def _knock(host: str, port: int, pair: tuple[bytes, bytes] | None) -> str:
  """Opens a TLS connection without believing anybody, and says what comes back."""
  context = ssl.create_default_context()
  context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
  context.set_alpn_protocols(["h2"])
  with tempfile.TemporaryDirectory() as folder:
    if pair is not None:
      key, certificate = pathlib.Path(folder, "key"), pathlib.Path(folder, "crt")
      key.write_bytes(pair[0])
      certificate.write_bytes(pair[1])
      context.load_cert_chain(certificate, key)
    try:
      with (
        socket.create_connection((host, port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
      ):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        answer = connection.recv(100)
        return f"{len(answer)} bytes" if answer else "closed"
    except OSError as error:
      return f"refused ({' '.join(str(error).split()[:6])})"


def _bad_job(stage: Stage, *, code: bool) -> Told:
  """Submits a job beside the server's own; says how it ended and what ran."""
  from fedbnr_jax.network import engine, engine_files, engine_process

  marker = stage.folder / "it-ran"
  files = engine_files.job("bad", SITES)
  name = "site/config/config_fed_client.json"
  if code:
    files["site/custom/bad.py"] = _code(marker)
    files[name] = files[name].replace(engine_files.SITE_CLASSES[1], "bad.Bad")
  else:
    files[name] = files[name].replace(
      engine_files.SITE_CLASSES[1], "nvflare.app_common.np.np_trainer.NPTrainer"
    )
  for site in SITES:
    stage.join(site)
  kit = kits.opened(stage.fed / "server")
  with engine_process.running(kit), engine.control(kit, 120) as control:
    until(lambda: len(control.connected()) == len(SITES))
    when = time.monotonic()
    place = stage.folder / "bad"
    for path, text in files.items():
      (place / path).parent.mkdir(parents=True, exist_ok=True)
      (place / path).write_text(text)
    try:
      job = control._session.submit_job(str(place))
    except Exception as error:
      return f"not taken: {error}", time.monotonic() - when
    until(lambda: control.status(job).startswith(("FINISHED", "FAILED", "ABANDONED")))
    seconds = time.monotonic() - when
    status = control.status(job)
    meta = control._session.get_job_meta(job)
  detail = str(meta.get("job_deploy_detail", ""))[:200]
  return (
    f"{status}; {'it RAN' if marker.exists() else 'nothing ran'}; {detail}",
    seconds,
  )


def _ask_engine(
  stage: Stage, marker: pathlib.Path, ask: Callable[[Any, str], Any]
) -> Told:
  """Asks the engine for something while a run goes on; says what it answered."""
  from fedbnr_jax.network import engine

  server, _ = stage.start()
  server.wait_for("round 1,")
  kit = kits.opened(stage.fed / "server")
  with engine.control(kit, 120) as control:
    (job,) = control._session.list_jobs()
    when = time.monotonic()
    try:
      answer = f"answered: {ask(control._session, job['job_id'])}"
    except Exception as error:
      answer = f"refused: {type(error).__name__}: {error}"
    seconds = time.monotonic() - when
  code = server.wait()
  ran = "it RAN" if marker.exists() else "nothing ran"
  return f"{' '.join(answer.split())[:200]}; {ran} [serve: {code}]", seconds


def _code(marker: pathlib.Path) -> str:
  body = f"open({str(marker)!r}, 'w').close()"
  return f"{body}\n\n\nclass Bad:\n  def __init__(self):\n    {body}\n"


def _known(path: pathlib.Path) -> set[str]:
  """Returns the faults that stand in a file."""
  if not path.exists():
    return set()
  with open(path, newline="") as file:
    return {row["fault"] for row in csv.DictReader(file)}


def _append(path: pathlib.Path, row: dict[str, Any]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  new = not path.exists()
  with open(path, "a", newline="") as file:
    writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
    if new:
      writer.writeheader()
    writer.writerow(row)


if __name__ == "__main__":
  main()
