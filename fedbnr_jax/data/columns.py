"""Parses one column of a raw frame into numbers or labels, or names its bad cell.

The check runs over the whole column at once. Single cells are inspected only if it
fails, to find the one to report.
"""

import datetime
import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]

from fedbnr_jax.data.lookalikes import Lookalike, looks_like, unit_of
from fedbnr_jax.data.reader import place
from fedbnr_jax.errors import InputError

Kind = Literal["numeric", "categorical"]
# What becomes of a missing cell of a feature.
MISSING = ("error", "impute")
# What stands for a missing cell in a column of numbers, whatever the case of its
# letters. In a column of labels they may be labels.
_NOTHING = ("", "na", "n/a", "nan", "null", "none", "<na>")

_NUMBER = re.compile(
  r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.ASCII | re.I
)
_LONGEST_SHOWN = 40
# What to do with text that is not a label, though it is not a plain number either.
# More different cells than this with one unit, such as `12 kg`, are no labels.
_MANY_LABELS = 20
_REMEDIES = {
  "number": "write numbers with digits and a decimal point only",
  "date": "derive numbers from it (for example days since the start), or leave the "
  "column out",
}


def parse_column(
  frame: pd.DataFrame, name: str, kind: Kind | None = None, missing: str | None = None
) -> np.ndarray:
  """Parses a column into numbers or labels.

  Args:
    frame: A raw frame of N rows.
    name: The name of the column.
    kind: The kind that the column must have; None to infer it from the cells. A
      column with at least one number is then numeric, and every other cell of it is an
      error; so is a column most of whose cells look like numbers or dates to a person.
      A column of truth values (not of the words True and False) counts as 0 and 1.
    missing: One of `MISSING`: whether a missing cell of a feature is an error or kept;
      None for a column of which no cell may ever be missing.

  Returns:
    `[N]` finite float64 numbers, or `[N]` objects, which are non-empty Python strings.
    Where missing cells are kept, they are NaN, or empty strings.

  Raises:
    InputError: At the first cell that does not fit, with its row and column.
  """
  series = frame[name]
  if kind == "categorical":
    return _labels(frame, name, missing)
  _refuse_dates(frame, name, kind)
  if kind is None and isinstance(series.dtype, pd.CategoricalDtype):
    return _labels(frame, name, missing)
  if pd.api.types.is_complex_dtype(series):
    raise InputError(f"column {name!r} holds complex numbers: give real ones")
  if pd.api.types.is_numeric_dtype(series):  # Truth values included.
    values = series.to_numpy(np.float64, na_value=np.nan)
    return _finite(frame, name, values, missing)
  texts = _texts(series)
  numbers = _without_nothing(texts, kind) if missing == "impute" else texts
  try:
    values = numbers.cast(pa.float64()).to_numpy(zero_copy_only=False)
  except pa.ArrowInvalid:
    different = numbers.drop_null().unique().to_pylist()
    words = [word for word in different if not _NUMBER.fullmatch(word)]
    if not words:
      values = np.array([float(word or "nan") for word in numbers.to_pylist()])
    elif kind is None and len(words) == len(different):
      _refuse_lookalikes(frame, name, texts)
      return _labels(frame, name, missing)
    else:
      _refuse_words(frame, name, numbers, words, kind, missing)
  return _finite(frame, name, values, missing)


def _without_nothing(
  texts: pa.LargeStringArray, kind: Kind | None
) -> pa.LargeStringArray:
  """Replaces what stands for a missing number by null, in a column of numbers."""
  lower = pyarrow.compute.utf8_lower(texts)
  gone = pyarrow.compute.is_in(lower, pa.array(_NOTHING, texts.type))
  rest = texts.filter(pyarrow.compute.invert(gone)).unique().to_pylist()
  if kind is None and not any(_NUMBER.fullmatch(word) for word in rest):
    return texts
  return pyarrow.compute.if_else(gone, pa.scalar(None, texts.type), texts)


def _texts(series: pd.Series) -> pa.LargeStringArray:
  """Returns the cells `[N]` as trimmed text; a missing cell becomes an empty one."""
  kind = pa.large_string()
  try:
    texts = pa.array(series, kind, from_pandas=True)
    if isinstance(texts, pa.ChunkedArray):
      texts = texts.combine_chunks()
  except pa.ArrowException:  # Not all of them are strings.
    cells = series.to_numpy(object)
    missing = pd.isna(cells)
    texts = pa.array(
      ["" if gone else _text(cell) for cell, gone in zip(cells, missing, strict=True)],
      kind,
    )
  return pyarrow.compute.utf8_trim_whitespace(texts.fill_null(""))


def _text(cell: object) -> str:
  """Writes a cell as text."""
  # A category must read the same from 3 in a text file and from 3.0 in a typed one.
  if isinstance(cell, (float, np.floating)):
    return str(int(cell)) if float(cell).is_integer() else repr(float(cell))
  if isinstance(cell, datetime.datetime) and cell.timetz() == datetime.time():
    return cell.date().isoformat()  # As pandas writes it to a text file.
  return str(cell)


def _labels(frame: pd.DataFrame, name: str, missing: str | None) -> np.ndarray:
  """Returns the cells `[N]` as strings, and refuses an empty one unless it is kept."""
  texts = _texts(frame[name])
  empty = pyarrow.compute.index(texts, pa.scalar("", texts.type)).as_py()
  if empty >= 0 and missing != "impute":
    raise InputError(
      f"{place(frame, empty)}, column {name!r}: the cell is empty: fill it in or drop "
      f"that row{_hint(missing)}"
    )
  return texts.to_numpy(zero_copy_only=False).astype(object)


def _finite(
  frame: pd.DataFrame, name: str, values: np.ndarray, missing: str | None
) -> np.ndarray:
  """Returns numbers `[N]` unchanged, and refuses the first that is not finite."""
  finite = np.isfinite(values)
  if missing == "impute":
    finite |= np.isnan(values)
  if finite.all():
    return values
  row = int(np.argmin(finite))
  cell = frame[name].iloc[row]
  shown = "the cell is empty" if pd.isna(cell) else f"{_shown(cell)} is not finite"
  hint = _hint(missing) if np.isnan(values[row]) else ""
  raise InputError(
    f"{place(frame, row)}, column {name!r}: {shown}: correct it or drop that row{hint}"
  )


def _hint(missing: str | None) -> str:
  """Says what else can be done with a missing cell, if it is one of a feature."""
  return ", or train with data.missing=impute" if missing == "error" else ""


def _refuse_words(
  frame: pd.DataFrame,
  name: str,
  texts: pa.LargeStringArray,
  words: list[str],
  kind: Kind | None,
  missing: str | None,
) -> NoReturn:
  """Raises at the first cell of a numeric column that is one of `words`."""
  row, cell = _first_of(texts, words)
  shown = f"{_shown(cell)} is not a number" if cell else "the cell is empty"
  taken_for = looks_like(cell)
  remedy = _REMEDIES[taken_for] if taken_for else "correct it or drop that row"
  hint = "" if kind or not cell else ", or name the column in `categorical`"
  if cell.lower() in _NOTHING:
    hint += _hint(missing)
  raise InputError(f"{place(frame, row)}, column {name!r}: {shown}: {remedy}{hint}")


def _refuse_lookalikes(
  frame: pd.DataFrame, name: str, texts: pa.LargeStringArray
) -> None:
  """Raises if most cells of a column look like numbers or dates, at the first of them.

  Empty cells do not count, and a few words among them, such as `unknown`, do not help.
  """
  counts = {item["values"]: item["counts"] for item in texts.value_counts().to_pylist()}
  counts.pop("", None)
  taken_for = {word: looks_like(word) for word in counts} | _measurements(counts)
  alike = [word for word, guess in taken_for.items() if guess]
  if 2 * sum(counts[word] for word in alike) <= sum(counts.values()):
    return
  row, cell = _first_of(texts, alike)
  guess = taken_for[cell]
  assert guess is not None
  raise InputError(
    f"{place(frame, row)}, column {name!r}: {_shown(cell)} looks like a {guess} but is "
    f"text: {_REMEDIES[guess]}; or name the column in `categorical`, if its cells are "
    "labels"
  )


def _measurements(words: Iterable[str]) -> dict[str, Lookalike | None]:
  """Finds words that are numbers with one unit, if there are many different ones."""
  units = {word: unit_of(word) for word in words}
  counts = Counter(unit for unit in units.values() if unit)
  many = {unit for unit, count in counts.items() if count > _MANY_LABELS}
  return {word: "number" for word, unit in units.items() if unit in many}


def _first_of(texts: pa.LargeStringArray, words: list[str]) -> tuple[int, str]:
  """Returns position and text of the first cell that is one of `words`."""
  found = pyarrow.compute.is_in(texts, pa.array(words, texts.type))
  row = pyarrow.compute.index(found, True).as_py()
  return row, texts[row].as_py()


def _refuse_dates(frame: pd.DataFrame, name: str, kind: Kind | None) -> None:
  """Raises if a column holds dates, times, periods or intervals."""
  series = frame[name]
  guess: str = series.dtype.kind
  if guess == "O" and not isinstance(series.dtype, pd.StringDtype):
    guess = pd.api.types.infer_dtype(series, skipna=True)
  if guess in "mM" or guess.startswith(("date", "time", "period", "interval")):
    row = int(np.argmin(series.isna()))
    cell = "" if series.isna().all() else _text(series.iloc[row])
    hint = "" if kind else ", or name it in `categorical`"
    raise InputError(
      f"{place(frame, row)}, column {name!r} holds dates or times "
      f"({_shown(cell)}): {_REMEDIES['date']}{hint}"
    )


def _shown(cell: object) -> str:
  """Quotes a cell for a message, shortened if it is long."""
  text = str(cell)
  return repr(text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…")
