"""One training as a site knows it: its own rows, standardised, and what it computes."""

import functools
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fedbnr_jax.data import Preprocessor
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.federation import Rows
from fedbnr_jax.federated.state import ServerState
from fedbnr_jax.gp import conformal, metrics, urk
from fedbnr_jax.network import parts, vectors
from fedbnr_jax.network.own_states import OwnStates
from fedbnr_jax.network.question import OWN_SCORES, Question
from fedbnr_jax.network.refusal import RefusalError
from fedbnr_jax.network.schema import SiteTable
from fedbnr_jax.network.site_rows import SiteSplit
from fedbnr_jax.prediction import padded_size
from fedbnr_jax.run import input_summary
from fedbnr_jax.run.task import init_key

_CHUNK = 8192  # Rows predicted at a time: bounds the memory.
_ROUNDING = 1e-4  # Of draws on different machines.
# Sites with fewer test rows tell no scores of their own: of one row it is its error.
FEWEST_TO_TELL = 10
Model = tuple[ServerState, Any]  # What all have, and what the site keeps.


class NotFiniteError(ArithmeticError):
  """The loss of this site is NaN or infinite; it says so instead of answering."""


class SiteTraining:
  """A training's method, and the rows of one site in its inputs."""

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    preprocessor: Preprocessor,
    table: SiteTable,
    split: SiteSplit,
    members: Sequence[str],
    name: str,
    folder: pathlib.Path,
    left_out: np.ndarray | None = None,
  ) -> None:
    """Standardises a site's rows.

    Args:
      config: The training's.
      preprocessor: Made of sums over all sites.
      table: The site's rows.
      split: Which of them train, validate, test and calibrate.
      members: Names of the sites of the federation.
      name: The site's.
      folder: Where it keeps what is its own, if the method has it keep anything.
      left_out: [num_train] true for rows of the fold that this training is without.
    """
    with warnings.catch_warnings(action="ignore"):  # What is odd is everybody's.
      inputs = preprocessor.transform(table.features)
    targets = preprocessor.standardise(table.targets)
    dtype, wide = config.dtype, jax.dtypes.canonicalize_dtype(jnp.float64)

    def rows(chosen: np.ndarray, of_targets: Any) -> Rows:
      arrays: Any = (
        np.asarray(inputs[chosen], dtype),
        np.asarray(targets[chosen], of_targets),
        np.ones(len(chosen), bool),
      )
      return Rows(*arrays)

    self._train = rows(split.train, dtype)
    if left_out is None:
      left_out = np.zeros(len(split.train), bool)
    self._left_out = rows(split.train[left_out], wide)
    if left_out.any():
      self._train = _without(self._train, left_out)
    self._validation, self._test = rows(split.validation, wide), rows(split.test, wide)
    self._calibration = rows(split.calibration, wide)
    self._summary = input_summary.Site(inputs[split.train])
    names = sorted(members)
    self._parts = parts.of_config(config, len(names), inputs.shape[1])
    self._same_draws = False  # Whether they have been compared, and are.
    self._own: OwnStates | None = None
    if self._parts.keeps:
      number = jnp.asarray(names.index(name), jnp.int32)
      key = init_key(config.seed)
      start = functools.partial(self._parts.start, key, number, self._train)
      self._own = OwnStates(folder, start)

  def answer(self, question: Question) -> Any:
    """Computes a site's answer, a tree of arrays that add over sites.

    Raises:
      InputError: If it is no question about a training, or its arrays do not fit.
      NotFiniteError: If the loss of this site is not finite.
    """
    if question.name.startswith("input_"):
      arguments = dict(zip(question.names, question.arrays, strict=True))
      return self._summary.answer(question.name, arguments)
    if question.name in ("exchange", "held-out"):
      return self._exchange(question)
    server = vectors.from_arrays(question.arrays, self._parts.model_like)
    self._require_same_draws(server)
    model = server, self.own_after(question.place.round)
    if question.name == "scores":
      return {
        "validation": self._score_sums(model, self._validation),
        "test": self._score_sums(model, self._test),
      }
    if question.name == "conformal":
      return {
        "calibration": self._counts(model, self._calibration),
        "test": self._counts(model, self._test),
      }
    if question.name == OWN_SCORES:
      return self._own_scores(model)
    if question.name == "left-out":
      return {"left-out": self._counts(model, self._left_out)}
    raise InputError(f"question {question.name!r} is not about a training.")

  def _require_same_draws(self, server: ServerState) -> None:
    """Raises RefusalError unless ω of the coordinator is what this machine draws, too.

    Sums under one kernel and predictions under another would fit nothing.
    """
    if self._parts.draw is None or self._same_draws:
      return
    drawn = self._parts.draw(urk.Source(server.seed, server.inputs))
    pairs = zip(*map(jax.tree.leaves, (drawn, server.omega)), strict=True)
    self._same_draws = all(np.allclose(a, b, _ROUNDING, _ROUNDING) for a, b in pairs)
    if not self._same_draws:
      raise RefusalError("other-draws")

  def own_after(self, number: int) -> Any:
    """Returns what the site kept after a round; () if it keeps nothing."""
    return () if self._own is None else self._own.after(number)

  @property
  def num_rows(self) -> int:
    """How many rows train."""
    return len(self._train.y)

  def exchange_name(self, question: Question) -> str:
    """Names the exchange that a question is about, or returns ""."""
    found = self._parts_of(question)
    return found[question.number].name if question.number < len(found) else ""

  def _parts_of(self, question: Question) -> tuple[parts.Part, ...]:
    of = {"exchange": self._parts.exchanges, "held-out": self._parts.held_out}
    return of.get(question.name, ())

  def _exchange(self, question: Question) -> Any:
    """Does the client's part of an exchange."""
    found = self._parts_of(question)
    if not 0 <= question.number < len(found):
      raise InputError(f"this method has no {question.name} {question.number}.")
    part = found[question.number]
    rows = self._train if question.name == "exchange" else self._validation
    if not len(rows.y):
      # A row of padding: sums over no rows have a shape too.
      rows = jax.tree.map(lambda a: np.zeros((1, *a.shape[1:]), a.dtype), rows)
    down = vectors.from_arrays(question.arrays, part.down_like)
    own = () if self._own is None else self._own.before(question.place)
    up, own, report = part.answer(down, own, rows)
    if not np.all(np.isfinite(report.get("loss", 0.0))):
      raise NotFiniteError("the loss of this site is not finite")
    if self._own is not None:
      self._own.keep(question.place, own)
    return jax.device_get(up)

  def _predict(self, model: Model, x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Predicts mean and variance [N] of x [N, D]; programs are few, whatever N is."""
    found = []
    for start in range(0, len(x), _CHUNK):
      some = x[start : start + _CHUNK]
      missing = padded_size(len(some), _CHUNK) - len(some)
      padded = np.pad(some, ((0, missing), (0, 0)))
      mean, variance = jax.device_get(self._parts.predict(*model, padded))
      found.append((mean[: len(some)], variance[: len(some)]))
    means, variances = zip(*found, strict=True)
    return np.concatenate(means), np.concatenate(variances)

  def _score_sums(self, model: Model, rows: Rows) -> metrics.ScoreSums:
    if not len(rows.y):
      return metrics.no_score_sums()
    return jax.device_get(self._parts.score(*self._predict(model, rows.x), rows.y))

  def _own_scores(self, model: Model) -> dict[str, Any]:
    """Makes the few sums that are told of the test rows of this site alone."""
    enough = len(self._test.y) >= FEWEST_TO_TELL
    sums = metrics.no_score_sums()
    if enough:
      sums = self._score_sums(model, self._test)
    return {"rows": sums.count, "squares": sums.squares, "inside95": sums.inside[0]}

  def _counts(self, model: Model, rows: Rows) -> np.ndarray:
    """Counts by how many standard deviations predictions miss rows, in public bins."""
    if not len(rows.y):
      return np.zeros(len(conformal.EDGES) + 1)
    mean, variance = self._predict(model, rows.x)
    scores = conformal.scores(mean, variance, np.asarray(rows.y))
    return conformal.count(scores).astype(np.float64)


def _without(rows: Rows, left_out: np.ndarray) -> Rows:
  """Hides rows; arrays keep their shapes, so that nothing is compiled again."""
  arrays: Any = (
    np.where(left_out[:, None], np.zeros_like(rows.x), rows.x),
    np.where(left_out, np.zeros_like(rows.y), rows.y),
    ~left_out,
  )
  return Rows(*arrays)
