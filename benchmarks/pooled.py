"""Whether `fedbnr-exact` is pooled training: how far its parameters are from `central`.

python -m benchmarks.pooled [--datasets=skillcraft,ccpp] [--clients=1,10,100]

The same 50 steps of Adam in float64 on real rows, dealt out in three ways, with the CPU
preset's widths. A distance is ‖a − b‖ / ‖b‖ of one array of parameters; the table has
the largest.
"""

import argparse

from benchmarks import tools
from launch import common  # Prepares the process; before JAX is imported.

# ruff: isort: split

import jax
import numpy as np

from fedbnr_jax.federated import placement
from fedbnr_jax.run import experiment
from fedbnr_jax.sweep import grid

_RULES = ("sorted", "iid", "target")
_STEPS = {"central.num_steps": 10, "dtype": "float64"}


def trained(dataset: str, method: str, rule: str, num_clients: int) -> object:
  """The parameters after five rounds of ten steps."""
  fields = {"method": method, "num_clients": num_clients, "partition": rule, "mesh": 1}
  config = grid.config_of(f"configs/uci.py:{dataset}", fields | _STEPS, tools.ROOT)
  run = experiment.build(config)
  data = placement.put_federation(run.federation, run.algorithm.placement.mesh)
  state = jax.jit(run.algorithm.init)(run.key_init, data)
  step = jax.jit(run.algorithm.round)
  for number in range(5):
    state, _ = step(jax.random.fold_in(run.key_rounds, number + 1), state, data)
  return jax.device_get(state.server.params)


def distance(params: object, reference: object) -> float:
  """The largest relative distance between two arrays of the same name."""
  pairs = zip(jax.tree.leaves(params), jax.tree.leaves(reference), strict=True)
  return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--datasets", default="skillcraft,sml,ccpp")
  parser.add_argument("--clients", default="1,10,100")
  options = parser.parse_args()
  common.set_up_jax()
  rows = []
  for dataset in options.datasets.split(","):
    reference = trained(dataset, "central", "sorted", 10)
    for count in (int(text) for text in options.clients.split(",")):
      gaps = {
        rule: distance(trained(dataset, "fedbnr-exact", rule, count), reference)
        for rule in _RULES
      }
      rows.append({"dataset": dataset, "clients": count} | gaps)
      print(tools.markdown(rows[-1:]).splitlines()[-1], flush=True)
  print(tools.markdown(rows))
  tools.write("pooled", rows)


if __name__ == "__main__":
  main()
