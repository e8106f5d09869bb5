"""One of the paper's five UCI datasets: skillcraft, sml, parkinsons, bike or ccpp.

python -m launch.train --config=configs/uci.py:sml --workdir=runs/sml
python -m launch.train --config=configs/uci.py:ccpp,paper --workdir=runs/ccpp

Without `,paper` it is the preset for a CPU, chosen on validation rows; with it, the
paper's Table A.1. The data come from FEDBNR_DATA_DIR, or are downloaded.
"""

from typing import NamedTuple

import ml_collections

from fedbnr_jax import config as config_lib
from fedbnr_jax.config import suggest
from fedbnr_jax.errors import InputError


class Preset(NamedTuple):
  """What depends on the dataset."""

  hidden_size: int
  alpha_at_10: float  # FedBNR-KD's α with fewer than 100 clients ...
  alpha_at_100: float  # ... and with 100 or more.


PAPER = {
  "skillcraft": Preset(200, 10.0, 2.0),
  "sml": Preset(2000, 1.0, 0.5),
  "parkinsons": Preset(2000, 5.0, 2.0),
  "bike": Preset(5000, 5.0, 0.5),
  "ccpp": Preset(5000, 5.0, 5.0),
}
CPU = {
  "skillcraft": Preset(200, 10.0, 2.0),
  "sml": Preset(1000, 1.0, 0.5),
  "parkinsons": Preset(1000, 5.0, 2.0),
  "bike": Preset(500, 5.0, 0.5),
  "ccpp": Preset(500, 5.0, 5.0),
}


def get_config(argument: str = "skillcraft") -> ml_collections.ConfigDict:
  name, _, variant = argument.partition(",")
  suggest("the dataset after 'configs/uci.py:'", name, tuple(PAPER))
  if variant not in ("", "paper"):
    raise InputError(f"the variant after 'configs/uci.py:{name},' is 'paper', or none.")
  preset = PAPER[name] if variant else CPU[name]
  config = config_lib.base()
  config.data.source = "uci"
  config.data.name = name
  config.hidden_size = preset.hidden_size
  # A wide layer's activations for all clients at once would leave the cache.
  config.client_batch_size = 1 if preset.hidden_size > 200 else 0
  # A reference, not a value: it follows a --config.num_clients given later.
  hundreds = config.get_ref("num_clients").to_float() // 100.0
  many = 1.0 - 1.0 // (1.0 + hundreds)  # 0 below 100 clients, 1 from there on.
  config.kd.alpha = (
    preset.alpha_at_10 + (preset.alpha_at_100 - preset.alpha_at_10) * many
  )
  return config
