"""Loads five regression tables of the UCI repository, each checked by its digest.

Files are read as UCI distributes them (zip archives, a workbook, `?` for a missing
value, Latin-1) or unpacked and cleaned. The digest is taken of the parsed values, so
that every format of a table passes and every damaged one is refused. To add a table,
add an entry to `uci_tables.TABLES`.
"""

import csv
import hashlib
import io
import os
import warnings
import zipfile
from pathlib import Path

import numpy as np
import openpyxl
import pandas as pd

from fedbnr_jax.data import archives
from fedbnr_jax.data.dataset import Dataset
from fedbnr_jax.data.uci_tables import TABLES, Columns, UciTable
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import cache_folder
from fedbnr_jax.names import suggestion

ARCHIVE_URL = "https://archive.ics.uci.edu/static/public"
DATA_VARIABLE = "FEDBNR_DATA_DIR"

_MISSING = "?"

NAMES = tuple(TABLES)


def load(name: str, directory: str | os.PathLike[str] | None = None) -> Dataset:
  """Loads one of the five tables.

  The files are expected in `<directory>/<name>/`. The directory is the argument; else
  the environment variable FEDBNR_DATA_DIR; else a cache (FEDBNR_CACHE_DIR, by default
  ~/.cache/fedbnr_jax). Only into the cache is a missing table downloaded.

  Args:
    name: One of `NAMES`.
    directory: A folder that holds a folder for each table.

  Returns:
    The dataset, cleaned, without a split.

  Raises:
    InputError: If the table is unknown or absent, or differs from its digest.
  """
  if name not in TABLES:
    raise InputError(f"no UCI dataset {name!r}: {suggestion(name, NAMES)}")
  table = TABLES[name]
  where, columns = [], []
  for label, content in _files(name, table, directory):
    where.append(label)
    columns.append(_parse(label, content, table))
  whole = {key: np.concatenate([part[key] for part in columns]) for key in columns[0]}
  used = {key: values for key, values in whole.items() if key not in table.unused}
  if table.derive is not None:
    try:
      used = table.derive(used)
    except ValueError as error:
      raise InputError(
        f"{name}: {' and '.join(where)} has an unusable date or time ({error}): delete "
        f"it and get {_url(table)} again"
      ) from error
  found = _digest(used)
  if found != table.digest:
    rows = len(used[table.target])
    raise InputError(
      f"{name}: {' and '.join(where)} differs from UCI's table ({rows} rows, expected "
      f"{table.num_rows}; digest {found}, expected {table.digest}): delete it and get "
      f"{_url(table)} again"
    )
  targets = used.pop(table.target)
  return Dataset(
    name=name,
    features=pd.DataFrame(
      {key: pd.Series(values, dtype=values.dtype) for key, values in used.items()}
    ),
    targets=targets,
    target_name=table.target,
    standardised_error=table.standardised_error,
  )


def _url(table: UciTable) -> str:
  """Returns the address of a table's archive."""
  return f"{ARCHIVE_URL}/{table.archive}"


def _files(
  name: str, table: UciTable, directory: str | os.PathLike[str] | None
) -> list[tuple[str, bytes]]:
  """Finds or downloads the files of a table; returns place and content of each."""
  given = directory or os.environ.get(DATA_VARIABLE)
  folder = Path(given) / name if given else cache_folder() / "data" / name
  wanted = " and ".join(" or ".join(names) for names in table.files)
  found = [archives.find_file(folder, names) for names in table.files]
  if None in found and not given:
    target = folder / table.archive.rpartition("/")[2]
    try:
      archives.download(_url(table), target)
    except InputError as error:
      raise InputError(
        f"{name}: cannot download {_url(table)} ({error}): get it elsewhere and put "
        f"it, or {wanted} out of it, into {folder}, or set {DATA_VARIABLE} to a folder "
        f"that holds {name}{os.sep}{table.files[0][0]}"
      ) from error
    found = [archives.find_file(folder, names) for names in table.files]
  files = [file for file in found if file is not None]
  if len(files) < len(table.files):
    raise InputError(
      f"{name}: {wanted} is not in {folder}: get {_url(table)} and put it there, "
      "zipped or not"
    )
  return files


def _parse(where: str, content: bytes, table: UciTable) -> Columns:
  """Parses one file into columns, and drops rows with missing values."""
  if where.lower().endswith(".xlsx"):
    numbered = _workbook_rows(where, content)
  else:
    numbered = _text_rows(where, content, table.delimiter)
  target = table.columns.index(table.target)
  rows: list[list[str]] = []
  lines: list[int] = []
  for line, row in numbered:
    if len(row) != len(table.columns):
      raise InputError(
        f"{where}: line {line} has {len(row)} cells instead of {len(table.columns)}: "
        f"the file is damaged or another: get {_url(table)} again"
      )
    # The header is optional and its wording varies, but it never holds a number here.
    is_header = not lines and not _is_number(row[target])
    if not is_header and _MISSING not in row:
      rows.append(row)
      lines.append(line)
  if not rows:
    raise InputError(f"{where} holds no rows: get {_url(table)} again")
  columns: Columns = {}
  for name, cells in zip(table.columns, zip(*rows, strict=True), strict=True):
    if name in table.categorical:
      columns[name] = np.array(cells, dtype=object)
    else:
      columns[name] = _numbers(where, name, cells, lines, table)
  return columns


def _numbers(
  where: str, name: str, cells: tuple[str, ...], lines: list[int], table: UciTable
) -> np.ndarray:
  """Parses the cells of one column into float64 numbers `[N]`."""
  for line, cell in zip(lines, cells, strict=True):
    if not _is_number(cell):
      raise InputError(
        f"{where}: line {line}, column {name!r}: {cell[:40]!r} is not a number: the "
        f"file is damaged: get {_url(table)} again"
      )
  return np.array([float(cell) for cell in cells])


def _is_number(cell: str) -> bool:
  """Tells whether a cell holds a finite number."""
  try:
    return bool(np.isfinite(float(cell)))
  except ValueError:
    return False


def _text_rows(
  where: str, content: bytes, delimiter: str | None
) -> list[tuple[int, list[str]]]:
  """Splits a text file into numbered rows, without comments and blank lines."""
  try:
    text = content.decode("utf-8-sig")
  except UnicodeDecodeError:
    text = content.decode("latin-1")
  lines = [
    (number, line)
    for number, line in enumerate(text.splitlines(), start=1)
    if line.strip() and not line.startswith("#")
  ]
  if delimiter is None:
    return [(number, line.split()) for number, line in lines]
  try:
    cells = list(csv.reader([line for _, line in lines], delimiter=delimiter))
  except csv.Error as error:
    raise InputError(f"{where} is not a text table ({error}): get it again") from error
  stripped = [[cell.strip() for cell in row] for row in cells]
  return [(number, row) for (number, _), row in zip(lines, stripped, strict=False)]


def _workbook_rows(where: str, content: bytes) -> list[tuple[int, list[str]]]:
  """Returns the numbered rows of the first sheet of a workbook."""
  try:
    archives.check_unpacked_size(where, content)
    # openpyxl warns of styles that it does not know; only the numbers matter here.
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      book = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
      rows = list(book.worksheets[0].iter_rows(values_only=True))
      book.close()
  except InputError:
    raise
  except (zipfile.BadZipFile, KeyError, ValueError, OSError, IndexError) as error:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise InputError(f"{where} is not a workbook ({reason}): get it again") from error
  return [
    (number, ["" if cell is None else str(cell).strip() for cell in row])
    for number, row in enumerate(rows, start=1)
    if any(cell is not None for cell in row)
  ]


def _digest(columns: Columns) -> str:
  """Hashes the columns of a cleaned table, whatever file format they came from.

  Numbers are written with ten significant digits. No cell has more, and the last bits,
  in which a workbook's numbers may differ from their decimal text, do not show.
  """
  digest = hashlib.sha256()
  for name in sorted(columns):
    values = columns[name]
    if values.dtype == object:
      cells = values.tolist()
    else:
      # Adding zero turns a negative zero into a positive one.
      cells = [f"{value:.10g}" for value in (values + 0.0).tolist()]
    digest.update("\n".join([name, *cells, ""]).encode())
  return digest.hexdigest()
