"""The paper's appendix: two kernels on a function that jumps.

A Gaussian process with the unifying random kernel is trained with the paper's extractor
f and shifter h ("deep"), f being very small, and with the replicate policy, which has
the same f and no h. Most of the spread over seeds comes from the draw of the rows,
which both kernels share, so the kernels are compared seed by seed.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import ml_collections
import pandas as pd

from fedbnr_jax.federated.exchange import num_floats
from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.report import bands, figures
from fedbnr_jax.report import run as report
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.program import make_program

# Names of the kernels, and how the figure's panels call them.
KERNELS = {"deep": "Extractor f and shifter h", "replicate": "Replicate policy"}
_SCORES = ("test_rmse", "test_nll", "test_ece")


class Comparison(NamedTuple):
  """Test scores of both kernels."""

  seeds: pd.DataFrame  # One row per training.
  scores: pd.DataFrame  # One row per kernel, as by `summary`.


def base_config(
  *,
  num_rows: int = 200,
  noise_std: float = 0.2,
  hidden_size: int = 2,
  num_samples: int = 50,
  num_rounds: int = 100,
) -> ml_collections.ConfigDict:
  """Returns the config that all trainings share.

  Args:
    num_rows: Training rows; half as many test rows are drawn.
    noise_std: Of the targets; the jump is 3.
    hidden_size: Width of f.
    num_samples: S.
    num_rounds: Rounds of 50 steps, at most.
  """
  config = config_lib.base()
  config.method = "central"
  config.num_clients = 1
  config.data.name = "step"
  config.data.num_rows = num_rows
  config.data.noise_std = noise_std
  config.hidden_size = hidden_size
  config.num_samples = num_samples
  config.num_rounds = num_rounds
  # Chosen on validation rows of seeds 100 to 109: more patience and a larger rate
  # helped both kernels; copies close to x helped the replicate policy.
  config.patience = 20
  config.learning_rate = 3e-2
  config.replicate.noise_scale = 0.1
  return config


def compare(
  base: ml_collections.ConfigDict,
  num_seeds: int,
  folder: pathlib.Path,
  kernels: Mapping[str, str] = KERNELS,
) -> Comparison:
  """Trains two kernels with every seed and scores them on the test rows.

  Writes `seeds.csv`, `scores.csv` and, for the first seed, `step_function.png`.

  Args:
    base: Config of every training, except for the kernel and the seed.
    num_seeds: Seeds are 0, 1, ...; at least 2.
    folder: Made if it is not there.
    kernels: Values of `config.kernel`, and titles of their panels.
  """
  # All experiments are built first, so that bad values are refused before anything is
  # written.
  experiments = {
    kernel: build_experiments(base, kernel, num_seeds) for kernel in kernels
  }
  with explain_os_errors(folder):
    folder.mkdir(parents=True, exist_ok=True)
    rows, panels = [], []
    for kernel, runs in experiments.items():
      # Seeds differ in their arrays only, so one compiled program serves all.
      program = make_program(runs[0].algorithm, transform=jax.jit)
      results = [training.train(run, program) for run in runs]
      rows += [_row(run, one) for run, one in zip(runs, results, strict=True)]
      best = results[0].best
      title = f"{kernels[kernel]}: test RMSE {best['test_rmse']:.3f}"
      panel = report.band_panel(runs[0], program, results[0], title)
      panels.append(dataclasses.replace(panel, client_names=("training rows",)))
    seeds = pd.DataFrame(rows)
    seeds.to_csv(folder / "seeds.csv", index=False)
    scores = summary(seeds)
    scores.to_csv(folder / "scores.csv", index=False)
    left, right = panels
    figures.save(bands.two_panels(left, right), folder / "step_function.png")
  return Comparison(seeds, scores)


def build_experiments(
  base: ml_collections.ConfigDict, kernel: str, num_seeds: int
) -> list[Experiment]:
  """Builds the experiment of every seed with one kernel."""
  experiments = []
  for seed in range(num_seeds):
    config = ml_collections.ConfigDict(base.to_dict())
    config.kernel, config.seed = kernel, seed
    experiments.append(experiment_lib.build(config))
  return experiments


def _row(run: Experiment, result: training.Result) -> dict[str, object]:
  """Lists the test scores at the round that validation chose."""
  return {
    "kernel": run.config.kernel,
    "parameters": num_floats(result.state.server.params),
    "seed": run.config.seed,
    "best_round": result.best_round,
    **{name: result.best[name] for name in _SCORES},
    "noise_std": result.best["noise_std"],
  }


def summary(seeds: pd.DataFrame) -> pd.DataFrame:
  """Averages the scores over seeds.

  Args:
    seeds: One row per training.

  Returns:
    One row per kernel, with columns kernel, parameters, seeds, and for every score
    `<score>_mean` and `<score>_std`.
  """
  groups = seeds.groupby(["kernel", "parameters"], sort=False)
  columns: dict[str, pd.Series] = {"seeds": groups.size()}
  for name in _SCORES:
    columns[f"{name}_mean"] = groups[name].mean()
    columns[f"{name}_std"] = groups[name].std()
  return pd.DataFrame(columns).reset_index()


def score_table(scores: pd.DataFrame) -> pd.DataFrame:
  """Formats a `summary` for the terminal, with "mean ± std" in one cell."""
  table = scores[["kernel", "parameters", "seeds"]].copy()
  for name in _SCORES:
    pairs = zip(scores[f"{name}_mean"], scores[f"{name}_std"], strict=True)
    table[name] = [f"{mean:.3f} ± {std:.3f}" for mean, std in pairs]
  return table


def wins_text(seeds: pd.DataFrame) -> str:
  """Says in how many seeds the replicate policy has the lower score."""
  parts = []
  for name in _SCORES:
    values = seeds.pivot(index="seed", columns="kernel", values=name)
    parts.append(f"{name} in {(values.replicate < values.deep).sum()}")
  return f"replicate has the lower {', '.join(parts)} of {len(values)} seeds"
