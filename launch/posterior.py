"""Rows join or leave a trained model in seconds, without training.

python -m launch.posterior --workdir=runs/mine --add=new_site.csv
python -m launch.posterior --workdir=runs/mine --remove=old_site.csv
python -m launch.posterior --workdir=runs/mine --remove=old_site.csv --erase
python -m launch.posterior --workdir=runs/mine

The kernel stays; the posterior becomes the one of all rows now in, with σ and λ that
maximise their evidence, and `launch.predict` uses it from then on. Rows to remove that
are not in are refused, and rows to add that are; those of the training's own table that
were held out to validate, calibrate or test, and so never in, are passed over. The
ledger before a change is kept beside it. --erase, with --remove or later, deletes that
copy and rewrites what else in the folder shows rows that left, as far as it can be done
without training. Without flags it prints what has changed since training.
"""

from collections.abc import Iterator, Sequence

import pandas as pd
from absl import flags

from fedbnr_jax import posterior
from fedbnr_jax.data import read_table
from launch import common

flags.declare_key_flag(common.WORKDIR)
_ADD = flags.DEFINE_multi_string("add", [], "Table whose rows join; repeatable.")
_REMOVE = flags.DEFINE_multi_string("remove", [], "Table whose rows leave.")
_ERASE = flags.DEFINE_bool(
  "erase", False, "Rewrite or delete what the folder holds of rows that have left."
)
_ALLOW_EQUAL = flags.DEFINE_bool(
  "allow_equal", False, "Add rows also where equal ones are in: other measurements."
)


def main() -> None:
  update(
    common.workdir(),
    _ADD.value,
    _REMOVE.value,
    erase=_ERASE.value,
    allow_equal=_ALLOW_EQUAL.value,
  )


def update(
  workdir: str,
  add: list[str],
  remove: list[str],
  *,
  erase: bool = False,
  allow_equal: bool = False,
) -> None:
  """Adds and removes the rows of files, all or none, and prints the result."""
  changed = posterior.change_rows(
    workdir, _tables(add), _tables(remove), erase=erase, allow_equal=allow_equal
  )
  for source, num_passed, num_rows in changed.passed_over:
    print(
      f"{source}: {num_passed} of {num_rows} rows held out to validate, calibrate or "
      "test, and never in"
    )
  for change in changed.changes:
    print(f"{change['action']} {change['table']}: {change['rows']} rows")
  print(
    f"{changed.num_rows} rows in the posterior, noise {changed.noise_std:.4g}, "
    f"prior {changed.prior_std:.4g} (in the target's unit)"
  )
  if changed.calibration is not None and changed.calibration.outdated:
    print("The model is no longer calibrated, and has no conformal intervals.")
  if changed.traces.erasable:
    print("Rows have left the posterior; a call with --erase alone takes them out of:")
    _print_list(changed.traces.erasable)
  if changed.traces.lasting:
    print("What --erase cannot take rows that have left out of:")
    _print_list(changed.traces.lasting)


def _print_list(lines: Sequence[str]) -> None:
  print("\n".join(f"- {line}" for line in lines))


def _tables(sources: list[str]) -> Iterator[tuple[str, pd.DataFrame]]:
  return ((source, read_table(source)) for source in sources)


if __name__ == "__main__":
  common.run(main)
