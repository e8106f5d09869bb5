"""What sums over all clients say of the inputs, for kernels that draw inputs."""

import numpy as np

from fedbnr_jax.data import Preprocessor, marginals
from fedbnr_jax.gp import urk


def summarise(inputs: np.ndarray, preprocessor: Preprocessor) -> urk.InputSummary:
  """Summarises the inputs of training rows by sums alone.

  Args:
    inputs: `[N, D]` inputs of the training rows, as the kernel sees them.
    preprocessor: Says which of them are numeric, and which stand for a category.
  """
  num_inputs = inputs.shape[1]
  num_numeric = num_inputs - preprocessor.num_categories
  numeric = [marginals.fit([inputs[:, d]]) for d in range(num_numeric)]
  quantiles = np.zeros((marginals.NUM_QUANTILES, num_inputs))
  factor = np.eye(num_inputs)
  if numeric:
    quantiles[:, :num_numeric] = np.stack([one.quantiles() for one in numeric], axis=1)
    scores = np.stack([one.scores(inputs[:, d]) for d, one in enumerate(numeric)], 1)
    factor[:num_numeric, :num_numeric] = marginals.correlation_factor(scores)
  column = np.full(num_inputs, num_inputs, np.int32)
  log_frequency = np.zeros(num_inputs)
  start = num_numeric
  for number, (_, values) in enumerate(preprocessor.categories):
    stop = start + len(values)
    column[start:stop] = number
    start = stop
  off, on = inputs.min(axis=0), inputs.max(axis=0)
  is_on = inputs[:, num_numeric:] == on[num_numeric:]
  log_frequency[num_numeric:] = np.log(np.maximum(is_on.mean(axis=0), 1e-12))
  return urk.InputSummary(quantiles, factor, column, log_frequency, np.stack([off, on]))


def empty(num_inputs: int) -> urk.InputSummary:
  """Makes a summary of the right shapes, from which a method's state can be shaped."""
  return urk.InputSummary(
    quantiles=np.zeros((marginals.NUM_QUANTILES, num_inputs)),
    factor=np.eye(num_inputs),
    column=np.full(num_inputs, num_inputs, np.int32),
    log_frequency=np.zeros(num_inputs),
    levels=np.zeros((2, num_inputs)),
  )
