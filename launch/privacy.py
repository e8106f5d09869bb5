"""What privacy costs a finished run, what its messages leak, and a private release.

python -m launch.privacy --workdir=runs/ccpp
python -m launch.privacy --workdir=runs/ccpp --release=1

The first draws error and calibration against ε into figures/privacy.png, and what an
attacker reads from scatter matrices into figures/leakage.png. The second releases the
statistics once, with the given ε, into the folder released/, and notes in summary.json
what is spent and what is not covered; `launch.predict --released` predicts from it.
"""

import math
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from absl import flags

from fedbnr_jax import blr, membership, metrics, model, privacy, urk
from fedbnr_jax import experiment as experiment_lib
from fedbnr_jax.blr import SufficientStats
from fedbnr_jax.clients import features_of
from fedbnr_jax.errors import InputError
from fedbnr_jax.experiment import Experiment
from fedbnr_jax.model import Model
from fedbnr_jax.privacy import Mechanism
from fedbnr_jax.records import RunFolder, usable
from fedbnr_jax.report import curves
from launch import common

_EPSILONS = flags.DEFINE_list(
  "epsilons", ["0.5", "1", "3", "8", "inf"], "Of the curve."
)
_DELTA = flags.DEFINE_float("delta", 1e-5, "δ of every release.")
_BOUND = flags.DEFINE_float(
  "target_bound", 3.0, "Targets are clipped to so many standard deviations."
)
_DRAWS = flags.DEFINE_integer("draws", 20, "Draws of the noise at each ε.", 1)
_RELEASE = flags.DEFINE_string("release", None, "Release once, with this ε.")
_NOISE = flags.DEFINE_enum(
  "noise", "central", ["central", "client"], "Of a release: on the sum, or by each."
)


def main() -> None:
  workdir = common.workdir()
  folder, trained = RunFolder(workdir), model.load(workdir)
  summary = folder.summary()
  if summary is None:
    raise InputError(f"the training in {workdir} is not finished: let it finish.")
  trained.require_global_layer()
  if trained.config.kernel not in privacy.CONSTANT_NORM:
    raise InputError(
      f"the features of kernel {trained.config.kernel!r} have no common norm, and so "
      f"no sensitivity: train one of {', '.join(privacy.CONSTANT_NORM)}."
    )
  if folder.posterior.exists() and membership.read(folder.posterior).changes:
    raise InputError(
      f"rows have joined or left {workdir} since its training, and a release is made "
      "of those it was trained on: train again."
    )
  trained.config.mesh = 1
  experiment = experiment_lib.build(trained.config)
  folder.claim_data(experiment.dataset)
  with usable(folder.path):
    if _RELEASE.value is not None:
      release(trained, experiment, folder, summary, _RELEASE.value)
    else:
      draw_curves(trained, experiment, folder)


def clipped_stats(
  trained: Model, experiment: Experiment, mechanism: Mechanism
) -> SufficientStats:
  """Summed over the clients, each of which clips its own targets."""
  batches = (
    (x, privacy.clip_targets(y, mechanism), mask)
    for x, y, mask in membership.client_batches(experiment.federation.clients)
  )
  feature_map = urk.from_config(trained.config)
  stats = membership.statistics(feature_map, trained.state, batches, jax.jit)
  return jax.tree.map(jnp.asarray, stats)


def mechanism_of(
  epsilon: str, noise: str, trained: Model, num_clients: int
) -> Mechanism:
  try:
    value = float(epsilon)
  except ValueError as error:
    raise InputError(f"ε must be a number or 'inf', got {epsilon!r}.") from error
  mechanism = Mechanism(
    value,
    _DELTA.value,
    _BOUND.value,
    trained.config.num_samples,
    num_clients if noise == "client" else 1,
  )
  mechanism.check()
  return mechanism


def release(
  trained: Model,
  experiment: Experiment,
  folder: RunFolder,
  summary: dict[str, Any],
  epsilon: str,
) -> None:
  """One release, and what it spent."""
  if "privacy" in summary or folder.released.exists():
    spent = summary.get("privacy", {}).get("epsilon", "unknown")
    raise InputError(
      f"{folder.path} has released its statistics already (ε = {spent}): a second "
      "release would spend more."
    )
  mechanism = mechanism_of(epsilon, _NOISE.value, trained, experiment.num_clients)
  if math.isinf(mechanism.epsilon):
    raise InputError("--release=inf is no private release: give a number.")
  # Not the run's seed: who knows it could take the noise off again.
  key = jax.random.key(secrets.randbits(32))
  key = jax.random.fold_in(key, secrets.randbits(32))
  stats = privacy.release(key, clipped_stats(trained, experiment, mechanism), mechanism)
  fitted = privacy.private_posterior(stats, mechanism)
  summary["privacy"] = {
    "epsilon": mechanism.epsilon,
    "delta": mechanism.delta,
    "protects": "the addition or removal of one row",
    "noise": _NOISE.value,
    "noise_std": mechanism.noise_std,
    "target_bound": mechanism.target_bound,
    "not_covered": privacy.NOT_COVERED,
  }
  folder.write_summary(summary)  # First: what may have been seen is spent.
  model.write_released(folder, trained, stats, fitted)
  print(
    f"released with ε = {mechanism.epsilon:g}, δ = {mechanism.delta:g} into "
    f"{folder.released}. Not covered: {privacy.NOT_COVERED}."
  )


def draw_curves(trained: Model, experiment: Experiment, folder: RunFolder) -> None:
  """Error and calibration against ε; what scatter matrices leak."""
  unit = experiment.dataset.target_name
  if experiment.dataset.standardised_error:
    unit = f"std of {unit}"
  curve = privacy_curve(trained, experiment)
  table = curve.groupby(["noise", "epsilon"], sort=False)[["test_rmse", "test_ece"]]
  print(table.median().round(4).to_string())
  (folder.path / "privacy").mkdir(exist_ok=True)
  curve.to_csv(folder.path / "privacy" / "curve.csv", index=False)
  title = f"{experiment.dataset.name}, {experiment.num_clients} clients"
  curves.privacy(curve, folder.figures / "privacy.png", unit=unit, title=title)
  leaked = leakage_curve(trained, experiment)
  leaked.to_csv(folder.path / "privacy" / "leakage.csv", index=False)
  num_features = int(trained.state.stats.moment.shape[0])
  curves.leakage(leaked, folder.figures / "leakage.png", num_features=num_features)
  print(f"written to {folder.path / 'privacy'} and {folder.figures}")


def privacy_curve(trained: Model, experiment: Experiment) -> pd.DataFrame:
  """Test scores of every ε, kind of noise and draw."""
  if not _EPSILONS.value:
    raise InputError("--epsilons is empty: give at least one.")
  feature_map = urk.from_config(trained.config)
  state, test = trained.state, experiment.test
  features = jax.jit(lambda x: features_of(feature_map, state.params, state.omega, x))(
    test.x
  )
  rows = []
  for noise in ("central", "client"):
    for epsilon in _EPSILONS.value:
      mechanism = mechanism_of(epsilon, noise, trained, experiment.num_clients)
      stats = clipped_stats(trained, experiment, mechanism)

      def scores(
        key: jax.Array,
        stats: SufficientStats = stats,
        mechanism: Mechanism = mechanism,
      ) -> dict[str, jax.Array]:
        released = privacy.release(key, stats, mechanism)
        fitted = privacy.private_posterior(released, mechanism)
        mean, variance = blr.predict(fitted, features)
        return metrics.evaluate(mean, variance, test.y)

      keys = jax.random.split(jax.random.key(trained.config.seed), _DRAWS.value)
      told = jax.device_get(jax.jit(lambda keys, f=scores: jax.lax.map(f, keys))(keys))
      for draw in range(_DRAWS.value):
        rows.append(
          {
            "noise": noise,
            "epsilon": mechanism.epsilon,
            "draw": draw,
            "noise_std": mechanism.total_noise_std,
            "test_rmse": float(told["rmse"][draw]) * experiment.error_scale,
            "test_ece": float(told["ece"][draw]),
          }
        )
  return pd.DataFrame(rows)


def leakage_curve(trained: Model, experiment: Experiment) -> pd.DataFrame:
  """How well members are told from others, by the rows that a matrix sums."""
  feature_map, state = urk.from_config(trained.config), trained.state
  clients = experiment.federation.clients
  x = np.asarray(clients.x)[np.asarray(clients.mask)]
  rng = np.random.default_rng(trained.config.seed)
  x = x[rng.permutation(len(x))]
  features = np.asarray(
    jax.jit(lambda x: features_of(feature_map, state.params, state.omega, x))(x),
    np.float64,
  )
  rows = []
  half = len(x) // 2
  others = features[half : half + 1000]
  for name, epsilon in (("bare", "inf"), ("ε = 8", "8"), ("ε = 1", "1")):
    mechanism = mechanism_of(epsilon, "central", trained, 1)
    for count in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000):
      if count > half:
        break
      told = []
      # One draw of few rows and of the noise says little.
      for draw in range(_DRAWS.value):
        members = features[:half][rng.permutation(half)[:count]]
        gram = members.T @ members
        noise = privacy.symmetric_noise(
          jax.random.key(draw), jnp.asarray(gram), mechanism.noise_std
        )
        told.append(
          privacy.membership_advantage(gram + np.asarray(noise), members, others)
        )
      rows.append({"release": name, "rows": count, "advantage": np.mean(told)})
  return pd.DataFrame(rows)


if __name__ == "__main__":
  common.run(main)
