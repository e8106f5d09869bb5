"""The appendix's comparison of two kernels on a step function.

python -m launch.step_function --workdir=runs/step_function

Trains a GP with the unifying random kernel on rows of a function that jumps: with the
paper's f and h ("deep"), f being very small, and with the replicate policy, which has
the same f and no h. Draws both models of the first seed into step_function.png, writes
the scores of every seed into seeds.csv, and their mean and standard deviation into
scores.csv, which are printed. A further line says in how many seeds which kernel is
better. It takes a minute on one core.
"""

import pathlib

from absl import flags

from fedbnr_jax.report import tables
from fedbnr_jax.studies import step_function as study
from launch import common

flags.declare_key_flag(common.SEEDS)
flags.declare_key_flag(common.WORKDIR)
_ROWS = flags.DEFINE_integer("num_rows", 200, "To train on; half as many to test.", 10)
_NOISE = flags.DEFINE_float("noise_std", 0.2, "Of the targets; the jump is 3.", 0)
_WIDTH = flags.DEFINE_integer("hidden_size", 2, "Hidden units of f.", 1)
_SAMPLES = flags.DEFINE_integer("num_samples", 50, "S; there are 2S features.", 2)
_ROUNDS = flags.DEFINE_integer("num_rounds", 100, "Of 50 steps, at most.", 1)


def main() -> None:
  folder = pathlib.Path(common.workdir())
  config = study.base_config(
    num_rows=_ROWS.value,
    noise_std=_NOISE.value,
    hidden_size=_WIDTH.value,
    num_samples=_SAMPLES.value,
    num_rounds=_ROUNDS.value,
  )
  compared = study.compare(config, common.SEEDS.value, folder)
  print(tables.markdown(study.score_table(compared.scores)))
  print(study.wins_text(compared.seeds))
  print(f"written to {folder}")


if __name__ == "__main__":
  common.run(main)
