"""Holds a regression table in memory: raw features, raw targets, owners of the rows.

Nothing here is standardised or encoded. That takes statistics of training rows, hence
a split, and is the task of `preprocessing`.
"""

import dataclasses
import hashlib
from typing import NamedTuple, Protocol

import numpy as np
import pandas as pd

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing

_TRAIN_SHARE = 0.8


class Split(NamedTuple):
  """The row numbers of the three parts of a table; no row is in two of them."""

  train: np.ndarray  # [num_train] integers
  test: np.ndarray  # [num_test] integers
  validation: np.ndarray  # [num_validation] integers


class Truth(Protocol):
  """The noiseless function that synthetic targets were drawn from."""

  def __call__(self, inputs: np.ndarray, /) -> np.ndarray:
    """Returns the function's values `[N]` at raw inputs `[N, D]`."""


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A dataset is a table of N rows to learn a regression from.

  Attributes:
    name: Name of the table in messages and reports.
    features: `[N, columns]`; float64 columns are numeric, columns of Python strings
      are categorical. A missing cell is NaN or an empty string.
    targets: `[N]` float64, in the raw unit.
    target_name: Name of the column that the targets came from.
    clients: `[N]` string labels of the owners of the rows, or None if nobody is named.
    split: A predefined split, or None if one is to be drawn at random.
    standardised_error: Whether errors are reported in units of the standard
      deviation of the training targets instead of the raw unit.
    truth: The noiseless function of the raw inputs, for synthetic data only.
    missing: Whether missing cells of features are an "error", or allowed, "impute".
  """

  name: str
  features: pd.DataFrame
  targets: np.ndarray
  target_name: str
  clients: np.ndarray | None = None
  split: Split | None = None
  standardised_error: bool = False
  truth: Truth | None = None
  missing: str = "error"

  def __post_init__(self) -> None:
    """Raises an InputError if nothing can be learnt from the table."""
    self._check_targets()
    self._check_features()
    if self.clients is not None and np.shape(self.clients) != self.targets.shape:
      raise InputError(
        f"dataset {self.name!r}: client labels have shape {np.shape(self.clients)}, "
        f"the targets {self.targets.shape}: give one label a row"
      )
    if self.split is not None:
      self._check_split(self.split)

  @property
  def num_rows(self) -> int:
    """The number of rows, N."""
    return len(self.targets)

  def digest(self) -> str:
    """Returns a SHA-256 of columns and rows, by which two tables are compared."""
    total = hashlib.sha256()
    total.update(repr([*self.features.columns, self.target_name]).encode())
    by_row = pd.util.hash_pandas_object(self.features, index=False)
    total.update(by_row.to_numpy().tobytes())
    total.update(self.targets.tobytes())
    if self.clients is not None:
      total.update(repr(self.clients.tolist()).encode())
    return total.hexdigest()

  def _check_targets(self) -> None:
    """Raises unless the targets are finite numbers `[N]` that vary."""
    where = f"dataset {self.name!r}: column {self.target_name!r}"
    if np.ndim(self.targets) != 1 or len(self.targets) == 0:
      raise InputError(
        f"{where} has shape {np.shape(self.targets)}: the target is to be one "
        "number for each of at least one row"
      )
    finite = np.isfinite(self.targets)
    if not finite.all():
      row = int(np.argmin(finite)) + 1
      raise InputError(f"{where} is not finite in row {row}: correct or drop that row")
    if self.targets.min() == self.targets.max():
      raise InputError(
        f"{where} is constant (value {float(self.targets[0])}): nothing to predict"
      )

  def _check_features(self) -> None:
    """Raises unless there is a row of usable features for each target."""
    where = f"dataset {self.name!r}"
    if len(self.features) != len(self.targets):
      raise InputError(
        f"{where}: {len(self.features)} rows of features but {len(self.targets)} "
        "targets: give one target a row"
      )
    if self.features.shape[1] == 0:
      raise InputError(f"{where} has no feature column: give at least one input")
    twice = self.features.columns[self.features.columns.duplicated()]
    if len(twice):
      raise InputError(f"{where}: feature {twice[0]!r} occurs twice: rename one")
    for column in self.features.columns:
      values = self.features[column]
      if pd.api.types.is_numeric_dtype(values):
        numbers = values.to_numpy(np.float64, na_value=np.nan)
        good = np.isfinite(numbers)
        if self.missing == "impute":
          good |= np.isnan(numbers)
      else:
        good = ~values.isna().to_numpy()
      if not good.all():
        raise InputError(
          f"{where}: column {column!r} is missing or not finite in row "
          f"{int(np.argmin(good)) + 1}: correct or drop that row"
        )

  def _check_split(self, split: Split) -> None:
    """Raises unless the parts of a split are disjoint sets of rows, none empty."""
    where = f"dataset {self.name!r}: split"
    empty = [part for part, rows in split._asdict().items() if len(rows) == 0]
    if empty:
      raise InputError(f"{where} has no rows in {listing(empty)}: give every part some")
    rows = np.concatenate(split)
    if rows.min() < 0 or rows.max() >= self.num_rows:
      raise InputError(f"{where} names a row outside 0 to {self.num_rows - 1}")
    if len(np.unique(rows)) != len(rows):
      raise InputError(f"{where} names a row twice: the parts must not overlap")


def random_split(rng: np.random.Generator, num_rows: int) -> Split:
  """Draws 80 % of the rows for training, and half of the rest for testing.

  Args:
    rng: Source of the permutation.
    num_rows: Number of rows, N.

  Returns:
    Row numbers for training, test and validation, in the order of the permutation.

  Raises:
    InputError: If a part would be empty.
  """
  num_train = int(_TRAIN_SHARE * num_rows)
  num_test = (num_rows - num_train) // 2
  if num_train < 1 or num_test < 1:
    raise InputError(
      f"{num_rows} rows are too few to split into training, test and validation "
      "rows: give at least 6"
    )
  order = rng.permutation(num_rows)
  return Split(*np.split(order, [num_train, num_train + num_test]))
