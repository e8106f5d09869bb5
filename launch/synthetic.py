"""The paper's synthetic study: who can predict where a client has no rows.

python -m launch.synthetic --workdir=runs/synthetic

Kernels are learnt from all rows on [-5, 5] and then fixed. Client 1 holds the left half
of the rows, client 2 the right half; bands.png has pFedGP of client 1 and FedBNR's one
model. Then a new client comes, with --counts rows on [-5, 5] or on [5, 15];
new_client.png has the squared error of its predictions on [-5, 5] against the number of
its rows, and mse.csv the errors of every seed. pFedGP predicts from the new client's
own rows, FedLoc fuses all three clients, FedBNR adds their statistics. It takes four
minutes on one core.
"""

import pathlib

from absl import flags

from fedbnr_jax.errors import InputError
from fedbnr_jax.report import tables
from fedbnr_jax.studies import synthetic as study
from launch import common

flags.declare_key_flag(common.SEEDS)
flags.declare_key_flag(common.WORKDIR)
_COUNTS = flags.DEFINE_list(
  "counts", ["2", "5", "10", "20", "50", "100", "200"], "Rows of the new client."
)


def main() -> None:
  counts = [_count(text) for text in _COUNTS.value]
  if not counts:
    raise InputError("--counts is empty: give at least one number of rows.")
  folder = pathlib.Path(common.workdir())
  errors = study.run(study.base_config(), common.SEEDS.value, counts, folder)
  print(tables.markdown(study.error_table(errors)))
  print(f"written to {folder}")


def _count(text: str) -> int:
  if not text.strip().isdecimal() or int(text) < 1:
    raise InputError(f"--counts has {text!r}: give numbers from 1 on.")
  return int(text)


if __name__ == "__main__":
  common.run(main)
