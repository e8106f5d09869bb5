"""What the coordinator knows of an answer beforehand, and so looks for in it.

It knows the question; what sites have told of themselves, such as how many rows train;
and the method, from which follow the parts of a vector of numbers, and how long a row
of features can be. `checks` then says what no rows could have made.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from fedbnr_jax import prediction
from fedbnr_jax.data import Preprocessor, encoding
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import conformal, metrics
from fedbnr_jax.network import checks, parts, row_norms, schema, vectors
from fedbnr_jax.network.checks import Known
from fedbnr_jax.network.parts import Part, Parts
from fedbnr_jax.network.question import OWN_SCORES, Question
from fedbnr_jax.network.row_norms import RowNorm
from fedbnr_jax.network.schema import Schema

_EDGES, _COUNTS, _SUMS = "edges_", "counts_", "sums_"
_PARTS = ("train", "validation", "test", "calibration")
_ROUNDING = 1e-9  # Relative, of sums in float64.

Members = tuple[str, ...]


class Answers:
  """What is known in a run so far; called with each vector of numbers that comes."""

  def __init__(self, agreed: Schema, members: Sequence[str]) -> None:
    """Knows nothing yet but what people have agreed on.

    Args:
      agreed: What each site's table has.
      members: Names of all sites.
    """
    columns = schema.columns(agreed)
    marked = columns.numeric if columns.missing == "impute" else None
    names = encoding.input_names(columns.numeric, columns.categories, marked)
    self._num_columns = 1 + len(names)  # Target first.
    self._complete = columns.missing == "error"
    self._everybody = tuple(sorted(members))
    # By what it is and whose: numbers that sites have told, alone or in a sum.
    self._told: dict[tuple[str, Members], np.ndarray] = {}
    self._trainings: dict[str, tuple[Parts, dict[int, RowNorm]]] = {}
    self._without_fold: set[str] = set()  # Trainings: how many rows is not told.

  def begin_training(
    self,
    name: str,
    config: ml_collections.ConfigDict,
    preprocessor: Preprocessor,
    fold: int | None = None,
  ) -> None:
    """Learns of a training, by the digest that names it in questions.

    Args:
      name: The digest.
      config: The training's.
      preprocessor: The training's.
      fold: The fold of each site's rows that it is without, if it is.
    """
    if fold is not None:
      self._without_fold.add(name)
    num_inputs, largest = preprocessor.num_inputs, preprocessor.largest_input
    self._trainings[name] = (
      parts.of_config(config, len(self._everybody), num_inputs),
      row_norms.by_number(prediction.method_key(config), num_inputs, largest),
    )

  def like(self, question: Question) -> Any:
    """Returns a tree with the shapes and types of the answer to a question."""
    size, arguments = self._num_columns, _arguments(question)
    bins = np.zeros(len(conformal.EDGES) + 1, np.int64)
    scores = metrics.no_score_sums()
    trees: dict[str, Callable[[], Any]] = {
      "counts": lambda: dict.fromkeys(_PARTS, np.zeros(())),
      "totals": lambda: {
        **dict.fromkeys(("counts", "sums"), np.zeros(size)),
        "rows": np.zeros(()),
      },
      "squares": lambda: {"squares": np.zeros(size)},
      "bins": lambda: _bins_like(arguments),
      "input_bins": lambda: _bins_like(arguments),
      "input_totals": lambda: {
        "on": arguments["on"],
        "rows": np.zeros(()),
        "scores": np.zeros(len(arguments) // 2),  # Numeric inputs have two arrays.
      },
      "input_products": lambda: {"products": np.zeros((len(arguments["mean"]),) * 2)},
      "scores": lambda: {"validation": scores, "test": scores},
      "conformal": lambda: {"calibration": bins, "test": bins},
      "left-out": lambda: {"left-out": bins},
      OWN_SCORES: lambda: dict.fromkeys(("rows", "squares", "inside95"), np.zeros(())),
      "exchange": lambda: self._part(question).up_like,
      "held-out": lambda: self._part(question).up_like,
    }
    return trees[question.name]()

  def what(self, question: Question) -> str:
    """Names what is asked for, as people know it."""
    is_exchange = question.name in ("exchange", "held-out")
    return self._part(question).name if is_exchange else question.name

  def size(self, question: Question) -> int:
    """Counts the numbers n of the answer to a question."""
    return sum(int(np.prod(one.shape)) for one in jax.tree.leaves(self.like(question)))

  def __call__(
    self, members: Sequence[str], vector: np.ndarray, question: Question
  ) -> None:
    """Raises InputError if a vector [n] cannot be the answer to a question.

    What is raised is a predicate, such as "has numbers that are not finite".

    Args:
      members: Whose sum it is: of one site its own numbers.
      vector: What they have sent.
      question: What was asked.
    """
    checks.require_finite(vector)
    told = _tree(vector, self.like(question))
    _CHECKS[question.name](self, tuple(sorted(members)), told, question)

  # --------------------------------------------------------------------- about columns

  def _counts(self, members: Members, told: Any, question: Question) -> None:
    del question
    checks.require_whole(list(told.values()), "rows")
    if told["train"] < len(members):
      raise InputError("has no row to train on for each site")
    for part, rows in told.items():
      if self._told.setdefault((part, members), rows) != rows:
        raise InputError("has another number of rows than it was told before")

  def _totals(self, members: Members, told: Any, question: Question) -> None:
    del question
    checks.require_rows(told["rows"], self._known(members, "train"))
    checks.require_whole(told["counts"], "filled cells", float(told["rows"]))
    if self._complete and np.any(told["counts"] != told["rows"]):
      raise InputError("has empty cells, which the schema does not allow")
    self._told["cells", members] = told["counts"]

  def _squares(self, members: Members, told: Any, question: Question) -> None:
    del question
    checks.require_not_negative(told["squares"], "sum of squares")
    self._told["squares", members] = told["squares"]

  def _bins(self, members: Members, told: Any, question: Question) -> None:
    cells = self._of("cells", members)
    _require_bins(told, question, lambda n: None if cells is None else cells[n])

  def _input_bins(self, members: Members, told: Any, question: Question) -> None:
    rows = self._known(members, "train").rows
    _require_bins(told, question, lambda number: rows)

  def _input_totals(self, members: Members, told: Any, question: Question) -> None:
    del question
    checks.require_rows(told["rows"], self._known(members, "train"))
    checks.require_whole(told["on"], "rows of a category", float(told["rows"]))

  def _input_products(self, members: Members, told: Any, question: Question) -> None:
    del members, question
    # The two halves of a product may be rounded differently.
    products = told["products"]
    symmetric = 0.5 * (products + products.T)
    size = np.max(np.abs(products), initial=0.0)
    if np.any(np.abs(products - symmetric) > _ROUNDING * size):
      raise InputError("has a matrix of products that is not symmetric")
    checks.require_sum_of_squares(symmetric, "a matrix of products")

  # --------------------------------------------------------------------- of a training

  def _scores(self, members: Members, told: Any, question: Question) -> None:
    del question
    for part, sums in told.items():
      checks.require_possible(sums, self._known(members, part))

  def _conformal(self, members: Members, told: Any, question: Question) -> None:
    del question
    for part, counts in told.items():
      known = self._known(members, part)
      checks.require_whole(counts, "rows in bins", known.most_rows)
      checks.require_total(counts, "rows in bins", known.rows)

  def _left_out(self, members: Members, told: Any, question: Question) -> None:
    del question
    known, counts = self._known(members, "train"), told["left-out"]
    checks.require_whole(counts, "rows in bins", known.most_rows)
    most = known.most_rows if known.rows is None else known.rows
    checks.require_whole(np.sum(counts), "rows left out", most)

  def _own_scores(self, members: Members, told: Any, question: Question) -> None:
    del question
    known = self._known(members, "test")
    # Of few test rows a site tells nothing.
    most = known.most_rows if known.rows is None else known.rows
    checks.require_whole(told["rows"], "test rows", most)
    checks.require_whole(told["inside95"], "rows inside", float(told["rows"]))
    checks.require_not_negative(told["squares"], "sum of squares")

  def _exchange(self, members: Members, told: Any, question: Question) -> None:
    held_out = question.name == "held-out"
    known = self._known(members, "validation" if held_out else "train")
    if not held_out and question.training in self._without_fold:
      known = known._replace(rows=None)
    # Targets and inputs are standardised: over all training rows, their squares add up
    # to one a row. Of held-out rows this is not known.
    by_all = [self._of(what, self._everybody) for what in ("cells", "squares")]
    known_squares = not held_out and all(one is not None for one in by_all)
    most = known.most_rows if known_squares else math.inf
    _, norms = self._trainings[question.training]
    row_norm = norms.get(_num_features(told))
    if row_norm is not None:
      like = self._part(question).down_like
      theta = vectors.from_arrays(question.arrays, like).theta
      known = known._replace(norm=row_norm.of_sum(theta, most))
    checks.require_possible(told, known._replace(energy=most))

  def _part(self, question: Question) -> Part:
    of, _ = self._trainings[question.training]
    exchanges = of.held_out if question.name == "held-out" else of.exchanges
    return exchanges[question.number]

  # ----------------------------------------------------------------------- what is told

  def _known(self, members: Members, part: str) -> Known:
    """Says what is known of the rows of members in a part of their tables."""
    rows, most = self._of(part, members), self._of(part, self._everybody)
    return Known(
      len(members),
      None if rows is None else float(rows),
      math.inf if most is None else float(most),
    )

  def _of(self, what: str, members: Members) -> np.ndarray | None:
    """Returns what members have told together or each alone, added up."""
    together = self._told.get((what, members))
    if together is not None:
      return together
    alone = [self._told.get((what, (name,))) for name in members]
    known = [one for one in alone if one is not None]
    return np.sum(known, axis=0) if len(known) == len(members) else None


_CHECKS: dict[str, Callable[[Answers, Members, Any, Question], None]] = {
  "counts": Answers._counts,
  "totals": Answers._totals,
  "squares": Answers._squares,
  "bins": Answers._bins,
  "input_bins": Answers._input_bins,
  "input_totals": Answers._input_totals,
  "input_products": Answers._input_products,
  "scores": Answers._scores,
  "conformal": Answers._conformal,
  "left-out": Answers._left_out,
  OWN_SCORES: Answers._own_scores,
  "exchange": Answers._exchange,
  "held-out": Answers._exchange,
}


def _arguments(question: Question) -> dict[str, np.ndarray]:
  """Returns the arrays of a question by name, where they have names."""
  return dict(zip(question.names, question.arrays, strict=False))


def _edges(arguments: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the edges of bins [B + 1], by the number of their column."""
  return {
    name.removeprefix(_EDGES): own
    for name, own in arguments.items()
    if name.startswith(_EDGES)
  }


def _bins_like(arguments: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  return {
    f"{what}{number}": np.zeros(len(own) - 1)
    for number, own in _edges(arguments).items()
    for what in (_COUNTS, _SUMS)
  }


def _require_bins(
  told: Mapping[str, np.ndarray],
  question: Question,
  total_of: Callable[[int], float | None],
) -> None:
  """Checks counts and sums in the bins of each column that was asked for."""
  for number, own in _edges(_arguments(question)).items():
    counts, sums = told[f"{_COUNTS}{number}"], told[f"{_SUMS}{number}"]
    checks.require_whole(counts, "values in bins")
    checks.require_total(counts, "values in bins", total_of(int(number)))
    # The outermost bins are open.
    slack = _ROUNDING * (1.0 + np.abs(sums))
    low, high = counts * own[:-1] - slack, counts * own[1:] + slack
    if np.any(sums[1:] < low[1:]) or np.any(sums[:-1] > high[:-1]):
      raise InputError("has bins whose values lie outside of them")


def _tree(vector: np.ndarray, like: Any) -> Any:
  """Makes a tree of a vector [n], without rounding any number of it.

  Raises:
    InputError: If it has another length.
  """
  leaves, structure = jax.tree.flatten(like)
  sizes = [int(np.prod(leaf.shape)) for leaf in leaves]
  if vector.shape != (sum(sizes),):
    raise InputError(f"has {vector.size} numbers instead of {sum(sizes)}")
  pieces = np.split(vector, np.cumsum(sizes)[:-1]) if sizes else []
  shaped = [p.reshape(leaf.shape) for p, leaf in zip(pieces, leaves, strict=True)]
  return jax.tree.unflatten(structure, shaped)


def _num_features(message: Any) -> int:
  """Counts the features that a message has sums of; 0 where it has none."""
  moments = getattr(message, "moments", message)
  return len(getattr(moments, "moment", getattr(moments, "features", ())))
