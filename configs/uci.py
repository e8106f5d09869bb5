"""One of the paper's five UCI datasets.

python -m launch.train --config=configs/uci.py:sml --workdir=runs/sml
python -m launch.train --config=configs/uci.py:ccpp,paper --workdir=runs/ccpp

Without `,paper` it is the CPU preset; with it, the sizes of the paper's Table A.1.
The data come from FEDBNR_DATA_DIR, or are downloaded.
"""

import ml_collections

from fedbnr_jax import config as config_lib


def get_config(name: str = "skillcraft") -> ml_collections.ConfigDict:
  config = config_lib.base()
  config.data.source = "uci"
  config.data.name = name
  return config
