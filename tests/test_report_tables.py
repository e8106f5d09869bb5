"""Tables of results: means over seeds, the paper's figures, and what is refused."""

import pandas as pd
import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.report import tables
from launch import tables as launch_tables
from tests.runs import assert_refused


def _results(**changes):
  row = {
    "dataset": "ccpp",
    "num_clients": 10,
    "method": "fedbnr",
    "seed": 0,
    "status": "done",
    "test_rmse": 4.0,
    "min_test_rmse": 3.5,
    "test_ece": 0.1,
    "rounds": 20,
    "seconds": 7.0,
  }
  return row | changes


def test_cells_are_means_over_seeds_beside_the_papers_figures():
  frame = pd.DataFrame([_results(), _results(seed=1, test_rmse=5.0, rounds=40)])
  (cell,) = tables.beside_paper(frame).to_dict("records")
  assert cell["seeds"] == 2
  assert cell["test RMSE"] == pytest.approx(4.5)
  assert cell["rounds"] == pytest.approx(30)
  assert (cell["paper"], cell["paper ECE"]) == (4.40, 0.24)


def test_failed_runs_do_not_count():
  frame = pd.DataFrame([_results(), _results(seed=1, test_rmse=99.0, status="failed")])
  (cell,) = tables.beside_paper(frame).to_dict("records")
  assert cell["test RMSE"] == pytest.approx(4.0)


def test_paper_has_every_cell_of_its_five_tables():
  paper = tables.paper_results()
  assert len(paper) == 260
  assert not paper.duplicated(["dataset", "num_clients", "method", "metric"]).any()


def test_markdown_has_a_line_a_cell_and_a_dash_for_what_the_paper_lacks():
  frame = pd.DataFrame([_results(dataset="mine")])
  lines = tables.markdown(tables.beside_paper(frame)).splitlines()
  assert len(lines) == 3
  cells = ["mine", "10", "fedbnr", "1", "4.000", "3.500", "–", "0.100", "–", "20", "7"]
  assert lines[2].strip("| ").split(" | ") == cells


def test_settings_of_a_sweep_are_cells_of_their_own(tmp_path):
  scores = {"val_rmse": 3.0, "val_ece": 0.1, "val_nll": 1.0}
  rows = [
    _results(seed=seed, **scores | {"val_rmse": 3.0 + seed, "config.num_samples": size})
    for size in (25, 50)
    for seed in (0, 1)
  ]
  path = tmp_path / "results.csv"
  pd.DataFrame(rows).to_csv(path, index=False)
  results = tables.read_results(path)
  assert list(tables.beside_paper(results)["config.num_samples"]) == ["25", "50"]
  cells = tables.on_validation(results)
  assert list(cells["validation RMSE"]) == [3.5, 3.5]
  assert list(cells["seeds"]) == [2, 2]
  assert "validation RMSE" in tables.markdown(cells)


def test_results_without_validation_scores_choose_nothing():
  with pytest.raises(InputError, match="val_rmse"):
    tables.on_validation(pd.DataFrame([_results()]))


def test_files_of_shards_are_one_table(tmp_path):
  paths = [tmp_path / "one.csv", tmp_path / "two.csv"]
  for seed, path in enumerate(paths):
    pd.DataFrame([_results(seed=seed)]).to_csv(path, index=False)
  assert list(tables.read_results(*paths).seed) == [0, 1]
  with pytest.raises(InputError, match="twice"):
    tables.read_results(paths[0], paths[0])


def test_searches_of_different_fields_stand_in_one_table(tmp_path):
  paths = [tmp_path / "one.csv", tmp_path / "two.csv"]
  scores = {"val_rmse": 3.0, "val_ece": 0.1, "val_nll": 1.0}
  for path, method, name in zip(
    paths, ("fedprox", "fedloc"), ("config.mu", "config.rho"), strict=True
  ):
    pd.DataFrame([_results(method=method, **scores) | {name: 1.0}]).to_csv(
      path, index=False
    )
  results = tables.read_results(*paths)
  assert list(tables.on_validation(results).method) == ["fedprox", "fedloc"]
  assert len(tables.beside_paper(results)) == 2


def test_results_survive_the_file(tmp_path):
  path = tmp_path / "results.csv"
  pd.DataFrame([_results()]).to_csv(path, index=False)
  assert tables.read_results(path).to_dict("records") == [_results()]


@pytest.mark.parametrize(
  "rows, word",
  [([{"a": 1}], "dataset"), ([_results(), _results()], "twice")],
)
def test_a_table_that_is_no_sweeps_is_refused(tmp_path, rows, word):
  path = tmp_path / "results.csv"
  pd.DataFrame(rows).to_csv(path, index=False)
  with pytest.raises(InputError, match=word):
    tables.read_results(path)


def test_a_sweep_of_which_nothing_is_done_is_an_empty_table(tmp_path):
  path = tmp_path / "results.csv"
  keys = ("dataset", "num_clients", "method", "seed")
  failed = {name: _results()[name] for name in keys} | {"status": "failed"}
  pd.DataFrame([failed]).to_csv(path, index=False)
  assert tables.beside_paper(tables.read_results(path)).empty


def test_the_command_prints_the_table(tmp_path, capsys):
  path = tmp_path / "results.csv"
  pd.DataFrame([_results()]).to_csv(path, index=False)
  launch_tables.show(path)
  assert (
    capsys.readouterr().out.splitlines()[2].startswith("| ccpp | 10 | fedbnr | 1 |")
  )


def test_a_file_with_done_runs_but_no_scores_is_refused(tmp_path):
  path = tmp_path / "results.csv"
  path.write_text("dataset,num_clients,method,seed,status\na,2,fedbnr,0,done\n")
  assert_refused(lambda: tables.read_results(path), "lacks column 'test_rmse'")
  path.write_text("dataset,num_clients,method,seed,status\na,2,fedbnr,0,failed\n")
  assert len(tables.read_results(path)) == 1
