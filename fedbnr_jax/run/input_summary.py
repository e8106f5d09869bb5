"""What sums over all clients say of the inputs, for kernels that draw inputs."""

from collections.abc import Callable

import numpy as np
from scipy import special

from fedbnr_jax.data import Preprocessor, marginals, questions
from fedbnr_jax.data.questions import Arrays, Ask
from fedbnr_jax.gp import urk


def summarise(inputs: np.ndarray, preprocessor: Preprocessor) -> urk.InputSummary:
  """Summarises the inputs of training rows by sums alone.

  Args:
    inputs: `[N, D]` inputs of the training rows, as the kernel sees them.
    preprocessor: Says which of them are numeric, and which stand for a category.
  """
  return from_sums(Site(inputs).answer, preprocessor)


class Site:
  """The inputs of one site's training rows, as far as this summary goes."""

  def __init__(self, inputs: np.ndarray) -> None:
    """Keeps inputs `[n, D]`."""
    self._inputs = inputs

  def answer(self, question: str, arguments: Arrays) -> Arrays:
    """Answers one of the questions of this module by numbers that add over sites."""
    answers: dict[str, Callable[..., Arrays]] = {
      "input_bins": self._bins,
      "input_totals": self._totals,
      "input_products": self._products,
    }
    return questions.answer(answers, question, arguments)

  def _bins(self, **edges: np.ndarray) -> Arrays:
    return questions.binned(lambda number: self._inputs[:, number], edges)

  def _totals(self, on: np.ndarray, **maps: np.ndarray) -> Arrays:
    return {
      "rows": np.array(float(len(self._inputs))),
      "scores": self._scores(maps).sum(axis=0),
      "on": (self._inputs == on).sum(axis=0).astype(np.float64),
    }

  def _products(self, mean: np.ndarray, **maps: np.ndarray) -> Arrays:
    centred = self._scores(maps) - mean
    return {"products": centred.T @ centred}

  def _scores(self, maps: Arrays) -> np.ndarray:
    """Maps numeric inputs to scores `[n, d]`, by points `[P]` of each."""
    scores = np.zeros((len(self._inputs), len(maps) // 2))
    for d in range(scores.shape[1]):
      points = maps[f"values_{d}"], maps[f"scores_{d}"]
      scores[:, d] = np.interp(self._inputs[:, d], *points)
    return scores


def from_sums(ask: Ask, preprocessor: Preprocessor) -> urk.InputSummary:
  """Summarises the inputs of all sites' training rows by what they tell of them.

  Args:
    ask: Reaches all sites.
    preprocessor: Says which inputs are numeric, and which stand for a category.
  """
  num_inputs = preprocessor.num_inputs
  num_numeric = num_inputs - preprocessor.num_categories
  share, std = np.array(preprocessor.input_mean), np.array(preprocessor.input_std)
  off, on = (0.0 - share) / std, (1.0 - share) / std  # Of indicators.

  quantiles = np.zeros((marginals.NUM_QUANTILES, num_inputs))
  factor = np.eye(num_inputs)
  maps: Arrays = {}
  if num_numeric:
    found = questions.find_marginals(ask, "input_bins", range(num_numeric), {})
    quantiles[:, :num_numeric] = np.stack([one.quantiles() for one in found], axis=1)
    for d, one in enumerate(found):
      maps |= {f"values_{d}": one.values}
      maps |= {f"scores_{d}": marginals.normal_scores(one.levels)}
  totals = ask("input_totals", {"on": on, **maps})
  if num_numeric:
    mean = totals["scores"] / totals["rows"]
    products = ask("input_products", {"mean": mean, **maps})["products"]
    own = marginals.correlation_factor(products / totals["rows"])
    factor[:num_numeric, :num_numeric] = own
  frequency = totals["on"][num_numeric:] / totals["rows"]
  log_frequency = np.zeros(num_inputs)
  log_frequency[num_numeric:] = np.log(np.maximum(frequency, 1e-12))
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
