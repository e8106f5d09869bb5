"""Pages: a browser finds all it needs in the file, and what they say was measured."""

import html.parser
import math
import re
import types

import numpy as np
import pandas as pd
import pytest

from fedbnr_jax import data, workflow
from fedbnr_jax.report import figures, page, results_page, tables
from fedbnr_jax.run.records import RunFolder
from launch import tables as launch_tables
from tests.runs import assert_refused, sites, tiny

_EMPTY = ("meta", "path", "use", "rect", "br")


class Reader(html.parser.HTMLParser):
  """Reads a page: its texts, its addresses, and whether its elements are closed."""

  def __init__(self, text):
    super().__init__()
    self.open, self.texts, self.addresses, self.cells = [], [], [], []
    self.feed(text)
    self.close()
    assert self.open == []

  def handle_starttag(self, tag, attributes):
    for name, value in attributes:
      if name in ("src", "href", "xlink:href"):
        self.addresses.append(value)
    if tag not in _EMPTY:
      self.open.append(tag)
    if tag in ("td", "th"):
      self.cells.append("")

  def handle_startendtag(self, tag, attributes):
    self.handle_starttag(tag, attributes)
    if tag not in _EMPTY:
      self.open.pop()

  def handle_endtag(self, tag):
    if tag not in _EMPTY:
      assert self.open.pop() == tag

  def handle_data(self, data):
    if self.open and self.open[-1] in ("td", "th"):
      self.cells[-1] += data
    self.texts.append(data)


def _is_self_contained(text):
  """Whether a page fetches nothing: addresses are its own, and styles import none."""
  own = all(address.startswith("#") for address in Reader(text).addresses)
  # Names of XML vocabularies are no addresses that a browser opens.
  bare = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
  return own and not re.search(r"url\((?!#)|@import|https?:", bare)


def _frame():
  return pd.DataFrame({"name": ["<b>", "y" * 50], "value": [1.5, math.nan]})


def test_a_page_is_whole_and_escapes_what_people_wrote():
  section = page.Section("S", page.table(_frame()) + page.facts({"<i>": 3}))
  text = page.page("a & b", "<lead>", [page.Tile("t", "1")], [section])
  reader = Reader(text)
  assert {"a & b", "<lead>", "<b>", "<i>"} <= set(reader.texts)
  assert _is_self_contained(text)
  assert "prefers-color-scheme: dark" in text
  assert 'name="viewport"' in text


def test_cells_keep_exact_values_for_sorting():
  text = page.table(pd.DataFrame({"v": [1 / 3, math.nan]}), {"v": "{:.1f}".format})
  assert f'data-value="{1 / 3}">0.3<' in text
  assert 'data-value="">–<' in text


def test_pictures_take_the_colours_of_the_page_and_keep_their_numbers():
  mean = np.linspace(-1.0, 1.0, 50)
  rows = (mean, np.full(50, 0.1), mean + 0.1)
  again = [page.picture(figures.reliability(*rows), (4.0, 4.0)) for _ in range(2)]
  assert again[0] == again[1]  # The same numbers, the same bytes.
  text = again[0]
  assert "<figcaption>Reliability on 50 rows: ECE" in text
  assert "var(--ink)" in text
  assert not re.search("#000000|#222222|#e6e6e6|#ffffff", text, re.I)
  assert figures.BLUE.lower() in text.lower()
  assert _is_self_contained(text)
  ids = re.findall(r' id="([^"]*)"', text)
  assert all(ids.count(name) == 1 for name in ids)


def test_no_letters_of_a_picture_get_smaller_than_eight_pixels():
  for size in (6.0, 8.0, 10.0):
    figure, (ax,) = figures.new_axes(1, 1, (3.0, 2.0))
    ax.set_xlabel("small", fontsize=size)
    text = page.picture(figure)
    least = float(re.search(r"min-width: (\d+)px", text)[1])
    box = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])
    assert size * least / box == pytest.approx(8.0, abs=0.2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """The folder of a run of a table with sites, a category and two numbers."""
  folder = tmp_path_factory.mktemp("page")
  frame = sites(80).rename(columns={"b": "<b>"})
  frame["kind"] = np.where(np.arange(80) % 3, "x", "y")
  config = tiny(num_rounds=1, kernel="gaussian", partition="column")
  dataset = data.load_table(frame, target="y", client="site")
  workflow.train(config, folder / "run", dataset=dataset)
  return RunFolder(folder / "run")


def test_the_page_of_a_run_says_what_its_summary_says(finished):
  text = finished.report.read_text()
  reader, summary = Reader(text), finished.summary()
  assert _is_self_contained(text)
  texts = set(reader.texts)
  assert f"{summary['test_rmse']:.4g}" in texts
  assert f"{summary['test_coverage95']:.1%}" in texts
  assert any(f"{summary['test_rows']} test rows" in one for one in reader.texts)
  titles = ("Error by client", "Which columns matter", "Intervals", "Config")
  assert set(titles) <= texts
  assert {"north", "south", "<b>"} <= texts
  # Errors of clients add up to the error of all.
  place = reader.cells.index("north")
  errors = [float(reader.cells[place + 2])]
  counts = [int(reader.cells[place + 1])]
  place = reader.cells.index("south")
  errors.append(float(reader.cells[place + 2]))
  counts.append(int(reader.cells[place + 1]))
  assert sum(counts) == summary["test_rows"]
  mean = np.average(np.square(errors), weights=counts)
  assert math.sqrt(mean) == pytest.approx(summary["test_rmse"], rel=1e-3)


def test_intervals_of_the_page_cover_what_the_summary_counts(finished):
  cells = Reader(finished.report.read_text()).cells
  covered = cells[cells.index("95 %") + 1]
  assert covered == f"{finished.summary()['test_coverage95']:.1%}"


def _results(folder, **changes):
  rows = [
    {"dataset": "ccpp", "method": method, "num_clients": 10, "seed": seed}
    | {"test_rmse": 4.0 + seed, "min_test_rmse": 4.0, "test_ece": 0.1, "rounds": 3}
    | {"seconds": 7.0, "status": "done", "reason": ""}
    | changes
    for method in ("fedbnr", "fedavg")
    for seed in range(3)
  ]
  rows.append(rows[0] | {"seed": 9, "status": "failed", "reason": "it <diverged>"})
  pd.DataFrame(rows).to_csv(folder / "results.csv", index=False)
  return folder / "results.csv"


def test_the_page_of_results_has_means_the_papers_and_failures(tmp_path):
  results = tables.read_results(_results(tmp_path))
  results_page.write(results, "a <sweep>", tmp_path / "page.html")
  text = (tmp_path / "page.html").read_text()
  reader = Reader(text)
  assert _is_self_contained(text)
  place = reader.cells.index("fedavg")
  assert reader.cells[place + 1 : place + 5] == ["5", "0.58", "4.45", "3"]
  assert {"a <sweep>", "it <diverged>", "RMSE and ECE"} <= set(reader.texts)
  assert 'class="sortable"' in text


def test_results_of_other_settings_have_no_figure(tmp_path):
  path = _results(tmp_path, **{"config.hidden_size": 5})
  results_page.write(tables.read_results(path), "t", tmp_path / "page.html")
  text = (tmp_path / "page.html").read_text()
  assert "config.hidden_size" in text
  assert "<svg" not in text


def test_a_sweep_in_which_every_run_failed_has_a_page_too(tmp_path):
  path = _results(tmp_path, status="failed", reason="no luck", test_rmse="")
  results_page.write(tables.read_results(path), "t", tmp_path / "page.html")
  texts = set(Reader((tmp_path / "page.html").read_text()).texts)
  assert {"no luck", "of 7"} <= texts


def test_the_command_writes_the_page(tmp_path, capsys):
  output = tmp_path / "deep" / "page.html"
  launch_tables.write_page(str(_results(tmp_path)), output=str(output))
  assert output.exists()
  assert str(output) in capsys.readouterr().out


def test_a_page_and_another_output_are_not_both_written(tmp_path, monkeypatch):
  flags = {"_RESULTS": [str(_results(tmp_path))], "_HTML": "a.html", "_BRIEF": True}
  for name, value in flags.items():
    monkeypatch.setattr(launch_tables, name, types.SimpleNamespace(value=value))
  monkeypatch.setattr(launch_tables.common, "OUTPUT", types.SimpleNamespace(value=None))
  monkeypatch.setattr(launch_tables, "_VALIDATION", types.SimpleNamespace(value=False))
  assert_refused(launch_tables.main, "--html", "--brief")
