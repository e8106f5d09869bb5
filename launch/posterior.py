"""Rows join or leave a trained model in seconds, without training.

python -m launch.posterior --workdir=runs/mine --add=new_site.csv
python -m launch.posterior --workdir=runs/mine --remove=old_site.csv
python -m launch.posterior --workdir=runs/mine

The kernel stays; the posterior becomes the one of all rows now in, with σ and λ that
maximise their evidence, and `launch.predict` uses it from then on. Without --add and
--remove it tells what has changed since training.
"""

import jax
import numpy as np
from absl import flags

from fedbnr_jax import membership, model
from fedbnr_jax.data import read_table
from fedbnr_jax.errors import InputError
from fedbnr_jax.records import RunFolder, usable
from launch import common

_ADD = flags.DEFINE_multi_string("add", [], "Table whose rows join; repeatable.")
_REMOVE = flags.DEFINE_multi_string("remove", [], "Table whose rows leave.")


def main() -> None:
  update(common.workdir(), _ADD.value, _REMOVE.value)


def update(workdir: str, add: list[str], remove: list[str]) -> None:
  """Adds and removes the rows of tables, all or none, and tells the result."""
  folder = RunFolder(workdir)
  if folder.summary() is None:
    raise InputError(f"the training in {workdir} is not finished: let it finish.")
  trained = model.load(workdir)
  trained.require_global_layer()
  ledger = membership.read(folder.posterior)
  membership.require_kernel(ledger, trained.state, folder.posterior)
  for source in add:
    stats = trained.statistics(read_table(source), transform=jax.jit)
    ledger = membership.joined(ledger, stats, source)
  for source in remove:
    stats = trained.statistics(read_table(source), transform=jax.jit)
    ledger = membership.left(ledger, stats, source)
  if add or remove:
    with usable(folder.path):
      membership.write(folder.posterior, ledger)
  for change in ledger.changes:
    print(f"{change['action']} {change['table']}: {change['rows']} rows")
  state = membership.with_posterior(trained.state, ledger)
  scale = trained.preprocessor.target_std
  told = state.posterior if ledger.changes else trained.state.posterior
  print(
    f"{int(np.rint(ledger.stats.count))} rows in the posterior, "
    f"noise {float(told.noise_std) * scale:.4g}, "
    f"prior {float(told.prior_std) * scale:.4g} (in the target's unit)"
  )


if __name__ == "__main__":
  common.run(main)
