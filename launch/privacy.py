"""What privacy costs a finished run, what its messages leak, and a private release.

python -m launch.privacy --workdir=runs/ccpp
python -m launch.privacy --workdir=runs/ccpp --release=1

The first command draws error and calibration against ε into figures/privacy.png, and
how well an attacker finds the rows of a Gram matrix into figures/leakage.png. The
second releases the statistics once, with the given ε, into the folder released/, and
notes in summary.json what was spent and what is not covered; `launch.predict
--released` predicts from it.
"""

from absl import flags

from fedbnr_jax.errors import InputError
from fedbnr_jax.privacy import NOT_COVERED
from fedbnr_jax.studies import privacy as study
from launch import common

_EPSILONS = flags.DEFINE_list(
  "epsilons", ["0.5", "1", "3", "8", "inf"], "Values of ε on the curve."
)
_DELTA = flags.DEFINE_float("delta", 1e-5, "δ of every release.")
_BOUND = flags.DEFINE_float(
  "target_bound", 3.0, "Targets are clipped to so many standard deviations."
)
_DRAWS = flags.DEFINE_integer("draws", 20, "Draws of the noise at each ε.", 1)
_RELEASE = flags.DEFINE_string("release", None, "Release once, with this ε.")
_NOISE = flags.DEFINE_enum(
  "noise",
  "central",
  list(study.NOISES),
  "Noise of a release: one on the sum, or one added by each client.",
)


def main() -> None:
  run = study.load_run(common.workdir())
  promise = study.Promise(_DELTA.value, _BOUND.value)
  if _RELEASE.value is not None:
    mechanism = study.release(run, _epsilon(_RELEASE.value), promise, _NOISE.value)
    print(
      f"released with ε = {mechanism.epsilon:g}, δ = {mechanism.delta:g} into "
      f"{run.folder.released}. Not covered: {NOT_COVERED}."
    )
    return
  if not _EPSILONS.value:
    raise InputError("--epsilons is empty: give at least one.")
  epsilons = [_epsilon(text) for text in _EPSILONS.value]
  cost = study.write_curves(run, epsilons, promise, _DRAWS.value)
  print(study.medians(cost).to_string())
  print(f"written to {run.folder.path / 'privacy'} and {run.folder.figures}")


def _epsilon(text: str) -> float:
  try:
    return float(text)
  except ValueError as error:
    raise InputError(f"ε must be a number or 'inf', got {text!r}.") from error


if __name__ == "__main__":
  common.run(main)
