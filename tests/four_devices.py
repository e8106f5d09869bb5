"""What tests want to know of four host devices, found out by one process of its own.

The number of devices is settled before JAX starts. XLA's pool needs more threads than
a small machine has cores, or programs over several host devices may hang: hence NPROC,
and a time limit.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SECONDS = 240

_EXPERTS = {"method": "fedloc", "kernel": "deep", "fedloc__num_inducing": 3}
# Fields of a training, and of the one it must equal: that on one device, at once.
TRAININGS = {
  "two devices": ({"mesh": 2, "client_batch_size": 1}, {}),
  "a network on four devices": (
    {"mesh": 4, "client_batch_size": 1, "kernel": "deep"},
    {"kernel": "deep"},
  ),
  "four devices streamed": ({"mesh": 4, "stream_clients": 2}, {}),
  "some clients on four devices": (
    {"mesh": 4, "client_batch_size": 1, "participation": 0.5},
    {"participation": 0.5},
  ),
  "some clients streamed in portions": (
    {"mesh": 1, "client_batch_size": 2, "stream_clients": 3, "participation": 0.5},
    {"participation": 0.5},
  ),
  "distilled on four devices": (
    {"mesh": 4, "client_batch_size": 1, "method": "fedbnr-kd"},
    {"method": "fedbnr-kd"},
  ),
  "global evidence on four devices": (
    {"mesh": 4, "client_batch_size": 1, "method": "fedbnr-ev"},
    {"method": "fedbnr-ev"},
  ),
  "exact gradients on four devices": (
    {"mesh": 4, "client_batch_size": 1, "method": "fedbnr-exact"},
    {"method": "fedbnr-exact"},
  ),
  "a model each on four devices": (
    {"mesh": 4, "client_batch_size": 1, "method": "local+local"},
    {"method": "local+local"},
  ),
  "experts on four devices": (
    {"mesh": 4, "client_batch_size": 1} | _EXPERTS,
    _EXPERTS,
  ),
}


@functools.cache
def results() -> dict:
  """What `main` prints."""
  environment = os.environ | {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    "NPROC": "8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
  }
  done = subprocess.run(
    [sys.executable, "-m", "tests.four_devices"],
    cwd=_ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=_SECONDS,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
  import jax

  from launch import common

  common.set_up_jax()
  jax.config.update("jax_numpy_dtype_promotion", "strict")
  assert len(jax.devices()) == 4
  found = {
    "trainings": {
      name: _difference(_compared(fields), _compared(plain))
      for name, (fields, plain) in TRAININGS.items()
    },
    "float32": _float32(),
    "padding": _padding(),
  }
  print(json.dumps(found))


@functools.cache
def _state(**fields):
  """The state after two rounds of five clients, and what it predicts."""
  import jax

  from fedbnr_jax import experiment, training
  from tests.runs import tiny

  sizes = {"num_clients": 5, "num_rounds": 2, "kd__num_steps": 2}
  # A kernel without a network: it is the layout that is tested, and compiled often.
  common = sizes | {"kernel": "gaussian", "dtype": "float64", "mesh": 1}
  built = experiment.build(tiny(**(common | fields)))
  program = training.jit(training.make_program(built))
  result = training.train(built, program)
  assert len(result.history) == 2
  return result.state, jax.device_get(program.predict(result.state, built.test.x))


def _compared(fields: dict):
  """Parameters, statistics and predictions: what weighs nothing may differ."""
  state, predictions = _state(**fields)
  return state.params, state.stats, predictions


def _float32() -> dict[str, float]:
  """The paper's kernel on four devices and on one: differences of what."""
  fields = {"dtype": "float32", "kernel": "deep"}
  one, four = _state(**fields), _state(mesh=4, **fields)
  return {
    "state": _difference(four[0], one[0]),
    "predictions": _difference(four[1], one[1]),
  }


def _difference(one, other) -> float:
  """The largest, over arrays, of ‖a − b‖ / ‖b‖."""
  import jax
  import numpy as np

  def relative(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12))

  return max(jax.tree.leaves(jax.tree.map(relative, one, other)))


def _padding() -> dict:
  """How five clients lie on four devices."""
  import jax
  import numpy as np

  from fedbnr_jax import devices, federation, mapping

  rng = np.random.default_rng(0)
  parts = np.array_split(np.arange(23), 5)
  built = federation.build(
    rng.normal(size=(23, 2)), rng.normal(size=23), parts, on_host=True
  )
  server = federation.ServerSet(rng.normal(size=(3, 2)), rng.normal(size=3))
  built = built.replace(server=server)
  mesh = mapping.client_mesh(4)
  put = devices.put_federation(built, mesh)
  key = devices.replicate_key(jax.random.key(3), mesh)
  y = np.asarray(put.clients.y)
  return {
    "num_clients": put.num_clients,
    "num_padding": put.num_padding,
    "shares": sorted(s.data.shape[0] for s in put.clients.x.addressable_shards),
    "devices": len({s.device for s in put.clients.x.addressable_shards}),
    "rows_kept": bool(np.array_equal(y[:5], built.clients.y)),
    "padding_admits": int(np.sum(np.asarray(put.clients.mask)[5:])),
    "server_copies": [list(s.data.shape) for s in put.server.x.addressable_shards],
    "key_kept": bool(
      np.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(3)))
    ),
  }


if __name__ == "__main__":
  main()
