"""A model of a frame or of arrays in one call: `fit`."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
import pandas as pd

from fedbnr_jax import auto, calibration, precision, workflow
from fedbnr_jax import model as model_lib
from fedbnr_jax.candidates import Choice
from fedbnr_jax.data import Bounds, Dataset, load_table, read_bounds, tables
from fedbnr_jax.errors import InputError
from fedbnr_jax.intervals import Calibration
from fedbnr_jax.model import Model
from fedbnr_jax.names import nearest
from fedbnr_jax.progress import ProgressBar
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import config_checks, training
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run.coverage import warn_of_coverage

_TARGET, _CLIENT = "y", "client"  # Columns of a frame that is made from arrays.
# What of config.data can be given by keyword: not what says which rows to read.
_DATA_FIELDS = (
  "data.raw_target",
  "data.inputs",
  "data.missing",
  "data.calibration",
  "data.calibration_folds",
)


def fit(
  data: Any,
  y: Any = None,
  *,
  target: str | None = None,
  client: str | None = None,
  clients: Any = None,
  features: Sequence[str] | None = None,
  categorical: Sequence[str] = (),
  bounds: Mapping[str, Any] | str | os.PathLike[str] | None = None,
  inputs: str = "auto",
  missing: str = "error",
  method: str = "auto",
  seed: int = 0,
  folder: str | os.PathLike[str] | None = None,
  progress: bool = True,
  **fields: Any,
) -> Model:
  """Trains one global Gaussian process on rows that belong to several clients.

  `fit(frame, target="price", client="site")` takes a table, `fit(x, y, clients=c)`
  arrays. Rows without owners are dealt to `num_clients` clients, as in the paper.
  80 % of the rows are trained on, 10 % choose the best round, 10 % test it. A warning
  says if these test rows are not covered as they should be, or are too few to tell. A
  tenth of the training rows is set aside to calibrate intervals; where that is fewer
  than 100, five more trainings do it (`data__calibration=0, data__calibration_folds=0`
  for neither).

  Args:
    data: A frame, or an array [N, D] of numbers.
    y: Targets [N], where they are no column of a frame.
    target: The column of the frame to predict.
    client: The column of the frame that says whose row it is. It is no feature.
    clients: Labels [N] that say whose row it is, beside `y`.
    features: Columns to predict from; None for all others.
    categorical: Features to take as categories although they look like numbers or
      dates.
    bounds: What columns may hold, the target included, as a mapping or a JSON file:
      `{"age": [0, 120], "sex": ["f", "m"], "price": [0, 1e6]}`. With it nothing of the
      rows is in the standardisation, as a private release needs.
    inputs: "standard" for numeric features of mean zero and deviation one, "scores" for
      normal scores of their ranks, where columns have long tails; "auto" for scores,
      with method "auto" for the better of both, with bounds for standard ones.
    missing: "error" to refuse missing cells of features, "impute" to fill them in by
      training medians, with an input that says where; the target must be whole.
    method: "auto", which tries `fedbnr-ard` in a few ways and trains the best; or one
      of `algorithms.METHODS`.
    seed: Drives everything random: split, partition, initialisation, sampling.
    folder: Where to write the run as it goes, as `launch.train` does. A run that was
      stopped is taken up again there, and a finished one is loaded.
    progress: Whether to show a progress bar.
    **fields: Any field of a config, such as `num_rounds=20`; one within a group is
      `fedloc__rho=10.0`, or `**{"fedloc.rho": 10.0}`.

  Returns:
    The model at the best validation round.

  Raises:
    InputError: If the data, a field or the folder cannot be used.
    NonFiniteError: If the training diverges.
  """
  own = {"data.inputs": inputs, "data.missing": missing}
  fields = {"method": method, "seed": seed, **own, **fields}
  if y is None:
    if clients is not None:
      raise InputError(
        "clients= goes with arrays, fit(x, y, clients=c): name the column of a frame "
        "by client=."
      )
    frame = _require_frame(data)
    name = "table"
  else:
    if target is not None or client is not None:
      raise InputError(
        "target= and client= name columns of a frame, but y is given: leave it out, or "
        "give labels by clients=."
      )
    frame, target, client = _joined(data, y, clients)
    name = "table" if isinstance(data, pd.DataFrame) else "arrays"
  declared = None if bounds is None else read_bounds(bounds)
  config = _config(fields, target or "", client, features, categorical, declared)
  dataset = load_table(
    frame,
    target=target or "",
    client=client,
    features=features,
    categorical=categorical,
    name=name,
    bounds=declared,
    missing=config.data.missing,
  )
  fitted = _train(config, dataset, folder, ProgressBar(disable=not progress))
  warn_of_coverage(fitted.summary)
  return fitted


def fit_arrays(x: Any, y: Any, clients: Any, fields: Mapping[str, Any]) -> Model:
  """Trains as `fit(x, y, clients=clients, **fields)` does, and shows nothing.

  It does not warn of error bars either: whoever fits often, as cross-validation does,
  should hear of them when they are asked for. Nor are intervals calibrated, unless
  `fields` say so.
  """
  frame, target, client = _joined(x, y, clients)
  fields = {f"data.{name}": 0 for name in config_lib.CALIBRATED} | dict(fields)
  config = _config(fields, target, client, None, (), None)
  missing = config.data.missing
  dataset = load_table(
    frame, target=target, client=client, name="arrays", missing=missing
  )
  return _train(config, dataset, None, ProgressBar(disable=True))


@dataclasses.dataclass(frozen=True)
class FittedRun:
  """A training in memory: what `Model.save` needs to write its folder."""

  config: ml_collections.ConfigDict
  dataset: Dataset
  result: training.Result
  calibrated: Calibration | None = None
  # The config as it was given, and what method `auto` made of it.
  chosen: tuple[ml_collections.ConfigDict, Choice] | None = None

  def save(self, workdir: str | os.PathLike[str]) -> None:
    """Writes the folder that a training in `workdir` would have left."""
    with precision.float64():
      workflow.save(
        self.config,
        self.dataset,
        self.result,
        workdir,
        self.calibrated,
        self.chosen,
      )


def _train(
  config: ml_collections.ConfigDict,
  dataset: Dataset,
  folder: str | os.PathLike[str] | None,
  progress: workflow.Progress,
) -> Model:
  """Trains with 64-bit types, unless the environment says otherwise."""
  with precision.float64():
    if folder is not None:
      workflow.train(config, folder, progress, dataset)
      return model_lib.load(folder)
    precision.warn_of_float32()
    given, begun, chosen = config, None, None
    if config.method == config_lib.AUTO:
      choice = auto.choose(
        config,
        auto.of_rows(dataset),
        workflow.program_for,
        on_begin=progress.trying,
      )
      config, begun = choice.config, choice.begun
      chosen = given, choice._replace(begun=None)
    with config_lib.left_open(given):
      experiment = experiment_lib.build(config, dataset)
    program = workflow.program_for(experiment)
    progress.start(experiment, 0, 1)
    try:
      result = training.train(
        experiment, program, on_round=progress.update, begun=begun
      )
      calibrated = calibration.of_training(
        experiment, program, result, progress.calibrating
      )
    finally:
      progress.close()
    fitted = model_lib.from_result(experiment, result, calibrated)
  run = FittedRun(config, dataset, result, calibrated, chosen)
  return dataclasses.replace(fitted, source=run)


def _require_frame(data: Any) -> pd.DataFrame:
  """Raises InputError unless `data` is a frame, as it must be where y is not given."""
  if isinstance(data, pd.DataFrame):
    return data
  if isinstance(data, str | os.PathLike):
    raise InputError(
      f"{os.fspath(data)!r} is the name of a file: read it first, by "
      "fedbnr_jax.data.read_table or pandas."
    )
  raise InputError(
    "no targets are given: call fit(x, y) for arrays, or fit(frame, target=column)."
  )


def _joined(x: Any, y: Any, clients: Any) -> tuple[pd.DataFrame, str, str | None]:
  """A frame of features, targets and labels; the columns of the latter two."""
  frame = x.copy() if isinstance(x, pd.DataFrame) else tables.array_frame(x)
  named = getattr(y, "name", None)
  target = named if isinstance(named, str) and named else _TARGET
  frame[_free(target, frame)] = _column("y", y, len(frame))
  if clients is None:
    return frame, target, None
  client = _free(_CLIENT, frame)
  frame[client] = _column("clients", clients, len(frame))
  return frame, target, client


def _free(name: str, frame: pd.DataFrame) -> str:
  """Raises InputError if a frame has a column of this name already."""
  if name in frame.columns:
    raise InputError(
      f"x has a column {name!r}, which is the name of the targets or clients beside "
      "it: rename that column, or give one frame with target= and client=."
    )
  return name


def _column(name: str, values: Any, num_rows: int) -> np.ndarray:
  """Values [N] that go beside N rows of features."""
  array = np.asarray(values)
  if array.ndim != 1:
    raise InputError(f"{name} has shape {array.shape}: give one value a row, [N].")
  if len(array) != num_rows:
    raise InputError(
      f"x has {num_rows} rows but {name} has {len(array)}: give one value a row."
    )
  return array


def _config(
  fields: Mapping[str, Any],
  target: str,
  client: str | None,
  features: Sequence[str] | None,
  categorical: Sequence[str],
  bounds: Bounds | None,
) -> ml_collections.ConfigDict:
  """The config of a training on a table, with the caller's fields."""
  config = config_lib.base()
  config.data.update(
    {
      "source": "table",
      "name": "",
      "target": target,
      "client": client or "",
      "features": ",".join(features or ()),
      "categorical": ",".join(categorical),
      "bounds": "" if bounds is None else bounds.text,
      **config_lib.CALIBRATED,
    }
  )
  known = [
    name
    for name in config_lib.field_names(config)
    if not name.startswith("data.") or name in _DATA_FIELDS
  ]
  known.remove("num_seeds")  # One call, one model.
  for given, value in fields.items():
    name = given.replace("__", ".")
    if name not in known:
      raise _unknown_field(given, known)
    plain = value.item() if isinstance(value, np.generic) else value
    try:
      config.update_from_flattened_dict({name: plain})
    except (TypeError, ValueError) as error:
      kind = type(config_lib.get(config, name)).__name__
      raise InputError(
        f"the field {given!r} cannot be {value!r}: its kind is {kind!r}."
      ) from error
  config_checks.validate(config)
  return config


def _unknown_field(given: str, known: Sequence[str]) -> InputError:
  """The error of a keyword that names no field, with the nearest that does."""
  name = given.replace("__", ".")
  if name.startswith("data."):
    return InputError(
      f"there is no field {given!r}: the data are what fit is given, with target=, "
      "client=, features=, categorical=, bounds=, inputs= and missing=."
    )
  near = nearest(name, known)
  hint = f"did you mean {near.replace('.', '__')!r}? " if near else ""
  return InputError(
    f"there is no field {given!r}: {hint}The fields are those of a config, see "
    "fedbnr_jax/run/config.py."
  )
