"""Prints the paper's tables from the results of a sweep, ours beside the paper's.

python -m launch.tables --results=results/paper_table.csv [--output=DIR]
python -m launch.tables --results=runs/mine/results.csv --brief
python -m launch.tables --results=runs/num_samples/results.csv --validation
python -m launch.tables --results=results/paper_table.csv --html=page.html

The tables are in Markdown, with standard errors and marks of significance, followed by
the number of cells in which the paper's claims hold. With --output, tables.md,
tables.tex, tables.csv and figure.png are written into that folder. --brief prints one
line per cell, also for sweeps over other settings; --validation prints the scores on
validation rows, by which settings are chosen. --html writes one page, to be opened in
any browser, with a table to sort and the figure.
"""

import os
import pathlib

from absl import flags

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.report import (
  figures,
  paper_formats,
  paper_tables,
  results_page,
  score_figure,
  tables,
)
from launch import common

flags.declare_key_flag(common.OUTPUT)
_RESULTS = flags.DEFINE_list("results", [], "The results.csv of one sweep or more.")
_BRIEF = flags.DEFINE_bool("brief", False, "One line per cell and setting.")
_VALIDATION = flags.DEFINE_bool("validation", False, "Scores on validation rows.")
_HTML = flags.DEFINE_string("html", None, "A page of the results, to be written.")


def main() -> None:
  if not _RESULTS.value:
    raise InputError("--results is missing: name the results.csv of a sweep.")
  others = (common.OUTPUT.value, _BRIEF.value, _VALIDATION.value)
  if _HTML.value:
    if any(others):
      raise InputError("give --html, or --output, --brief or --validation, not both.")
    write_page(*_RESULTS.value, output=_HTML.value)
  elif not (_BRIEF.value or _VALIDATION.value):
    show_paper(*_RESULTS.value, output=common.OUTPUT.value)
  elif common.OUTPUT.value or (_BRIEF.value and _VALIDATION.value):
    raise InputError("give only one of --output, --brief and --validation.")
  else:
    show(*_RESULTS.value, validation=_VALIDATION.value)


def show(*paths: str | os.PathLike[str], validation: bool = False) -> None:
  """Prints one line per cell and setting of the results in `paths`."""
  results = tables.read_results(*paths)
  table = tables.on_validation if validation else tables.beside_paper
  print(tables.markdown(table(results)))


def write_page(*paths: str, output: str) -> None:
  """Writes the page of the results in `paths`."""
  results, title = tables.read_results(*paths), ", ".join(paths)
  with explain_os_errors(output, "--html"):
    results_page.write(results, title, output)
  print(f"written to {output}")


def show_paper(
  *paths: str | os.PathLike[str], output: str | os.PathLike[str] | None = None
) -> None:
  """Prints the paper's tables; with `output`, also writes them, and their figure."""
  cells = paper_tables.cells(tables.read_results(*paths))
  if not cells.n[cells.table == "Table 1"].any():
    names = ", ".join(str(path) for path in paths)
    raise InputError(f"no run in {names} is done: there is nothing to show.")
  print(paper_formats.markdown(cells))
  if output:
    folder = pathlib.Path(output)
    with explain_os_errors(folder, "--output"):
      folder.mkdir(parents=True, exist_ok=True)
      paper_formats.write(cells, folder)
      figures.save(score_figure.scores(cells), folder / "figure.png")
    print(f"written to {folder}: tables.md, tables.tex, tables.csv and figure.png")


if __name__ == "__main__":
  common.run(main)
