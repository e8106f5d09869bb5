"""How fast each construction of the unifying random kernel reaches its kernel.

python -m launch.kernels --workdir=runs/kernels

For S draws of ω, the Gram matrix of the features is held against the exact kernel, on
standard normal inputs. Features carry 1/√(S−1), so that the mean of their Gram is
S/(S−1) times the kernel: the Gram is multiplied by (S−1)/S first. The error is the root
mean square over pairs of different inputs, divided by that of the kernel; then the mean
over seeds, each of which draws inputs and ω. kernels.png has it against S, beside 1/√S,
errors.csv of every seed, slopes.csv the slopes of the fitted lines, which are printed.

Expect −1/2, the rate of Monte Carlo. But exp(ωᵀx) is log-normal: with z = x + x' the
product of two features has a variance of exp(‖z‖²) − 1 times its squared mean, and the
sum rests on draws that are rarely met. On standard normal inputs thousands of draws are
far too few; on inputs a quarter of the size ("exponential, x/4") the rate is there. The
band of the figure holds 80 % of the seeds; one seed can lift the mean above it. 40 s.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from absl import flags

from fedbnr_jax import urk
from fedbnr_jax.errors import InputError
from fedbnr_jax.records import usable
from fedbnr_jax.report import curves, tables
from launch import common

_FEWEST = flags.DEFINE_integer("fewest_samples", 8, "The smallest S.", 2)
_MOST = flags.DEFINE_integer("most_samples", 8192, "The largest S.", 2)
_FACTOR = flags.DEFINE_integer("sample_factor", 4, "From one S to the next.", 2)
_INPUTS = flags.DEFINE_integer("num_inputs", 3, "D.", 1)
_POINTS = flags.DEFINE_integer("num_points", 32, "Inputs; every two are a pair.", 2)

# Of two sets of inputs, [N, D] and [P, D], to [N, P].
Kernel = Callable[[jax.Array, jax.Array], jax.Array]


class Construction(NamedTuple):
  """A feature map of S samples, and the kernel that it should reach."""

  feature_map: Callable[[int], urk.FeatureMap]
  kernel: Kernel
  input_std: float = 1.0  # Of each coordinate.


def stationary(profile: Callable[[jax.Array], jax.Array]) -> Kernel:
  """The kernel of a function of the gap x − x', [N, P, D] to [N, P]."""
  return lambda x, y: profile(x[:, None, :] - y[None, :, :])


def matern(order: int) -> Kernel:
  """Matérn with ν = order + 1/2 and unit length-scale; of order 0, 1 or 2."""

  def profile(gap: jax.Array) -> jax.Array:
    r = jnp.sqrt((2 * order + 1) * jnp.sum(gap**2, axis=-1))
    return sum((r, r**2 / 3.0)[:order], jnp.ones_like(r)) * jnp.exp(-r)

  return stationary(profile)


def exponential(x: jax.Array, y: jax.Array) -> jax.Array:
  """exp(‖x + x'‖²/2)."""
  return stationary(lambda total: jnp.exp(jnp.sum(total**2, axis=-1) / 2.0))(x, -y)


def polynomial(x: jax.Array, y: jax.Array) -> jax.Array:
  """(xᵀx' + 1)², as `urk.polynomial` has it by default."""
  return (x @ y.T + 1.0) ** 2


_STATIONARY: dict[str, Kernel] = {
  "gaussian": stationary(lambda gap: jnp.exp(-jnp.sum(gap**2, axis=-1) / 2.0)),
  "laplacian": stationary(lambda gap: jnp.exp(-jnp.sum(jnp.abs(gap), axis=-1))),
  "cauchy": stationary(lambda gap: jnp.prod(1.0 / (1.0 + gap**2), axis=-1)),
  "matern12": matern(0),
  "matern32": matern(1),
  "matern52": matern(2),
}

CONSTRUCTIONS = {
  **{
    name: Construction(functools.partial(urk.random_fourier, spectrum=name), kernel)
    for name, kernel in _STATIONARY.items()
  },
  "polynomial": Construction(urk.polynomial, polynomial),
  "exponential": Construction(urk.exponential, exponential),
  "exponential, x/4": Construction(urk.exponential, exponential, 0.25),
}
PANELS = {
  "Random Fourier features": list(urk.SPECTRA),
  "Other constructions": ["polynomial", "exponential", "exponential, x/4"],
}


def main() -> None:
  counts = sample_counts(_FEWEST.value, _MOST.value, _FACTOR.value)
  folder = pathlib.Path(common.workdir())
  compare(counts, common.SEEDS.value, (_POINTS.value, _INPUTS.value), folder)


def sample_counts(fewest: int, most: int, factor: int) -> list[int]:
  """A geometric range of S, at least two of them."""
  if most < fewest * factor:
    raise InputError(
      f"--most_samples={most} leaves one S only: give at least {fewest * factor}, "
      "--sample_factor times --fewest_samples."
    )
  counts = [fewest]
  while counts[-1] * factor <= most:
    counts.append(counts[-1] * factor)
  return counts


def compare(
  counts: list[int], num_seeds: int, shape: tuple[int, int], folder: pathlib.Path
) -> None:
  """Measures every construction, and tells and draws what came of it.

  Args:
    counts: Values of S.
    num_seeds: Draws of inputs and ω at each.
    shape: Of the inputs, (N, D).
    folder: Where the figure and the tables go.
  """
  with usable(folder):
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, construction in CONSTRUCTIONS.items():
      measured = errors(construction, counts, num_seeds, shape)
      for (seed, index), error in np.ndenumerate(measured):
        rows.append((name, counts[index], seed, error))
    table = pd.DataFrame(rows, columns=["kernel", "num_samples", "seed", "error"])
    table.to_csv(folder / "errors.csv", index=False)
    fitted = slopes(table)
    fitted.to_csv(folder / "slopes.csv", index=False)
    curves.convergence(table, PANELS, folder / "kernels.png")
  told = fitted.set_index("kernel").map("{:.3f}".format).reset_index()
  print(tables.markdown(told))
  print(f"written to {folder}")


def errors(
  construction: Construction,
  counts: list[int],
  num_seeds: int,
  shape: tuple[int, int],
) -> np.ndarray:
  """Relative errors [num_seeds, counts] of Grams over pairs of different inputs."""
  upper = jnp.triu_indices(shape[0], 1)
  stops = np.cumsum(counts)

  def error(key: jax.Array) -> list[jax.Array]:
    key_x, key_omega = jax.random.split(key)
    x = construction.input_std * jax.random.normal(key_x, shape)
    exact = construction.kernel(x, x)[upper]
    # All draws at once, to compile once, and then to each S its own.
    params = construction.feature_map(int(stops[-1])).init(key_omega, x)
    told = []
    for count, stop in zip(counts, stops, strict=True):
      omega = jax.tree.map(
        lambda draws, c=count, s=stop: draws[s - c : s], params.omega
      )
      features = construction.feature_map(count).apply(params.replace(omega=omega), x)
      gram = features @ features.T * ((count - 1) / count)
      square = jnp.mean((gram[upper] - exact) ** 2) / jnp.mean(exact**2)
      told.append(jnp.sqrt(square))
    return told

  # One seed after another, for the sake of memory.
  keys = jax.random.split(jax.random.key(0), num_seeds)
  told = jax.jit(lambda keys: jax.lax.map(error, keys))(keys)
  return np.stack(told, axis=1)


def slopes(table: pd.DataFrame) -> pd.DataFrame:
  """Of each kernel, how its mean error goes with S.

  Args:
    table: Columns kernel, num_samples and error; a row a seed.

  Returns:
    Columns kernel, slope (of logarithms), mean error at the smallest and largest S.
  """
  rows = []
  for name, part in table.groupby("kernel", sort=False):
    mean = part.groupby("num_samples").error.mean()
    slope = np.polyfit(np.log(mean.index.to_numpy()), np.log(mean.to_numpy()), 1)[0]
    ends = {f"error_at_{count}": mean[count] for count in mean.index[[0, -1]]}
    rows.append({"kernel": name, "slope": slope, **ends})
  return pd.DataFrame(rows)


if __name__ == "__main__":
  common.run(main)
