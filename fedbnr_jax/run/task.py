"""A task: what records and the host loop know of a training, without any of its rows.

A simulation has the rows as well (experiment.py). A coordinator of real sites has
nothing else.
"""

from typing import Any, NamedTuple, Protocol

import chex
import jax
import ml_collections

from fedbnr_jax import algorithms
from fedbnr_jax.data import Dataset, Preprocessor


class TableNote(NamedTuple):
  """What is said of a table without its rows.

  Attributes:
    name: Its name, in messages and reports.
    rows: How many rows it has.
    digest: Tells it from another table.
    features: Columns to predict from, in their order.
    target: The column to predict.
    standardised_error: Whether errors are told in standard deviations of the target.
  """

  name: str
  rows: int
  digest: str
  features: tuple[str, ...]
  target: str
  standardised_error: bool = False


def table_note(dataset: Dataset) -> TableNote:
  """Says of a table what goes into records."""
  return TableNote(
    dataset.name,
    dataset.num_rows,
    dataset.digest(),
    tuple(dataset.features.columns),
    dataset.target_name,
    dataset.standardised_error,
  )


class RowCounts(NamedTuple):
  """How many rows of all clients train, validate and test."""

  train: int
  validation: int
  test: int


class Task(Protocol):
  """A training as its records know it."""

  @property
  def config(self) -> ml_collections.FrozenConfigDict: ...

  @property
  def algorithm(self) -> algorithms.FederatedAlgorithm: ...

  @property
  def preprocessor(self) -> Preprocessor: ...

  @property
  def client_names(self) -> tuple[str, ...]: ...

  @property
  def num_clients(self) -> int:
    """Owners of the rows, also where a method pools them."""

  @property
  def notes_clients(self) -> bool:
    """Whether each round's record says of every client by name if it took part."""

  @property
  def table(self) -> TableNote: ...

  @property
  def counts(self) -> RowCounts: ...

  @property
  def num_padded_rows(self) -> int:
    """N of the arrays [K, N, ...] that hold the clients' rows."""

  @property
  def error_scale(self) -> float:
    """What a standardised error is multiplied by to be reported."""

  @property
  def stopping_score(self) -> str: ...

  @property
  def patience(self) -> int: ...

  @property
  def key_init(self) -> chex.PRNGKey: ...

  @property
  def key_rounds(self) -> chex.PRNGKey: ...

  def placed(self) -> tuple[Any, Any, Any]:
    """Puts the rows of clients, validation and test where the program wants them."""


class FromConfig:
  """What of a task follows from its config alone."""

  config: ml_collections.FrozenConfigDict

  @property
  def notes_clients(self) -> bool:
    """Whether each round's record says of every client by name if it took part."""
    return False

  @property
  def stopping_score(self) -> str:
    """The column of `metrics.csv` that chooses the best round."""
    return f"val_{self.config.stop_on}"

  @property
  def patience(self) -> int:
    """Rounds without a better validation score before stopping."""
    patience: int = self.config.patience
    return patience or algorithms.method(self.config.method).patience

  @property
  def key_init(self) -> chex.PRNGKey:
    """The key from which server and clients start."""
    return init_key(self.config.seed)

  @property
  def key_rounds(self) -> chex.PRNGKey:
    """The key from which each round's participants are drawn."""
    return jax.random.fold_in(jax.random.key(self.config.seed), 1)


def init_key(seed: int) -> chex.PRNGKey:
  """Makes the key from which the server and all clients of a federation start."""
  return jax.random.fold_in(jax.random.key(seed), 0)
