"""A training of real sites as their coordinator knows it: made of sums, not of rows."""

import dataclasses
import functools
import warnings
from typing import Any

import jax.numpy as jnp
import ml_collections
import numpy as np

from fedbnr_jax import algorithms
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.data import Preprocessor, column_sums
from fedbnr_jax.data.questions import Arrays, Ask
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.federation import Federation, Rows
from fedbnr_jax.gp import urk
from fedbnr_jax.network import parts, schema, units
from fedbnr_jax.network.framing import digest
from fedbnr_jax.network.question import Question
from fedbnr_jax.network.site import training_digest
from fedbnr_jax.network.site_rows import FEWEST_TO_SPLIT, num_folds
from fedbnr_jax.network.strict_json import canonical
from fedbnr_jax.network.sums import Sums
from fedbnr_jax.prediction import needs_inputs
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import input_summary, memory
from fedbnr_jax.run.records import as_json
from fedbnr_jax.run.task import FromConfig, RowCounts, TableNote


@dataclasses.dataclass(frozen=True)
class NetworkTask(FromConfig):
  """A training whose rows are at sites; see `run.task.Task`."""

  config: ml_collections.FrozenConfigDict
  algorithm: algorithms.FederatedAlgorithm
  preprocessor: Preprocessor
  client_names: tuple[str, ...]
  table: TableNote
  counts: RowCounts
  num_calibration_rows: int
  name: str  # Digest that names the training in questions.
  inputs: Any  # What is known of the inputs, where the kernel draws from it; else ().
  without: str = ""  # What people call the fold that the training is without, if any.

  @property
  def num_clients(self) -> int:
    return len(self.client_names)

  @property
  def num_folds(self) -> int:
    """Into how many folds each site deals its training rows; 0 for none."""
    return 0 if self.algorithm.one_model_each else num_folds(self.config)

  @property
  def notes_clients(self) -> bool:
    """Sites have names that people know, and are seldom all there."""
    return True

  @property
  def num_padded_rows(self) -> int:
    """There is no array of rows here; a model's shapes do not depend on its length."""
    return 1

  @property
  def error_scale(self) -> float:
    return self.preprocessor.target_std

  def placed(self) -> tuple[Any, Any, Any]:
    return self.inputs, (), ()

  @functools.cached_property
  def parts(self) -> parts.Parts:
    """What is computed in the training."""
    config = ml_collections.ConfigDict(self.config.to_dict())
    return parts.of_config(config, self.num_clients, self.preprocessor.num_inputs)


def prepare(config: ml_collections.ConfigDict, sums: Sums) -> NetworkTask:
  """Makes a training's preprocessing of sums, and tells the sites of it.

  Args:
    config: Agreed on, or what `auto` has made of that.
    sums: Reaches the sites.

  Raises:
    InputError: If nothing can be learnt from the rows, or a site refuses.
  """
  agreed = sums.members.agreement.schema
  sizes = {n: round(float(c)) for n, c in sums.named(Question("counts")).items()}
  _require_rows(sizes)
  with config_lib.left_open(config):
    inputs = config_lib.inputs_of(config)
    fitted = column_sums.fit(asking(sums), schema.columns(agreed), inputs)
  preprocessor = units.from_units(agreed, fitted)
  own, record = as_json(config), preprocessor.to_json()
  name = training_digest(own, record)
  sums.members.begin(name, own, record)
  summary: Any = ()
  if needs_inputs(config):
    summary = input_summary.from_sums(asking(sums, name), preprocessor)
  _require_memory(config, summary, preprocessor.num_inputs)
  algorithm = parts.algorithm_of(parts.key_of(config))
  algorithm.check(_rows_like(sizes["train"]))
  sums.answers.begin_training(name, config, preprocessor)
  what = digest("table", canonical(record), canonical(sizes))
  table = TableNote(
    agreed.name, sum(sizes.values()), what, agreed.features, agreed.target.name
  )
  return NetworkTask(
    config=ml_collections.FrozenConfigDict(config),
    algorithm=algorithm,
    preprocessor=preprocessor,
    client_names=sums.members.names,
    table=table,
    counts=RowCounts(sizes["train"], sizes["validation"], sizes["test"]),
    num_calibration_rows=sizes["calibration"],
    name=name,
    inputs=summary,
  )


def quietly(config: ml_collections.ConfigDict, sums: Sums) -> NetworkTask:
  """Prepares a training for `auto`, which says what is odd when it has chosen."""
  with warnings.catch_warnings(action="ignore"):
    return prepare(config, sums)


def asking(sums: Sums, training: str = "") -> Ask:
  """Makes the function by which a module of sums puts its questions to all sites."""

  def ask(question: str, arguments: Arrays) -> Arrays:
    names, arrays = tuple(arguments), tuple(arguments.values())
    return sums.named(Question(question, training, 0, names, arrays))

  return ask


def _require_rows(sizes: dict[str, int]) -> None:
  """Raises InputError if no site has rows for one of the parts that a run needs."""
  for part in ("validation", "test"):
    if not sizes[part]:
      raise InputError(
        f"no site has a row for {part}: a site of fewer than {FEWEST_TO_SPLIT} rows "
        "trains on all of them; let at least one have more."
      )


def _rows_like(num_rows: int) -> Federation:
  """Makes a federation of so many rows, for a method to say if they are enough."""
  mask: Any = np.ones((1, num_rows), bool)
  empty: Any = np.zeros((1, num_rows, 0))
  return Federation(Rows(empty, mask, mask))


def _require_memory(
  config: ml_collections.ConfigDict, summary: Any, num_inputs: int
) -> None:
  """Raises InputError if the kernel has more features than fit into memory."""
  if not algorithms.method(config.method).random_features:
    return
  kernel = kernels.of_last_layer(config)
  row = jnp.zeros((1, num_inputs), config.dtype)
  num_features = urk.num_features(kernel, row, summary)
  field = kernels.draws_field(config)
  memory.require(num_features, field, config_lib.get(config, field))
