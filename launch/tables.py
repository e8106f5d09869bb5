"""Prints the results of a sweep beside the paper's, in Markdown.

python -m launch.tables --results=results/paper_table.csv
"""

import os

from absl import flags

from fedbnr_jax.errors import InputError
from fedbnr_jax.report import tables
from launch import common

_RESULTS = flags.DEFINE_string("results", None, "A results.csv.")


def main() -> None:
  if not _RESULTS.value:
    raise InputError("--results is missing: name the results.csv of a sweep.")
  show(_RESULTS.value)


def show(path: str | os.PathLike[str]) -> None:
  """Prints the table of the results in `path`."""
  results = tables.read_results(path)
  print(tables.markdown(tables.beside_paper(results)))


if __name__ == "__main__":
  common.run(main)
