"""Predicts a table with a trained model.

python -m launch.predict --workdir=runs/mine --input=new.csv --output=predicted.csv

The output has the input's columns and mean, std, lower95 and upper95, in the
target's unit, noise included, and outside, which marks rows unlike the training's. If
the run was calibrated (config.data.calibration), it also has lower95_conformal and
upper95_conformal, which cover 95 % of new rows whatever the model. --level=0.9 gives
lower90 and so on instead, and can be repeated.
"""

import warnings
from collections.abc import Sequence

from absl import flags

from fedbnr_jax import model
from fedbnr_jax.data import read_table, write_table
from fedbnr_jax.errors import InputError
from fedbnr_jax.release import folder as release_folder
from launch import common

flags.declare_key_flag(common.OUTPUT)
flags.declare_key_flag(common.WORKDIR)
_INPUT = flags.DEFINE_string("input", None, "Table to predict.")
_CLIENT = flags.DEFINE_string(
  "client", None, "Whose model, where the method leaves one for each client."
)
_LEVELS = flags.DEFINE_multi_float(
  "level", None, "Share of rows that intervals are to cover; 0.95 by default."
)
_RELEASED = flags.DEFINE_bool("released", False, "From the private release.")


def main() -> None:
  if not _INPUT.value or not common.OUTPUT.value:
    raise InputError(
      "--input and --output are needed: name the tables to read and write."
    )
  predict(
    common.workdir(),
    _INPUT.value,
    common.OUTPUT.value,
    _RELEASED.value,
    _CLIENT.value,
    _LEVELS.value,
  )


def predict(
  workdir: str,
  source: str,
  target: str,
  released: bool = False,
  client: str | None = None,
  levels: Sequence[float] | None = None,
) -> None:
  """Adds the predicted columns to the table `source` and writes it to `target`."""
  trained = release_folder.load(workdir) if released else model.load(workdir)
  if not released and not trained.summary:
    warnings.warn(
      f"the training in {workdir} is not finished: this is its best model so far.",
      stacklevel=2,
    )
  table = read_table(source)
  predicted = trained.predict(table, client=client, levels=levels)
  clash = [name for name in predicted.columns if name in table.columns]
  if clash:
    raise InputError(
      f"{source} already has a column {clash[0]!r}, which the output needs: rename it."
    )
  joined = table.join(predicted)
  write_table(joined, target)
  print(f"{len(joined)} rows predicted, written to {target}")


if __name__ == "__main__":
  common.run(main)
