"""Times a round, and the matrix products that it cannot do without.

python -m launch.benchmark                  a table of five shapes
python -m launch.benchmark --clients=100 --rows=34 --inputs=18 --width=200 --json

A round is broadcast, local steps and mean, without last layer and evaluation. Clients
are shared by one pinned single-threaded process per core (--local_processes). In turns
with the rounds, the same processes multiply float32 matrices of 2000 × 2000; the rate
of these products bounds the speed of a round.
"""

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.experimental import multihost_utils

from fedbnr_jax.algorithms.fedbnr import fedbnr
from fedbnr_jax.federated import aggregation
from fedbnr_jax.federated import placement as placement_lib
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.exchange import Stage
from fedbnr_jax.federated.federation import Federation, Rows
from fedbnr_jax.federated.host_chunks import streamed
from fedbnr_jax.federated.optimizers import adam
from fedbnr_jax.federated.placement import Placement, client_mesh
from fedbnr_jax.federated.state import State
from fedbnr_jax.gp import urk
from fedbnr_jax.run.processes import is_first
from launch import common, distributed

flags.adopt_module_key_flags(distributed)
_CLIENTS = flags.DEFINE_integer("clients", 100, "K, the number of clients.", 1)
_ROWS = flags.DEFINE_integer("rows", 34, "N, rows of each client.", 1)
_INPUTS = flags.DEFINE_integer("inputs", 18, "D, inputs of a row.", 1)
_WIDTH = flags.DEFINE_integer("width", 200, "Hidden units of the extractor.", 1)
_LATENT = flags.DEFINE_integer("latent", 5, "Size of the latent space.", 1)
_SAMPLES = flags.DEFINE_integer("samples", 50, "S; there are 2S features.", 2)
_STEPS = flags.DEFINE_integer("local_steps", 50, "Steps of a client in a round.", 1)
_BATCH = flags.DEFINE_integer(
  "client_batch_size", 0, "Clients at once; 0: automatic.", 0
)
_STREAM = flags.DEFINE_integer("stream_clients", 0, "Clients on the device; 0: all.", 0)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Rounds timed; the best counts.", 1)
_JSON = flags.DEFINE_bool("json", False, "Times one shape; a line of JSON.")
_X64 = flags.DEFINE_bool("float64", True, "Float64 for the small linear algebra.")

_GEMM_SIZE = 2000
_CHUNK = 1000  # Clients whose rows are made at a time.


@dataclasses.dataclass(frozen=True)
class Shape:
  """The sizes of a round that is timed."""

  clients: int
  rows: int
  inputs: int
  width: int
  latent: int = 5
  samples: int = 50
  local_steps: int = 50

  @property
  def flops(self) -> int:
    """Operations in the matrix products of a round, forward and backward."""
    rows, features = self.clients * self.rows, 2 * self.samples
    network = 6 * rows * self.width * (self.inputs + self.latent)
    likelihood = 6 * rows * features * min(self.rows, features)
    return self.local_steps * (network + likelihood)


# Skillcraft with 100 and 10 clients, with 10 clients and a wider network, and CCPP with
# 10 and 100 clients.
TABLE = (
  Shape(100, 34, 18, 200),
  Shape(10, 332, 18, 200),
  Shape(10, 332, 18, 2000),
  Shape(10, 766, 4, 5000),
  Shape(100, 78, 4, 5000),
)


def main() -> None:
  # One process per core was measured to be the fastest; a training may choose.
  num_local = distributed.num_local(default="auto")
  if num_local > 1:
    sys.exit(distributed.run_locally("launch.benchmark", num_local))
  distributed.join()
  jax.config.update("jax_enable_x64", _X64.value)
  if _JSON.value:
    shape = Shape(
      _CLIENTS.value,
      _ROWS.value,
      _INPUTS.value,
      _WIDTH.value,
      _LATENT.value,
      _SAMPLES.value,
      _STEPS.value,
    )
    result = measure(shape)
    if is_first():
      print(json.dumps(result), flush=True)
    return
  if is_first():
    print("| K x N, D, s | ms/epoch | bound | efficiency | GFLOP/s | compile s | MB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
  for shape in TABLE:
    result = measure(dataclasses.replace(shape, local_steps=_STEPS.value))
    if is_first():
      print(table_row(shape, result), flush=True)


def table_row(shape: Shape, result: dict[str, Any]) -> str:
  """Formats the result of one shape as a row of Markdown."""
  per_epoch = 1e3 / result["local_steps"]
  return (
    f"| {shape.clients} x {shape.rows}, {shape.inputs}, {shape.width} "
    f"| {result['sec_per_round'] * per_epoch:.2f} "
    f"| {result['gemm_sec_per_round'] * per_epoch:.2f} | {result['efficiency']:.2f} "
    f"| {result['peak_gflops']:.0f} | {result['compile_sec']:.1f} "
    f"| {result['peak_rss_mb']:.0f} |"
  )


def measure(shape: Shape) -> dict[str, Any]:
  """Times rounds of this shape and matrix products, in turns."""
  mesh = client_mesh(0)
  algorithm = build(shape, Placement(_BATCH.value or None, mesh))
  start = time.perf_counter()
  run = prepare_round(shape, algorithm)
  run()
  compile_seconds = time.perf_counter() - start
  product = prepare_product()
  rounds, rates = [], []
  for _ in range(_REPEATS.value):
    rounds.append(timed(run))
    rates.append(sum_over_processes(2e-9 * _GEMM_SIZE**3 / timed(product)))
  # A round ends when the last process is done, so all processes measure the same.
  seconds, peak = min(rounds), max(rates)
  bound = shape.flops / (peak * 1e9)
  return dataclasses.asdict(shape) | {
    "sec_per_round": seconds,
    "ms_per_epoch": 1e3 * seconds / shape.local_steps,
    "flops": shape.flops,
    "peak_gflops": peak,
    "gemm_sec_per_round": bound,
    "efficiency": bound / seconds,
    "dtype": "float32",
    "linear_algebra": "float64" if _X64.value else "float32",
    "compile_sec": compile_seconds - seconds,
    "peak_rss_mb": sum_over_processes(peak_rss_mb()),
    "federation_mb": federation_mb(shape),
    "processes": jax.process_count(),
    "devices": jax.device_count(),
    "stream_clients": _STREAM.value,
    "jax": jax.__version__,
  }


def build(shape: Shape, placement: Placement) -> FederatedAlgorithm:
  """Builds FedBNR without its last layer."""
  whole = fedbnr(
    urk.deep(shape.samples, shape.width, latent_size=shape.latent, length_scale=10.0),
    adam(1e-2),
    aggregation.mean(),
    num_local_steps=shape.local_steps,
    placement=placement,
  )
  return dataclasses.replace(whole, stages=(Stage(whole.exchanges[:1]),))


def prepare_round(shape: Shape, algorithm: FederatedAlgorithm) -> Callable[[], Any]:
  """Returns a function that runs one round from the initial state and waits."""
  mesh = algorithm.placement.mesh
  key = placement_lib.replicate_key(jax.random.key(0), mesh)
  if _STREAM.value:
    federation = Federation(host_rows(shape))
    one_round: Callable[..., Any] = streamed(algorithm, _STREAM.value, jax.jit)
  else:
    federation = device_rows(shape, algorithm)
    one_round = jax.jit(algorithm.round)
  state: State = jax.jit(algorithm.init)(key, federation)
  return lambda: jax.block_until_ready(one_round(key, state, federation))


def device_rows(shape: Shape, algorithm: FederatedAlgorithm) -> Federation:
  """Makes rows on the devices that hold them, a few clients at a time."""
  mesh = algorithm.placement.mesh
  num_devices = 1 if mesh is None else mesh.size
  missing = -shape.clients % num_devices
  numbers = np.arange(shape.clients + missing, dtype=np.int32)

  def client(number: jax.Array) -> Rows:
    key_x, key_y = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
    x = jax.random.normal(key_x, (shape.rows, shape.inputs), jnp.float32)
    noise = jax.random.normal(key_y, (shape.rows,), jnp.float32)
    y = jnp.sin(3.0 * x[:, 0]) + 0.3 * noise
    return Rows(x, y, jnp.full((shape.rows,), number < shape.clients))

  def make(numbers: jax.Array) -> Rows:
    return jax.lax.map(client, numbers, batch_size=min(_CHUNK, numbers.shape[0]))

  if mesh is not None:
    part = jax.sharding.PartitionSpec("clients")
    make = jax.shard_map(make, mesh=mesh, in_specs=part, out_specs=part)
  return Federation(
    jax.jit(make)(placement_lib.share(numbers, mesh)), num_padding=missing
  )


def host_rows(shape: Shape) -> Any:
  """Makes rows of the same kind in host memory."""
  rng = np.random.default_rng(1)
  size = (shape.clients, shape.rows)
  x = np.empty((*size, shape.inputs), np.float32)
  y = np.empty(size, np.float32)
  for start in range(0, shape.clients, _CHUNK):
    some = slice(start, start + _CHUNK)
    rng.standard_normal(dtype=np.float32, out=x[some])
    rng.standard_normal(dtype=np.float32, out=y[some])
    y[some] = np.sin(3.0 * x[some, :, 0]) + np.float32(0.3) * y[some]
  arrays: Any = (x, y, np.ones(size, bool))
  return Rows(*arrays)


def prepare_product() -> Callable[[], Any]:
  """Returns a function that multiplies matrices on this process's cores alone."""
  device = jax.local_devices()[0]
  size = (_GEMM_SIZE, _GEMM_SIZE)
  matrix = jax.device_put(np.ones(size, np.float32), device)
  product = jax.jit(jnp.matmul)
  jax.block_until_ready(product(matrix, matrix))
  return lambda: jax.block_until_ready(product(matrix, matrix))


def timed(run: Callable[[], Any]) -> float:
  """Times one run that all processes start together, in seconds."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices("start")
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


def sum_over_processes(value: float) -> float:
  """Adds up a number that each process measured."""
  if jax.process_count() == 1:
    return value
  return float(np.sum(multihost_utils.process_allgather(np.asarray(value))))


def peak_rss_mb() -> float:
  """Returns the most memory that this process has ever held."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / (2**20 if sys.platform == "darwin" else 2**10)


def federation_mb(shape: Shape) -> float:
  """Returns the size of the rows: x and y in float32, and the mask."""
  return shape.clients * shape.rows * (4 * shape.inputs + 4 + 1) / 2**20


if __name__ == "__main__":
  common.run(main)
