"""How fast the random features of each kernel reach the kernel as S grows.

For S draws of ω the Gram matrix of the features is compared with the exact kernel on
standard normal inputs. The features carry a factor 1/√(S−1), so the mean of their Gram
is S/(S−1) times the kernel; the Gram is therefore multiplied by (S−1)/S. The error is
the root mean square over pairs of different inputs, relative to that of the kernel.
Each seed draws its own inputs and ω.

The rate of Monte Carlo is S^(−1/2). The feature exp(ωᵀx) is log-normal, however: with z
= x + x' the product of two features has a variance of exp(‖z‖²) − 1 times its squared
mean, and its sum depends on draws that are rarely met. On standard normal inputs
thousands of draws are far too few; on inputs a quarter of that size ("exponential,
x/4") the rate shows.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.gp import urk
from fedbnr_jax.report import curves, figures

# Maps two sets of inputs, [N, D] and [P, D], to kernel values [N, P].
Kernel = Callable[[jax.Array, jax.Array], jax.Array]


class Construction(NamedTuple):
  """A family of feature maps, and the kernel that it approaches."""

  feature_map: Callable[[int], urk.FeatureMap]  # By the number of samples S.
  kernel: Kernel
  input_std: float = 1.0  # Standard deviation of each coordinate.


class Convergence(NamedTuple):
  """What `compare` measured."""

  errors: pd.DataFrame  # Columns kernel, num_samples, seed, error.
  slopes: pd.DataFrame  # As by `slopes`.


def stationary(profile: Callable[[jax.Array], jax.Array]) -> Kernel:
  """Returns the kernel that applies `profile`, [N, P, D] to [N, P], to x − x'."""
  return lambda x, y: profile(x[:, None, :] - y[None, :, :])


def matern(order: int) -> Kernel:
  """Returns Matérn with ν = order + 1/2, order 0, 1 or 2, and unit length-scale."""

  def profile(gap: jax.Array) -> jax.Array:
    r = jnp.sqrt((2 * order + 1) * jnp.sum(gap**2, axis=-1))
    return sum((r, r**2 / 3.0)[:order], jnp.ones_like(r)) * jnp.exp(-r)

  return stationary(profile)


def exponential(x: jax.Array, y: jax.Array) -> jax.Array:
  """Evaluates exp(‖x + x'‖²/2), [N, D] and [P, D] to [N, P]."""
  return stationary(lambda total: jnp.exp(jnp.sum(total**2, axis=-1) / 2.0))(x, -y)


def polynomial(x: jax.Array, y: jax.Array) -> jax.Array:
  """Evaluates (xᵀx' + 1)², the default of `urk.polynomial`, to [N, P]."""
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
# Panels of the figure: titles, and the constructions that each shows.
PANELS = {
  "Random Fourier features": list(urk.SPECTRA),
  "Other constructions": ["polynomial", "exponential", "exponential, x/4"],
}


def compare(
  counts: Sequence[int],
  num_seeds: int,
  shape: tuple[int, int],
  folder: pathlib.Path,
  constructions: Mapping[str, Construction] = CONSTRUCTIONS,
  panels: Mapping[str, Sequence[str]] = PANELS,
) -> Convergence:
  """Measures constructions; writes `errors.csv`, `slopes.csv` and `kernels.png`.

  Args:
    counts: Values of S.
    num_seeds: Draws of inputs and ω for each S.
    shape: (N, D) of the inputs.
    folder: Made if it is not there.
    constructions: By the name that they have in tables and figure.
    panels: Names of the constructions in each panel of the figure, by its title.
  """
  with explain_os_errors(folder):
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, construction in constructions.items():
      measured = errors(construction, counts, num_seeds, shape)
      for (seed, index), error in np.ndenumerate(measured):
        rows.append((name, counts[index], seed, error))
    table = pd.DataFrame(rows, columns=["kernel", "num_samples", "seed", "error"])
    table.to_csv(folder / "errors.csv", index=False)
    fitted = slopes(table)
    fitted.to_csv(folder / "slopes.csv", index=False)
    figures.save(curves.convergence(table, panels), folder / "kernels.png")
  return Convergence(table, fitted)


def errors(
  construction: Construction,
  counts: Sequence[int],
  num_seeds: int,
  shape: tuple[int, int],
) -> np.ndarray:
  """Returns relative errors [num_seeds, len(counts)] of the features' Gram matrices."""
  keys = jax.random.split(jax.random.key(0), num_seeds)
  by_count = _errors(
    keys,
    construction.input_std,
    feature_map=construction.feature_map,
    kernel=construction.kernel,
    counts=tuple(counts),
    shape=shape,
  )
  return np.stack(by_count, axis=1)


@functools.partial(
  jax.jit, static_argnames=("feature_map", "kernel", "counts", "shape")
)
def _errors(
  keys: jax.Array,
  input_std: jax.Array,
  *,
  feature_map: Callable[[int], urk.FeatureMap],
  kernel: Kernel,
  counts: tuple[int, ...],
  shape: tuple[int, int],
) -> list[jax.Array]:
  """Returns errors [num_seeds] for each S, of seeds with these keys [num_seeds]."""
  upper = jnp.triu_indices(shape[0], 1)
  stops = np.cumsum(counts)

  def error(key: jax.Array) -> list[jax.Array]:
    key_x, key_omega = jax.random.split(key)
    x = input_std * jax.random.normal(key_x, shape)
    exact = kernel(x, x)[upper]
    # One draw for all values of S compiles once; each S then takes its own part of it.
    params = feature_map(int(stops[-1])).init(key_omega, x)
    values = []
    for count, stop in zip(counts, stops, strict=True):
      omega = jax.tree.map(
        lambda draws, c=count, s=stop: draws[s - c : s], params.omega
      )
      features = feature_map(count).apply(params.replace(omega=omega), x)
      gram = features @ features.T * ((count - 1) / count)
      square = jnp.mean((gram[upper] - exact) ** 2) / jnp.mean(exact**2)
      values.append(jnp.sqrt(square))
    return values

  # Seeds run one after another, which bounds the memory.
  errors: list[jax.Array] = jax.lax.map(error, keys)
  return errors


def slopes(table: pd.DataFrame) -> pd.DataFrame:
  """Fits log(mean error over seeds) as a line in log S, for each kernel.

  Args:
    table: Columns kernel, num_samples and error; one row per seed.

  Returns:
    Columns kernel, slope, and the mean error at the smallest and at the largest S.
  """
  rows = []
  for name, part in table.groupby("kernel", sort=False):
    mean = part.groupby("num_samples").error.mean()
    slope = np.polyfit(np.log(mean.index.to_numpy()), np.log(mean.to_numpy()), 1)[0]
    ends = {f"error_at_{count}": mean[count] for count in mean.index[[0, -1]]}
    rows.append({"kernel": name, "slope": slope, **ends})
  return pd.DataFrame(rows)
