"""Draws tables from a known function, so that predictions can be compared with it.

To add a task, write its function and add an entry to `TASKS`.
"""

import dataclasses
import math

import numpy as np
import pandas as pd

from fedbnr_jax.data.dataset import Dataset, Split, Truth
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import suggestion

_FEWEST_ROWS = 10
# The jump is not at zero, where every ReLU bends before it is trained, and where noise
# that multiplies the input does nothing.
_JUMP = 1.0


def bumps(inputs: np.ndarray) -> np.ndarray:
  """Computes the truth of "two-ranges", a trend with bumps of one input.

  Args:
    inputs: `[N, 1]`, meant for the range from -5 to 5.

  Returns:
    `[N]` values, all between -3.5 and 2.5.
  """
  x = inputs[:, 0]
  return 0.35 * x + 1.3 * np.sin(1.8 * x) + 0.6 * np.cos(0.7 * x)


def additive(inputs: np.ndarray) -> np.ndarray:
  """Computes the truth of "additive", a sum of smooth functions of four inputs.

  Args:
    inputs: `[N, 5]`, meant for the range from -2 to 2; the last has no effect.

  Returns:
    `[N]` values.
  """
  x1, x2, x3, x4, _ = inputs.T
  return 2.0 * np.sin(1.5 * x1) + 0.5 * x2**2 + 1.5 * np.exp(-(x3**2)) + 0.8 * x4


def step(inputs: np.ndarray) -> np.ndarray:
  """Computes the truth of "step", one jump of one input.

  Args:
    inputs: `[N, 1]`, meant for the range from -5 to 5.

  Returns:
    `[N]` values: -1.5 below 1, and 1.5 from there on.
  """
  return np.where(inputs[:, 0] < _JUMP, -1.5, 1.5)


@dataclasses.dataclass(frozen=True)
class Task:
  """A task is a function, its inputs, and the way that clients divide them.

  Attributes:
    truth: The noiseless function of the D inputs.
    columns: Names of the D inputs.
    limit: Inputs are uniform from -limit to limit.
    equal_widths: Whether training rows are sorted and clients own neighbouring ranges
      of equal width of the first input. Otherwise each client owns an equal share of
      the training rows, by quantile of the first input.
  """

  truth: Truth
  columns: tuple[str, ...]
  limit: float
  equal_widths: bool


TASKS = {
  "two-ranges": Task(bumps, ("x",), 5.0, equal_widths=True),
  "additive": Task(additive, ("x1", "x2", "x3", "x4", "x5"), 2.0, equal_widths=False),
  "step": Task(step, ("x",), 5.0, equal_widths=True),
}


def load(
  task: str,
  rng: np.random.Generator,
  *,
  num_rows: int = 200,
  noise_std: float = 0.5,
  num_clients: int = 2,
) -> Dataset:
  """Draws a table with a predefined split.

  "two-ranges" is the paper's synthetic experiment: one input, uniform on [-5, 5],
  whose training rows are sorted, and clients that own neighbouring ranges of equal
  width, so that no client can predict for another. "step" has the same inputs and
  owners, and a truth that jumps. "additive" has five inputs and gives each client an
  equal share of training rows, by quantile of the first input.

  Args:
    task: The name of one of `TASKS`.
    rng: Source of inputs and noise.
    num_rows: Number of training rows; half as many are drawn for each of test and
      validation.
    noise_std: Standard deviation of the Gaussian noise on the targets.
    num_clients: Number of owners, labelled "client 1" and so on.

  Returns:
    The dataset, with training rows first, then test rows, then validation rows.

  Raises:
    InputError: If an argument is out of range, or a client gets no training row.

  Example:
    >>> import numpy as np
    >>> from fedbnr_jax import data
    >>> dataset = data.synthetic.load("two-ranges", np.random.default_rng(0))
    >>> dataset.num_rows, len(dataset.split.train), sorted({*dataset.clients.tolist()})
    (400, 200, ['client 1', 'client 2'])
  """
  _check(task, num_rows, noise_std, num_clients)
  chosen = TASKS[task]
  half = num_rows // 2
  size = (num_rows + 2 * half, len(chosen.columns))
  inputs = rng.uniform(-chosen.limit, chosen.limit, size=size)
  if chosen.equal_widths:
    inputs[:num_rows].sort(axis=0)
    edges = np.linspace(-chosen.limit, chosen.limit, num_clients + 1)[1:-1]
  else:
    shares = np.arange(1, num_clients) / num_clients
    edges = np.quantile(inputs[:num_rows, 0], shares)
  owner = np.searchsorted(edges, inputs[:, 0], side="right") + 1
  _check_owners(task, owner[:num_rows], num_clients)
  rows = np.arange(len(inputs))
  return Dataset(
    name=task,
    features=pd.DataFrame(inputs, columns=list(chosen.columns)),
    targets=chosen.truth(inputs) + noise_std * rng.standard_normal(len(inputs)),
    target_name="y",
    clients=np.array([f"client {number}" for number in owner]),
    split=Split(*np.split(rows, [num_rows, num_rows + half])),
    truth=chosen.truth,
  )


def _check(task: str, num_rows: int, noise_std: float, num_clients: int) -> None:
  """Raises for an argument out of range, with the range that is allowed."""
  if task not in TASKS:
    raise InputError(f"no synthetic task {task!r}: {suggestion(task, TASKS)}")
  if num_rows < _FEWEST_ROWS:
    raise InputError(
      f"synthetic task {task!r}: num_rows is {num_rows}: give at least {_FEWEST_ROWS}"
    )
  if not (math.isfinite(noise_std) and noise_std > 0):
    raise InputError(
      f"synthetic task {task!r}: noise_std is {noise_std}: give a positive number"
    )
  if not 1 <= num_clients <= num_rows // 2:
    raise InputError(
      f"synthetic task {task!r}: num_clients is {num_clients}: give at least 1 and at "
      f"most half of the {num_rows} rows"
    )


def _check_owners(task: str, owner: np.ndarray, num_clients: int) -> None:
  """Raises if a client is not among the owners `[num_rows]` of the training rows."""
  absent = set(range(1, num_clients + 1)) - set(owner.tolist())
  if absent:
    raise InputError(
      f"synthetic task {task!r}: client {min(absent)} of {num_clients} got none of "
      f"the {len(owner)} training rows: draw more rows or name fewer clients"
    )
