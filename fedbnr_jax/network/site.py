"""A site: it answers the coordinator's messages from its own rows, and nothing else.

It answers runs of the agreement that its people have approved. Sums are all that leaves
of its rows, masked if that was agreed on, and each is noted in its own log before.
"""

import logging
import os
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_collections
import numpy as np

from fedbnr_jax import precision
from fedbnr_jax.data import Preprocessor, column_sums
from fedbnr_jax.network import (
  members,
  own_model,
  protocol,
  question,
  schema,
  site_model,
  site_rows,
  site_run,
  units,
  vectors,
)
from fedbnr_jax.network.agreement import Agreement
from fedbnr_jax.network.framing import digest
from fedbnr_jax.network.identity import Signer
from fedbnr_jax.network.question import Question
from fedbnr_jax.network.refusal import RefusalError
from fedbnr_jax.network.schema import SiteTable
from fedbnr_jax.network.sent import SUM, SentLog
from fedbnr_jax.network.site_run import SiteRun
from fedbnr_jax.network.site_training import NotFiniteError, SiteTraining
from fedbnr_jax.network.strict_json import canonical
from fedbnr_jax.run.config import AUTO, differences
from fedbnr_jax.run.records import RunFolder, as_json

MODEL = "model"  # In a site's folder, the folder of the trained model.
_LOG = logging.getLogger(__name__)
_MOST_TRAININGS = 8  # That are kept: `auto` has a few, and they are not small.
# Fields that method `auto` sets when it has chosen.
_CHOSEN = ("method", "num_rounds", "data.inputs", "sparse.")

Reply = tuple[dict[str, Any], tuple[np.ndarray, ...]]


class Site:
  """One member of a federation, reached by `answer`."""

  def __init__(
    self,
    folder: str | os.PathLike[str],
    name: str,
    agreement: Agreement,
    table: SiteTable,
    signer: Signer,
  ) -> None:
    """Splits the rows, as in every run before.

    Args:
      folder: Of the site's own: its seed, its memory, its log, and the model.
      name: The site's, one of the agreement's members.
      agreement: What its people have approved.
      table: Its rows, as the schema has them.
      signer: The private half of its identity.
    """
    self.name = name
    self._folder = pathlib.Path(folder)
    self._agreement, self._digest = agreement, agreement.digest()
    self._table, self._signer = table, signer
    self._rows = site_run.table_digest(table)
    share = agreement.config.data.calibration
    self._seed = site_rows.kept_seed(self._folder / "split.json")
    self._split = site_rows.split(self._seed, table, share)
    rows = self._split.train
    scaled = units.in_units(agreement.schema, table)
    self._columns = column_sums.Site(
      schema.columns(agreement.schema),
      scaled.features.iloc[rows],
      scaled.targets[rows],
    )
    self._log = SentLog(self._folder / "sent.csv")
    self._num_sums: dict[str, int] = {}  # Answered so far, by run.
    self._runs: dict[str, SiteRun] = {}
    self._trainings: dict[str, SiteTraining] = {}
    self._one_at_a_time = threading.Lock()

  def answer(self, data: bytes) -> bytes:
    """Answers a message; whatever goes wrong is a refusal, and is logged here."""
    head: dict[str, Any]
    arrays: tuple[np.ndarray, ...] = ()
    try:
      with self._one_at_a_time, precision.float64():
        head, arrays = self._answer(protocol.decode(data))
      head = {"kind": "answer", **head}
    except RefusalError as error:
      _LOG.warning("refused (%s): %s", error.code, error)
      head = {"kind": "refusal", "code": error.code}
    except Exception:  # Nothing of it may travel: its text may quote a row.
      _LOG.exception("a message could not be answered")
      head = {"kind": "refusal", "code": "failed"}
    told = {**head, "site": self.name, "to": protocol.digest(data)}
    return protocol.encode(told, arrays)

  def _answer(self, message: protocol.Message) -> Reply:
    head = message.head
    if head.get("federation") != self._digest:
      raise RefusalError("not-approved")
    run = head.get("run")
    if not isinstance(run, str) or not question.is_digest(run):
      raise RefusalError("unknown-run")
    kinds: dict[str, Callable[[str, protocol.Message], Reply]] = {
      "hello": self._hello,
      "keys": self._take_keys,
      "begin": self._begin,
      "ask": self._ask,
      "reveal": self._reveal,
      "model": self._take_model,
    }
    kind = head.get("kind")
    if kind not in kinds:
      raise RefusalError("unreadable", f"a message has the kind {kind!r}")
    if run not in self._runs:
      folder = self._folder / "memory"
      self._runs[run] = SiteRun(folder, self._agreement, self.name, run, self._rows)
    return kinds[kind](run, message)

  # ------------------------------------------------------------------ how a run starts

  def _hello(self, run: str, message: protocol.Message) -> Reply:
    """Says who this is, and gives its key of the run where sums are masked."""
    del message
    head: dict[str, Any] = {"versions": members.versions()}
    if self._agreement.masking:
      card = self._runs[run].card(self._signer)
      head |= {"public": card.public.hex(), "signed": card.signature.hex()}
    self._log.note(run, "hello", "versions and key of the run")
    return head, ()

  def _take_keys(self, run: str, message: protocol.Message) -> Reply:
    """Takes all sites' keys of the run, which their identities have signed."""
    self._runs[run].take_keys(message.head.get("cards", ()))
    return {}, ()

  def _begin(self, run: str, message: protocol.Message) -> Reply:
    """Starts a training that was agreed on, maybe without a fold of the rows."""
    try:
      config, record = message.head["config"], message.head["preprocessor"]
      fold = message.head.get("fold")
      _require_agreed(as_json(self._agreement.config), config)
      _require_fold(site_rows.num_folds(self._agreement.config), fold)
      self._training(run, config, record, fold)
    except (KeyError, TypeError, AttributeError) as error:
      raise RefusalError("unreadable", "this is no training") from error
    return {}, ()

  def _training(
    self,
    run: str,
    config: dict[str, Any],
    record: Mapping[str, Any],
    fold: int | None = None,
  ) -> SiteTraining:
    """Returns the training of a config and a preprocessor, made if need be."""
    name = training_digest(config, record, fold)
    if name in self._trainings:
      return self._trainings[name]
    preprocessor = Preprocessor.from_json(record)
    while len(self._trainings) >= _MOST_TRAININGS:
      self._trainings.pop(next(iter(self._trainings)))
    self._trainings[name] = SiteTraining(
      ml_collections.ConfigDict(config),
      preprocessor,
      self._table,
      self._split,
      tuple(self._agreement.members),
      self.name,
      self._own_folder(run, name),
      self._left_out(fold),
    )
    return self._trainings[name]

  def _left_out(self, fold: int | None) -> np.ndarray | None:
    """Says which training rows are in a fold [num_train]; None for none."""
    if fold is None:
      return None
    number = site_rows.num_folds(self._agreement.config)
    return site_rows.folds(self._seed, len(self._split.train), number) == fold

  # ----------------------------------------------------------------------------- sums

  def _ask(self, run: str, message: protocol.Message) -> Reply:
    """Answers a question with a vector, masked if that was agreed on."""
    asked = question.of_message(message)
    if run not in self._num_sums:
      self._num_sums[run] = self._log.num_sums(run)
    if self._num_sums[run] >= self._agreement.most_sums:
      raise RefusalError("limit")
    tree, what = self._tree(asked)
    vector = vectors.to_vector(tree)
    if not np.isfinite(vector).all():
      raise RefusalError("not-finite", f"{what} has numbers that are not finite")
    masked, sent = self._agreement.masking, vector
    if asked.name == question.OWN_SCORES:
      masked = False
      if not self._agreement.tell_scores:
        raise RefusalError("not-agreed", "own scores are not told")
      self._runs[run].tell_once(asked)
    if masked:
      sent = self._runs[run].mask(message.head, asked, vector)
    self._num_sums[run] += 1
    size, meaning = sent.nbytes, question.MEANINGS[asked.name]
    self._log.note(
      run,
      SUM,
      what,
      numbers=vector.size,
      size=size,
      masked=masked,
      meaning=meaning,
    )
    return {}, (sent,)

  def _tree(self, asked: Question) -> tuple[Any, str]:
    """Computes what is asked for; returns it and its name for people."""
    if asked.training:
      training = self._trainings.get(asked.training)
      if training is None:
        raise RefusalError("unknown-training")
      try:
        answer = jax.device_get(training.answer(asked))
      except NotFiniteError as error:
        raise RefusalError("not-finite") from error
      return answer, training.exchange_name(asked) or asked.name
    if asked.name == "counts":
      sizes = self._split._asdict()
      counts = {name: np.array(float(len(rows))) for name, rows in sizes.items()}
      return counts, asked.name
    arguments = dict(zip(asked.names, asked.arrays, strict=True))
    return self._columns.answer(asked.name, arguments), asked.name

  def _reveal(self, run: str, message: protocol.Message) -> Reply:
    """Gives the seed of the own mask, if all members have answered."""
    seed = self._runs[run].reveal(message.head)
    self._log.note(run, "reveal", "own mask of the sum above", size=seed.nbytes)
    return {}, (seed,)

  # -------------------------------------------------------------------------- the end

  def _take_model(self, run: str, message: protocol.Message) -> Reply:
    """Writes the trained model into the site's folder, for predictions here."""
    try:
      names = list(message.head["files"])
      content = {n: a.tobytes() for n, a in zip(names, message.arrays, strict=True)}
    except (KeyError, TypeError, ValueError) as error:
      raise RefusalError("unreadable", "this is no model") from error
    site_model.write(self._folder / MODEL, content)
    folder = RunFolder(self._folder / MODEL)
    config, record = as_json(folder.config()), folder.preprocessing().to_json()
    if self._own_folder(run, training_digest(config, record)).exists():
      training = self._training(run, config, record)
      own = training.own_after((folder.summary() or {})["best_round"])
      own_model.complete(folder.path, self.name, own, training.num_rows)
    return {}, ()

  def _own_folder(self, run: str, training: str) -> pathlib.Path:
    """Names the folder for what the site keeps for itself in a training."""
    return self._folder / "own" / run[:16] / training[:16]


def training_digest(
  config: Mapping[str, Any], preprocessor: Mapping[str, Any], fold: int | None = None
) -> str:
  """Returns what names a training in questions; `fold` is the one it is without."""
  parts = canonical(dict(config)), canonical(dict(preprocessor))
  return digest("training", *parts, *(() if fold is None else (fold,)))


def _require_agreed(agreed: dict[str, Any], asked: dict[str, Any]) -> None:
  """Raises RefusalError unless a config is agreed on, or what `auto` makes of it."""
  changed = differences(agreed, asked)
  free = _CHOSEN if agreed["method"] == AUTO else ()
  others = [name for name in changed if not name.startswith(free)]
  if others:
    raise RefusalError("not-agreed", f"config.{others[0]} is not as agreed on")


def _require_fold(num_folds: int, fold: Any) -> None:
  """Raises RefusalError unless a training is with all folds, or without an agreed one.

  Other folds than agreed on would be other groups of rows, and differences of sums over
  many such groups tell of single rows.
  """
  if fold is not None and (type(fold) is not int or not 0 <= fold < num_folds):
    raise RefusalError("not-agreed", f"there is no fold {fold!r} to train without")
