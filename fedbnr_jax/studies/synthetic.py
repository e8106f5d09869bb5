"""The paper's synthetic study: who can predict where a client has no rows.

Kernels are learnt from all rows on [-5, 5] and then fixed. Client 1 holds the left half
of the rows, client 2 the right half. Then a new client comes, with some rows on [-5, 5]
or on [5, 15], and its predictions are compared with the function on [-5, 5].
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pandas as pd

from fedbnr_jax.data import Preprocessor
from fedbnr_jax.data.synthetic import bumps
from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.report import bands, curves, figures
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.studies import fixed_kernels
from fedbnr_jax.studies.fixed_kernels import METHODS, ClientRows, Predict

# Where the rows of the new client lie.
RANGES = {"[-5, 5]": (-5.0, 5.0), "[5, 15]": (5.0, 15.0)}
_GRID = np.linspace(-5.0, 5.0, 400)[:, None]


def base_config() -> ml_collections.ConfigDict:
  """Returns the config that all trainings share: the demo's rows, in one client."""
  config = config_lib.base()
  config.num_clients = 1
  config.data.name = "two-ranges"
  config.num_rounds = 40
  config.learning_rate = 5e-3
  config.length_scale = 3.0
  config.hidden_size = 100
  config.fedloc.rho = 100.0  # Fits the targets' unit; see algorithms/fedloc.py.
  return config


def run(
  base: ml_collections.ConfigDict,
  num_seeds: int,
  counts: Sequence[int],
  folder: pathlib.Path,
) -> pd.DataFrame:
  """Trains the kernels of every seed and measures the errors of new clients.

  Writes `mse.csv`, `new_client.png` and, for the first seed, `bands.png`.

  Args:
    base: Config of every training, except for the method and the seed.
    num_seeds: Seeds are 0, 1, ...
    counts: Numbers of rows of the new client.
    folder: Made if it is not there.

  Returns:
    Columns seed, range, rows, method, mse.
  """
  with explain_os_errors(folder):
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for models, experiment in fixed_kernels.learn(base, range(num_seeds)):
      clients = two_clients(experiment)
      if experiment.config.seed == 0:
        draw_bands(models, experiment, clients, folder / "bands.png")
      rows += new_client_errors(models, experiment, clients, counts)
    errors = pd.DataFrame(rows)
    errors.to_csv(folder / "mse.csv", index=False)
    figures.save(curves.new_client(errors), folder / "new_client.png")
  return errors


def two_clients(experiment: Experiment) -> tuple[ClientRows, ClientRows]:
  """Splits the training rows into those left and those right of zero."""
  x = experiment.dataset.features["x"].to_numpy()[experiment.split.train]
  y = experiment.dataset.targets[experiment.split.train]
  left, right = (
    standardised(experiment.preprocessor, x[side], y[side], len(x))
    for side in (x < 0, x >= 0)
  )
  return left, right


def standardised(
  preprocessor: Preprocessor, x: np.ndarray, y: np.ndarray, size: int
) -> ClientRows:
  """Standardises raw rows x [n], y [n] and pads them to `size`."""
  inputs = preprocessor.transform(pd.DataFrame({"x": x}))
  missing = size - len(y)
  return ClientRows(
    jnp.asarray(np.pad(inputs, ((0, missing), (0, 0))), jnp.float32),
    jnp.asarray(np.pad(preprocessor.standardise(y), (0, missing)), jnp.float32),
    jnp.arange(size) < len(y),
  )


def new_client_errors(
  models: dict[str, Predict],
  experiment: Experiment,
  clients: tuple[ClientRows, ClientRows],
  counts: Sequence[int],
) -> list[dict[str, Any]]:
  """Measures the squared errors on [-5, 5] of a third client's predictions.

  Args:
    models: As by `fixed_kernels.learn`.
    experiment: Of the same seed.
    clients: As by `two_clients`.
    counts: Numbers of rows of the third client.

  Returns:
    One row per range, number of rows and method.
  """
  scaler, most = experiment.preprocessor, max(counts)
  seed, noise_std = experiment.config.seed, experiment.config.data.noise_std
  prepare = functools.partial(standardised, scaler, size=most)
  truth = bumps(_GRID)
  queries = standardised(scaler, _GRID[:, 0], truth, len(_GRID))
  rows = []
  for index, (name, (low, high)) in enumerate(RANGES.items()):
    rng = np.random.default_rng([seed, 100 + index])  # Apart from the clients' rows.
    x = rng.uniform(low, high, most)
    y = bumps(x[:, None]) + noise_std * rng.standard_normal(most)
    for count in counts:
      own = prepare(x[:count], y[:count])
      for method, predict in models.items():
        mean, _ = predict((*clients, own), queries.x)
        gap = scaler.unstandardise_mean(np.asarray(mean)) - truth
        mse = float(np.mean(np.square(gap)))
        rows.append(
          {"seed": seed, "range": name, "rows": count, "method": method, "mse": mse}
        )
  return rows


def draw_bands(
  models: dict[str, Predict],
  experiment: Experiment,
  clients: tuple[ClientRows, ClientRows],
  path: pathlib.Path,
) -> None:
  """Draws pFedGP of client 1 beside FedBNR's one model of both clients."""
  left, right = clients
  scaler, truth = experiment.preprocessor, bumps(_GRID)
  queries = standardised(scaler, _GRID[:, 0], truth, len(_GRID))
  train_x = experiment.dataset.features["x"].to_numpy()[experiment.split.train]
  panels = []
  for method, ordered, title, used in (
    ("pfedgp", (right, left), "pFedGP, client 1", train_x < 0),
    ("fedbnr", (left, right), "FedBNR", None),
  ):
    mean, variance = jax.device_get(models[method](ordered, queries.x))
    panels.append(
      bands.BandPanel(
        x=_GRID[:, 0],
        mean=scaler.unstandardise_mean(mean),
        variance=variance * scaler.target_std**2,
        train_x=train_x,
        train_y=experiment.dataset.targets[experiment.split.train],
        train_client=(train_x >= 0).astype(int),
        truth=truth,
        title=title,
        used=used,
      )
    )
  first, second = panels
  figures.save(bands.two_panels(first, second), path)


def error_table(errors: pd.DataFrame) -> pd.DataFrame:
  """Formats "mean ± std" over seeds, one row per range and number of rows."""
  groups = errors.groupby(["range", "rows", "method"], sort=False).mse
  text = [
    f"{mean:.3f} ± {std:.3f}"
    for mean, std in zip(groups.mean(), groups.std(), strict=True)
  ]
  table = pd.Series(text, groups.mean().index).unstack("method", sort=False)
  return table[list(METHODS)].reset_index()
