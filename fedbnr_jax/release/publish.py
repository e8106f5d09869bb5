"""Releases a run's statistics; what that spends is noted before anything is seen."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedbnr_jax import ledger_file, precision, privacy
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors, is_full
from fedbnr_jax.gp import blr
from fedbnr_jax.lock import alone_in
from fedbnr_jax.names import require_choice
from fedbnr_jax.release import budget as budget_lib
from fedbnr_jax.release import folder as folder_lib
from fedbnr_jax.release import grid as grid_lib
from fedbnr_jax.release import noise as noise_lib
from fedbnr_jax.release.grid import Grid, IntegerSums
from fedbnr_jax.release.noise import Scales
from fedbnr_jax.release.trained import TrainedRun, load_run
from fedbnr_jax.run.records import RunFolder

_PROTECTS = "the addition or removal of one training row"
_NOISES = {
  "central": "one noise on the sum over clients",
  "client": "one noise of each client on its own statistics, which are then summed",
}


class Published(NamedTuple):
  """What a release has spent, and what the run has spent in all."""

  epsilon: float
  delta: float
  total_epsilon: float  # At the same δ, this release included.
  num_releases: int


def publish(
  workdir: str | os.PathLike[str],
  epsilon: float,
  delta: float = 1e-5,
  noise: str = "central",
  budget: float | None = None,
  frame: pd.DataFrame | None = None,
) -> Published:
  """Releases the statistics of a finished run into its folder `released/`.

  What releases have spent is kept in `budget.json`, and noted in `summary.json`. It is
  written before the noise is drawn: if writing `released/` fails, it is spent all the
  same.

  Args:
    workdir: The folder of a run that was trained with declared bounds.
    epsilon: ε of this release.
    delta: δ of this release; below one over the number of training rows.
    noise: "central": one noise on the sum; "client": each client adds its own.
    budget: The ε that all releases of the run together may spend, at this δ; None for
      no more than this release alone.
    frame: The table of a run of `fit(frame)`, whose folder names no file of rows.

  Raises:
    InputError: If the run cannot be released, the promise is none, or the budget does
      not allow it; and if writing fails, which says whether the release is spent.
  """
  require_choice("noise", noise, privacy.NOISES)
  folder = RunFolder(workdir)
  folder.config()  # Refuses a folder without a run before anything is written there.
  with precision.float64(), alone_in(folder.path), explain_os_errors(folder.path):
    _require_float64(folder)
    _require_bounds(folder)
    run = load_run(workdir, frame)
    x, y = run.training_rows()
    _require_promise(epsilon, delta, len(y))
    grid = _grid(run)
    scales = Scales.of(grid, budget_lib.rho_of(epsilon, delta))
    new = budget_lib.Spent(scales.rho(grid), epsilon, delta, noise)
    releases = [*budget_lib.read(folder.path), new]
    total = budget_lib.total_epsilon([one.rho for one in releases], delta)
    _require_budget(folder, releases, total, budget)
    noise_lib.discrete_gaussian([0], 1)  # Refuses to spend where OpenDP is missing.
    theta, omega = run.wide_kernel()
    sums = grid.sums(grid_lib.row_features(run.feature_map, theta, omega), x, y)
    note = _note(run, grid, scales, releases, total)
    budget_lib.write(folder.path, releases)
    with _is_spent(folder, releases):
      folder.write_summary(run.summary | {"privacy": _for_summary(note)})
      num_noises = run.experiment.num_clients if noise == "client" else 1
      noisy = noise_lib.with_noise(sums, scales, num_noises)
      noise_std = math.sqrt(num_noises) * scales.diagonal * grid.unit
      stats = statistics(noisy, grid)
      fitted = jax.jit(privacy.private_posterior)(stats, noise_std)
      folder_lib.write(folder, run.model, stats, fitted, note)
  return Published(epsilon, delta, total, len(releases))


def statistics(sums: IntegerSums, grid: Grid) -> blr.SufficientStats:
  """Returns noisy sums as statistics of some rows, in the unit of features and targets.

  Args:
    sums: Integers with noise.
    grid: Whose steps they are.
  """
  gram = jnp.asarray(sums.gram.astype(np.float64) * grid.unit)
  count = jnp.asarray(sums.count / grid.count_unit, gram.dtype)
  scale = math.sqrt(grid.squared_norm) / grid.target_bound
  return privacy.repaired(gram, count, scale)


def _grid(run: TrainedRun) -> Grid:
  reach = run.model.preprocessor.target_reach
  assert reach is not None  # Bounds were required.
  (num_features,) = run.model.state.server.stats.moment.shape
  return Grid(run.squared_norm, reach, int(num_features))


def _note(
  run: TrainedRun,
  grid: Grid,
  scales: Scales,
  releases: list[budget_lib.Spent],
  total: float,
) -> dict[str, Any]:
  """What `release.json` says of a release."""
  new = releases[-1]
  return {
    "epsilon": new.epsilon,
    "delta": new.delta,
    "protects": _PROTECTS,
    "mechanism": "discrete Gaussian noise on integer statistics",
    "sampler": folder_lib.version("opendp"),
    "noise": new.noise,
    "noise_in_words": _NOISES[new.noise],
    "accounting": f"zCDP, as (ε, δ) by {folder_lib.version('dp-accounting')}",
    "rho": new.rho,
    "sensitivity": math.sqrt(grid.squared_sensitivity) * grid.unit,
    "noise_std": scales.diagonal * grid.unit,
    "grid": {
      "resolution": grid.resolution,
      "step": grid.unit,
      "squared_sensitivity": grid.squared_sensitivity,
      "noise_on_the_diagonal": scales.diagonal,
      "noise_beside_the_diagonal": scales.beside,
      "count_unit": grid.count_unit,
    },
    "squared_norm_of_features": grid.squared_norm,
    "bound_of_standardised_target": grid.target_bound,
    "target_bounds": list(run.model.preprocessor.target_bounds or ()),
    "spent_in_total": {
      "releases": len(releases),
      "rho": sum(one.rho for one in releases),
      "epsilon": total,
      "delta": new.delta,
    },
  }


def _for_summary(note: dict[str, Any]) -> dict[str, Any]:
  """What `summary.json` says of all releases, and of the last one."""
  last = ("epsilon", "delta", "noise", "noise_std", "protects", "mechanism")
  return {
    **note["spent_in_total"],
    "last_release": {name: note[name] for name in last},
    "not_covered": list(folder_lib.NOT_COVERED),
  }


def _require_float64(folder: RunFolder) -> None:
  if blr.statistics_dtype() != jnp.float64:
    raise InputError(
      "a private release needs 64-bit types, which are off: unset JAX_ENABLE_X64."
    )
  if folder.posterior.exists():
    dtype = ledger_file.read(folder.posterior).stats.gram.dtype
    if dtype != np.float64:
      raise InputError(
        f"{folder.path} was trained with 64-bit types off ({dtype} statistics): train "
        "it again in another workdir, without JAX_ENABLE_X64=0."
      )


def _require_bounds(folder: RunFolder) -> None:
  if folder.preprocessing().target_bounds is None:
    raise InputError(
      f"{folder.path} is standardised by means and deviations of its rows, which a "
      "release would give away: train in another workdir with "
      "--config.data.bounds=bounds.json, which declares what every column may hold, as "
      '{"age": [0, 120], "sex": ["f", "m"], "price": [0, 1e6]}.'
    )


def _require_promise(epsilon: float, delta: float, num_rows: int) -> None:
  if math.isinf(epsilon):
    raise InputError("ε = inf is no private release: give a number.")
  privacy.check_promise(epsilon, delta)
  if delta * num_rows >= 1.0:
    raise InputError(
      f"δ = {delta:g} is not below 1/n = {1.0 / num_rows:.3g} of the {num_rows} "
      "training rows: it would allow a release that shows one of them as it is."
    )


def _require_budget(
  folder: RunFolder,
  releases: list[budget_lib.Spent],
  total: float,
  budget: float | None,
) -> None:
  """Refuses a release that would spend more than was said."""
  new = releases[-1]
  if budget is not None and not 0 < budget < math.inf:
    raise InputError(f"--budget must be a positive number, got {budget}.")
  if len(releases) == 1 and folder.released.exists():
    raise InputError(
      f"{budget_lib.NAME}, which says what {folder.released} has spent, is not in "
      f"{folder.path}: restore it."
    )
  allowed = new.epsilon if budget is None else budget
  if total > allowed * (1 + 1e-9):
    before = [one.rho for one in releases[:-1]]
    spent = budget_lib.total_epsilon(before, new.delta) if before else 0.0
    raise InputError(
      f"{folder.path} has spent ε = {spent:.4g} in {len(before)} release(s), and this "
      f"one would bring it to ε = {total:.4g} (δ = {new.delta:g}), more than "
      f"{allowed:.4g}: to allow that, say --budget={_rounded_up(total)}."
    )


@contextlib.contextmanager
def _is_spent(folder: RunFolder, releases: list[budget_lib.Spent]) -> Iterator[None]:
  """Has what fails in the block say that ε is spent, and what another release takes.

  The same command would be refused, for the budget that it gives is used up.
  """
  try:
    yield
  except (OSError, InputError) as error:
    cause = error.__cause__ if isinstance(error, InputError) else error
    reason = cause.strerror if isinstance(cause, OSError) else str(error)
    what, remedy = f"{folder.released} cannot be written ({reason})", "mend that"
    if is_full(cause):
      what, remedy = f"no space is left for {folder.released} ({reason})", "free some"
    new = releases[-1]
    total = budget_lib.total_epsilon([one.rho for one in (*releases, new)], new.delta)
    raise InputError(
      f"{what}, and the ε = {new.epsilon:g} of this release is spent all the same: "
      f"{remedy}, and to release again with the same ε, say "
      f"--budget={_rounded_up(total)}."
    ) from error


def _rounded_up(value: float) -> str:
  """A short number that is at least `value`."""
  return f"{math.ceil(value * 1000) / 1000:g}"
