"""Turns columns into inputs: numbers as they are, an indicator for each category."""

import numpy as np
import pandas as pd

from fedbnr_jax.errors import InputError


def raw_inputs(
  features: pd.DataFrame,
  numeric: list[str] | tuple[str, ...],
  categories: list | tuple,
) -> np.ndarray:
  """Stacks numeric columns and 0/1 indicators, `[N, D]`, before standardising."""
  blocks = [numbers(features, column)[:, None] for column in numeric]
  for column, values in categories:
    # get_indexer returns -1 for an unknown value, which leaves the row no indicator.
    labels = features[column].astype(str).to_numpy(object)
    codes = pd.Index(values, dtype=object).get_indexer(labels)
    blocks.append((codes[:, None] == np.arange(len(values))).astype(np.float64))
  return np.concatenate(blocks, axis=1)


def numbers(features: pd.DataFrame, column: str) -> np.ndarray:
  """Returns one numeric column `[N]` as float64, and refuses a value not finite."""
  series = features[column]
  if not pd.api.types.is_numeric_dtype(series):
    raise InputError(
      f"column {column!r} is to be numeric but holds {series.dtype} values: parse "
      "the table with parse_features first"
    )
  values = series.to_numpy(np.float64, na_value=np.nan)
  finite = np.isfinite(values)
  if not finite.all():
    raise InputError(
      f"column {column!r} is missing or not finite in row "
      f"{int(np.argmin(finite)) + 1}: correct or drop that row"
    )
  return values


def moments(
  values: np.ndarray, names: list[str]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Returns mean and standard deviation of each column of values `[N, D]`.

  Raises:
    InputError: If a column is constant, or too wide for float64 to square.
  """
  with np.errstate(over="ignore", invalid="ignore"):
    mean, std = values.mean(axis=0), values.std(axis=0)
  for name, low, high, deviation in zip(
    names, values.min(axis=0), values.max(axis=0), std, strict=True
  ):
    if low == high:
      raise InputError(
        f"column {name!r} is constant (value {float(low)}) over the training rows: "
        "nothing to predict"
      )
    if not (np.isfinite(deviation) and deviation > 0):
      raise InputError(
        f"column {name!r} runs from {float(low)} to {float(high)}, too far or too "
        "little for float64 statistics: rescale it"
      )
  return tuple(mean.tolist()), tuple(std.tolist())


def input_names(
  numeric: list[str] | tuple[str, ...], categories: list | tuple
) -> list[str]:
  """Returns the names of the D inputs."""
  indicators = [
    f"{column}={value}" for column, values in categories for value in values
  ]
  return [*numeric, *indicators]
