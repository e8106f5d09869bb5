"""A number for each row of a table, by which rows that are in a model are known again.

Sums do not show which rows are in them; tags do. Equal rows have equal tags, so a list
of tags says of every row how often it is there, and rows are paired with it one by one.
"""

import warnings
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedbnr_jax.run.experiment import Experiment


class OwnedRows(NamedTuple):
  """Standardised rows of a table, and whose they are."""

  x: np.ndarray  # [n, D]
  y: np.ndarray  # [n]
  owners: np.ndarray | None = None  # [n] strings; None where there is no such column.

  def where(self, chosen: np.ndarray) -> "OwnedRows":
    """Selects rows by a mask [n] or by indices."""
    owners = None if self.owners is None else self.owners[chosen]
    return OwnedRows(self.x[chosen], self.y[chosen], owners)


def row_tags(rows: OwnedRows) -> np.ndarray:
  """Gives each row a number, [n] uint64: rows that agree in float32 get the same.

  Rows of different owners have different tags: rounded measurements repeat, and when
  one site leaves, the same row of another stays.
  """
  values = np.concatenate([rows.x, rows.y[:, None]], axis=1).astype(np.float32)
  frame = pd.DataFrame(values + np.float32(0))  # −0 becomes 0.
  if rows.owners is not None:
    frame["owner"] = rows.owners
  return pd.util.hash_pandas_object(frame, index=False).to_numpy()


def dataset_tags(experiment: Experiment) -> np.ndarray:
  """The tags [N] of all rows of an experiment's dataset."""
  dataset, preprocessor = experiment.dataset, experiment.preprocessor
  with warnings.catch_warnings(action="ignore"):  # Given when the training started.
    x = preprocessor.transform(dataset.features)
  # Tables that join or leave later name the owner of a row by this column, or not.
  owners = dataset.clients if experiment.config.data.client else None
  return row_tags(OwnedRows(x, preprocessor.standardise(dataset.targets), owners))


def paired(tags: np.ndarray, others: np.ndarray) -> np.ndarray:
  """Marks the tags [n] that have an equal one of their own among the others [m].

  Of a tag that occurs three times here and twice there, the first two are marked.
  """
  column = pd.Series(tags)
  before = column.groupby(column).cumcount().to_numpy()
  there = pd.Series(others).value_counts().reindex(tags, fill_value=0).to_numpy()
  return before < there


def without(tags: np.ndarray, gone: np.ndarray) -> np.ndarray:
  """The tags [n] less those that are gone [m], each of which takes one with it."""
  return tags[~paired(tags, gone)]
