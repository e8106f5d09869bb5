"""Fits a preprocessor from what sites tell of their columns: counts, sums, histograms.

A site answers questions about its own training rows, each with numbers that add over
sites. Nothing else is needed: not the rows, and not their order. The columns, their
kinds and their categories were agreed on beforehand, because a union is not a sum.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedbnr_jax.data import encoding, questions, scores
from fedbnr_jax.data.encoding import Categories
from fedbnr_jax.data.missing_cells import Imputation
from fedbnr_jax.data.preprocessing import Preprocessor
from fedbnr_jax.data.questions import Arrays, Ask
from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing

# A deviation below so many times the mean's size is rounding.
_ROUNDING = 1e-14


class Columns(NamedTuple):
  """What all sites have agreed on.

  Attributes:
    target: Name of the column to predict.
    numeric: Names of columns of numbers.
    categories: Pairs (categorical column, its categories).
    missing: "error", or "impute" where cells of features may be missing.
  """

  target: str
  numeric: tuple[str, ...]
  categories: tuple[Categories, ...]
  missing: str = "error"


class Site:
  """The training rows of one site, as far as these questions go."""

  def __init__(
    self, columns: Columns, features: pd.DataFrame, targets: np.ndarray
  ) -> None:
    """Keeps parsed features `[n, columns]` and targets `[n]` of the training rows."""
    marked = columns.numeric if columns.missing == "impute" else None
    # Target first, then numbers, indicators of missing cells and of categories.
    inputs = encoding.raw_inputs(features, columns.numeric, columns.categories, marked)
    self._values = np.column_stack([np.asarray(targets, np.float64), inputs])

  def answer(self, question: str, arguments: Arrays) -> Arrays:
    """Answers one of the questions of this module."""
    answers: dict[str, Callable[..., Arrays]] = {
      "totals": self._totals,
      "squares": self._squares,
      "bins": self._bins,
    }
    return questions.answer(answers, question, arguments)

  def _totals(self) -> Arrays:
    seen = ~np.isnan(self._values)
    return {
      "rows": np.array(float(len(self._values))),
      "counts": seen.sum(axis=0).astype(np.float64),
      "sums": np.where(seen, self._values, 0.0).sum(axis=0),
    }

  def _squares(self, mean: np.ndarray) -> Arrays:
    with np.errstate(over="ignore"):
      return {"squares": np.nansum(np.square(self._values - mean), axis=0)}

  def _bins(self, mean: np.ndarray, std: np.ndarray, **edges: np.ndarray) -> Arrays:
    def column(number: int) -> np.ndarray:
      values = (self._values[:, number] - mean[number]) / std[number]
      return values[~np.isnan(values)]

    return questions.binned(column, edges)


def fit(ask: Ask, columns: Columns, inputs: str = "standard") -> Preprocessor:
  """Fits the preprocessor that the pooled training rows would give, but for rounding.

  The range of a column is that of its histogram, and so a little narrower than that of
  its rows: the lowest value is the mean of those in the lowest bin.

  Args:
    ask: Reaches all sites.
    columns: What they have agreed on.
    inputs: "standard" or "scores", as in `Preprocessor.fit`.

  Raises:
    InputError: If the target or every column is constant, or a sum is not finite.
  """
  marked = columns.numeric if columns.missing == "impute" else None
  names = encoding.input_names(columns.numeric, columns.categories, marked)
  totals = ask("totals", {})
  counts, sums = totals["counts"], totals["sums"]
  known = np.maximum(counts, 1.0)  # Of a column without any number, the sums are zero.
  mean = sums / known
  spread = np.sqrt(ask("squares", {"mean": mean})["squares"] / known)
  _require_finite(mean, spread, [columns.target, *names])
  varies = spread > _ROUNDING * np.abs(mean)
  if not varies[0]:
    raise InputError(
      f"column {columns.target!r} is constant (value {mean[0]}) over the training rows "
      "of all sites: nothing to predict"
    )
  kept = _kept(columns, varies[1:])
  places = [1 + names.index(name) for name in kept.names]
  found = questions.find_marginals(
    ask, "bins", places[: len(kept.numeric)], {"mean": mean, "std": spread}
  )
  maps = scores.maps_of(found, kept.numeric) if inputs == "scores" else ()
  low_high = [
    (one.values[0] * spread[p] + mean[p], one.values[-1] * spread[p] + mean[p])
    for p, one in zip(places, found, strict=False)
  ]
  imputation = None
  if kept.marked is not None:
    medians = [
      one.median() * spread[p] + mean[p] for p, one in zip(places, found, strict=False)
    ]
    imputation = Imputation(tuple(map(float, medians)), kept.marked)
  return Preprocessor(
    numeric_columns=kept.numeric,
    categories=kept.categories,
    input_mean=tuple(mean[places].tolist()),
    input_std=tuple(spread[places].tolist()),
    target_name=columns.target,
    target_mean=float(mean[0]),
    target_std=float(spread[0]),
    numeric_ranges=tuple((float(low), float(high)) for low, high in low_high),
    input_scores=maps,
    imputation=imputation,
  )


class _Kept(NamedTuple):
  """What is left of the columns without those that do not vary."""

  numeric: tuple[str, ...]
  marked: tuple[str, ...] | None
  categories: tuple[Categories, ...]

  @property
  def names(self) -> list[str]:
    return encoding.input_names(self.numeric, self.categories, self.marked)


def _kept(columns: Columns, varies: np.ndarray) -> _Kept:
  """Leaves out columns and categories that no training row of any site tells apart.

  Args:
    columns: What was agreed on.
    varies: `[D]` whether an input does, in the order of `encoding.input_names`.
  """
  num_numeric = len(columns.numeric)
  numeric = [n for n, v in zip(columns.numeric, varies, strict=False) if v]
  marked, place = None, num_numeric
  if columns.missing == "impute":
    there = varies[num_numeric : 2 * num_numeric]
    marked = tuple(n for n, v in zip(columns.numeric, there, strict=True) if v)
    place += num_numeric
  categories = []
  for column, values in columns.categories:
    there = varies[place : place + len(values)]
    place += len(values)
    # An indicator that never varies is of a category that all rows have, or none.
    left = tuple(v for v, varied in zip(values, there, strict=True) if varied)
    categories += [(column, left)] if left else []
  if not (numeric or marked or categories):
    raise InputError(
      "no feature varies over the training rows of all sites (columns "
      f"{listing([*columns.numeric, *(c for c, _ in columns.categories)])}): add an "
      "input that does"
    )
  return _Kept(tuple(numeric), marked, tuple(categories))


def _require_finite(mean: np.ndarray, spread: np.ndarray, names: Sequence[str]) -> None:
  """Raises InputError for a column whose sums are not finite."""
  for name, *both in zip(names, mean, spread, strict=True):
    if not np.isfinite(both).all():
      raise InputError(
        f"column {name!r} has no finite mean and deviation over the training rows of "
        "all sites: rescale it, or look for a cell that is far too large"
      )
