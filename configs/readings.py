"""Other readings of the paper, one at a time: what explains where its figures differ.

python -m launch.sweep --config=configs/readings.py:noise --workdir=runs/noise
python -m launch.tables --results=runs/noise/results.csv --brief

After the colon one of `READINGS`. Seed 0 of the cells in which the question arose, with
the settings of the table otherwise; minutes to half an hour on two cores. What came of
them is in results/readings/ and docs/results.md.
"""

from typing import Any, NamedTuple

import ml_collections

from fedbnr_jax.names import require_choice
from fedbnr_jax.sweep import grid


class Reading(NamedTuple):
  """A reading: the field that it sets, to which values, in which cells."""

  field: str
  values: tuple[Any, ...]
  methods: tuple[str, ...]
  arguments: tuple[str, ...]  # Of configs/uci.py.
  num_clients: tuple[int, ...] = (10, 100)


READINGS = {
  # Error bars of the function, which leave the noise out.
  "noise": Reading(
    "with_noise",
    (False,),
    ("local+local", "pfedgp", "fedloc"),
    ("skillcraft", "ccpp"),
  ),
  # A process of mean zero on targets that are not centred, with the paper's ρ.
  "raw-targets": Reading(
    "data.raw_target",
    (True,),
    ("fedloc", "fedloc-poe"),
    ("skillcraft,paper", "sml,paper", "ccpp,paper"),
  ),
  # The paper's methods stop as late as ours.
  "patience": Reading(
    "patience", (30,), ("fedavg", "fedbnr", "fedbnr-kd"), ("sml", "parkinsons")
  ),
  # FedLoc's experts with more than the paper's 50 inducing inputs.
  "inducing": Reading(
    "fedloc.num_inducing", (100, 200), ("fedloc",), ("sml", "parkinsons"), (10,)
  ),
}


def get_config(reading: str = "noise") -> ml_collections.ConfigDict:
  require_choice("the reading after 'configs/readings.py:'", reading, tuple(READINGS))
  chosen = READINGS[reading]
  fields = {
    "num_clients": chosen.num_clients,
    "method": chosen.methods,
    "seed": (0,),
    chosen.field: chosen.values,
  }
  return grid.config("configs/uci.py", chosen.arguments, fields)
