"""How fast each construction of the unifying random kernel reaches its kernel.

python -m launch.kernels --workdir=runs/kernels

Compares the Gram matrix of the features of S draws of ω with the exact kernel, for a
range of S. kernels.png has the mean relative error over seeds against S, beside 1/√S;
its band holds 80 % of the seeds, and a single seed can lift the mean above it.
errors.csv has the error of every seed, and slopes.csv the slopes of the fitted lines,
which are printed. Expect −1/2, the rate of Monte Carlo; fedbnr_jax/studies/kernels.py
says why exp(ωᵀx) does not reach it on standard normal inputs. It takes 40 s.
"""

import pathlib

from absl import flags

from fedbnr_jax.errors import InputError
from fedbnr_jax.report import tables
from fedbnr_jax.studies import kernels as study
from launch import common

flags.declare_key_flag(common.SEEDS)
flags.declare_key_flag(common.WORKDIR)
_FEWEST = flags.DEFINE_integer("fewest_samples", 8, "The smallest S.", 2)
_MOST = flags.DEFINE_integer("most_samples", 8192, "The largest S.", 2)
_FACTOR = flags.DEFINE_integer("sample_factor", 4, "From one S to the next.", 2)
_INPUTS = flags.DEFINE_integer("num_inputs", 3, "D.", 1)
_POINTS = flags.DEFINE_integer("num_points", 32, "Inputs; every two are a pair.", 2)


def main() -> None:
  counts = sample_counts(_FEWEST.value, _MOST.value, _FACTOR.value)
  folder = pathlib.Path(common.workdir())
  shape = (_POINTS.value, _INPUTS.value)
  measured = study.compare(counts, common.SEEDS.value, shape, folder)
  slopes = measured.slopes.set_index("kernel").map("{:.3f}".format).reset_index()
  print(tables.markdown(slopes))
  print(f"written to {folder}")


def sample_counts(fewest: int, most: int, factor: int) -> list[int]:
  """Returns a geometric range of S with at least two values."""
  if most < fewest * factor:
    raise InputError(
      f"--most_samples={most} leaves one S only: give at least {fewest * factor}, "
      "--sample_factor times --fewest_samples."
    )
  counts = [fewest]
  while counts[-1] * factor <= most:
    counts.append(counts[-1] * factor)
  return counts


if __name__ == "__main__":
  common.run(main)
