"""Any table: a CSV or Parquet file with a target column.

python -m launch.train --config=configs/csv.py --workdir=runs/mine \
  --config.data.path=table.csv --config.data.target=price [--config.data.client=site]

With a client column each of its values is a client; without, the rows are dealt to
`num_clients` clients as in the paper. Method `auto` compares two readings of the
inputs and trains the better: a minute or so for a few thousand rows; the score is
printed and stands in `summary.json`, what was tried in `candidates.json`. Intervals are
calibrated by a tenth of the training rows, or, where that is fewer than 100, by five
more trainings; to do without, --config.data.calibration=0
--config.data.calibration_folds=0.
"""

import ml_collections

from fedbnr_jax.run import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.base()
  config.method = config_lib.AUTO  # The most accurate, on validation rows.
  config.data.source = "table"
  config.data.name = ""
  config.data.update(config_lib.CALIBRATED)
  return config
