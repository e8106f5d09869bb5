"""Notebooks and their scripts agree, and show what a reader is meant to see."""

import pathlib
import re

import nbformat
import pytest

from tests import notebooks

SCRIPTS = notebooks.scripts()
by_name = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
MOST_BYTES = 1_500_000  # Of all notebooks together: a clone should stay small.


def executed(script: pathlib.Path) -> nbformat.NotebookNode:
  return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def outputs(script: pathlib.Path) -> list[nbformat.NotebookNode]:
  return [o for cell in executed(script).cells for o in cell.get("outputs", [])]


def test_every_notebook_has_its_script():
  found = {path.stem for path in notebooks.FOLDER.glob("*.ipynb")}
  assert found == {script.stem for script in SCRIPTS}
  assert found >= {"your_table", "the_paper", "your_own_kernel"}


@by_name
def test_pairs_agree_cell_by_cell(script: pathlib.Path):
  pair = [
    [(cell.id, cell.cell_type, cell.source) for cell in book.cells]
    for book in (notebooks.from_script(script), executed(script))
  ]
  assert pair[0] == pair[1], f"run make notebooks: {script.stem} has changed"


@by_name
def test_it_begins_with_a_title_and_the_common_first_cell(script: pathlib.Path):
  title, first = executed(script).cells[:2]
  assert title.cell_type == "markdown"
  assert title.source.startswith("# ")
  assert first.cell_type == "code"
  assert first.source == notebooks.FIRST_CELL.read_text().strip()


@by_name
def test_it_sets_nothing(script: pathlib.Path):
  """A reader who copies a cell has all that the cell needs."""
  setting = re.compile(r"environ\[|putenv|config\.update|enable_x64|absl|%env|^!", re.M)
  for cell in executed(script).cells:
    if cell.cell_type == "code":
      assert not setting.search(cell.source), cell.source


@by_name
def test_it_was_executed_from_top_to_bottom_without_an_error(script: pathlib.Path):
  code = [cell for cell in executed(script).cells if cell.cell_type == "code"]
  assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
  kinds = [output.output_type for output in outputs(script)]
  assert "error" not in kinds
  pictures = [o for o in outputs(script) if "image/png" in o.get("data", {})]
  assert len(pictures) >= 3


@by_name
def test_no_path_of_a_machine_and_no_time_is_in_it(script: pathlib.Path):
  book = executed(script)
  for cell in book.cells:
    assert cell.metadata == {}
  for output in outputs(script):
    texts = [output.get("text", "")]
    texts += [v for k, v in output.get("data", {}).items() if k.startswith("text/")]
    for text in texts:
      assert not re.search(r"/(root|home|tmp|work|Users|content)/|ipykernel", text), (
        text
      )


def test_together_they_are_small():
  sizes = [script.with_suffix(".ipynb").stat().st_size for script in SCRIPTS]
  assert sum(sizes) < MOST_BYTES
