"""A grid of runs: expanded, resumed, and written down whatever becomes of them."""

import pathlib

import ml_collections
import pandas as pd
import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.records import RunFolder
from launch import sweep
from tests.runs import SUMMARY

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
  """A grid of trainings that take seconds."""
  sizes = {
    "hidden_size": (8,),
    "num_rounds": (2,),
    "num_local_steps": (2,),
    "compare_clients": (False,),
    "data__num_rows": (40,),
    "seed": (0,),
  }
  return grid(**(sizes | fields))


def without_training(monkeypatch, fail: tuple[str, ...] = ()) -> list[str]:
  """Lets runs write a summary only; gives the names of those executed."""
  executed = []

  def execute(run: sweep.Run, folder: RunFolder, cores: object) -> str | None:
    executed.append(run.name)
    if any(part in run.name for part in fail):
      return "error: no luck"
    fields = {"num_clients": 2, "method": "fedbnr", "seed": 0} | dict(run.fields)
    folder.claim(sweep.config_of(run.base, dict(run.fields)))
    folder.write_summary({"dataset": "made", "test_rmse": 0.5} | fields)
    return None

  monkeypatch.setattr(sweep, "execute", execute)
  return executed


def results(workdir: pathlib.Path) -> pd.DataFrame:
  return pd.read_csv(workdir / "results.csv")


# ----------------------------------------------------------------------- expansion


def test_grid_is_the_product_of_its_fields():
  config = grid(num_clients=(2, 4), method=("fedbnr", "fedbnr-kd"), seed=(0, 1, 2))
  runs = sweep.expand(config)
  points = [tuple(dict(run.fields).values()) for run in runs]
  assert len(points) == len(set(points)) == 2 * 2 * 3
  assert len({run.name for run in runs}) == 12


def test_pooled_method_runs_once_for_all_client_counts():
  config = grid(num_clients=(2, 4), method=("fedbnr", "central"), seed=(0, 1))
  runs = [dict(run.fields) for run in sweep.expand(config)]
  pooled = [run for run in runs if run["method"] == "central"]
  assert [run["seed"] for run in pooled] == [0, 1]
  assert {run["num_clients"] for run in pooled} == {2}
  assert len(runs) == 4 + 2


def test_nested_fields_become_dotted_overrides(tmp_path):
  (run,) = sweep.expand(grid(kd__alpha=(0.5,)))
  assert run.fields == (("kd.alpha", 0.5),)
  command = run.command(tmp_path)
  assert "--config.kd.alpha=0.5" in command
  assert f"--workdir={tmp_path}" in command


def test_arguments_make_a_base_each():
  config = grid(seed=(0,))
  config.base, config.arguments = "configs/uci.py", ("sml", "ccpp,paper")
  runs = sweep.expand(config)
  assert [run.base for run in runs] == [
    "configs/uci.py:sml",
    "configs/uci.py:ccpp,paper",
  ]
  assert [run.name for run in runs] == ["sml_seed=0", "ccpp-paper_seed=0"]


def test_empty_grid_is_refused():
  with pytest.raises(InputError, match="grid is empty"):
    sweep.expand(grid(seed=()))


def test_unknown_method_is_refused_before_anything_runs(tmp_path, monkeypatch):
  executed = without_training(monkeypatch)
  with pytest.raises(InputError, match="did you mean 'fedbnr'"):
    sweep.sweep(grid(method=("fedbnr", "fedbrn")), tmp_path / "s", 1)
  assert executed == []


# ------------------------------------------------------------- one training for real


def test_done_and_failed_runs_stand_in_the_table(tmp_path, capsys):
  # One training for all client counts, and one that fails: 5 rows are too few.
  config = small(num_clients=(2, 3), method=("central",), data__num_rows=(40, 5))
  with pytest.raises(InputError, match="1 runs failed") as caught:
    sweep.sweep(config, tmp_path, 1)
  assert "num_rows=5" in str(caught.value)
  table = results(tmp_path)
  assert set(table.columns) >= SUMMARY | {"status", "reason"}
  done, failed = (table[table["status"] == word] for word in ("done", "failed"))
  assert len(table) == 4
  assert list(done["num_clients"]) == list(failed["num_clients"]) == [2, 3]
  assert set(done["method"]) == set(failed["method"]) == {"central"}
  assert done["test_rmse"].nunique() == 1
  assert done["reason"].isna().all()
  assert failed["reason"].str.contains("give at least 10").all()
  assert not failed["reason"].str.contains("Traceback").any()

  # Again, without the bad point: nothing is left to do, and no file changes.
  config.grid.data.num_rows = (40,)
  (folder,) = (tmp_path / "runs").glob("*num_rows=40*")
  summary = folder / "summary.json"
  before = summary.stat().st_mtime_ns
  sweep.sweep(config, tmp_path, 1)
  assert summary.stat().st_mtime_ns == before
  assert list(results(tmp_path)["status"]) == ["done", "done"]

  # Without its summary the run is taken up again and ends the same.
  rmse = results(tmp_path)["test_rmse"]
  summary.unlink()
  sweep.sweep(config, tmp_path, 1)
  assert summary.exists()
  assert list(results(tmp_path)["test_rmse"]) == list(rmse)


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
  executed = without_training(monkeypatch)
  config = grid(num_clients=(2, 4), seed=(0, 1))
  sweep.sweep(config, tmp_path, 1)
  assert len(executed) == 4
  executed.clear()
  (tmp_path / "runs" / "num_clients=4_seed=0" / "summary.json").unlink()
  sweep.sweep(config, tmp_path, 1)
  assert executed == ["num_clients=4_seed=0"]
  assert len(results(tmp_path)) == 4


def test_failed_run_is_tried_again(tmp_path, monkeypatch):
  without_training(monkeypatch, fail=("seed=1",))
  config = grid(num_clients=(2,), seed=(0, 1))
  with pytest.raises(InputError, match="seed=1"):
    sweep.sweep(config, tmp_path, 1)
  assert list(results(tmp_path)["status"]) == ["done", "failed"]
  executed = without_training(monkeypatch)
  sweep.sweep(config, tmp_path, 1)
  assert len(executed) == 1
  assert list(results(tmp_path)["status"]) == ["done", "done"]


def test_failed_run_names_its_dataset(tmp_path, monkeypatch):
  without_training(monkeypatch, fail=("sml",))
  config = grid(seed=(0,))
  config.base, config.arguments = "configs/uci.py", ("sml", "ccpp")
  with pytest.raises(InputError, match="sml"):
    sweep.sweep(config, tmp_path, 1)
  failed = results(tmp_path).query("status == 'failed'")
  assert list(failed["dataset"]) == ["sml"]


def test_pooled_base_gives_one_row_for_each_point(tmp_path, monkeypatch):
  def execute(run: sweep.Run, folder: RunFolder, cores: object) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_summary({"method": "central", "seed": 0} | dict(run.fields))

  monkeypatch.setattr(sweep, "execute", execute)
  sweep.sweep(grid(num_clients=(2, 4)), tmp_path, 1)
  assert not results(tmp_path).duplicated(KEY).any()


def test_results_of_another_base_are_not_taken_over(tmp_path, monkeypatch):
  executed = without_training(monkeypatch)
  config = grid(num_clients=(2,), seed=(0,))
  sweep.sweep(config, tmp_path, 1)
  config.base = "configs/csv.py"
  executed.clear()
  try:
    sweep.sweep(config, tmp_path, 1)
  except InputError:
    return  # Refused: as good as done anew.
  assert len(executed) == 1
