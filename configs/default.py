"""The paper's synthetic federation: two clients whose ranges do not overlap.

python -m launch.train --config=configs/default.py --workdir=runs/demo

200 noisy rows of a function on [-5, 5]; client 1 holds the left half, client 2 the
right. Needs no file; about 15 seconds on two cores. Test RMSE about 0.5, the noise.
"""

import ml_collections

from fedbnr_jax.run import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.base()
  config.method = "fedbnr-ev"  # The better calibrated, on validation rows.
  config.num_clients = 2
  config.num_rounds = 40
  config.learning_rate = 5e-3
  config.length_scale = 3.0
  config.hidden_size = 100
  config.compare_clients = True
  return config
