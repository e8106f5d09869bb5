"""The paper's tables from results made by hand, cell by cell, in every format."""

import functools
import math
import re

import pandas as pd
import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.report import figures, paper_formats, paper_tables, score_figure, tables
from launch import tables as launch_tables
from tests.runs import assert_refused

NUM_SEEDS = 10
# Of fedbnr on CCPP with 10 clients; differences from it are powers of two or sums of
# them, so that they are what they are meant to be, bit by bit.
RMSE = 4.0
STEP = 2.0**-10


def _run(method="fedbnr", seed=0, **changes):
  row = {
    **{"dataset": "ccpp", "num_clients": 10, "method": method, "seed": seed},
    **{"status": "done", "test_rmse": RMSE, "min_test_rmse": 3.5, "test_ece": 0.125},
    **{"test_mce": 0.2, "test_bri": 0.25, "test_nll": 2.0, "test_crps": 1.5},
    **{"rounds": 20, "seconds": 7.0, "test_ece10": 0.15},
  }
  return row | changes


def _differing(method, negative_ranks, sign=1, score="test_rmse", base=RMSE):
  """Ten runs, 1 to 10 steps above `base`, or below it at the given ranks."""
  ranks = range(1, NUM_SEEDS + 1)
  steps = [-rank if rank in negative_ranks else rank for rank in ranks]
  return [
    _run(method, seed, **{score: base + sign * step * STEP})
    for seed, step in enumerate(steps)
  ]


def _reference(method="fedbnr", **changes):
  return [_run(method, seed, **changes) for seed in range(NUM_SEEDS)]


def _cells(rows, *names):
  chosen = [table for table in paper_tables.TABLES if table.name in names]
  return paper_tables.cells(pd.DataFrame(rows), chosen or paper_tables.TABLES)


def _cell(cells, method="fedbnr", table="Table 1", dataset="ccpp", num_clients=10):
  (cell,) = cells[
    (cells.table == table)
    & (cells.dataset == dataset)
    & (cells.num_clients == num_clients)
    & (cells.method == method)
  ].to_dict("records")
  return cell


def _line(text, method, whose, heading):
  """The texts of a line of a Markdown table, by column."""
  lines = iter(text.splitlines())
  assert any(line.startswith(f"### {heading}: ") for line in lines), heading
  rows = []
  for line in lines:
    if line.startswith("###"):
      break
    if line.startswith("|"):
      rows.append([cell.strip() for cell in line.strip("|").split("|")])
  above = ""
  for row in rows[2:]:
    above = row[0] or above
    if (above, row[1]) == (method, whose):
      return dict(zip(rows[0][2:], row[2:], strict=True))
  raise AssertionError(f"{heading} has no line of {method}, {whose}")


@pytest.fixture
def results(tmp_path):
  """A file of the given rows."""

  def write(rows):
    path = tmp_path / "results.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    return path

  return write


def test_a_cell_is_as_by_hand():
  rows = [
    _run(seed=seed, test_rmse=score) for seed, score in enumerate((4.0, 5.0, 6.0))
  ]
  assert _cell(_cells(rows, "Table 1")) == {
    **{"table": "Table 1", "dataset": "ccpp", "num_clients": 10, "method": "fedbnr"},
    **{
      "n": 3,
      "seeds": "0 1 2",
      "mean": 5.0,
      "sem": pytest.approx(1 / math.sqrt(3), rel=1e-14),
    },
    **{"mark": "", "best": True, "paper": 4.40, "paper_sem": 0.01, "paper_mark": ""},
    **{"difference": pytest.approx(0.6, rel=1e-14)},
  }


@pytest.mark.parametrize(
  "table, score, paper",
  [
    ("Table 1", 0.5, 4.40),
    ("Table 1, lowest", 0.4, 4.40),
    ("Table 2", 0.1, 0.24),
    ("Table 2, 10 levels", 0.15, 0.24),
    ("Table A.2", 0.2, 0.39),
    ("Table A.3", 0.3, 0.24),
    ("Table A.4", 0.5, 4.40),
    ("Table A.4, lowest", 0.4, 4.40),
    ("NLL", 0.6, math.nan),
    ("CRPS", 0.7, math.nan),
    ("Seconds", 0.8, math.nan),
  ],
)
def test_every_table_is_of_its_own_score(table, score, paper):
  scores = {"test_rmse": 0.5, "min_test_rmse": 0.4, "test_ece": 0.1, "test_mce": 0.2}
  scores |= {"test_bri": 0.3, "test_nll": 0.6, "test_crps": 0.7, "seconds": 0.8}
  cell = _cell(_cells([_run(**scores)], table), table=table)
  assert cell["mean"] == score
  assert cell["paper"] == pytest.approx(paper, nan_ok=True)
  assert cell["difference"] == pytest.approx(score - paper, nan_ok=True)


@pytest.mark.parametrize(
  "negative_ranks, sign, mark",
  [
    ((5,), 1, "⇑"),
    ((1, 5), 1, "↑"),
    ((1, 2, 3, 4), 1, "↑"),
    ((1, 2, 3, 5), 1, ""),
    ((5,), -1, "⇓"),
    ((1, 5), -1, "↓"),
    ((1, 2, 3, 4), -1, "↓"),
    ((1, 2, 3, 5), -1, ""),
  ],
)
def test_marks_of_rmse_are_against_fedbnr(negative_ranks, sign, mark):
  rows = _reference() + _differing("fedavg", negative_ranks, sign)
  # What other methods do is of no account.
  rows += _reference("fedbnr-kd", test_rmse=1.0)
  cells = _cells(rows, "Table 1", "Table A.4")
  assert _cell(cells, "fedavg")["mark"] == mark
  assert _cell(cells, "fedbnr")["mark"] == ""
  assert _cell(cells, "fedavg", "Table A.4")["mark"] == ""


@pytest.mark.parametrize("negative_ranks, mark", [((5,), "⇑"), ((1, 5), "↑")])
def test_marks_of_calibration_are_against_fedbnr_kd(negative_ranks, mark):
  calibration = {
    "Table 2": "test_ece",
    "Table A.2": "test_mce",
    "Table A.3": "test_bri",
  }
  for table, score in (calibration | {"NLL": "test_nll", "CRPS": "test_crps"}).items():
    rows = _reference("fedbnr-kd", **{score: 0.25})
    rows += _differing("pfedgp", negative_ranks, score=score, base=0.25)
    cells = _cells(rows, table)
    assert _cell(cells, "pfedgp", table)["mark"] == mark
    assert _cell(cells, "fedbnr-kd", table)["mark"] == ""


def test_pairs_are_of_one_cell_and_below_five_there_is_no_mark():
  rows = _reference() + _differing("fedavg", ())[:4]
  rows += _reference(num_clients=100) + [
    _run("fedavg", seed, num_clients=100, test_rmse=5.0) for seed in range(5, 10)
  ]
  rows += _differing("fedprox", ())
  for row in rows[-NUM_SEEDS:]:
    row["num_clients"] = 5
  cells = _cells(rows, "Table 1")
  assert (_cell(cells, "fedavg")["n"], _cell(cells, "fedavg")["mark"]) == (4, "")
  assert _cell(cells, "fedavg", num_clients=100)["mark"] == "↑"
  # Without the reference there is nothing to compare with.
  assert _cell(cells, "fedprox", num_clients=5)["mark"] == ""


def test_central_is_never_best_nor_marked():
  rows = (
    _reference() + _differing("central", (), -1) + _reference("fedavg", test_rmse=9)
  )
  cells = _cells(rows, "Table 1")
  central = _cell(cells, "central")
  assert central["mean"] < RMSE
  assert (central["best"], central["mark"]) == (False, "")
  assert _cell(cells, "fedbnr")["best"]
  assert cells.best.sum() == 1


def test_a_method_of_which_the_paper_has_no_figure_may_be_the_best():
  rows = [_run(), _run("fedavg", test_ece=0.1), _run("local+local", test_ece=0.05)]
  cells = _cells(rows, "Table 2")
  assert list(cells.method[cells.best]) == ["local+local"]


def test_equal_methods_share_the_best_and_time_has_none():
  rows = [_run("fedbnr"), _run("fedbnr-kd"), _run("fedavg", test_rmse=5.0)]
  cells = _cells(rows, "Table 1", "Seconds")
  assert list(cells.method[cells.best & (cells.table == "Table 1")]) == [
    "fedbnr",
    "fedbnr-kd",
  ]
  assert not cells.best[cells.table == "Seconds"].any()


def test_other_seeds_are_other_splits_and_have_no_best():
  rows = [_run(seed=0), _run("fedavg", seed=1, test_rmse=0.1)]
  cells = _cells(rows, "Table 1")
  assert not cells.best.any()
  cells = _cells([*rows, _run(seed=1)], "Table 1")  # Now one has more.
  assert list(cells.method[cells.best]) == ["fedbnr"]


def test_both_rules_of_fedloc_stand_beside_the_papers_one():
  cells = _cells([_run("fedloc"), _run("fedloc-poe")], "Table 1")
  for method in ("fedloc", "fedloc-poe"):
    assert _cell(cells, method)["paper"] == 20.6
    assert _cell(cells, method)["difference"] == pytest.approx(RMSE - 20.6)


def test_the_legend_says_when_methods_stop():
  text = paper_formats.markdown(_cells([_run()], "Table 1"), paper_tables.TABLES[:1])
  assert "fedbnr-ev, fedbnr-kd-ev after 30" in text
  assert "the others after 5, as in the paper" in text


def test_runs_that_are_not_done_do_not_count():
  rows = [_run(), _run(seed=1, status="failed", test_rmse=99.0)]
  rows.append(_run("fedavg", status="failed"))
  cells = _cells(rows, "Table 1")
  assert (_cell(cells)["n"], _cell(cells)["mean"]) == (1, RMSE)
  assert _cell(cells, "fedavg")["n"] == 0


def test_missing_cells_are_there_as_missing():
  cells = _cells([_run()])
  # Eleven methods in the paper's RMSE tables and five in the others, ten columns.
  sizes = cells.groupby("table", sort=False).size().to_dict()
  assert list(sizes.values()) == [110, 110, 50, 50, 50, 50, 110, 110, 10, 10, 10]
  missing = _cell(cells, "fedprox", dataset="bike", num_clients=100)
  assert (missing["n"], missing["best"], missing["paper"]) == (0, False, 0.42)
  assert math.isnan(missing["mean"])
  assert math.isnan(missing["difference"])


def test_scores_that_a_file_lacks_are_missing():
  row = _run()
  del row["test_nll"]
  cells = _cells([row | {"test_ece": math.nan}])
  assert _cell(cells, table="Table 2")["n"] == 0
  assert not (cells.table == "NLL").any()  # Nor has the paper any.
  text = paper_formats.markdown(cells)
  assert _line(text, "fedbnr", "ours", "Table 2")["ccpp, 10"] == "–"
  assert text.count("No runs.") == 2
  assert paper_formats.latex(cells).count(r"\begin{tabular}") == 10


def test_methods_are_in_the_papers_order_and_others_follow():
  rows = [
    _run(name) for name in ("mine", "fedbnr-exact", "fedloc-poe", "avg+local", "fedbnr")
  ]
  cells = _cells(rows, "Table 1", "Table 2")
  order = cells.groupby("table").method.unique()
  assert list(order["Table 1"]) == [
    *("central", "local+local", "local+global", "avg+local", "kd+local"),
    *("fedavg", "fedprox", "pfedgp", "fedloc", "fedloc-poe"),
    *("fedbnr", "fedbnr-kd", "fedbnr-exact", "mine"),
  ]
  assert list(order["Table 2"]) == [
    *("central", "pfedgp", "fedloc", "fedloc-poe", "fedbnr", "fedbnr-kd"),
    *("fedbnr-exact", "mine", "avg+local"),
  ]


def test_columns_are_the_papers_and_others_follow():
  rows = [_run(dataset="mine", num_clients=3), _run(num_clients=50)]
  cells = _cells(rows, "Table 1")
  columns = cells[["dataset", "num_clients"]].drop_duplicates().values.tolist()
  assert columns[0] == ["skillcraft", 10]
  assert columns[-4:] == [["ccpp", 10], ["ccpp", 50], ["ccpp", 100], ["mine", 3]]


def test_the_papers_numbers_are_whole():
  """A table of no runs is the paper's, mark by mark."""
  cells = _cells(
    [_run(status="failed")], "Table 1", "Table 2", "Table A.2", "Table A.3"
  )
  paper = tables.paper_results()
  assert cells.paper.sum() == pytest.approx(paper.value.sum(), rel=1e-12)
  assert (cells.paper_mark != "").sum() == paper.significance.notna().sum()
  assert _cell(cells, "fedavg", dataset="bike")["paper_mark"] == "↓"
  assert _cell(cells, "fedbnr-kd", dataset="skillcraft")["paper_mark"] == "⇓"
  assert _cell(cells, "fedavg", dataset="skillcraft")["paper_mark"] == "↑"
  assert _cell(cells, "pfedgp", "Table 2")["paper_mark"] == "⇑"


def test_several_settings_of_a_method_are_refused():
  rows = [_run(**{"config.num_samples": size}) for size in (25, 50)]
  with pytest.raises(InputError, match="several settings"):
    _cells(rows)


def _full():
  rows = _reference() + _differing("fedavg", (5,)) + _differing("central", (), -1)
  rows += [_run("fedbnr-kd", seed, test_rmse=3.5 + seed) for seed in range(3)]
  return [*rows, _run("my_own", dataset="50% & more", num_clients=7)]


@functools.cache
def _full_cells():
  """All tables of `_full`; nobody may change them."""
  return _cells(_full())


def test_markdown_cell_by_cell():
  text = paper_formats.markdown(_full_cells())
  line = _line(text, "fedavg", "ours", "Table 1")
  assert line["ccpp, 10"] == "4.004⇑"
  assert line["ccpp, 100"] == "–"
  assert _line(text, "fedavg", "paper", "Table 1")["bike, 10"] == "0.38↓"
  assert _line(text, "fedavg", "paper", "Table 1")["ccpp, 10"] == "4.45"
  assert _line(text, "fedavg", "difference", "Table 1")["ccpp, 10"] == "−0.446"
  assert _line(text, "fedavg", "difference", "Table 1")["ccpp, 100"] == "–"
  assert _line(text, "fedbnr", "ours", "Table 1")["ccpp, 10"] == "**4.000**"
  assert _line(text, "central", "ours", "Table 1")["ccpp, 10"] == "3.995"
  # n stands in the cell where it is not that of most.
  assert "\nn = 10 unless brackets say otherwise. Worse than fedbnr: ↑ p < .05" in text
  assert _line(text, "fedbnr-kd", "ours", "Table 1")["ccpp, 10"] == "4.500 (n=3)"
  line = _line(text, "fedbnr-kd", "ours", "Table A.4")
  assert line["ccpp, 10"] == "4.500 ± 0.577 (n=3)"
  assert _line(text, "local+local", "paper", "Table A.4")["ccpp, 100"] == "19.3 ± 2.08"
  assert _line(text, "my_own", "ours", "Seconds")["50% & more, 7"] == "7.0 (n=1)"


def test_markdown_says_nothing_where_the_paper_has_nothing():
  text = paper_formats.markdown(_cells([_run("fedbnr-ev")], "Table 1", "NLL"))
  assert _line(text, "fedbnr-ev", "ours", "NLL")["ccpp, 10"] == "**2.000**"
  assert "n = 1. Worse than fedbnr-kd" in text
  with pytest.raises(AssertionError):
    _line(text, "fedbnr-ev", "paper", "Table 1")


def test_latex_is_whole_and_every_row_has_its_columns():
  text = paper_formats.latex(_full_cells())
  for name in ("table", "tabular"):
    assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") == 11
  # Comments aside, every brace and every dollar closes.
  plain = re.sub(r"(?<!\\)%.*", "", text)
  plain = re.sub(r"\\[&%#_${}]", "", plain)
  assert plain.count("{") == plain.count("}")
  assert plain.count("$") % 2 == 0
  assert plain.replace("\n", "").isascii()
  for tabular in re.findall(r"\\begin{tabular}(.*?)\\end{tabular}", text, re.DOTALL):
    columns = re.match(r"{(l+)}", tabular)[1]
    rows = [row for row in tabular.splitlines() if row.endswith(r"\\")]
    assert len(rows) > 3
    for row in rows:
      cells = re.split(r"(?<!\\)&", row)
      widths = [re.search(r"\\multicolumn{(\d+)}", cell) for cell in cells]
      assert sum(int(width[1]) if width else 1 for width in widths) == len(columns)


def test_latex_cell_by_cell():
  text = paper_formats.latex(_cells(_full(), "Table 1"), paper_tables.TABLES[:1])
  assert r"\multicolumn{2}{c}{ccpp} & \multicolumn{1}{c}{50\% \& more} \\" in text
  assert r"\cmidrule(lr){11-12}" in text
  assert r"\cmidrule(lr){13-13}" in text
  assert r"my\_own & ours & -- &" in text
  rows = {
    tuple(re.split(" & ", row)[:2]): re.split(" & ", row.removesuffix(r" \\"))[10]
    for row in text.splitlines()
    if " & ours & " in row
  }
  assert rows["fedavg", "ours"] == r"4.004$^\Uparrow$"
  assert rows["fedbnr", "ours"] == r"\textbf{4.000}"
  assert rows["fedbnr-kd", "ours"] == "4.500 (n=3)"
  assert r"0.38$^\downarrow$" in text
  assert "$-$0.446" in text
  # Rules around central, ablations, earlier work, FedBNR and what is nobody's.
  assert text.count(r"\midrule") == 5


def test_csv_has_the_cells_unrounded(tmp_path):
  cells = _full_cells()
  paper_formats.csv(cells, tmp_path / "tables.csv")
  options = {"keep_default_na": False, "na_values": [""], "dtype": {"seeds": str}}
  read = pd.read_csv(tmp_path / "tables.csv", **options)
  text = ["seeds", "mark", "paper_mark"]
  read[text] = read[text].fillna("")
  # Pandas 2 reads some numbers to thirteen digits.
  pd.testing.assert_frame_equal(read, cells, rtol=1e-12, atol=0, check_dtype=False)


def _points(ax):
  """Marker and place of what a panel shows."""
  return {(line.get_marker(), *line.get_xydata()[0]) for line in ax.lines}


def test_figure_has_a_panel_a_cell_with_our_mean_and_the_papers():
  rows = (
    _reference() + _reference(num_clients=100) + _reference("fedavg", test_ece=math.nan)
  )
  rows += [_run("my_own", seed, dataset="bike", test_rmse=0.4) for seed in range(2)]
  figure = score_figure.scores(_cells(rows, "Table 1", "Table 2"))
  width, height = figure.get_size_inches()
  assert height > width > 1
  panels = {
    (ax.get_title(loc="left"), ax.get_xlabel().partition(",")[0]): ax
    for ax in figure.axes
  }
  assert len(panels) == 8  # Two datasets, two numbers of clients, two scores.
  ax = panels["ccpp, 10 clients", "RMSE"]
  assert ax.get_xlabel() == "RMSE, log scale"
  # Names of methods stand at the left only.
  left = {score: panels["bike, 10 clients", score] for score in ("RMSE", "ECE")}
  names = {
    score: [label.get_text() for label in first.get_yticklabels()]
    for score, first in left.items()
  }
  assert names["RMSE"][-1] == names["ECE"][-1] == "my_own"
  assert "fedavg" not in names["ECE"]
  place = names["RMSE"].index("fedavg")
  assert {("o", RMSE, place), ("|", 4.45, place)} <= _points(ax)
  place = names["ECE"].index("fedbnr")
  points = _points(panels["ccpp, 100 clients", "ECE"])
  assert {("o", 0.125, place), ("|", 0.20, place)} <= points


def test_figure_bears_what_has_no_end_and_what_nobody_ran(tmp_path):
  rows = [_run("a", dataset="x"), _run("b", dataset="x", test_rmse=math.inf)]
  rows.append(_run("a", dataset="y", num_clients=3, test_ece=math.nan))
  figure = score_figure.scores(_cells(rows, "Table 1", "Table 2"))
  figures.save(figure, tmp_path / "figure.png")
  assert (tmp_path / "figure.png").exists()


def test_the_command_writes_all_and_prints_the_markdown(results, tmp_path, capsys):
  output = tmp_path / "deep" / "tables"
  launch_tables.show_paper(results([_run(), _run("fedavg")]), output=output)
  assert {path.name for path in output.iterdir()} == {
    *("tables.md", "tables.tex", "tables.csv", "figure.png")
  }
  written = (output / "tables.md").read_text(encoding="utf-8")
  assert capsys.readouterr().out.startswith(written)
  assert _line(written, "fedavg", "ours", "Table A.3")["ccpp, 10"] == "**0.250**"


@pytest.mark.parametrize(
  "rows, words",
  [
    ([{"a": 1}], "dataset"),
    ([_run(), _run()], "twice"),
    ([_run(num_clients="many")], "num_clients"),
    ([_run(test_mce="low")], "test_mce"),
    ([_run(), _run(seed=None)], "seed"),
    ([_run(status="failed")], "done"),
    ([_run(**{"config.num_samples": size}) for size in (25, 50)], "several settings"),
  ],
)
def test_bad_results_get_one_line_and_nothing_is_written(
  results, tmp_path, rows, words
):
  output = tmp_path / "tables"
  path = results(rows)
  assert_refused(lambda: launch_tables.show_paper(path, output=output), words)
  assert not output.exists()


def test_a_folder_that_cannot_be_gets_one_line(results, tmp_path):
  path = results([_run()])
  assert_refused(lambda: launch_tables.show_paper(path, output=path), "results.csv")
