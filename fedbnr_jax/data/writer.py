"""Writes a table in any format that `read_table` reads, whole or not at all."""

import os
from pathlib import Path

import pandas as pd

from fedbnr_jax.data.reader import DELIMITERS, PARQUET, table_suffix, unknown_suffix
from fedbnr_jax.errors import InputError


def write_table(frame: pd.DataFrame, path: str | os.PathLike[str]) -> None:
  """Writes `frame` without its index, in the format that the suffix of `path` names.

  Raises:
    InputError: If the suffix is unknown or the file cannot be written.
  """
  path = Path(path)
  suffix = table_suffix(path)
  if suffix not in (*DELIMITERS, *PARQUET):
    raise unknown_suffix(path)
  part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    if suffix in PARQUET:
      frame.to_parquet(part, index=False)
    else:
      zipped = path.name.lower().endswith(".gz")
      frame.to_csv(
        part,
        sep=DELIMITERS[suffix],
        index=False,
        compression="gzip" if zipped else None,
      )
    os.replace(part, path)
  except OSError as error:
    raise InputError(f"cannot write {path} ({error.strerror or error}).") from error
  finally:
    part.unlink(missing_ok=True)
