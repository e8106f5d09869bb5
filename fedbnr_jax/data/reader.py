"""Reads a file into a raw frame whose cells can be traced to their row and line.

A CSV file is read as text only. Which columns hold numbers is decided later, in
`columns`, where a bad cell can still be shown as it stands in the file. The frame holds
the file's name in `attrs["source"]`, for messages.
"""

import csv
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing

DELIMITERS = {".csv": ",", ".txt": ",", ".data": ",", ".tsv": "\t"}
PARQUET = (".parquet", ".pq")
# A file with one of these is binary: text has no control characters but tab, line
# feed, form feed and carriage return.
_CONTROL = [chr(code) for code in range(32) if chr(code) not in "\t\n\f\r"]


def read_table(path: str | os.PathLike[str]) -> pd.DataFrame:
  """Reads a CSV or Parquet file without interpreting it.

  Args:
    path: A file that ends in .csv, .txt or .data (separated by commas), .tsv
      (by tabs), each possibly with .gz behind it, or .parquet or .pq. Text is UTF-8
      or, failing that, Latin-1; its first line names the columns.

  Returns:
    The raw frame, with string columns from text files and typed ones from Parquet.

  Raises:
    InputError: If there is no such file or it is not a table with rows.
  """
  path = Path(path)
  if path.is_dir():
    raise InputError(f"{path} is a folder: name the table file in it")
  if not path.exists():
    raise InputError(f"{path} does not exist: check the path of the table")
  suffix = table_suffix(path)
  if suffix in PARQUET:
    frame = _read_parquet(path)
  elif suffix in DELIMITERS:
    frame = _read_text(path, DELIMITERS[suffix])
  else:
    raise unknown_suffix(path)
  _check_names(path, list(frame.columns))
  if frame.empty:
    raise InputError(f"{path} has column names but no rows: add data below them")
  frame.attrs["source"] = str(path)
  return frame


def place(frame: pd.DataFrame, position: int) -> str:
  """Describes where a row stands, for an error message.

  Args:
    frame: A raw frame, from `read_table` or from the user.
    position: Position of the row in the frame, from 0.

  Returns:
    The row, counted from 1; also the file, if it is known, and its line, if it is text.
  """
  source = frame.attrs.get("source")
  if source is None:
    return f"row {position + 1}"
  # The index still numbers the rows of the file after the user has dropped some.
  label = frame.index[position]
  row = (int(label) if isinstance(label, (int, np.integer)) else position) + 1
  line = _line_of_row(Path(source), row)
  return f"{source}: row {row}" + (f" (line {line})" if line else "")


def unknown_suffix(path: Path) -> InputError:
  """Returns the error for a file whose suffix names no known format."""
  return InputError(
    f"{path} has the unknown suffix {table_suffix(path)!r}: save the table as one of "
    f"{listing([*DELIMITERS, *PARQUET])}"
  )


def table_suffix(path: Path) -> str:
  """Returns the suffix that names the format, lower-cased and without .gz."""
  name = path.name.lower()
  return Path(name.removesuffix(".gz")).suffix


def _read_parquet(path: Path) -> pd.DataFrame:
  """Reads a Parquet file; a named index becomes a column, an unnamed one is dropped."""
  try:
    # If pandas' metadata is ignored, an index is a column like any other.
    frame = pyarrow.parquet.read_table(path).to_pandas(ignore_metadata=True)
  except (pa.ArrowException, OSError) as error:
    raise InputError(
      f"{path} cannot be read as Parquet: check that it is complete and was not "
      "merely renamed"
    ) from error
  unnamed = [name for name in frame.columns if name.startswith("__index_level_")]
  return frame.drop(columns=unnamed)


def _read_text(path: Path, delimiter: str) -> pd.DataFrame:
  """Reads a delimited text file into a frame of strings."""
  text = _decode(path)
  header = _header(path, text, delimiter)
  # A quote that is never closed would make one cell of all lines below it.
  if text.count('"') % 2:
    _find_bad_line(path, text, delimiter, len(header))
  # A duplicate or empty name would confuse the column types below.
  _check_names(path, header)
  # pyarrow skips blank lines, but would take a blank first line for the header.
  content = text.lstrip("\r\n").encode()
  try:
    table = pyarrow.csv.read_csv(
      pa.BufferReader(content),
      read_options=pyarrow.csv.ReadOptions(
        column_names=header, skip_rows_after_names=1, block_size=1 << 24
      ),
      parse_options=pyarrow.csv.ParseOptions(
        delimiter=delimiter, newlines_in_values='"' in text
      ),
      convert_options=pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False
      ),
    )
  except pa.ArrowInvalid as error:
    # pyarrow does not say on which line it failed; the csv module finds it.
    _find_bad_line(path, text, delimiter, len(header))
    reason = str(error).splitlines()[0]
    raise InputError(f"{path} is not a table ({reason}): correct the file") from error
  return table.to_pandas()


def _decode(path: Path) -> str:
  """Reads a file as text, unzipped if it ends in .gz, and refuses a binary one."""
  try:
    content = path.read_bytes()
    if path.name.lower().endswith(".gz"):
      content = gzip.decompress(content)
  except (OSError, EOFError, zlib.error) as error:
    raise InputError(f"{path} cannot be read ({error}): check the file") from error
  try:
    text = content.decode("utf-8-sig")
  except UnicodeDecodeError:
    text = content.decode("latin-1")
  if any(character in text for character in _CONTROL):
    raise InputError(
      f"{path} is a binary file, not text: save the table as CSV in UTF-8, or give a "
      "Parquet file the suffix .parquet"
    )
  if not text.strip():
    raise InputError(f"{path} is empty: give a table with column names and rows")
  return text


def _records(
  text: str, delimiter: str, strict: bool = False
) -> Iterator[tuple[int, list[str]]]:
  """Yields each record that is not blank, after the line on which it starts."""
  reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=strict)
  start = 1
  for record in reader:
    if record:
      yield start, record
    start = reader.line_num + 1


def _header(path: Path, text: str, delimiter: str) -> list[str]:
  """Returns the column names, and refuses a file with another separator."""
  try:
    _, header = next(_records(text, delimiter))
  except (StopIteration, csv.Error) as error:
    raise InputError(f"{path} has no line of column names: add one") from error
  other = next((mark for mark in ";\t|," if mark in header[0]), None)
  if len(header) == 1 and other is not None:
    raise InputError(
      f"{path} seems to be separated by {other!r}, not {delimiter!r}: save it with "
      "commas as .csv or with tabs as .tsv"
    )
  return [name.strip() for name in header]


def _check_names(path: Path, names: list[str]) -> None:
  """Raises if a column name is empty or occurs twice."""
  seen: set[str] = set()
  for number, name in enumerate(names, start=1):
    if not name:
      raise InputError(
        f"{path}: column {number} has no name: name it in the first line, or remove it "
        "if it only numbers the rows"
      )
    if name in seen:
      raise InputError(f"{path}: column name {name!r} occurs twice: rename one")
    seen.add(name)


def _find_bad_line(path: Path, text: str, delimiter: str, width: int) -> None:
  """Raises at the first line that has too few or too many fields, if there is one."""
  line = 1
  try:
    for line, record in _records(text, delimiter, strict=True):
      if len(record) != width:
        raise InputError(
          f"{path}: line {line} has {len(record)} fields where the first line names "
          f"{width} columns: correct that line"
        )
  except csv.Error as error:
    raise InputError(
      f"{path}: cannot read on after line {line} ({error}): look for a stray quote"
    ) from error


def _line_of_row(path: Path, row: int) -> int | None:
  """Finds the line on which a data row, counted from 1, starts; None if unknown.

  Blank lines and line breaks inside of quotes make the two numbers differ.
  """
  suffix = table_suffix(path)
  if suffix not in DELIMITERS:
    return None
  try:
    lines = [line for line, _ in _records(_decode(path), DELIMITERS[suffix])]
  except (InputError, csv.Error):  # The file has changed since it was read.
    return None
  return lines[row] if row < len(lines) else None
