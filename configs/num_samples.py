"""How many draws of ω pay: S from 25 to 400 on every dataset, scored on validation.

python -m launch.sweep --config=configs/num_samples.py --workdir=runs/num_samples
python -m launch.tables --results=runs/num_samples/results.csv --validation

50 trainings of `fedbnr-exact`, whose result does not depend on the clients, with seeds
that no table reports; about an hour on two cores.
"""

import ml_collections

from configs import uci


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.base = "configs/uci.py"
  config.arguments = tuple(uci.PAPER)
  config.grid = ml_collections.ConfigDict()
  config.grid["method"] = ("fedbnr-exact",)
  config.grid["num_clients"] = (10,)
  config.grid["exact"] = ml_collections.ConfigDict({"noise": ("varying",)})
  config.grid["num_samples"] = (25, 50, 100, 200, 400)
  config.grid["seed"] = (100, 101)
  return config
