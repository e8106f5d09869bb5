"""Writes the notebooks with their outputs: python -m tests.notebooks [NAME ...].

A notebook is a script in notebooks/, NAME.py, in cells that begin with `# %%`. Its pair
NAME.ipynb has the same cells and what they have put out. Nothing is written there that
would differ when nothing has changed, such as times.
"""

import os
import pathlib
import re
import sys
import time

# As in tests: several notebooks may run at once, each on one thread.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jupytext
import nbclient
import nbformat

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
FIRST_CELL = FOLDER / "first_cell.py"
_METADATA = {
  "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
  "language_info": {"name": "python"},
}
# Where a warning stands, which has the number of the kernel's process in it.
_PLACE = re.compile(r"\S*ipykernel_\d+\S*/\d+\.py:(\d+)")


def scripts() -> list[pathlib.Path]:
  """Lists the scripts that are notebooks."""
  return sorted(path for path in FOLDER.glob("*.py") if path != FIRST_CELL)


def from_script(path: pathlib.Path) -> nbformat.NotebookNode:
  """Reads a script as a notebook without outputs."""
  book = jupytext.reads(path.read_text(), fmt="py:percent")
  book.metadata = nbformat.from_dict(_METADATA)
  for number, cell in enumerate(book.cells):
    cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
  return book


def execute(book: nbformat.NotebookNode) -> None:
  """Runs all cells in the folder of the notebooks, and keeps what they put out."""
  nbclient.NotebookClient(
    book, timeout=300, resources={"metadata": {"path": str(FOLDER)}}
  ).execute()
  book.metadata = nbformat.from_dict(_METADATA)
  for cell in book.cells:
    cell.metadata = nbformat.from_dict({})
    for output in cell.get("outputs", []):
      if output.output_type == "stream":
        output.text = _PLACE.sub(r"line \1", output.text)


def write(path: pathlib.Path) -> None:
  """Executes the notebook of a script and writes its pair."""
  book = from_script(path)
  execute(book)
  nbformat.validate(book)
  path.with_suffix(".ipynb").write_text(nbformat.writes(book) + "\n")


def main(names: list[str]) -> None:
  """Writes the notebooks of these names, or all."""
  for path in [FOLDER / f"{name}.py" for name in names] or scripts():
    start = time.perf_counter()
    write(path)
    print(f"{path.stem}: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
  main(sys.argv[1:])
