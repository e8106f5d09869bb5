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

# Method and fields of two rounds. Without the fields of LAYOUT they are rounds on one
# device, of all clients at once, as other tests have compiled them already: the same
# must come out.
LAYOUT = ("mesh", "client_batch_size", "stream_clients")
_SOME = {"participation": 0.6, "dropout": 0.3}
ROUNDS = {
  "distilled, with evidence": {"method": "fedbnr-kd-ev", "mesh": 4},
  "exact gradients through a network": {
    "method": "fedbnr-exact",
    "kernel": "deep",
    "num_local_steps": 10,
    "learning_rate": 0.01,
    "mesh": 4,
    "client_batch_size": 1,
  },
  "a kernel each, of some clients": {
    "method": "local+global",
    "mesh": 4,
    "client_batch_size": 1,
    **_SOME,
  },
  "a kernel each, of some clients, streamed": {
    "method": "local+global",
    "mesh": 4,
    "stream_clients": 2,
    **_SOME,
  },
  "experts": {"method": "fedloc", "mesh": 4},
  "averaged": {"method": "fedbnr", "mesh": 4, "client_batch_size": 1},
  "distilled": {"method": "fedbnr-kd", "mesh": 4, "client_batch_size": 1},
  "a model each": {"method": "local+local", "mesh": 4, "client_batch_size": 1},
}
FLOAT32 = {"method": "fedbnr", "kernel": "deep", "dtype": "float32", "mesh": 4}


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

  from tests import conftest

  del conftest  # Imported for its settings of JAX.
  assert len(jax.devices()) == 4
  found = {
    "rounds": {name: _numbers(*_rounds(**fields)) for name, fields in ROUNDS.items()},
    "training": _numbers(*_training(mesh=2, client_batch_size=1)),
    "float32": _numbers(*_rounds(**FLOAT32)),
    "padding": _padding(),
  }
  print(json.dumps(found))


def of_weight(state, predictions) -> list:
  """The arrays in which a layout may show: kernels, statistics and predictions."""
  import jax

  own = getattr(state.own, "params", ()) or getattr(state.own, "multipliers", ())
  return jax.tree.leaves((state.server.params, state.server.stats, own, predictions))


def _numbers(state, predictions) -> list[list[float]]:
  import numpy as np

  return [np.ravel(leaf).tolist() for leaf in of_weight(state, predictions)]


def difference(one, other) -> float:
  """The largest, over arrays, of ‖a − b‖ / ‖b‖."""
  import numpy as np

  def relative(a, b) -> float:
    a, b = np.ravel(np.asarray(a, np.float64)), np.ravel(np.asarray(b, np.float64))
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12))

  return max(relative(a, b) for a, b in zip(one, other, strict=True))


def _rounds(**fields):
  """The state after two rounds of five clients, and what it predicts."""
  import jax
  import numpy as np

  from fedbnr_jax.federated import placement
  from fedbnr_jax.federated.host_chunks import streamed
  from tests import methods

  algorithm = methods.built(**fields)
  mesh = algorithm.placement.mesh
  data = methods.small(dtype=np.dtype(fields.get("dtype", "float64")))
  x, chunk = data.clients.x[3], fields.get("stream_clients")
  if not chunk:
    data = placement.put_federation(data, mesh)
  key = placement.replicate_key(methods.KEY, mesh)
  state = jax.jit(algorithm.init)(key, data)
  round_ = streamed(algorithm, chunk, jax.jit) if chunk else jax.jit(algorithm.round)
  for number in range(2):
    key = placement.replicate_key(jax.random.key(number), mesh)
    state, _ = round_(key, state, data)
  state = jax.device_get(state)
  return state, jax.jit(algorithm.predict)(state, x)


def _training(**layout):
  """The best state of a training, and what it predicts."""
  import jax

  from fedbnr_jax.run import experiment, training
  from fedbnr_jax.run.program import make_program
  from tests import methods, runs

  built = experiment.build(runs.tiny(**(methods.SOME_ROUNDS | layout)))
  program = make_program(built.algorithm, transform=jax.jit)
  result = training.train(built, program)
  return result.state, program.predict(result.state, built.test.x)


def _padding() -> dict:
  """How five clients lie on four devices."""
  import jax
  import numpy as np

  from fedbnr_jax.federated import placement
  from tests import methods

  built = methods.small()
  mesh = placement.client_mesh(4)
  put = placement.put_federation(built, mesh)
  key = placement.replicate_key(jax.random.key(3), mesh)
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
