"""The programs from end to end: train, train again, predict."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pandas as pd
import pytest

from configs import csv as csv_config
from configs import default
from fedbnr_jax import model, workflow
from fedbnr_jax.data import load_table, read_table
from fedbnr_jax.errors import InputError
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from fedbnr_jax.run.program import make_program
from fedbnr_jax.run.records import RunFolder
from fedbnr_jax.run.task import table_note
from launch import predict as launch_predict
from launch import train as launch_train
from tests.runs import SUMMARY, seal_anew, tiny

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMALL = {
  "method": "fedbnr-ev",
  "data.inputs": "standard",
  "hidden_size": 8,
  "num_samples": 4,
  "num_rounds": 3,
  "num_local_steps": 2,
  "num_clients": 2,
  "data.num_rows": 40,
}


def launch(
  program: str, *arguments: object, optimised: bool = False
) -> subprocess.CompletedProcess[str]:
  """Runs a program as from the shell, and if so said, compiled as a user's."""
  environment = {k: v for k, v in os.environ.items() if k != "FEDBNR_CACHE_DIR"}
  if optimised:  # Which conftest.py switches off for speed.
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
  command = [sys.executable, "-m", f"launch.{program}", *map(str, arguments)]
  return subprocess.run(
    command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
  )


def overrides(**more: object) -> list[str]:
  fields = SMALL | {name.replace("__", "."): value for name, value in more.items()}
  return [f"--config.{name}={value}" for name, value in fields.items()]


def times(folder: pathlib.Path) -> dict[str, int]:
  return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def write_table(path: pathlib.Path, num_rows: int = 60) -> pd.DataFrame:
  """A table with a client column and a categorical one."""
  rng = np.random.default_rng(1)
  area, age = rng.uniform(30, 200, num_rows), rng.integers(0, 90, num_rows)
  heating = np.array(["gas", "oil", "heat pump"])[rng.integers(3, size=num_rows)]
  price = 2000 * area - 500 * age + 1e4 * (heating == "gas")
  table = pd.DataFrame(
    {
      "area": area,
      "age": age,
      "heating": heating,
      "site": np.array(["north", "south", "west"])[np.arange(num_rows) % 3],
      "price": price + rng.normal(scale=1e3, size=num_rows),
    }
  )
  table.to_csv(path, index=False)
  return table


def table_config(path: pathlib.Path, **fields: object):
  config = csv_config.get_config()
  config.update_from_flattened_dict(SMALL)
  config.data.path = str(path)
  config.data.target = "price"
  config.data.client = "site"
  for name, value in fields.items():
    config.update_from_flattened_dict({name.replace("__", "."): value})
  return config


# ------------------------------------------------------------------------- train


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> pathlib.Path:
  """The demo made small, in a process of its own, as users run it."""
  workdir = tmp_path_factory.mktemp("demo") / "run"
  command = ["--config=configs/default.py", f"--workdir={workdir}", *overrides()]
  done = launch("train", *command, optimised=True)
  assert done.returncode == 0, done.stderr
  assert "client 1 alone" in done.stdout
  assert "Traceback" not in done.stderr
  return workdir


def demo_config():
  config = default.get_config()
  config.update_from_flattened_dict(SMALL)
  return config


def test_demo_writes_every_public_file(demo):
  made = {str(path.relative_to(demo)) for path in demo.rglob("*")}
  assert {"config.json", "metrics.csv", "summary.json", "checkpoint"} <= made
  figures = ("learning_curve", "reliability", "predicted", "function", "comparison")
  for name in figures:
    content = (demo / "figures" / f"{name}.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 5000
  assert not [name for name in made if name.endswith(".tmp")]


def test_demo_records_agree(demo):
  summary = json.loads((demo / "summary.json").read_text())
  assert set(summary) >= SUMMARY
  metrics = pd.read_csv(demo / "metrics.csv")
  assert list(metrics["round"]) == [1, 2, 3]
  best = metrics.iloc[summary["best_round"] - 1]
  assert summary["test_rmse"] == best["test_rmse"]
  assert best["val_rmse"] == metrics["val_rmse"].min()
  assert summary["min_test_rmse"] == metrics["test_rmse"].min()
  assert summary["dataset"] == "two-ranges"
  config = json.loads((demo / "config.json").read_text())
  assert config == demo_config().to_dict()


def test_finished_run_says_so_and_changes_nothing(demo, capsys):
  before = times(demo)
  launch_train.train(demo_config(), str(demo))
  assert "finished" in capsys.readouterr().out
  assert times(demo) == before


def test_finished_run_exits_zero(demo):
  before = times(demo)
  command = ["--config=configs/default.py", f"--workdir={demo}", *overrides()]
  done = launch("train", *command)
  assert (done.returncode, done.stderr) == (0, "")
  assert "finished" in done.stdout
  assert times(demo) == before


@pytest.mark.parametrize("method", ["fedbnr-kd", "central"])
def test_other_methods_train(tmp_path, method: str):
  launch_train.train(tiny(method=method), str(tmp_path / "run"))
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["method"] == method
  assert summary["num_clients"] == 2


@pytest.mark.parametrize("method", ["fedbnr-kd", "fedavg"])
def test_clients_alone_are_compared_whatever_the_method(tmp_path, capsys, method: str):
  config = tiny(method=method, compare_clients=True)
  launch_train.train(config, str(tmp_path / "run"))
  assert "client 1 alone" in capsys.readouterr().out
  assert (tmp_path / "run" / "figures" / "comparison.png").exists()
  assert (tmp_path / "run" / "summary.json").exists()


def test_one_input_beside_a_constant_column_is_drawn(tmp_path):
  x = np.linspace(0.0, 1.0, 40)
  table = pd.DataFrame({"always": 1.0, "x": x, "price": np.sin(6 * x)})
  table.to_csv(tmp_path / "t.csv", index=False)
  config = table_config(tmp_path / "t.csv", data__client="")
  with pytest.warns(UserWarning, match="'always'"):
    launch_train.train(config, str(tmp_path / "run"))
  assert (tmp_path / "run" / "figures" / "function.png").exists()


def test_non_finite_loss_exits_with_one_line(tmp_path):
  workdir = tmp_path / "run"
  command = ["--config=configs/default.py", f"--workdir={workdir}"]
  command += overrides(dtype="float32", learning_rate=1e30, initial_prior_std=1e30)
  done = launch("train", *command)
  assert done.returncode == 3, done.stderr
  assert done.stderr.startswith("error: round 1")
  assert done.stderr.count("\n") == 1
  assert not (workdir / "summary.json").exists()


# ----------------------------------------------------------------------- predict


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
  """A folder with a table, a run on it, and rows to predict."""
  folder = tmp_path_factory.mktemp("site")
  table = write_table(folder / "houses.csv")
  launch_train.train(table_config(folder / "houses.csv"), str(folder / "run"))
  table.drop(columns=["price", "site"]).to_csv(folder / "new.csv", index=False)
  return folder


def test_table_trains_with_a_client_for_each_site(site):
  summary = json.loads((site / "run" / "summary.json").read_text())
  assert summary["num_clients"] == 3
  assert summary["dataset"] == "houses"
  assert summary["rmse_unit"] == "target"
  assert not (site / "run" / "figures" / "function.png").exists()


def unfinished(site: pathlib.Path, folder: pathlib.Path):
  """A copy of table and run without the summary; gives the run's config."""
  shutil.copytree(site, folder)
  (folder / "run" / "summary.json").unlink()
  config = table_config(folder / "houses.csv")
  (folder / "run" / "config.json").write_text(json.dumps(config.to_dict()))
  seal_anew(RunFolder(folder / "run"))
  return config


def test_run_stopped_before_its_summary_is_completed(site, tmp_path):
  config = unfinished(site, tmp_path / "copy")
  launch_train.train(config, str(tmp_path / "copy" / "run"))
  for name in ("summary.json", "metrics.csv", "preprocessing.json"):
    before = (site / "run" / name).read_text()
    assert (tmp_path / "copy" / "run" / name).read_text() == before


@pytest.mark.parametrize("finished", [False, True])
def test_changed_table_is_not_taken_for_the_one_of_the_run(site, tmp_path, finished):
  config = unfinished(site, tmp_path / "copy")
  if finished:
    shutil.copy(site / "run" / "summary.json", tmp_path / "copy" / "run")
  table = pd.read_csv(tmp_path / "copy" / "houses.csv")
  table["price"] *= 1000
  table.to_csv(tmp_path / "copy" / "houses.csv", index=False)
  with pytest.raises(InputError, match=r"houses.*are not those"):
    launch_train.train(config, str(tmp_path / "copy" / "run"))


def test_a_changed_table_shows_in_the_folders_of_seeds(tmp_path):
  table = write_table(tmp_path / "houses.csv")
  config = table_config(tmp_path / "houses.csv", num_seeds=2, seed=3)
  folder = RunFolder(tmp_path / "run")
  folder.claim(config)
  folder.write_summary({"test_rmse": 1.0})
  for own in workflow.seed_folders(folder, config):
    own.path.mkdir()
    own.claim_data(table_note(experiment_lib.load_dataset(config)))
  assert (tmp_path / "run" / "seed_4" / "data.json").exists()
  assert workflow.is_finished(folder, config)
  table.assign(price=2 * table["price"]).to_csv(tmp_path / "houses.csv", index=False)
  with pytest.raises(InputError, match=r"houses.*are not those"):
    workflow.is_finished(folder, config)


def test_a_finished_run_does_not_need_its_table(site, tmp_path, capsys):
  config = unfinished(site, tmp_path / "copy")
  shutil.copy(site / "run" / "summary.json", tmp_path / "copy" / "run")
  (tmp_path / "copy" / "houses.csv").unlink()
  launch_train.train(config, str(tmp_path / "copy" / "run"))
  assert "is finished" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.pq"])
def test_prediction_is_written_beside_the_input(site, tmp_path, name: str):
  launch_predict.predict(str(site / "run"), str(site / "new.csv"), str(tmp_path / name))
  columns = ["area", "age", "heating", "mean", "std", "lower95", "upper95"]
  columns += ["lower95_conformal", "upper95_conformal", "outside"]
  written = read_table(tmp_path / name)
  assert list(written.columns) == columns
  given = pd.read_csv(site / "new.csv")
  np.testing.assert_allclose(written["area"].astype(float), given["area"])
  assert list(written["heating"]) == list(given["heating"])
  expected = model.load(site / "run").predict(given)
  np.testing.assert_allclose(written["mean"].astype(float), expected["mean"])
  np.testing.assert_allclose(written["upper95"].astype(float), expected["upper95"])
  assert [path.name for path in tmp_path.iterdir()] == [name]


def test_rows_far_outside_are_marked_in_the_output(site, tmp_path):
  rows = pd.read_csv(site / "new.csv")
  rows.loc[1, "area"] = 1e6
  rows.to_csv(tmp_path / "new.csv", index=False)
  out = tmp_path / "out.csv"
  with pytest.warns(UserWarning, match="^1 of .* rows lies outside"):
    launch_predict.predict(str(site / "run"), str(tmp_path / "new.csv"), str(out))
  assert np.flatnonzero(pd.read_csv(out)["outside"]).tolist() == [1]
  rows["area"] = rows["area"].astype(object)
  rows.loc[1, "area"] = "1e45"
  rows.to_csv(tmp_path / "new.csv", index=False)
  out.unlink()
  with pytest.raises(InputError, match=r"row 2 \(line 3\).*not finite.*'area'"):
    launch_predict.predict(str(site / "run"), str(tmp_path / "new.csv"), str(out))
  assert not out.exists()


@pytest.mark.parametrize("name", ["out.tsv", "out.csv.gz"])
def test_what_predict_writes_can_be_read(site, tmp_path, name: str):
  launch_predict.predict(str(site / "run"), str(site / "new.csv"), str(tmp_path / name))
  assert "upper95" in read_table(tmp_path / name).columns


def test_output_may_replace_the_input(site, tmp_path):
  rows = tmp_path / "rows.csv"
  rows.write_bytes((site / "new.csv").read_bytes())
  launch_predict.predict(str(site / "run"), str(rows), str(rows))
  assert "upper95" in read_table(rows).columns


def test_column_that_the_output_needs_is_not_overwritten(site, tmp_path):
  rows = pd.read_csv(site / "new.csv").assign(std=1.0)
  rows.to_csv(tmp_path / "rows.csv", index=False)
  with pytest.raises(InputError, match="'std'"):
    launch_predict.predict(
      str(site / "run"), str(tmp_path / "rows.csv"), str(tmp_path / "out.csv")
    )
  assert not (tmp_path / "out.csv").exists()


def test_output_in_no_folder_is_refused(site, tmp_path):
  with pytest.raises(InputError, match="cannot write"):
    launch_predict.predict(
      str(site / "run"), str(site / "new.csv"), str(tmp_path / "absent" / "out.csv")
    )


def test_predict_from_the_shell_warns_of_damage_in_one_line(site, tmp_path):
  run = tmp_path / "run"
  shutil.copytree(site / "run", run)
  newest = run / "checkpoint" / "3.npz"
  newest.write_bytes(newest.read_bytes()[:100])
  (run / "summary.json").unlink()
  done = launch(
    "predict",
    f"--workdir={run}",
    f"--input={site / 'new.csv'}",
    f"--output={tmp_path / 'out.csv'}",
  )
  assert done.returncode == 0
  assert "60 rows predicted" in done.stdout
  assert len(read_table(tmp_path / "out.csv")) == 60
  damaged, unfinished = done.stderr.splitlines()
  assert damaged.startswith("warning: checkpoint of round 3 is damaged")
  assert unfinished.startswith("warning: the training in")


def test_ten_lines_of_python(tmp_path):
  table = write_table(tmp_path / "houses.csv")
  rows = load_table(tmp_path / "houses.csv", target="price", client="site")
  config = csv_config.get_config()
  config.update_from_flattened_dict(SMALL)  # Only to be quick.
  experiment = experiment_lib.build(config, rows)
  program = make_program(experiment.algorithm, transform=jax.jit)
  result = training.train(experiment, program)
  predicted = model.from_result(experiment, result).predict(table.head())
  assert list(predicted.columns) == ["mean", "std", "lower95", "upper95", "outside"]
  assert len(predicted) == 5


# ------------------------------------------------------------------------- shell


@pytest.mark.parametrize(
  "options", [["--brief"], [], ["--help"]], ids=["in the buffer", "large", "help"]
)
def test_a_reader_that_has_seen_enough_is_no_error(options):
  reader, writer = os.pipe()
  os.close(reader)  # As `| head` does sooner or later.
  command = ["-m", "launch.tables", "--results=results/paper_table.csv", *options]
  with open(writer, "wb") as output:
    done = subprocess.run(
      [sys.executable, *command],
      cwd=ROOT,
      stdout=output,
      stderr=subprocess.PIPE,
      text=True,
      check=False,
    )
  assert done.stderr == ""
  assert done.returncode == 141


def tables_in_shell(rest: str) -> subprocess.CompletedProcess[str]:
  command = f"{sys.executable} -m launch.tables --results=results/paper_table.csv"
  return subprocess.run(
    f"exec {command} {rest}",
    shell=True,
    cwd=ROOT,
    stderr=subprocess.PIPE,
    text=True,
    check=False,
  )


@pytest.mark.parametrize("option, status", [("--brief", 0), ("--help", 1)])
def test_no_output_at_all_is_no_error(option, status):
  done = tables_in_shell(f"{option} >&-")
  assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("options", ["", "--help"])
def test_a_full_disk_is_told_in_one_line(options):
  done = tables_in_shell(f"{options} > /dev/full")
  assert done.returncode == 1
  assert done.stderr.startswith("error: cannot print (No space left")
  assert done.stderr.count("\n") == 1, done.stderr
