"""What privacy costs a finished run, what its messages leak, and a private release.

python -m launch.privacy --workdir=runs/ccpp
python -m launch.privacy --workdir=runs/ccpp --release=1
python -m launch.privacy --workdir=runs/ccpp --release=1 --budget=1.5

The first command draws error and calibration against ε into figures/privacy.png, and
how well an attacker finds the rows of a Gram matrix into figures/leakage.png. Its noise
is a fast Gaussian, which is nobody's release.

The second releases the statistics, with the given ε, into the folder released/, which
says what was promised and what is not covered; `launch.predict --released` predicts
from it. The run must have been trained with --config.data.bounds. What releases spend
adds up in budget.json and stands in summary.json; a further release takes a --budget,
the ε that all of them together may spend, and moves the one before to released_1/.
"""

from absl import flags

from fedbnr_jax.errors import InputError
from fedbnr_jax.privacy import NOISES
from fedbnr_jax.release.folder import NOT_COVERED
from fedbnr_jax.release.publish import publish
from fedbnr_jax.release.trained import load_run
from fedbnr_jax.run.records import RunFolder
from fedbnr_jax.studies import privacy as study
from launch import common

flags.declare_key_flag(common.WORKDIR)
_EPSILONS = flags.DEFINE_list(
  "epsilons", ["0.5", "1", "3", "8", "inf"], "Values of ε on the curve."
)
_DELTA = flags.DEFINE_float("delta", 1e-5, "δ of every release.")
_BOUND = flags.DEFINE_float(
  "target_bound",
  3.0,
  "On the curve of a run without declared bounds, targets are clipped to so many "
  "standard deviations.",
)
_DRAWS = flags.DEFINE_integer("draws", 20, "Draws of the noise at each ε.", 1)
_RELEASE = flags.DEFINE_string("release", None, "Release, with this ε.")
_BUDGET = flags.DEFINE_float(
  "budget", None, "ε of all releases together; without it, of this one alone."
)
_NOISE = flags.DEFINE_enum(
  "noise",
  "central",
  list(NOISES),
  "Noise of a release: one on the sum, or one added by each client.",
)


def main() -> None:
  if _RELEASE.value is not None:
    _release(common.workdir(), _epsilon(_RELEASE.value))
    return
  if not _EPSILONS.value:
    raise InputError("--epsilons is empty: give at least one.")
  epsilons = [_epsilon(text) for text in _EPSILONS.value]
  run = load_run(common.workdir())
  promise = study.Promise(_DELTA.value, _BOUND.value)
  cost = study.write_curves(run, epsilons, promise, _DRAWS.value)
  print(study.medians(cost).to_string())
  print(f"written to {run.folder.path / 'privacy'} and {run.folder.figures}")


def _release(workdir: str, epsilon: float) -> None:
  done = publish(workdir, epsilon, _DELTA.value, _NOISE.value, _BUDGET.value)
  print(
    f"released with ε = {done.epsilon:g}, δ = {done.delta:g} into "
    f"{RunFolder(workdir).released}. Spent in all: ε = {done.total_epsilon:.4g} in "
    f"{done.num_releases} release(s), added up by zCDP. Not covered: "
    f"{'; '.join(NOT_COVERED)}."
  )


def _epsilon(text: str) -> float:
  try:
    return float(text)
  except ValueError as error:
    raise InputError(f"ε must be a number or 'inf', got {text!r}.") from error


if __name__ == "__main__":
  common.run(main)
