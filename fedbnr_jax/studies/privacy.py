"""What privacy costs a trained model, and what its messages leak.

Noise is the Gaussian of `fedbnr_jax.privacy`, the least that (ε, δ) takes. A release
has discrete noise, 6 to 10 % more of it at δ = 1e-5, as zCDP accounts for it.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedbnr_jax import membership, privacy
from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.gp import blr, metrics
from fedbnr_jax.gp.blr import SufficientStats
from fedbnr_jax.lock import alone_in
from fedbnr_jax.names import require_choice
from fedbnr_jax.privacy import Mechanism
from fedbnr_jax.release.trained import TrainedRun
from fedbnr_jax.report import curves, figures

_LEAKAGE_ROWS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_LEAKAGE_EPSILONS = {"bare": math.inf, "ε = 8": 8.0, "ε = 1": 1.0}
_MOST_OTHERS = 1000  # Rows that are not in the matrix, for the attacker to confuse.


@dataclasses.dataclass(frozen=True)
class Promise:
  """What all releases of a study have in common."""

  delta: float = 1e-5
  # Y, in standard deviations of the target, of a run without declared bounds.
  target_bound: float = 3.0

  def mechanism(
    self, run: TrainedRun, epsilon: float, noise: str = "central"
  ) -> Mechanism:
    """Returns the checked mechanism of one release of `run`."""
    require_choice("noise", noise, privacy.NOISES)
    num_noises = run.experiment.num_clients if noise == "client" else 1
    bound = run.model.preprocessor.target_reach or self.target_bound
    mechanism = Mechanism(epsilon, self.delta, bound, run.squared_norm, num_noises)
    mechanism.check()
    return mechanism


def clipped_stats(run: TrainedRun, mechanism: Mechanism) -> SufficientStats:
  """Sums the clients' statistics, after each client has clipped its targets."""
  batches = (
    (x, privacy.clip_targets(y, mechanism), mask)
    for x, y, mask in membership.client_batches(run.experiment.federation.clients)
  )
  stats = membership.statistics(run.feature_map, run.model.state, batches, jax.jit)
  return jax.tree.map(jnp.asarray, stats)


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
  with explain_os_errors(folder.path), alone_in(folder.path):
    (folder.path / "privacy").mkdir(exist_ok=True)
    cost.to_csv(folder.path / "privacy" / "curve.csv", index=False)
    figure = curves.privacy(cost, unit=unit, title=title)
    figures.save(figure, folder.figures / "privacy.png")
    leakage.to_csv(folder.path / "privacy" / "leakage.csv", index=False)
    figure = curves.leakage(leakage, num_features=int(num_features))
    figures.save(figure, folder.figures / "leakage.png")
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
    for noise in privacy.NOISES
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
