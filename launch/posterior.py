"""Rows join or leave a trained model in seconds, without training.

python -m launch.posterior --workdir=runs/mine --add=new_site.csv
python -m launch.posterior --workdir=runs/mine --remove=old_site.csv
python -m launch.posterior --workdir=runs/mine

The kernel stays; the posterior becomes the one of all rows now in, with σ and λ that
maximise their evidence, and `launch.predict` uses it from then on. Rows that are not in
are refused; those of the training's own table that were held out for validation or
test, and so never in, are passed over. Without --add and --remove it tells what has
changed since training.
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
  folder, trained = RunFolder(workdir), model.load(workdir)
  if folder.summary() is None:
    raise InputError(f"the training in {workdir} is not finished: let it finish.")
  trained.require_global_layer()
  ledger = membership.read(folder.posterior)
  membership.require_kernel(ledger, trained.state, folder.posterior)
  told = []
  for source in add:
    rows = trained.rows(read_table(source))
    stats, tags = trained.statistics(rows, jax.jit), membership.row_tags(rows)
    ledger = membership.joined(ledger, stats, tags, source)
  for source in remove:
    rows = trained.rows(read_table(source))
    tags = membership.row_tags(rows)
    leave = membership.leaving(ledger, tags, source)
    stats = trained.statistics(rows.where(leave), jax.jit)
    ledger = membership.left(ledger, stats, tags[leave], source)
    if not leave.all():
      told.append(
        f"{source}: {np.sum(~leave)} of {len(leave)} rows held out for validation or "
        "test, and never in"
      )
  if add or remove:
    with usable(folder.path):
      membership.write(folder.posterior, ledger)
  for line in told:
    print(line)
  for change in ledger.changes:
    print(f"{change['action']} {change['table']}: {change['rows']} rows")
  state = membership.with_posterior(trained.state, ledger)
  scale = trained.preprocessor.target_std
  fitted = state.posterior if ledger.changes else trained.state.posterior
  print(
    f"{int(np.rint(ledger.stats.count))} rows in the posterior, "
    f"noise {float(fitted.noise_std) * scale:.4g}, "
    f"prior {float(fitted.prior_std) * scale:.4g} (in the target's unit)"
  )


if __name__ == "__main__":
  common.run(main)
