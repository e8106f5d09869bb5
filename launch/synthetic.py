"""The paper's synthetic study: who can predict where a client has no rows.

python -m launch.synthetic --workdir=runs/synthetic

Kernels are learnt from all rows on [-5, 5] and then fixed. Client 1 holds the left half
of the rows, client 2 the right. bands.png has client 1's pFedGP and FedBNR's one model.
Then a new client comes, with so many rows on [-5, 5] or on [5, 15]: new_client.png has
the squared error on [-5, 5] that it gets, against the number of its rows. pFedGP
predicts from the new client's own rows, FedLoc fuses all three clients, FedBNR adds
their statistics. mse.csv has every seed. Four minutes on one core.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pandas as pd
from absl import flags

from fedbnr_jax import blr, experts, fitc, networks, training, urk
from fedbnr_jax import config as config_lib
from fedbnr_jax import experiment as experiment_lib
from fedbnr_jax.algorithms import pfedgp
from fedbnr_jax.clients import features_of
from fedbnr_jax.data import Preprocessor
from fedbnr_jax.data.synthetic import bumps
from fedbnr_jax.errors import InputError
from fedbnr_jax.experiment import Experiment
from fedbnr_jax.records import usable
from fedbnr_jax.report import curves, figures, tables
from launch import common

_COUNTS = flags.DEFINE_list(
  "counts", ["2", "5", "10", "20", "50", "100", "200"], "Rows of the new client."
)

RANGES = {"[-5, 5]": (-5.0, 5.0), "[5, 15]": (5.0, 15.0)}
METHODS = ("pfedgp", "fedloc", "fedloc-poe", "fedbnr")
_GRID = np.linspace(-5.0, 5.0, 400)[:, None]


class Rows(NamedTuple):
  """Standardised rows of one client, padded."""

  x: jax.Array  # [N, 1]
  y: jax.Array  # [N]
  mask: jax.Array  # [N] bool


# (rows of the clients, the one that asks last; x [G, 1]) -> mean [G], variance [G].
Predict = Callable[[tuple[Rows, ...], jax.Array], tuple[jax.Array, jax.Array]]


def main() -> None:
  counts = [_count(text) for text in _COUNTS.value]
  if not counts:
    raise InputError("--counts is empty: give at least one number of rows.")
  study(base_config(), common.SEEDS.value, counts, pathlib.Path(common.workdir()))


def _count(text: str) -> int:
  if not text.strip().isdecimal() or int(text) < 1:
    raise InputError(f"--counts has {text!r}: give numbers from 1 on.")
  return int(text)


def base_config() -> ml_collections.ConfigDict:
  """Of every training; the demo's, which is of the same rows."""
  config = config_lib.base()
  config.num_clients = 1
  config.data.name = "two-ranges"
  config.num_rounds = 40
  config.learning_rate = 5e-3
  config.length_scale = 3.0
  config.hidden_size = 100
  config.fedloc.rho = 100.0  # For the targets' unit; see algorithms/fedloc.py.
  return config


def study(
  base: ml_collections.ConfigDict,
  num_seeds: int,
  counts: list[int],
  folder: pathlib.Path,
) -> None:
  """Trains the kernels of every seed, and tells and draws what came of them.

  Args:
    base: Of every training, but for the method and the seed.
    num_seeds: Seeds from 0 on.
    counts: Numbers of rows of the new client.
    folder: Where the figures and the table go.
  """
  with usable(folder):
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for seed in range(num_seeds):
      models, run = learn_kernels(base, seed)
      clients = two_clients(run)
      if seed == 0:
        draw_bands(models, run, clients, folder)
      rows += new_client(models, run, clients, counts, seed)
    errors = pd.DataFrame(rows)
    errors.to_csv(folder / "mse.csv", index=False)
    curves.new_client(errors, folder / "new_client.png")
  print(tables.markdown(readable(errors)))
  print(f"written to {folder}")


# ------------------------------------------------------------------ fixed kernels


def learn_kernels(
  base: ml_collections.ConfigDict, seed: int
) -> tuple[dict[str, Predict], Experiment]:
  """Of each method, how it predicts under a kernel that was learnt from all rows."""
  models: dict[str, Predict] = {}
  for method, build in (
    ("central", fedbnr_model),
    ("pfedgp", pfedgp_model),
    ("fedloc", fedloc_model),
  ):
    config = ml_collections.ConfigDict(base.to_dict())
    config.method, config.seed = method, seed
    run = experiment_lib.build(config)
    result = training.train(run, training.jit(training.make_program(run)))
    models |= build(config, result.state)
  return {method: jax.jit(models[method]) for method in METHODS}, run


def fedbnr_model(config: ml_collections.ConfigDict, state: Any) -> dict[str, Predict]:
  """The statistics of all clients added up."""
  feature_map = urk.from_config(config)
  features = functools.partial(features_of, feature_map, state.params, state.omega)

  def predict(clients: tuple[Rows, ...], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    parts = [
      blr.sufficient_stats(features(rows.x), rows.y, rows.mask) for rows in clients
    ]
    stats = functools.reduce(lambda a, b: a + b, parts)
    scales = (state.params.noise_std, state.params.prior_std)
    fitted = blr.posterior(stats, *(jnp.asarray(s, stats.gram.dtype) for s in scales))
    return blr.predict(fitted, features(x))

  return {"fedbnr": predict}


def pfedgp_model(config: ml_collections.ConfigDict, state: Any) -> dict[str, Predict]:
  """A Gaussian process of the rows of who asks."""
  network = networks.Extractor(
    config.hidden_size,
    config.latent_size,
    config.num_hidden_layers,
    jnp.dtype(config.dtype),
  )
  params = state.params

  def embed(x: jax.Array) -> jax.Array:
    return pfedgp.embedding(
      network, params.network, x, normalise=config.pfedgp.normalise
    )

  def predict(clients: tuple[Rows, ...], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    own = clients[-1]
    fitted = fitc.fit(embed(own.x), own.y, params.inducing, params.scales, own.mask)
    mean, variance = fitc.predict(fitted, embed(x))
    return mean, variance + fitted.params.noise_variance

  return {"pfedgp": predict}


def fedloc_model(config: ml_collections.ConfigDict, state: Any) -> dict[str, Predict]:
  """A Gaussian process of each client's rows, fused."""
  key = jax.random.key(config.seed)

  def predict(
    rule: str, clients: tuple[Rows, ...], x: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    told = []
    for rows in clients:
      inducing = fitc.choose_inducing(
        key, rows.x, rows.mask, config.fedloc.num_inducing
      )
      fitted = fitc.fit(rows.x, rows.y, inducing, state.params, rows.mask)
      told.append(fitc.predict(fitted, x))
    means, variances = (jnp.stack(part) for part in zip(*told, strict=True))
    mean, variance = experts.fuse(rule, means, variances, fitted.params.prior_variance)
    return mean, variance + fitted.params.noise_variance

  return {
    "fedloc": functools.partial(predict, "rbcm"),
    "fedloc-poe": functools.partial(predict, "poe"),
  }


# -------------------------------------------------------------------------- clients


def two_clients(run: Experiment) -> tuple[Rows, Rows]:
  """The training rows left and right of zero."""
  x = run.dataset.features["x"].to_numpy()[run.split.train]
  y = run.dataset.targets[run.split.train]
  left, right = (
    prepared(run.preprocessor, x[side], y[side], len(x)) for side in (x < 0, x >= 0)
  )
  return left, right


def prepared(
  preprocessor: Preprocessor, x: np.ndarray, y: np.ndarray, size: int
) -> Rows:
  """Rows x [n], y [n] as the kernels know them, padded to `size`."""
  inputs = preprocessor.transform(pd.DataFrame({"x": x}))
  missing = size - len(y)
  return Rows(
    jnp.asarray(np.pad(inputs, ((0, missing), (0, 0))), jnp.float32),
    jnp.asarray(np.pad(preprocessor.standardise(y), (0, missing)), jnp.float32),
    jnp.arange(size) < len(y),
  )


def new_client(
  models: dict[str, Predict],
  run: Experiment,
  clients: tuple[Rows, Rows],
  counts: list[int],
  seed: int,
) -> list[dict[str, Any]]:
  """Squared errors of the function on [-5, 5] when a third client asks."""
  prepare = functools.partial(prepared, run.preprocessor, size=max(counts))
  queries = prepared(run.preprocessor, _GRID[:, 0], bumps(_GRID), len(_GRID))
  rows = []
  for index, (name, (low, high)) in enumerate(RANGES.items()):
    rng = np.random.default_rng([seed, 100 + index])  # Not those of the clients' rows.
    x = rng.uniform(low, high, max(counts))
    noise = run.config.data.noise_std * rng.standard_normal(max(counts))
    y = bumps(x[:, None]) + noise
    for count in counts:
      own = prepare(x[:count], y[:count])
      for method, predict in models.items():
        mean, _ = predict((*clients, own), queries.x)
        told = run.preprocessor.unstandardise_mean(np.asarray(mean))
        error = float(np.mean(np.square(told - bumps(_GRID))))
        rows.append(
          {"seed": seed, "range": name, "rows": count, "method": method, "mse": error}
        )
  return rows


def draw_bands(
  models: dict[str, Predict],
  run: Experiment,
  clients: tuple[Rows, Rows],
  folder: pathlib.Path,
) -> None:
  """Client 1's pFedGP, and FedBNR's model of both clients."""
  left, right = clients
  queries = prepared(run.preprocessor, _GRID[:, 0], bumps(_GRID), len(_GRID))
  panels = []
  for method, asked, title in (
    ("pfedgp", (right, left), "pFedGP, client 1"),
    ("fedbnr", (left, right), "FedBNR"),
  ):
    mean, variance = jax.device_get(models[method](asked, queries.x))
    x = run.dataset.features["x"].to_numpy()[run.split.train]
    panels.append(
      figures.BandPanel(
        x=_GRID[:, 0],
        mean=run.preprocessor.unstandardise_mean(mean),
        variance=variance * run.preprocessor.target_std**2,
        train_x=x,
        train_y=run.dataset.targets[run.split.train],
        train_client=(x >= 0).astype(int),
        truth=bumps(_GRID),
        title=title,
        used=x < 0 if method == "pfedgp" else None,
      )
    )
  first, second = panels
  figures.two_panels(first, second, folder / "bands.png")


def readable(errors: pd.DataFrame) -> pd.DataFrame:
  """Mean and standard deviation over seeds, a row a range and number of rows."""
  groups = errors.groupby(["range", "rows", "method"], sort=False).mse
  text = [
    f"{mean:.3f} ± {std:.3f}"
    for mean, std in zip(groups.mean(), groups.std(), strict=True)
  ]
  table = pd.Series(text, groups.mean().index).unstack("method", sort=False)
  return table[list(METHODS)].reset_index()


if __name__ == "__main__":
  common.run(main)
