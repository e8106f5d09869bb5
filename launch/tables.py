"""Prints the results of a sweep beside the paper's, in Markdown.

python -m launch.tables --results=results/paper_table.csv
"""

from absl import flags

from fedbnr_jax.report import tables
from launch import common

_RESULTS = flags.DEFINE_string("results", None, "A results.csv.", required=True)


def main() -> None:
  results = tables.read_results(_RESULTS.value)
  print(tables.markdown(tables.beside_paper(results)))


if __name__ == "__main__":
  common.run(main)
