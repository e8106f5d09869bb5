"""How many draws of ω pay: S from 25 to 400 on every dataset, scored on validation.

python -m launch.sweep --config=configs/num_samples.py --workdir=runs/num_samples
python -m launch.tables --results=runs/num_samples/results.csv --validation

50 trainings of `fedbnr-exact`, whose result does not depend on the clients, with seeds
that no table reports; about an hour on two cores.
"""

import ml_collections

from configs import uci
from fedbnr_jax.sweep import grid


def get_config() -> ml_collections.ConfigDict:
  fields = {
    "method": ("fedbnr-exact",),
    "num_clients": (10,),
    "exact.noise": ("varying",),
    "num_samples": (25, 50, 100, 200, 400),
    "seed": (100, 101),
  }
  return grid.config("configs/uci.py", uci.PAPER, fields)
