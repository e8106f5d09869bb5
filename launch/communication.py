"""Error against communication: how much a method sends to become how good.

python -m launch.communication --runs=runs/a,runs/b,... --output=communication.png

Draws test RMSE, at the best validation round so far, against the floats that a client
has sent and received. Prints the rounds and floats that each run takes to reach --goal,
which by default is the RMSE of the paper's FedBNR on the same data and number of
clients.
"""

import pathlib

from absl import flags

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.report import tables
from fedbnr_jax.studies import communication as study
from launch import common

flags.declare_key_flag(common.OUTPUT)
_RUNS = flags.DEFINE_list("runs", [], "Folders of runs of one dataset.")
_GOAL = flags.DEFINE_float("goal", None, "Error to reach.")


def main() -> None:
  output = common.OUTPUT.value
  if not _RUNS.value or not output:
    raise InputError("--runs and --output are needed: folders to read, PNG to write.")
  comparison = study.read([pathlib.Path(path) for path in _RUNS.value], _GOAL.value)
  with explain_os_errors(pathlib.Path(output).parent, "--output"):
    study.draw(comparison, output)
  print(tables.markdown(study.table(comparison)))
  print(f"drawn to {output}")


if __name__ == "__main__":
  common.run(main)
