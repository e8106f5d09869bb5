"""The paper's FedBNR, its pooled reference and ours: every dataset, 10 and 100 clients.

python -m launch.sweep --config=configs/paper_table.py --workdir=runs/paper_table

165 trainings, about two hours on two cores. The README has their scores.
`configs/paper_table.py:paper` takes the paper's own sizes, and several times as long.
"""

import ml_collections

from configs import uci
from fedbnr_jax.errors import InputError


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  if variant not in ("", "paper"):
    raise InputError("the variant after 'configs/paper_table.py:' is 'paper', or none.")
  config = ml_collections.ConfigDict()
  config.base = "configs/uci.py"
  config.arguments = tuple(f"{name},{variant}".rstrip(",") for name in uci.PAPER)
  config.grid = ml_collections.ConfigDict()
  config.grid["num_clients"] = (10, 100)
  config.grid["method"] = (
    *("fedbnr", "fedbnr-kd", "central"),
    *("fedbnr-ev", "fedbnr-kd-ev", "fedbnr-exact"),
  )
  config.grid["seed"] = (0, 1, 2)
  return config
