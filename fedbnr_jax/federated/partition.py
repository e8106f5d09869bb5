"""Partitioners: rules by which training rows are dealt to simulated clients.

A new rule is a function here and a line in `PARTITIONERS`.
"""

from typing import Protocol

import numpy as np

from fedbnr_jax.errors import InputError


class Partitioner(Protocol):
  """A rule that deals n rows to K clients."""

  def __call__(
    self,
    rng: np.random.Generator,
    inputs: np.ndarray,
    targets: np.ndarray,
    num_clients: int,
  ) -> list[np.ndarray]:
    """Returns K arrays of row numbers, given inputs [n, D] and targets [n]."""


def sorted_chunks(
  rng: np.random.Generator, inputs: np.ndarray, targets: np.ndarray, num_clients: int
) -> list[np.ndarray]:
  """Sorts rows by the most correlated input and gives each client two of 2K chunks.

  This is the paper's rule.
  """
  column = most_correlated(inputs, targets)
  order = np.argsort(inputs[:, column], kind="stable")
  chunks = np.array_split(order, 2 * num_clients)
  dealt = rng.permutation(2 * num_clients)
  return [
    np.concatenate([chunks[first], chunks[second]])
    for first, second in dealt.reshape(num_clients, 2)
  ]


def iid(
  rng: np.random.Generator, inputs: np.ndarray, targets: np.ndarray, num_clients: int
) -> list[np.ndarray]:
  """Shuffles the rows and deals equal parts."""
  del targets
  return np.array_split(rng.permutation(len(inputs)), num_clients)


def target_quantile(
  rng: np.random.Generator, inputs: np.ndarray, targets: np.ndarray, num_clients: int
) -> list[np.ndarray]:
  """Gives each client one quantile range of the target: the hardest skew."""
  del inputs
  parts = np.array_split(np.argsort(targets, kind="stable"), num_clients)
  return [parts[index] for index in rng.permutation(num_clients)]


PARTITIONERS: dict[str, Partitioner] = {
  "sorted": sorted_chunks,
  "iid": iid,
  "target": target_quantile,
}


def partition(
  name: str,
  rng: np.random.Generator,
  inputs: np.ndarray,
  targets: np.ndarray,
  num_clients: int,
) -> list[np.ndarray]:
  """Deals the training rows to `num_clients` clients by a named rule.

  Example:
    >>> import numpy as np
    >>> from fedbnr_jax.federated import partition
    >>> rng, x = np.random.default_rng(0), np.arange(12.0)[:, None]
    >>> parts = partition.partition("sorted", rng, x, x[:, 0], num_clients=3)
    >>> [len(part) for part in parts]
    [4, 4, 4]
  """
  if name not in PARTITIONERS:
    raise InputError(
      f"partition is {name!r}, not one of {', '.join(PARTITIONERS)} (or, with a client "
      "column, 'column')."
    )
  num_rows = len(targets)
  if not 1 <= num_clients <= num_rows // 2:
    raise InputError(
      f"num_clients must be between 1 and half of the {num_rows} training rows "
      f"({num_rows // 2}), got {num_clients}."
    )
  return PARTITIONERS[name](rng, inputs, targets, num_clients)


def by_column(
  labels: np.ndarray, train: np.ndarray
) -> tuple[list[np.ndarray], list[str]]:
  """Makes every label a client.

  Args:
    labels: [n] owners of all rows.
    train: [n_train] numbers of the training rows.

  Returns:
    For each label, positions within `train`; and the labels, sorted.
  """
  names = np.unique(labels)
  owners = labels[train]
  return [np.flatnonzero(owners == name) for name in names], [str(n) for n in names]


def most_correlated(inputs: np.ndarray, targets: np.ndarray) -> int:
  """Finds the column of inputs [n, D] that correlates most with targets [n]."""
  centred = inputs - inputs.mean(axis=0)
  spread = np.sqrt(np.sum(centred**2, axis=0))
  products = np.abs(centred.T @ (targets - targets.mean()))
  return int(np.argmax(products / np.where(spread > 0, spread, np.inf)))
