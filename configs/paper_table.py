"""All of the paper's tables, and ours: every method, dataset and number of clients.

python -m launch.sweep --config=configs/paper_table.py --workdir=runs/paper_table
python -m launch.tables --results=runs/paper_table/results.csv --output=runs/paper_table

1,450 trainings, some hours on two cores; --config.grid.seed='(0,)' takes a tenth of
them, and the same command with more seeds later takes up the rest. docs/results.md has
the scores. `configs/paper_table.py:paper` takes the paper's own sizes, and several
times as long.
"""

import ml_collections

from configs import uci
from fedbnr_jax.errors import InputError
from fedbnr_jax.sweep import grid

METHODS = (
  "central",
  *("local+local", "local+global", "avg+local", "kd+local"),
  *("fedavg", "fedprox", "pfedgp", "fedloc", "fedloc-poe"),
  *("fedbnr", "fedbnr-kd"),
  *("fedbnr-ev", "fedbnr-kd-ev", "fedbnr-exact"),
)


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  if variant not in ("", "paper"):
    raise InputError("the variant after 'configs/paper_table.py:' is 'paper', or none.")
  fields = {"num_clients": (10, 100), "method": METHODS, "seed": range(10)}
  arguments = [f"{name},{variant}".rstrip(",") for name in uci.PAPER]
  return grid.config("configs/uci.py", arguments, fields)
