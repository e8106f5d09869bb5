"""Questions to sites, whose answers are numbers that add up over sites."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fedbnr_jax.data import marginals
from fedbnr_jax.data.marginals import BinSums, Marginal
from fedbnr_jax.errors import InputError

Arrays = dict[str, np.ndarray]
_EDGES = "edges_"  # Before the number of a column, in the names of arrays.


class Ask(Protocol):
  """A function that puts a question to every site and adds up the answers."""

  def __call__(self, question: str, arguments: Arrays) -> Arrays: ...


def answer(
  answers: Mapping[str, Callable[..., Arrays]], question: str, arguments: Arrays
) -> Arrays:
  """Answers a question by the function that a site has for it.

  Raises:
    InputError: If there is no such question.
  """
  if question not in answers:
    raise InputError(f"there is no question {question!r} that a site answers.")
  return answers[question](**arguments)


def binned(column: Callable[[int], np.ndarray], edges: Mapping[str, Any]) -> Arrays:
  """Counts and adds up a site's values in bins.

  Args:
    column: Gives the values `[n]` of a column by its number.
    edges: Of each column that is asked for, `[B + 1]`.
  """
  told: Arrays = {}
  for name, own in edges.items():
    number = name.removeprefix(_EDGES)
    sums = marginals.bin_sums(column(int(number)), own)
    told[f"counts_{number}"] = sums.counts.astype(np.float64)
    told[f"sums_{number}"] = sums.sums
  return told


def find_marginals(
  ask: Ask, question: str, columns: Sequence[int], arguments: Arrays
) -> list[Marginal]:
  """Finds the marginals of columns, by a question that sites answer by `binned`.

  Args:
    ask: Reaches all sites.
    question: Its name.
    columns: Numbers of the columns.
    arguments: What else the question takes.
  """

  def collect(edges: Sequence[np.ndarray]) -> list[BinSums]:
    asked = {
      f"{_EDGES}{number}": own
      for number, own in zip(columns, edges, strict=True)
      if len(own)
    }
    told, nothing = ask(question, arguments | asked), np.zeros(0)
    return [
      BinSums(
        np.rint(told.get(f"counts_{number}", nothing)).astype(np.int64),
        told.get(f"sums_{number}", nothing),
      )
      for number in columns
    ]

  return marginals.find(collect, len(columns)) if columns else []
