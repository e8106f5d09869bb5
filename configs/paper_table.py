"""The paper's table as far as its methods are here: every dataset, 10 and 100 clients.

python -m launch.sweep --config=configs/paper_table.py --workdir=runs/paper_table

With the CPU preset; `configs/paper_table.py:paper` takes the paper's own sizes.
"""

import ml_collections

from configs import uci


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.base = "configs/uci.py"
  config.arguments = tuple(f"{name},{variant}".rstrip(",") for name in uci.PAPER)
  config.grid = ml_collections.ConfigDict()
  config.grid["num_clients"] = (10, 100)
  config.grid["method"] = ("fedbnr", "fedbnr-kd", "central")
  config.grid["seed"] = (0,)
  return config
