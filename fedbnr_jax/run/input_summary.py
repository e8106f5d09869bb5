"""What sums over all clients say of the inputs, for kernels that draw inputs."""

import numpy as np
from scipy import special

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
  log_frequency = np.zeros(num_inputs)
  off, on = inputs.min(axis=0), inputs.max(axis=0)
  is_on = inputs[:, num_numeric:] == on[num_numeric:]
  log_frequency[num_numeric:] = np.log(np.maximum(is_on.mean(axis=0), 1e-12))
  return urk.InputSummary(
    quantiles, factor, _column(preprocessor), log_frequency, np.stack([off, on])
  )


def of_preprocessor(preprocessor: Preprocessor) -> urk.InputSummary:
  """Summarises the inputs by what their standardisation alone says of them.

  Numbers are taken as normal, as far as their training range goes, and as independent;
  categories have their frequencies, which are the means of their indicators.
  """
  num_numbers = len(preprocessor.numeric_columns)
  num_numeric = preprocessor.num_inputs - preprocessor.num_categories
  share, std = np.array(preprocessor.input_mean), np.array(preprocessor.input_std)
  levels = np.stack([-share / std, (1.0 - share) / std])  # Of indicators.
  at = (np.arange(marginals.NUM_QUANTILES) + 0.5)[:, None] / marginals.NUM_QUANTILES
  off, on = levels[:, None, :]
  # Whether a number is missing is an indicator with a place among the numeric inputs.
  quantiles = np.where(at < 1.0 - share, off, on)
  quantiles[:, :num_numbers] = special.ndtri(at)
  if preprocessor.numeric_ranges and not preprocessor.input_scores:
    ends = (np.array(preprocessor.numeric_ranges).T - share[:num_numbers]) / (
      std[:num_numbers]
    )
    quantiles[:, :num_numbers] = np.clip(quantiles[:, :num_numbers], *ends)
  log_frequency = np.zeros(preprocessor.num_inputs)
  log_frequency[num_numeric:] = np.log(share[num_numeric:])
  factor = np.eye(preprocessor.num_inputs)
  return urk.InputSummary(
    quantiles, factor, _column(preprocessor), log_frequency, levels
  )


def _column(preprocessor: Preprocessor) -> np.ndarray:
  """Numbers [D] the categorical columns of indicators; D stands for other inputs."""
  sizes = [len(values) for _, values in preprocessor.categories]
  num_inputs = preprocessor.num_inputs
  rest = np.full(num_inputs - sum(sizes), num_inputs)
  return np.concatenate([rest, np.repeat(np.arange(len(sizes)), sizes)]).astype(
    np.int32
  )


def empty(num_inputs: int) -> urk.InputSummary:
  """Makes a summary of the right shapes, from which a method's state can be shaped."""
  return urk.InputSummary(
    quantiles=np.zeros((marginals.NUM_QUANTILES, num_inputs)),
    factor=np.eye(num_inputs),
    column=np.full(num_inputs, num_inputs, np.int32),
    log_frequency=np.zeros(num_inputs),
    levels=np.zeros((2, num_inputs)),
  )
