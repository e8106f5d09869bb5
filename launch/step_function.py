"""The appendix's comparison of two kernels on a step function.

python -m launch.step_function --workdir=runs/step_function

A GP with the unifying random kernel is trained on rows of a function that jumps: with
the paper's f and h ("deep"), f being very small, and with the replicate policy, which
has the same f and no h. Draws both into step_function.png, of the first seed; writes
the scores of every seed into seeds.csv, their mean and standard deviation into
scores.csv, and prints these. Most of the spread is the draw of the rows, which the
kernels share: a line says in how many seeds which is better. A minute on one core.
"""

import dataclasses
import pathlib

import ml_collections
import pandas as pd
from absl import flags

from fedbnr_jax import config as config_lib
from fedbnr_jax import experiment as experiment_lib
from fedbnr_jax import training
from fedbnr_jax.experiment import Experiment
from fedbnr_jax.records import usable
from fedbnr_jax.report import figures, tables
from fedbnr_jax.report import run as report
from launch import common

_ROWS = flags.DEFINE_integer("num_rows", 200, "To train on; half as many to test.", 10)
_NOISE = flags.DEFINE_float("noise_std", 0.2, "Of the targets; the jump is 3.", 0)
_WIDTH = flags.DEFINE_integer("hidden_size", 2, "Hidden units of f.", 1)
_SAMPLES = flags.DEFINE_integer("num_samples", 50, "S; there are 2S features.", 2)
_ROUNDS = flags.DEFINE_integer("num_rounds", 100, "Of 50 steps, at most.", 1)

KERNELS = {"deep": "Extractor f and shifter h", "replicate": "Replicate policy"}
_SCORES = ("test_rmse", "test_nll", "test_ece")


def main() -> None:
  compare(base_config(), common.SEEDS.value, pathlib.Path(common.workdir()))


def base_config() -> ml_collections.ConfigDict:
  """What the trainings share, as the flags have it."""
  config = config_lib.base()
  config.method = "central"
  config.num_clients = 1
  config.data.name = "step"
  config.data.num_rows = _ROWS.value
  config.data.noise_std = _NOISE.value
  config.hidden_size = _WIDTH.value
  config.num_samples = _SAMPLES.value
  config.num_rounds = _ROUNDS.value
  # Chosen on validation rows of seeds 100 to 109: more patience and a larger rate
  # helped both kernels, and copies that stay near x the replicate policy.
  config.patience = 20
  config.learning_rate = 3e-2
  config.replicate.noise_scale = 0.1
  return config


def compare(
  base: ml_collections.ConfigDict, num_seeds: int, folder: pathlib.Path
) -> None:
  """Trains both kernels with every seed, and tells and draws what came of it.

  Args:
    base: Of every training, but for the kernel and the seed.
    num_seeds: Seeds from 0 on; at least 2.
    folder: Where the figure and the tables go.
  """
  # All of them first: what cannot be used is refused before anything is written.
  experiments = {kernel: build(base, kernel, num_seeds) for kernel in KERNELS}
  with usable(folder):
    folder.mkdir(parents=True, exist_ok=True)
    rows, panels = [], []
    for kernel, runs in experiments.items():
      # Seeds differ in their arrays only, so one compiled program serves all.
      program = training.jit(training.make_program(runs[0]))
      results = [training.train(run, program) for run in runs]
      rows += [_row(run, one) for run, one in zip(runs, results, strict=True)]
      best = results[0].best
      title = f"{KERNELS[kernel]}: test RMSE {best['test_rmse']:.3f}"
      panel = report.band_panel(runs[0], program, results[0], title)
      panels.append(dataclasses.replace(panel, client_names=("training rows",)))
    seeds = pd.DataFrame(rows)
    seeds.to_csv(folder / "seeds.csv", index=False)
    scores = summary(seeds)
    scores.to_csv(folder / "scores.csv", index=False)
    left, right = panels
    figures.two_panels(left, right, folder / "step_function.png")
  print(tables.markdown(readable(scores)))
  print(comparison(seeds))
  print(f"written to {folder}")


def build(
  base: ml_collections.ConfigDict, kernel: str, num_seeds: int
) -> list[Experiment]:
  """An experiment a seed."""
  experiments = []
  for seed in range(num_seeds):
    config = ml_collections.ConfigDict(base.to_dict())
    config.kernel, config.seed = kernel, seed
    experiments.append(experiment_lib.build(config))
  return experiments


def _row(run: Experiment, result: training.Result) -> dict[str, object]:
  """Test scores at the round that validation chose."""
  return {
    "kernel": run.config.kernel,
    "parameters": result.state.params.size,
    "seed": run.config.seed,
    "best_round": result.best_round,
    **{name: result.best[name] for name in _SCORES},
    "noise_std": result.best["noise_std"],
  }


def summary(seeds: pd.DataFrame) -> pd.DataFrame:
  """Mean and standard deviation over the seeds, a row a kernel.

  Args:
    seeds: A row a training.

  Returns:
    Columns kernel, parameters, seeds, and of every score `<score>_mean` and
    `<score>_std`.
  """
  groups = seeds.groupby(["kernel", "parameters"], sort=False)
  columns: dict[str, pd.Series] = {"seeds": groups.size()}
  for name in _SCORES:
    columns[f"{name}_mean"] = groups[name].mean()
    columns[f"{name}_std"] = groups[name].std()
  return pd.DataFrame(columns).reset_index()


def readable(scores: pd.DataFrame) -> pd.DataFrame:
  """The same for the terminal: a score and its spread in one cell."""
  table = scores[["kernel", "parameters", "seeds"]].copy()
  for name in _SCORES:
    pairs = zip(scores[f"{name}_mean"], scores[f"{name}_std"], strict=True)
    table[name] = [f"{mean:.3f} ± {std:.3f}" for mean, std in pairs]
  return table


def comparison(seeds: pd.DataFrame) -> str:
  """In how many seeds the second kernel is the better; both have the same rows."""
  parts = []
  for name in _SCORES:
    values = seeds.pivot(index="seed", columns="kernel", values=name)
    parts.append(f"{name} in {(values.replicate < values.deep).sum()}")
  return f"replicate has the lower {', '.join(parts)} of {len(values)} seeds"


if __name__ == "__main__":
  common.run(main)
