"""From a config to everything a run needs: data, federation, algorithm."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pandas as pd
from flax import struct

from fedbnr_jax import algorithms
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.data import (
  Bounds,
  Dataset,
  Preprocessor,
  Split,
  held_out,
  load_table,
  random_split,
  read_bounds,
  synthetic,
  uci,
)
from fedbnr_jax.data.hazards import warn_of_hazards
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated import federation as federation_lib
from fedbnr_jax.federated import partition as partition_lib
from fedbnr_jax.federated import placement
from fedbnr_jax.federated.federation import Federation, ServerSet
from fedbnr_jax.gp import urk
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import config_checks, input_summary, memory
from fedbnr_jax.run.task import FromConfig, RowCounts, TableNote, table_note

# Streams of randomness drawn from the one seed. What depends on the number of
# clients has a stream of its own, so that the others do not.
_DATA, _SPLIT, _PARTITION, _SERVER, _CALIBRATION, _FOLDS = range(6)
# A share of the training rows is set aside to calibrate intervals where it has as many
# rows: with 100 of them, 95 % intervals cover 93 to 97 % of new rows in two cases of
# three, whatever the luck of the draw. More than 2,000 are never set aside: then it is
# 94.5 to 95.5 %, and the model has better use for them.
FEWEST_CALIBRATION_ROWS, MOST_CALIBRATION_ROWS = 100, 2000


class EvaluationSet(struct.PyTreeNode):
  """Standardised rows to score predictions on."""

  x: jax.Array  # [N, D]
  y: jax.Array  # [N], in the dtype of the statistics.


@dataclasses.dataclass(frozen=True)
class Experiment(FromConfig):
  """One run, ready to start."""

  config: ml_collections.FrozenConfigDict
  dataset: Dataset
  split: Split
  preprocessor: Preprocessor
  federation: Federation
  num_clients: int  # Owners of the rows, also where a method pools them.
  client_names: tuple[str, ...]
  client_rows: tuple[np.ndarray, ...]  # Each client's row numbers in `dataset`.
  validation: EvaluationSet
  test: EvaluationSet
  algorithm: algorithms.FederatedAlgorithm
  # Row numbers in `dataset` that are set aside to calibrate intervals; they are in no
  # part of the split.
  calibration_rows: np.ndarray

  @property
  def num_folds(self) -> int:
    """Into how many folds the training rows are divided to calibrate; 0 for none."""
    if self.algorithm.one_model_each or len(self.calibration_rows):
      return 0
    return self.config.data.calibration_folds

  def folds(self) -> list[np.ndarray]:
    """Divides each client's rows, in the order of `client_rows`, into folds.

    Returns:
      For each client `[n]`, from 0 on; -1 for a row that belongs to no fold.
    """
    owners = np.repeat(np.arange(len(self.client_rows)), [*map(len, self.client_rows)])
    rng = _rng(self.config, _FOLDS)
    dealt = held_out.folds(rng, np.arange(len(owners)), self.num_folds, owners)
    return [dealt[owners == client] for client in range(len(self.client_rows))]

  @property
  def error_scale(self) -> float:
    """What a standardised error is multiplied by to be reported."""
    if not self.dataset.standardised_error:
      return self.preprocessor.target_std
    if self.preprocessor.target_bounds is None:
      return 1.0
    # Declared bounds have another deviation than the training targets.
    training_std = np.std(self.dataset.targets[self.split.train])
    return self.preprocessor.target_std / float(training_std)

  @functools.cached_property
  def table(self) -> TableNote:
    """What is said of the table in records."""
    return table_note(self.dataset)

  @property
  def counts(self) -> RowCounts:
    """How many rows train, validate and test."""
    return RowCounts(len(self.split.train), len(self.validation.y), len(self.test.y))

  @property
  def num_padded_rows(self) -> int:
    """N of the clients' arrays [K, N, ...]."""
    return int(self.federation.clients.x.shape[1])

  def placed(self) -> tuple[Federation, EvaluationSet, EvaluationSet]:
    """Puts the rows of clients, validation and test where the program wants them."""
    mesh = self.algorithm.placement.mesh
    federation = self.federation
    if not self.config.stream_clients:
      federation = placement.put_federation(federation, mesh)
    return federation, *placement.replicate((self.validation, self.test), mesh)


def build(
  config: ml_collections.ConfigDict, dataset: Dataset | None = None
) -> Experiment:
  """Loads, splits, standardises and deals out the data, and builds the method.

  Args:
    config: As `config.base` has it.
    dataset: Instead of the one that `config.data` names.

  Raises:
    InputError: If a field or the data cannot be used.
  """
  config_checks.validate(config)
  method = algorithms.method(config.method)
  if not method.random_features and config.kernel != config_lib.base().kernel:
    raise InputError(
      f"config.kernel is {config.kernel!r}, but method {config.method!r} has no kernel "
      "of random features: leave it out, or choose another method."
    )
  if dataset is None:
    dataset = load_dataset(config)
  algorithm = method.build(config)
  split = dataset.split or random_split(_rng(config, _SPLIT), dataset.num_rows)
  calibration_rows = np.array([], np.int64)
  if not algorithm.one_model_each:
    split, calibration_rows = _set_aside(config, dataset, split)
  preprocessor = _preprocessor(config, dataset, split)
  warn_of_hazards(dataset.features, dataset.targets, len(split.train), preprocessor)
  plain = preprocessor.standardised(dataset.features)
  inputs = preprocessor.scored(plain)
  targets = preprocessor.standardise(dataset.targets)
  preprocessor.warn_of_clipped_targets(dataset.targets)
  # Clipping what predictions are compared with would flatter them.
  scored_targets = preprocessor.standardise(dataset.targets, clip=False)
  # Who holds which rows does not depend on what becomes of the inputs.
  parts, names = _deal(config, dataset, split, plain, targets)
  num_clients = len(parts)
  if method.pooled:
    parts, names = [split.train], ["pooled"]
  federation = federation_lib.build(
    inputs,
    targets,
    parts,
    names=names,
    dtype=config.dtype,
    on_host=True,  # Whoever trains puts them where they belong.
  )
  if method.random_features:
    federation = _with_summary(config, federation, inputs[split.train], preprocessor)
  validation = split.validation
  if method.distils:
    server, validation = _server_rows(config, validation)
    federation = federation.replace(
      server=ServerSet(
        jnp.asarray(inputs[server], config.dtype),
        jnp.asarray(targets[server], config.dtype),
      )
    )

  def rows(indices: np.ndarray) -> EvaluationSet:
    dtype = jax.dtypes.canonicalize_dtype(jnp.float64)
    return EvaluationSet(
      jnp.asarray(inputs[indices], config.dtype),
      jnp.asarray(scored_targets[indices], dtype),
    )

  algorithm.check(federation)
  return Experiment(
    config=ml_collections.FrozenConfigDict(config),
    dataset=dataset,
    split=split,
    preprocessor=preprocessor,
    federation=federation,
    num_clients=num_clients,
    client_names=tuple(names),
    client_rows=tuple(parts),
    validation=rows(validation),
    test=rows(split.test),
    algorithm=algorithm,
    calibration_rows=calibration_rows,
  )


def _set_aside(
  config: ml_collections.ConfigDict, dataset: Dataset, split: Split
) -> tuple[Split, np.ndarray]:
  """Takes the rows to calibrate with out of the training rows, if there are enough."""
  train = split.train
  share = min(config.data.calibration, MOST_CALIBRATION_ROWS / len(train))
  enough = share * len(train) >= FEWEST_CALIBRATION_ROWS
  if not enough and config.data.calibration_folds:
    return split, train[:0]
  # Before rows are dealt to clients, where nobody owns them: as likely from each.
  owners = dataset.clients if _rule(config, dataset) == "column" else None
  owners = None if owners is None else owners[train]
  chosen = held_out.set_aside(_rng(config, _CALIBRATION), train, share, owners)
  return split._replace(train=train[~chosen]), train[chosen]


def _rule(config: ml_collections.ConfigDict, dataset: Dataset) -> str:
  """Names the rule by which rows get their owners."""
  if config.partition == "auto":
    return "sorted" if dataset.clients is None else "column"
  return config.partition


def _preprocessor(
  config: ml_collections.ConfigDict, dataset: Dataset, split: Split
) -> Preprocessor:
  """Standardisation by declared bounds if there are any, else by training rows."""
  bounds = _bounds(config)
  if bounds is not None:
    made = Preprocessor.from_bounds(dataset.features, dataset.target_name, bounds)
  else:
    with config_lib.left_open(config):
      made = Preprocessor.fit(
        dataset.features.iloc[split.train],
        dataset.targets[split.train],
        dataset.target_name,
        inputs=config_lib.inputs_of(config),
        missing=config.data.missing,
      )
  if config.data.raw_target and not dataset.standardised_error:
    made = dataclasses.replace(made, target_mean=0.0, target_std=1.0)
  return made


def _bounds(config: ml_collections.ConfigDict) -> Bounds | None:
  """The bounds that a config declares; None also for a run of an older version."""
  declared = config.data.get("bounds", "")
  return read_bounds(declared) if declared else None


def with_bounds_read(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Puts the content of a file of bounds in the place of its name.

  So a run's folder says what it was trained with, and a file that has changed since is
  noticed as any other change of a config is.
  """
  bounds = _bounds(config)
  if bounds is None or config.data.bounds == bounds.text:
    return config
  own = ml_collections.ConfigDict(config.to_dict())
  own.data.bounds = bounds.text
  return own


def _with_summary(
  config: ml_collections.ConfigDict,
  federation: Federation,
  inputs: np.ndarray,
  preprocessor: Preprocessor,
) -> Federation:
  """Adds what the kernel needs to know of the inputs; refuses one too large."""
  kernel = kernels.of_last_layer(config)
  if kernel.needs_inputs:
    # Of all training rows at once: the same draws, whoever holds which rows.
    federation = federation.replace(
      inputs=input_summary.summarise(inputs, preprocessor)
    )
  row = jnp.zeros((1, inputs.shape[1]), config.dtype)
  num_features = urk.num_features(kernel, row, federation.inputs)
  field = kernels.draws_field(config)
  memory.require(num_features, field, config_lib.get(config, field))
  return federation


def seed_configs(config: ml_collections.ConfigDict) -> list[ml_collections.ConfigDict]:
  """A config for each of `num_seeds` seeds, from `seed` on."""
  configs = []
  for seed in range(config.seed, config.seed + config.num_seeds):
    own = ml_collections.ConfigDict(config.to_dict())
    own.seed, own.num_seeds = seed, 1
    configs.append(own)
  return configs


def build_seeds(config: ml_collections.ConfigDict) -> list[Experiment]:
  """An experiment each for `num_seeds` seeds, from `seed` on, all of the same shapes.

  Raises:
    InputError: If a field or the data cannot be used, or the shapes differ.
  """
  config_checks.validate(config)
  if config.num_seeds == 1:
    return [build(config)]
  experiments = [build(own) for own in seed_configs(config)]
  num_rows = max(one.federation.clients.y.shape[1] for one in experiments)
  experiments = [
    dataclasses.replace(
      one, federation=federation_lib.with_rows(one.federation, num_rows)
    )
    for one in experiments
  ]
  shapes = [
    [leaf.shape for leaf in jax.tree.leaves((one.federation, one.validation, one.test))]
    for one in experiments
  ]
  for one, shape in zip(experiments, shapes, strict=True):
    if shape != shapes[0]:
      raise InputError(
        f"seeds {config.seed} and {one.config.seed} split the data into arrays of "
        "other shapes (as when a category is rare): train them one after another, as "
        "launch.sweep does, with config.num_seeds=1."
      )
  return experiments


def load_dataset(
  config: ml_collections.ConfigDict, frame: pd.DataFrame | None = None
) -> Dataset:
  """Reads the data that `config.data` names.

  Args:
    config: Of a run.
    frame: The table, where it is no file: a run of `fit(frame)` names none.
  """
  data = config.data
  if data.source == "uci":
    return uci.load(data.name, data.directory or None)
  if data.source == "synthetic":
    return synthetic.load(
      data.name,
      _rng(config, _DATA),
      num_rows=data.num_rows,
      noise_std=data.noise_std,
      num_clients=config.num_clients,
    )
  if frame is None and not data.path:
    raise InputError("config.data.path is empty: name a CSV or Parquet file.")
  bounds = _bounds(config)
  return load_table(
    data.path if frame is None else frame,
    name=None if frame is None else "table",
    target=data.target,
    client=data.client or None,
    features=_columns(data.features) or None,
    categorical=_columns(data.categorical),
    bounds=bounds,
    missing=data.missing,
  )


def _deal(
  config: ml_collections.ConfigDict,
  dataset: Dataset,
  split: Split,
  inputs: np.ndarray,
  targets: np.ndarray,
) -> tuple[list[np.ndarray], list[str]]:
  """Row numbers and name of each client."""
  train = split.train
  rule = _rule(config, dataset)
  if rule == "column":
    if dataset.clients is None:
      raise InputError(
        "config.partition is 'column' but the data has no client column: "
        "name it by config.data.client, or choose another partition."
      )
    parts, names = partition_lib.by_column(dataset.clients, train)
  else:
    parts = partition_lib.partition(
      rule,
      _rng(config, _PARTITION),
      inputs[train],
      targets[train],
      config.num_clients,
    )
    names = [f"client {index + 1}" for index in range(len(parts))]
  return [train[part] for part in parts], names


def _server_rows(
  config: ml_collections.ConfigDict, validation: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Splits the validation rows into the server's distillation set and the rest."""
  num_server = int(config.kd.fraction * len(validation))
  if num_server < 2 or num_server > len(validation) - 2:
    raise InputError(
      f"{len(validation)} validation rows are too few to give the server "
      f"{config.kd.fraction:.0%} of them for distillation: use more data, or another "
      "method."
    )
  order = _rng(config, _SERVER).permutation(validation)
  return order[:num_server], order[num_server:]


def _rng(config: ml_collections.ConfigDict, stream: int) -> np.random.Generator:
  return np.random.default_rng([config.seed, stream])


def _columns(names: str) -> tuple[str, ...]:
  return tuple(name.strip() for name in names.split(",") if name.strip())
