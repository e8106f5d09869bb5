"""Prints the results of a sweep beside the paper's, in Markdown.

python -m launch.tables --results=results/paper_table.csv
python -m launch.tables --results=results/paper_table.csv --output=tables
python -m launch.tables --results=runs/num_samples/results.csv --validation

With --output, the paper's tables with SEM and marks of significance: tables.md, which
is printed too, tables.tex, tables.csv and figure.png in that folder. With --validation,
scores on validation rows, by which settings are chosen.
"""

import os
import pathlib

from absl import flags

from fedbnr_jax.errors import InputError
from fedbnr_jax.records import usable
from fedbnr_jax.report import paper_formats, paper_tables, score_figure, tables
from launch import common

_RESULTS = flags.DEFINE_list("results", [], "The results.csv of one sweep or more.")
_VALIDATION = flags.DEFINE_bool("validation", False, "Scores on validation rows.")


def main() -> None:
  if not _RESULTS.value:
    raise InputError("--results is missing: name the results.csv of a sweep.")
  if not common.OUTPUT.value:
    show(*_RESULTS.value, validation=_VALIDATION.value)
  elif _VALIDATION.value:
    raise InputError("--output is of test scores: leave it or --validation out.")
  else:
    write(*_RESULTS.value, output=common.OUTPUT.value)


def show(*paths: str | os.PathLike[str], validation: bool = False) -> None:
  """Prints the table of the results in `paths`."""
  results = tables.read_results(*paths)
  table = tables.on_validation if validation else tables.beside_paper
  print(tables.markdown(table(results)))


def write(*paths: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
  """Writes the paper's tables and their figure into a folder, and prints them."""
  cells = paper_tables.cells(tables.read_results(*paths))
  if not cells.n[cells.table == "Table 1"].any():
    names = ", ".join(str(path) for path in paths)
    raise InputError(f"no run in {names} is done: there is nothing to write.")
  folder = pathlib.Path(output)
  with usable(folder):
    folder.mkdir(parents=True, exist_ok=True)
    paper_formats.write(cells, folder)
    score_figure.scores(cells, folder / "figure.png")
  print(paper_formats.markdown(cells))
  print(f"written to {folder}: tables.md, tables.tex, tables.csv and figure.png")


if __name__ == "__main__":
  common.run(main)
