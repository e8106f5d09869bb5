"""A grid of runs: expanded, resumed, and written down whatever becomes of them."""

import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import Future, wait

import ml_collections
import pandas as pd
import pytest

from fedbnr_jax import model
from fedbnr_jax.errors import InputError
from fedbnr_jax.report import tables
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import config_checks, cores
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run.records import RunFolder, as_json
from fedbnr_jax.run.task import table_note
from fedbnr_jax.sweep import grid as grid_lib
from fedbnr_jax.sweep import jobs, run_grid, schedule, table, workers
from fedbnr_jax.sweep.grid import expand
from fedbnr_jax.sweep.jobs import Job
from launch import sweep
from launch import train as launch_train
from tests.runs import SUMMARY, assert_refused, assert_same_bits, once, timeless, tiny

ROOT = pathlib.Path(__file__).resolve().parents[1]

KEY = ["num_clients", "method", "seed"]


def grid(**fields: tuple) -> ml_collections.ConfigDict:
  """A sweep over `configs/default.py`; `kd__alpha` is the field `kd.alpha`."""
  config = ml_collections.ConfigDict()
  config.base = "configs/default.py"
  config.arguments = ()
  config.grid = ml_collections.ConfigDict()
  for name, values in fields.items():
    *outer, last = name.split("__")
    place = config.grid
    for part in outer:
      place[part] = ml_collections.ConfigDict()
      place = place[part]
    place[last] = values
  return config


def small(**fields: tuple) -> ml_collections.ConfigDict:
  """A grid of trainings that take a second, but for the first, which compiles."""
  sizes = {
    "method": ("local+local",),
    "kernel": ("gaussian",),
    "num_samples": (4,),
    "num_rounds": (4,),
    "patience": (4,),
    "num_local_steps": (1,),
    "num_clients": (2,),
    "compare_clients": (False,),
    "data__num_rows": (40,),
    "seed": (0,),
  }
  return grid(**(sizes | fields))


def without_training(monkeypatch, fail: tuple[str, ...] = ()) -> list[str]:
  """Lets runs write a summary only; gives the names of those trained."""
  trained = []

  class Pretender:
    def __init__(self, *arguments: object) -> None:
      pass

    def submit(self, job: Job) -> Future[str | None]:
      name = pathlib.Path(job.folder).name
      trained.append(name)
      result: Future[str | None] = Future()
      if any(part in name for part in fail):
        result.set_result("error: no luck")
        return result
      folder, config = RunFolder(job.folder), ml_collections.ConfigDict(job.config)
      folder.claim(config)
      fields = {name: config[name] for name in KEY}
      folder.write_summary({"dataset": "made", "test_rmse": 0.5} | fields)
      result.set_result(None)
      return result

    def result(self, future: Future[str | None]) -> str | None:
      return future.result()

    def terminate(self) -> None:
      pass

    def end(self, deadline: float) -> None:
      pass

  monkeypatch.setattr(run_grid, "Worker", Pretender)
  return trained


def results(workdir: pathlib.Path) -> pd.DataFrame:
  return pd.read_csv(workdir / "results.csv")


# ----------------------------------------------------------------------- expansion


def test_grid_is_the_product_of_its_fields():
  config = grid(num_clients=(2, 4), method=("fedbnr", "fedbnr-kd"), seed=(0, 1, 2))
  runs = expand(config)
  points = [tuple(dict(run.fields).values()) for run in runs]
  assert len(points) == len(set(points)) == 2 * 2 * 3
  assert len({run.name for run in runs}) == 12


def test_pooled_method_runs_once_for_all_client_counts():
  config = grid(num_clients=(2, 4), method=("fedbnr", "central"), seed=(0, 1))
  runs = [dict(run.fields) for run in expand(config)]
  pooled = [run for run in runs if run["method"] == "central"]
  assert [run["seed"] for run in pooled] == [0, 1]
  assert {run["num_clients"] for run in pooled} == {2}
  assert len(runs) == 4 + 2


def test_nested_fields_become_dotted_overrides(tmp_path):
  (run,) = expand(grid(kd__alpha=(0.5,)))
  assert run.fields == (("kd.alpha", 0.5),)
  command = run.command(tmp_path)
  assert "--config.kd.alpha=0.5" in command
  assert f"--workdir={tmp_path}" in command


def test_arguments_make_a_base_each():
  config = grid(seed=(0,))
  config.base, config.arguments = "configs/uci.py", ("sml", "ccpp,paper")
  runs = expand(config)
  assert [run.base for run in runs] == [
    "configs/uci.py:sml",
    "configs/uci.py:ccpp,paper",
  ]
  assert [run.name for run in runs] == ["sml_seed=0", "ccpp-paper_seed=0"]


def test_empty_grid_is_refused():
  with pytest.raises(InputError, match="grid is empty"):
    expand(grid(seed=()))


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"num_clint": (2,)}, ["config.grid.num_clint", "did you mean 'num_clients'"]),
    ({"kd__alhpa": (2.0,)}, ["config.grid.kd.alhpa", "did you mean 'kd.alpha'"]),
    ({"kd": (2.0,)}, ["config.grid.kd is no field"]),
    ({"num_rounds": ("many",)}, ["config.grid.num_rounds has 'many'"]),
    ({"method": "fedbnr"}, ["config.grid.method is 'fedbnr'", "('fedbnr',)"]),
    ({"seed": 3}, ["config.grid.seed is 3", "(3,)"]),
    ({"fedloc__rule": ("rbmc",)}, ["config.fedloc.rule", "did you mean 'rbcm'"]),
  ],
)
def test_a_grid_that_does_not_fit_is_one_short_line(fields, parts):
  assert_refused(lambda: expand(grid(**fields)), *parts)


def test_configs_of_a_training_and_of_a_sweep_are_told_apart():
  assert_refused(lambda: expand(config_lib.base()), "no field 'base'", "launch.train")
  assert_refused(
    lambda: config_checks.validate(grid(seed=(0,))), "no field 'method'", "launch.sweep"
  )


def test_unknown_method_is_refused_before_anything_runs(tmp_path, monkeypatch):
  trained = without_training(monkeypatch)
  with pytest.raises(InputError, match="did you mean 'fedbnr'"):
    sweep.sweep(grid(method=("fedbnr", "fedbrn")), tmp_path / "s", 1)
  assert trained == []


def test_a_table_that_has_changed_since_a_run_was_done_is_refused(tmp_path):
  table = pd.DataFrame({"a": range(40), "y": [value**0.5 for value in range(40)]})
  table.to_csv(tmp_path / "table.csv", index=False)
  config = grid_lib.config(
    "configs/csv.py",
    (),
    {
      "data.path": (str(tmp_path / "table.csv"),),
      "data.target": ("y",),
      "method": ("fedbnr-ev",),
      "seed": (0,),
    },
  )
  ((run, whole),) = expand(config).items()
  folder = RunFolder(tmp_path / "sweep" / "runs" / run.name)
  folder.claim(whole)
  folder.claim_data(table_note(experiment_lib.load_dataset(whole)))
  folder.write_summary({"test_rmse": 1.0})
  table.assign(y=2 * table["y"]).to_csv(tmp_path / "table.csv", index=False)
  assert_refused(
    lambda: sweep.sweep(config, tmp_path / "sweep", num_workers=1), "are not those"
  )


# ----------------------------------------------------------- workers and their deaths

# Python runs a sitecustomize.py on its path at every start. This one lets something
# happen to a run of each seed as it opens a file to write it for the n-th time.
MISHAPS = """
import os, shutil, signal, sys

FOLDER = os.path.dirname(__file__)

def die_once(metrics):
  copy = os.path.join(FOLDER, "metrics_at_death.csv")
  if not os.path.exists(copy):
    shutil.copy(metrics, copy)
    os.kill(os.getpid(), signal.SIGKILL)

def print_in_c(metrics):
  os.write(1, b"only noise\\n")
  os.write(2, b"more noise\\n")

def meet_a_bug(metrics):
  raise RuntimeError("what nobody\\nforesaw")

def die_always(metrics):
  os._exit(7)

MISHAPS = {
  ("_seed=0", "metrics.csv", 3): die_once,
  ("_seed=1", "metrics.csv", 1): print_in_c,
  ("_seed=2", "metrics.csv", 1): meet_a_bug,
  ("_seed=3", "config.json.tmp", 1): die_always,
}
num_opened = {}

def watch(event, arguments):
  if event == "open" and isinstance(arguments[0], str) and arguments[1] in ("a", "w"):
    path = arguments[0]
    num_opened[path] = num_opened.get(path, 0) + 1
    for (seed, name, number), mishap in MISHAPS.items():
      if path.endswith(seed + "/" + name) and num_opened[path] == number:
        mishap(path)

if "--multiprocessing-fork" in sys.orig_argv:  # A worker.
  sys.addaudithook(watch)
"""


def on_start(patch: pytest.MonkeyPatch, folder: pathlib.Path, code: str) -> None:
  """Has every Python that is started from now on run the code first."""
  folder.mkdir()
  (folder / "sitecustomize.py").write_text(code)
  before = os.environ.get("PYTHONPATH", "")
  patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{before}")


@pytest.fixture(scope="module")
def mishaps(tmp_path_factory) -> tuple[pathlib.Path, str, str]:
  """A sweep of one worker over five seeds; gives its folder, output and last word."""

  def make() -> list[str]:
    workdir = tmp_path_factory.mktemp("mishaps")
    with pytest.MonkeyPatch.context() as patch:
      on_start(patch, workdir / "hook", MISHAPS)
      written: list[str] = []
      patch.setattr(sweep.tqdm, "write", written.append)
      with pytest.raises(InputError) as caught:
        sweep.sweep(small(seed=(0, 1, 2, 3, 4)), workdir, 1)
    return [str(workdir), "\n".join(written), str(caught.value)]

  workdir, written, error = once(tmp_path_factory, "mishaps_of_a_sweep", make)
  return pathlib.Path(workdir), written, error


def folder_of(workdir: pathlib.Path, seed: int) -> pathlib.Path:
  (folder,) = (workdir / "runs").glob(f"*_seed={seed}")
  return folder


def log_of(workdir: pathlib.Path, seed: int) -> str:
  (log,) = (workdir / "logs").glob(f"*_seed={seed}.log")
  return log.read_text()


def test_a_worker_killed_is_replaced_and_its_run_goes_on(mishaps):
  workdir, written, _ = mishaps
  lines = [line for line in written.splitlines() if "seed=0" in line]
  assert len(lines) == 1
  assert "killed by SIGKILL, perhaps for want of memory" in lines[0]
  # Rounds from before, whose seconds tell them from the same made anew.
  before = (workdir / "hook" / "metrics_at_death.csv").read_text().splitlines()
  after = (folder_of(workdir, 0) / "metrics.csv").read_text().splitlines()
  assert len(before) == 3
  assert len(after) == 5
  assert before[:2] == after[:2]


def test_a_run_that_kills_its_workers_fails_and_others_go_on(mishaps):
  workdir, written, error = mishaps
  table = results(workdir).set_index("seed")
  assert list(table["status"]) == ["done", "done", "failed", "failed", "done"]
  assert "exit status 7" in table["reason"][3]
  assert "3 times" in table["reason"][3]
  assert len([line for line in written.splitlines() if "seed=3" in line]) == 3
  assert log_of(workdir, 3).count("$ ") == 3
  assert error.startswith("2 runs failed:")
  assert "seed=2" in error
  assert "seed=3" in error


def test_done_and_failed_runs_stand_in_the_table(mishaps):
  table = results(mishaps[0])
  assert set(table.columns) >= SUMMARY | {"status", "reason"}
  done, failed = (table[table["status"] == word] for word in ("done", "failed"))
  assert set(done["method"]) == set(failed["method"]) == {"local+local"}
  assert set(done["num_clients"]) == set(failed["num_clients"]) == {2}
  assert done["test_rmse"].nunique() == 3
  assert failed["test_rmse"].isna().all()
  assert done["reason"].isna().all()


def test_a_bug_is_told_in_one_line_and_its_traceback_kept(mishaps):
  workdir, written, _ = mishaps
  reason = results(workdir).set_index("seed")["reason"][2]
  assert reason.startswith("RuntimeError: what nobody foresaw; see ")
  assert "Traceback" not in written
  log = log_of(workdir, 2)
  assert "Traceback" in log
  assert "meet_a_bug" in log


def test_what_a_run_prints_is_in_its_log(mishaps):
  workdir, _, _ = mishaps
  log = log_of(workdir, 1)
  assert "launch.train --config=configs/default.py" in log.splitlines()[0]
  assert "only noise" in log
  assert "more noise" in log
  assert "test RMSE" in log
  assert (folder_of(workdir, 1) / "summary.json").exists()
  (outside,) = (workdir / "logs").glob("worker-*.log")
  assert "noise" not in outside.read_text()


def test_a_run_of_a_sweep_is_that_of_the_program_alone(mishaps, tmp_path):
  workdir, _, _ = mishaps
  swept, alone = folder_of(workdir, 1), tmp_path / "alone"
  (run,) = expand(small(seed=(1,)))
  subprocess.run(run.command(alone), cwd=ROOT, capture_output=True, check=True)
  names = [
    sorted(str(path.relative_to(folder)) for path in folder.glob("*/*"))
    for folder in (swept, alone)
  ]
  assert names[0] == names[1]
  for name in ("config.json", "data.json", "preprocessing.json"):
    assert (swept / name).read_bytes() == (alone / name).read_bytes()
  for path in (alone / "figures").iterdir():
    assert (swept / "figures" / path.name).read_bytes() == path.read_bytes()
  one, other = RunFolder(swept), RunFolder(alone)
  assert timeless(one.metrics()) == timeless(other.metrics())
  assert timeless([one.summary()]) == timeless([other.summary()])
  assert_same_bits(model.load(swept).state, model.load(alone).state)


def test_a_second_sweep_does_what_is_left_and_ends_the_same(mishaps, tmp_path):
  workdir, done = tmp_path / "sweep", folder_of(mishaps[0], 4)
  shutil.copytree(done, workdir / "runs" / done.name)
  config = small(seed=(4,))
  summary = folder_of(workdir, 4) / "summary.json"
  before = summary.stat().st_mtime_ns
  run_grid.run_grid(config, workdir)  # Nothing is left to do, and no file changes.
  assert summary.stat().st_mtime_ns == before
  first = results(workdir)
  assert list(first["status"]) == ["done"]

  # Without its summary the run is taken up again and ends the same.
  summary.unlink()
  assert run_grid.run_grid(config, workdir).failures == {}
  assert summary.stat().st_mtime_ns > before
  second = results(workdir)
  seconds = [name for name in first if name.endswith("seconds")]
  pd.testing.assert_frame_equal(
    first.drop(columns=seconds), second.drop(columns=seconds), check_exact=True
  )


def test_pooled_rows_are_trained_once_for_all_client_counts(tmp_path):
  # Before it, one training that fails: 5 rows are too few.
  config = small(num_clients=(2, 3), method=("central",), data__num_rows=(5, 40))
  with pytest.raises(InputError, match="1 runs failed") as caught:
    sweep.sweep(config, tmp_path, 1)
  assert "num_rows=5" in str(caught.value)
  assert len(list((tmp_path / "runs").glob("*num_rows=40*"))) == 1
  table = results(tmp_path)
  assert list(table["status"]) == ["failed", "failed", "done", "done"]
  done, failed = (table[table["status"] == word] for word in ("done", "failed"))
  assert list(done["num_clients"]) == list(failed["num_clients"]) == [2, 3]
  assert set(done["method"]) == set(failed["method"]) == {"central"}
  assert done["test_rmse"].nunique() == 1
  assert done["reason"].isna().all()
  assert failed["reason"].str.contains("give at least 10").all()
  assert not failed["reason"].str.contains("Traceback").any()


def test_what_a_training_refuses_is_one_line(tmp_path, capsys):
  (config,) = expand(small(data__num_rows=(5,))).values()
  job = Job(as_json(config), str(tmp_path / "run"), str(tmp_path / "log"), "command")
  line = jobs.perform(launch_train.train, job)
  assert line.startswith("error: ")
  assert "give at least 10" in line
  assert "\n" not in line
  assert capsys.readouterr().err == f"$ command\n{line}\n"


def print_cores(config: ml_collections.ConfigDict, folder: str) -> None:
  """Stands for a training."""
  print(sorted(os.sched_getaffinity(0)), os.environ["XLA_FLAGS"], os.getpid())


def test_a_worker_has_its_core_and_is_replaced_when_it_died_between_runs(tmp_path):
  before = os.sched_getaffinity(0)
  core = max(before)
  worker = workers.Worker(core, tmp_path / "worker.log", print_cores)
  pids = []
  try:
    for number in range(2):
      log = tmp_path / f"{number}.log"
      # With a byte that is no text, as names of files may have.
      future = worker.submit(Job({}, str(tmp_path), str(log), "the command \udcff"))
      wait([future], timeout=60)
      assert worker.result(future) is None
      first, line = log.read_bytes().splitlines()
      assert first == b"$ the command \xff"
      *words, pid = line.decode().split()
      assert words == [f"[{core}]", *os.environ["XLA_FLAGS"].split()]
      pids.append(int(pid))
      (process,) = (p for p in multiprocessing.active_children() if p.pid == pids[-1])
      process.kill()
      process.join()
  finally:
    workers.stop([worker])
  assert pids[0] != pids[1]
  assert os.sched_getaffinity(0) == before


def test_a_worker_that_was_stopped_is_told_of_once():
  """It may be meant to go on; the sweep would wait for it without a word."""

  class Resting:
    def submit(self, job):
      return Future()

    def stopped(self):
      return 42

  said: list[str] = []
  run = types.SimpleNamespace(name="a-run")
  order = schedule.Schedule([run], [Resting()], lambda run: None, said.append)
  order.start()
  for _ in range(4):
    assert order.ended(0.0) == []
  (line,) = said
  assert line.startswith("a-run: ")
  assert "kill -CONT 42" in line


def test_workers_that_cannot_start_are_given_up(tmp_path, monkeypatch):
  code = 'import sys\nif "--multiprocessing-fork" in sys.orig_argv: sys.exit("no luck")'
  on_start(monkeypatch, tmp_path / "hook", code)
  with pytest.raises(InputError, match=r"no worker can start .*status 1: .*no luck"):
    sweep.sweep(small(seed=(0, 1, 2)), tmp_path, 2)
  assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "two", "", "AUTO", "1e3"])
def test_bad_number_of_workers_is_refused(text: str):
  assert_refused(lambda: sweep.parse_workers(text), "--workers", repr(text), "auto")


def test_number_of_workers():
  assert sweep.parse_workers("3") == 3
  assert sweep.parse_workers("auto") == len(cores.available_cores())


def test_a_script_that_its_workers_would_run_again_is_refused(tmp_path, monkeypatch):
  process = multiprocessing.current_process()
  monkeypatch.setattr(process, "_inheriting", True, raising=False)
  assert_refused(lambda: run_grid.run_grid(small(), tmp_path), 'if __name__ == "__main')


# -------------------------------------------------------------------- the sweep stopped

PROGRAM = """
import ml_collections
def get_config():
  config = ml_collections.ConfigDict(%s)
  config.base, config.arguments = "configs/default.py", ()
  return config
"""
ENDLESS = {"num_rounds": (100_000,), "patience": (100_000,)}


def started(workdir: pathlib.Path, num_rounds: int) -> subprocess.Popen[str]:
  """A sweep as from the shell, in a process group of its own, past some rounds."""
  file = workdir / "sweep.py"
  file.write_text(PROGRAM % {"grid": small(**ENDLESS).grid.to_dict()})
  # Tests that a shell has put in the background ignore interruptions, and so would it.
  handler = signal.signal(signal.SIGINT, signal.default_int_handler)
  program = subprocess.Popen(
    [sys.executable, "-m", "launch.sweep", f"--config={file}"]
    + [f"--workdir={workdir}", "--workers=1"],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    process_group=0,
  )
  signal.signal(signal.SIGINT, handler)
  while last_checkpoint(workdir) < num_rounds:
    assert program.poll() is None, program.communicate()[0]
    time.sleep(0.05)
  return program


def last_checkpoint(workdir: pathlib.Path) -> int:
  names = [path.stem for path in workdir.glob("runs/*/checkpoint/*.npz")]
  return max(map(int, names), default=0)


def wait_for_the_group_to_end(group: int) -> None:
  """Waits until no process of a group is left, or fails."""
  for _ in range(200):
    try:
      os.killpg(group, 0)
    except ProcessLookupError:
      return
    time.sleep(0.05)
  os.killpg(group, signal.SIGKILL)
  pytest.fail("a worker has outlived its sweep by ten seconds")


def test_workers_end_with_their_sweep_killed_or_stopped_and_keep_their_rounds(tmp_path):
  killed = started(tmp_path, 2)
  # Until then nobody else trains the same runs.
  assert_refused(
    lambda: sweep.sweep(small(**ENDLESS), tmp_path, 1), "another program", "is writing"
  )
  killed.kill()
  killed.communicate()
  wait_for_the_group_to_end(killed.pid)

  # Taken up by the same command, and stopped by the keyboard.
  (folder,) = (RunFolder(path) for path in (tmp_path / "runs").iterdir())
  before = folder.metrics()
  stopped = started(tmp_path, len(before) + 2)
  begin = time.monotonic()
  os.killpg(stopped.pid, signal.SIGINT)
  output = stopped.communicate(timeout=60)[0]
  assert time.monotonic() - begin < 10
  wait_for_the_group_to_end(stopped.pid)
  assert stopped.returncode == 130
  assert output.count("error: stopped") == 1
  for word in ("died", "leaked", "Warning"):
    assert word not in output
  for text in (output, *(log.read_text() for log in tmp_path.glob("logs/*"))):
    assert "Traceback" not in text
  after = folder.metrics()
  assert last_checkpoint(tmp_path) >= len(after) - 1
  assert after[: len(before) - 1] == before[:-1]


# -------------------------------------------------------------------- the table alone


def test_one_row_for_each_point(tmp_path, monkeypatch):
  without_training(monkeypatch)
  config = grid(num_clients=(2, 4), method=("fedbnr", "central"), seed=(0, 1))
  sweep.sweep(config, tmp_path, 2)
  table = results(tmp_path)
  assert len(table) == 8
  assert not table.duplicated(KEY).any()
  assert (table["status"] == "done").all()


def test_only_what_is_missing_is_run(tmp_path, monkeypatch):
  trained = without_training(monkeypatch)
  config = grid(num_clients=(2, 4), seed=(0, 1))
  sweep.sweep(config, tmp_path, 1)
  assert len(trained) == 4
  trained.clear()
  (tmp_path / "runs" / "num_clients=4_seed=0" / "summary.json").unlink()
  sweep.sweep(config, tmp_path, 1)
  assert trained == ["num_clients=4_seed=0"]
  assert len(results(tmp_path)) == 4


def test_failed_run_is_tried_again(tmp_path, monkeypatch):
  without_training(monkeypatch, fail=("seed=1",))
  config = grid(num_clients=(2,), seed=(0, 1))
  with pytest.raises(InputError, match="seed=1"):
    sweep.sweep(config, tmp_path, 1)
  assert list(results(tmp_path)["status"]) == ["done", "failed"]
  assert list(results(tmp_path)["reason"])[1] == "error: no luck"

  # A start that is stopped at once does not forget why.
  with monkeypatch.context() as patch:
    patch.setattr(schedule.Schedule, "start", lambda *_: pytest.exit("stopped"))
    with pytest.raises(pytest.exit.Exception):
      sweep.sweep(config, tmp_path, 1)
  assert list(results(tmp_path)["reason"])[1] == "error: no luck"

  trained = without_training(monkeypatch)
  sweep.sweep(config, tmp_path, 1)
  assert len(trained) == 1
  assert list(results(tmp_path)["status"]) == ["done", "done"]


def test_a_reason_may_name_a_file_whose_name_is_no_text(tmp_path):
  (run,), folder = expand(small()), RunFolder(tmp_path / "run")
  runs, folders = {run: tiny()}, {run.name: folder}
  written = table.RunTable(tmp_path / "results.csv", tmp_path, runs, folders)
  for name, shown in ((b"gr\xf6sse", "gr\ufffdsse"), ("größe".encode(), "größe")):
    written.record(run, f"error: {name.decode('ascii', 'surrogateescape')}")
    written.write()
    assert list(results(tmp_path)["reason"]) == [f"error: {shown}"]


def test_failed_run_names_its_dataset(tmp_path, monkeypatch):
  without_training(monkeypatch, fail=("sml",))
  config = grid(seed=(0,))
  config.base, config.arguments = "configs/uci.py", ("sml", "ccpp")
  with pytest.raises(InputError, match="sml"):
    sweep.sweep(config, tmp_path, 1)
  failed = results(tmp_path).query("status == 'failed'")
  assert list(failed["dataset"]) == ["sml"]


def test_failed_run_of_a_table_has_the_name_of_its_file(tmp_path, monkeypatch):
  without_training(monkeypatch, fail=("seed",))
  config = grid(seed=(0,), data__path=("some/where/sites.csv",))
  config.base = "configs/csv.py"
  with pytest.raises(InputError, match="1 runs failed"):
    sweep.sweep(config, tmp_path, 1)
  assert list(tables.read_results(tmp_path / "results.csv")["dataset"]) == ["sites"]


def test_pooled_base_gives_one_row_for_each_point(tmp_path, monkeypatch):
  without_training(monkeypatch)
  sweep.sweep(grid(num_clients=(2, 4), method=("central",)), tmp_path, 1)
  assert list(results(tmp_path)["num_clients"]) == [2, 4]
  assert not results(tmp_path).duplicated(KEY).any()


def test_results_of_another_base_are_not_taken_over(tmp_path, monkeypatch):
  trained = without_training(monkeypatch)
  config = grid(num_clients=(2,), seed=(0,))
  sweep.sweep(config, tmp_path, 1)
  config.base = "configs/csv.py"
  trained.clear()
  try:
    sweep.sweep(config, tmp_path, 1)
  except InputError:
    return  # Refused: as good as done anew.
  assert len(trained) == 1


# ----------------------------------------------------------------------------- shards


def test_shards_share_the_grid_out(tmp_path, monkeypatch):
  config = small(seed=(0, 1, 2, 3, 4))
  whole = [run.name for run in expand(config)]
  trained = []
  for index in (1, 2, 3):
    names = without_training(monkeypatch)
    sweep.sweep(config, tmp_path / str(index), 1, (index, 3))
    assert names
    trained += names
  assert sorted(trained) == sorted(whole)


def test_shards_may_share_a_folder_but_no_table(tmp_path, monkeypatch):
  config = small(seed=(0, 1, 2))
  without_training(monkeypatch)
  for index in (1, 2):
    sweep.sweep(config, tmp_path, 1, (index, 2))
  paths = [tmp_path / f"results-{index}of2.csv" for index in (1, 2)]
  assert [list(pd.read_csv(path).seed) for path in paths] == [[0, 2], [1]]
  assert sorted(tables.read_results(*paths).seed) == [0, 1, 2]


def test_a_shard_beyond_the_grid_is_refused(tmp_path):
  assert_refused(lambda: sweep.sweep(small(), tmp_path, 1, (2, 2)), "shard 2/2")


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "a/b", "1/0", "-1/2"])
def test_shard_that_is_none_is_refused(text):
  assert_refused(lambda: sweep.parse_shard(text), "--shard", repr(text))


def test_shard_is_read():
  assert sweep.parse_shard("2/3") == (2, 3)
