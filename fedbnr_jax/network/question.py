"""A question to all sites, whose answers are vectors that add up."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.network.framing import digest
from fedbnr_jax.network.own_states import Place
from fedbnr_jax.network.protocol import Message

OWN_SCORES = "own-scores"  # The one answer that is never masked, nor added up.
# What a site is asked for, and what people are told about it.
MEANINGS = {
  "counts": "how many rows train, validate, test and calibrate",
  "totals": "for each column, how many cells are filled, and their sum",
  "squares": "for each column, the sum of squared distances from the common mean",
  "bins": "for each column, how many values lie in each bin, and their sum",
  "input_bins": "for each input, how many values lie in each bin, and their sum",
  "input_totals": "for each input, the sum of its normal scores; rows by category",
  "input_products": "sums of products of two inputs' normal scores",
  "exchange": "the site's part of a training step; the column 'what' names it",
  "held-out": "sums over validation rows, by which error bars are set",
  "scores": "sums of errors and of rows inside intervals, over held-out rows",
  "conformal": "how many calibration and test rows are off by how much",
  "left-out": "how many rows of the fold that did not train are off by how much",
  OWN_SCORES: "this site's own sums of errors over its test rows, as agreed to be told",
}


class Question(NamedTuple):
  """What is asked.

  Attributes:
    name: One of `MEANINGS`.
    training: Digest of the training that it is about; "" where it is about none.
    number: Which exchange, where the question is one of several of its name.
    names: Of the arrays, where they are named.
    arrays: The down message.
    place: Where in the training, of a method by which sites keep a state of their own.
  """

  name: str
  training: str = ""
  number: int = 0
  names: tuple[str, ...] = ()
  arrays: tuple[np.ndarray, ...] = ()
  place: Place = Place()

  def head(self) -> dict[str, Any]:
    """Returns what of the question goes into the head of a message."""
    return {
      "question": self.name,
      "training": self.training,
      "number": self.number,
      "names": list(self.names),
      "place": list(self.place),
    }

  def digest(self) -> str:
    """Returns a digest that no other question has."""
    parts: list[str | bytes | int] = [self.name, self.training, self.number]
    parts += [*self.place, len(self.names), *self.names]
    for array in self.arrays:
      parts += [array.dtype.name, repr(array.shape), array.tobytes()]
    return digest("question", *parts)


def is_digest(text: str) -> bool:
  """Whether a text is 64 hexadecimal digits, as the number of a run is."""
  return re.fullmatch("[0-9a-f]{64}", text) is not None


def is_named(question: Question) -> bool:
  """Whether the answer is arrays by name, whose shapes follow from the question."""
  return not question.training or question.name.startswith("input_")


def of_message(message: Message) -> Question:
  """Reads the question in a message.

  Raises:
    InputError: If there is none.
  """
  head: Mapping[str, Any] = message.head
  try:
    name, training, number = head["question"], head["training"], head["number"]
    names, place = tuple(head["names"]), Place(*head["place"])
  except (KeyError, TypeError) as error:
    raise InputError("a message asks no question.") from error
  right = isinstance(training, str) and isinstance(number, int)
  right = right and all(isinstance(one, str) for one in names)
  right = right and all(type(one) is int and one >= 0 for one in place)
  if name not in MEANINGS or not right:
    raise InputError(f"there is no question {name!r} that a site answers.")
  return Question(name, training, number, names, message.arrays, place)
