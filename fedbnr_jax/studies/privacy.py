"""What privacy costs a trained model, what its messages leak, a private release."""

import dataclasses
import math
import os
import secrets
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedbnr_jax import membership, model, privacy
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.gp import blr, metrics, urk
from fedbnr_jax.gp.blr import SufficientStats
from fedbnr_jax.gp.kernel_model import features_of
from fedbnr_jax.names import require_choice
from fedbnr_jax.privacy import Mechanism
from fedbnr_jax.report import curves
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.records import RunFolder

# "central": one noise on the sum over clients; "client": each client adds its own.
NOISES = ("central", "client")

_LEAKAGE_ROWS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_LEAKAGE_EPSILONS = {"bare": math.inf, "ε = 8": 8.0, "ε = 1": 1.0}
_MOST_OTHERS = 1000  # Rows that are not in the matrix, for the attacker to confuse.


@dataclasses.dataclass(frozen=True)
class TrainedRun:
  """A finished run whose statistics can be made private."""

  folder: RunFolder
  summary: dict[str, Any]
  model: model.Model
  experiment: Experiment  # Rebuilt from the run's config, with the same rows.
  feature_map: urk.FeatureMap
  squared_norm: float  # The squared norm of every row's features.

  def features(self, x: jax.Array | np.ndarray) -> jax.Array:
    """Returns the features [N, M] of standardised inputs x [N, D]."""
    state = self.model.state.server
    return jax.jit(
      lambda x: features_of(self.feature_map, state.params.theta, state.omega, x)
    )(x)


@dataclasses.dataclass(frozen=True)
class Promise:
  """What all releases of a study have in common."""

  delta: float = 1e-5
  target_bound: float = 3.0  # Y, in standard deviations of the target.

  def mechanism(
    self, run: TrainedRun, epsilon: float, noise: str = "central"
  ) -> Mechanism:
    """Returns the checked mechanism of one release of `run`."""
    require_choice("noise", noise, NOISES)
    num_noises = run.experiment.num_clients if noise == "client" else 1
    mechanism = Mechanism(
      epsilon, self.delta, self.target_bound, run.squared_norm, num_noises
    )
    mechanism.check()
    return mechanism


def load_run(workdir: str | os.PathLike[str]) -> TrainedRun:
  """Loads a finished run and the rows that it was trained on.

  Raises:
    InputError: If the run is not finished, its statistics have no bounded sensitivity
      or are not summed over clients, or rows have joined or left since the training.
  """
  folder, trained = RunFolder(workdir), model.load(workdir)
  summary = folder.summary()
  if summary is None:
    raise InputError(f"the training in {workdir} is not finished: let it finish.")
  trained.require_global_layer()
  feature_map = kernels.from_config(trained.config)
  squared_norm = feature_map.squared_norm
  if squared_norm is None:
    raise InputError(
      f"the features of kernel {trained.config.kernel!r} have no common norm, and so "
      "no sensitivity: train a kernel of cosines and sines, such as 'deep' or "
      "'gaussian'."
    )
  if folder.posterior.exists() and membership.read(folder.posterior).changes:
    raise InputError(
      f"rows have joined or left {workdir} since its training, and a release is made "
      "of those it was trained on: train again."
    )
  trained.config.mesh = 1
  experiment = experiment_lib.build(trained.config)
  folder.claim_data(experiment.dataset)
  return TrainedRun(folder, summary, trained, experiment, feature_map, squared_norm)


def clipped_stats(run: TrainedRun, mechanism: Mechanism) -> SufficientStats:
  """Sums the clients' statistics, after each client has clipped its targets."""
  batches = (
    (x, privacy.clip_targets(y, mechanism), mask)
    for x, y, mask in membership.client_batches(run.experiment.federation.clients)
  )
  stats = membership.statistics(run.feature_map, run.model.state, batches, jax.jit)
  return jax.tree.map(jnp.asarray, stats)


def release(
  run: TrainedRun, epsilon: float, promise: Promise, noise: str = "central"
) -> Mechanism:
  """Releases the run's statistics once, into its folder `released/`.

  What was spent, and what it does not cover, is noted in `summary.json`.

  Returns:
    The mechanism by which the statistics were released.

  Raises:
    InputError: If the run has been released before, or ε promises nothing.
  """
  folder, summary = run.folder, run.folder.summary() or run.summary
  if "privacy" in summary or folder.released.exists():
    spent = summary.get("privacy", {}).get("epsilon", "unknown")
    raise InputError(
      f"{folder.path} has released its statistics already (ε = {spent}): a second "
      "release would spend more."
    )
  mechanism = promise.mechanism(run, epsilon, noise)
  if math.isinf(mechanism.epsilon):
    raise InputError("ε = inf is no private release: give a number.")
  # The run's seed will not do: whoever knows it could subtract the noise again.
  key = jax.random.key(secrets.randbits(32))
  key = jax.random.fold_in(key, secrets.randbits(32))
  stats = jax.jit(privacy.release, static_argnames="mechanism")(
    key, clipped_stats(run, mechanism), mechanism
  )
  fitted = jax.jit(privacy.private_posterior)(stats, mechanism.total_noise_std)
  note = {
    "epsilon": mechanism.epsilon,
    "delta": mechanism.delta,
    "protects": "the addition or removal of one row",
    "noise": noise,
    "noise_std": mechanism.noise_std,
    "target_bound": mechanism.target_bound,
    "not_covered": privacy.NOT_COVERED,
  }
  with explain_os_errors(folder.path):
    # The note comes first: statistics that may have been seen are spent.
    folder.write_summary(summary | {"privacy": note})
    model.write_released(folder, run.model, stats, fitted)
  return mechanism


def write_curves(
  run: TrainedRun, epsilons: Sequence[float], promise: Promise, num_draws: int
) -> pd.DataFrame:
  """Measures cost and leakage; writes `privacy/*.csv` and two figures into the run.

  Returns:
    `cost_curve` of the run.
  """
  dataset, folder = run.experiment.dataset, run.folder
  unit = dataset.target_name
  if dataset.standardised_error:
    unit = f"std of {unit}"
  title = f"{dataset.name}, {run.experiment.num_clients} clients"
  (num_features,) = run.model.state.server.stats.moment.shape
  cost = cost_curve(run, epsilons, promise, num_draws)
  leakage = leakage_curve(run, promise, num_draws)
  with explain_os_errors(folder.path):
    (folder.path / "privacy").mkdir(exist_ok=True)
    cost.to_csv(folder.path / "privacy" / "curve.csv", index=False)
    curves.privacy(cost, folder.figures / "privacy.png", unit=unit, title=title)
    leakage.to_csv(folder.path / "privacy" / "leakage.csv", index=False)
    path = folder.figures / "leakage.png"
    curves.leakage(leakage, path, num_features=int(num_features))
  return cost


def cost_curve(
  run: TrainedRun, epsilons: Sequence[float], promise: Promise, num_draws: int
) -> pd.DataFrame:
  """Scores releases on the test rows, for every kind of noise, ε and draw.

  Returns:
    Columns noise, epsilon, draw, noise_std, test_rmse, test_ece.
  """
  mechanisms = [
    (noise, promise.mechanism(run, epsilon, noise))
    for noise in NOISES
    for epsilon in epsilons
  ]
  test, (_, first) = run.experiment.test, mechanisms[0]
  # They differ in their noise only, so they share the statistics and one program.
  stats, features = clipped_stats(run, first), run.features(test.x)

  @jax.jit
  def scores(
    keys: jax.Array,
    noise_std: jax.Array,
    stats: SufficientStats,
    features: jax.Array,
    targets: jax.Array,
  ) -> dict[str, jax.Array]:
    def one_draw(key: jax.Array) -> dict[str, jax.Array]:
      noisy = privacy.add_noise(key, stats, first, noise_std)
      fitted = privacy.private_posterior(noisy, noise_std)
      return metrics.evaluate(*blr.predict(fitted, features), targets)

    return jax.lax.map(one_draw, keys)

  keys = jax.random.split(jax.random.key(run.model.config.seed), num_draws)
  frames = []
  for noise, mechanism in mechanisms:
    noise_std = mechanism.total_noise_std
    values = jax.device_get(
      scores(keys, jnp.asarray(noise_std, stats.gram.dtype), stats, features, test.y)
    )
    columns = {
      "noise": noise,
      "epsilon": mechanism.epsilon,
      "draw": np.arange(num_draws),
      "noise_std": noise_std,
      "test_rmse": np.float64(values["rmse"]) * run.experiment.error_scale,
      "test_ece": np.float64(values["ece"]),
    }
    frames.append(pd.DataFrame(columns))
  return pd.concat(frames, ignore_index=True)


def medians(cost: pd.DataFrame) -> pd.DataFrame:
  """Returns medians of the scores over draws, indexed by noise and ε."""
  groups = cost.groupby(["noise", "epsilon"], sort=False)
  return groups[["test_rmse", "test_ece"]].median().round(4)


def leakage_curve(run: TrainedRun, promise: Promise, num_draws: int) -> pd.DataFrame:
  """Measures how well an attacker finds the rows of a Gram matrix, by their number.

  Returns:
    Columns release, rows, and advantage: the mean over draws of
    `privacy.membership_advantage`.
  """
  clients = run.experiment.federation.clients
  x = np.asarray(clients.x)[np.asarray(clients.mask)]
  rng = np.random.default_rng(run.model.config.seed)
  features = np.asarray(run.features(x[rng.permutation(len(x))]), np.float64)
  half = len(x) // 2
  candidates, others = features[:half], features[half : half + _MOST_OTHERS]
  rows = []
  for name, epsilon in _LEAKAGE_EPSILONS.items():
    noise_std = promise.mechanism(run, epsilon).noise_std
    for count in (count for count in _LEAKAGE_ROWS if count <= half):
      advantages = []
      # A single draw of few rows and of the noise would say little.
      for draw in range(num_draws):
        members = candidates[rng.permutation(half)[:count]]
        gram = members.T @ members
        noise = privacy.symmetric_noise(
          jax.random.key(draw), jnp.asarray(gram), noise_std
        )
        advantages.append(
          privacy.membership_advantage(gram + np.asarray(noise), members, others)
        )
      rows.append({"release": name, "rows": count, "advantage": np.mean(advantages)})
  return pd.DataFrame(rows)
