"""What every method sends: each message through bytes, beside the simulation's own.

python -m benchmarks.wire [--config=configs/uci.py:skillcraft] [--methods=fedbnr,...]

Every client is a process of its own that is given the config, the seed in it and the
client's rows. One round of the simulation is taken apart into its messages; each down
message goes to the processes as bytes, and the sum of what comes back is held against
the simulation's. Then the server's side is computed from what came back, and its state
held against the simulation's after the round. In float64. Prints a table: a row a
method and exchange, bytes down and up of one client, and the recorded floats.
"""

import dataclasses
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import pandas as pd
from absl import flags

from fedbnr_jax import algorithms
from fedbnr_jax.federated import wire
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.collectors import Collected, Collector, OnDevice
from fedbnr_jax.federated.exchange import num_floats
from fedbnr_jax.federated.federation import Federation, Rows
from fedbnr_jax.federated.state import RoundInfo, State
from fedbnr_jax.report import tables
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import input_summary
from fedbnr_jax.run.task import init_key
from launch import common

_METHODS = flags.DEFINE_list("methods", list(algorithms.METHODS), "Which methods.")


# --------------------------------------------------------------------- the processes


def site_process(connection: Connection, number: int, cache: str) -> None:
  """Runs one client until it is asked to stop."""
  jax.config.update("jax_enable_x64", True)
  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  site: wire.Site | None = None
  while request := connection.recv_bytes():
    kind, content = request[:1], request[1:]
    if kind == b"c":
      start = json.loads(content)
      config = ml_collections.ConfigDict(start["config"])
      rows = (np.frombuffer(connection.recv_bytes(), t) for t in start["dtypes"])
      arrays: Any = [
        a.reshape(shape) for a, shape in zip(rows, start["shapes"], strict=True)
      ]
      known = connection.recv_bytes()
      like = input_summary.empty(arrays[0].shape[-1])
      site = wire.Site(
        algorithms.method(config.method).build(config),
        init_key(config.seed),
        number,
        start["num_clients"],
        Rows(*arrays),
        wire.decode(known, like) if known else (),
      )
      connection.send_bytes(b"ready")
    elif site is not None:
      connection.send_bytes(site.answer(content[0], content[1:]))


class Sites:
  """Processes, one a client, that are reached by bytes."""

  def __init__(self, num_clients: int) -> None:
    context = multiprocessing.get_context("spawn")
    cache = str(jax.config.jax_compilation_cache_dir)
    self._connections, self._processes = [], []
    for number in range(num_clients):
      here, there = context.Pipe()
      process = context.Process(
        target=site_process, args=(there, number, cache), daemon=True
      )
      process.start()
      self._connections.append(here)
      self._processes.append(process)

  def start(
    self, config: ml_collections.ConfigDict, clients: Rows, inputs: Any = ()
  ) -> None:
    """Gives each process in turn the config and the rows of its client."""
    num_clients = len(self._connections)
    for number, connection in enumerate(self._connections):
      rows = [np.asarray(a)[number] for a in (clients.x, clients.y, clients.mask)]
      content = {
        "config": config.to_dict(),
        "num_clients": num_clients,
        "dtypes": [str(array.dtype) for array in rows],
        "shapes": [array.shape for array in rows],
      }
      connection.send_bytes(b"c" + json.dumps(content).encode())
      for array in rows:
        connection.send_bytes(array.tobytes())
      connection.send_bytes(b"" if isinstance(inputs, tuple) else wire.encode(inputs))
      assert connection.recv_bytes() == b"ready"

  def ask(self, number: int, down: bytes) -> list[bytes]:
    """Sends a message to one after another, and waits for each answer.

    In turns, because what the first process compiles the others read from the cache.
    """
    answers = []
    for connection in self._connections:
      connection.send_bytes(b"m" + bytes([number]) + down)
      answers.append(connection.recv_bytes())
    return answers

  def close(self) -> None:
    """Ends the processes."""
    for connection, process in zip(self._connections, self._processes, strict=True):
      connection.send_bytes(b"")
      process.join(10)
      process.kill()


# -------------------------------------------------------------------- the comparison


class Recording:
  """A collector that also keeps every down message and every sum."""

  traced = True

  def __init__(self, inner: Collector) -> None:
    self.log: list[tuple[Any, Any]] = []
    self._inner = inner

  def __call__(self, exchange: Any, down: Any, own: Any, members: Any) -> Collected:
    collected = self._inner(exchange, down, own, members)
    self.log.append((down, collected.total))
    return collected


class Replaying:
  """A collector that hands out sums which came from elsewhere."""

  traced = True

  def __init__(self, totals: Sequence[Any]) -> None:
    self._totals: Iterator[Any] = iter(totals)

  def __call__(self, exchange: Any, down: Any, own: Any, members: Any) -> Collected:
    del exchange, down, members
    return Collected(next(self._totals), own, {})


class Comparison(NamedTuple):
  """What came of one method."""

  rows: list[dict[str, Any]]  # A row an exchange.
  message_gap: float  # Largest difference of a sum, relative to its array's size.
  state_gap: float  # The same for the server's state after the round.


def compare(config: ml_collections.ConfigDict, sites: Sites) -> Comparison:
  """Takes a round of the simulation apart and sends it through the sites.

  Stages must not repeat: a repeated message is the same message again.
  """
  experiment = experiment_lib.build(config)
  algorithm = experiment.algorithm
  federation = algorithm.view(experiment.federation)
  state = jax.jit(algorithm.init)(experiment.key_init, federation)
  sites.start(config, federation.clients, federation.inputs)
  rows: list[dict[str, Any]] = []
  gaps = [(0.0, 0.0)]
  for one in _kinds_of_rounds(algorithm):
    kinds = one, algorithm
    state, *gap = _compare_round(config, sites, experiment, kinds, state, rows)
    gaps.append((gap[0], gap[1]))
  return Comparison(rows, *map(max, zip(*gaps, strict=True)))


def _kinds_of_rounds(algorithm: FederatedAlgorithm) -> list[FederatedAlgorithm]:
  """Makes a method of each kind of round: a first one may differ from the others."""
  plain = dataclasses.replace(algorithm, warm_up=(), num_warm_up=0)
  if not algorithm.num_warm_up:
    return [plain]
  return [dataclasses.replace(plain, stages=algorithm.warm_up), plain]


def _compare_round(
  config: ml_collections.ConfigDict,
  sites: Sites,
  experiment: Any,
  kinds: tuple[FederatedAlgorithm, FederatedAlgorithm],
  state: State,
  rows: list[dict[str, Any]],
) -> tuple[State, float, float]:
  """Compares one round of a method, and adds a row for each of its exchanges.

  Returns:
    The state after the round, and the largest gaps of its messages and of this state.
  """
  algorithm, whole = kinds
  federation = whole.view(experiment.federation)
  (expected, info), log = jax.jit(lambda *arguments: _recorded(algorithm, *arguments))(
    experiment.key_rounds, state, federation
  )
  stages = (*algorithm.stages, *algorithm.closing)
  order = [e for stage in stages for e in stage.exchanges * stage.times]
  totals, gap, first = [], 0.0, len(rows)
  for exchange, (down, total) in zip(order, log, strict=True):
    message = wire.encode(down)
    answers = sites.ask(whole.exchanges.index(exchange), message)
    parts = [wire.decode(answer, total) for answer in answers]
    totals.append(jax.tree.map(lambda *leaves: sum(map(np.asarray, leaves)), *parts))
    gap = max(gap, largest_gap(totals[-1], total))
    rows.append(
      {
        "method": config.method,
        "exchange": exchange.name,
        "bytes down": len(message),
        "bytes up": len(answers[0]),
        "floats down": num_floats(down),
        "floats up": num_floats(total),
      }
    )
  sums = [sum(row[f"floats {way}"] for row in rows[first:]) for way in ("up", "down")]
  if algorithm.sends:
    assert sums == [int(info.floats_up), int(info.floats_down)]
  replay = jax.jit(
    lambda *arguments: _replayed(algorithm, federation.num_clients, *arguments)
  )
  got = replay(experiment.key_rounds, state.server, federation.server, totals)
  return expected, gap, largest_gap(got, expected.server)


def _recorded(
  algorithm: FederatedAlgorithm, key: jax.Array, state: State, federation: Federation
) -> tuple[tuple[State, RoundInfo], list[tuple[Any, Any]]]:
  """Runs a round as the simulation does, and returns its messages too."""
  placement = algorithm.sized_placement(state, federation)
  collector = Recording(OnDevice(federation, placement))
  result = algorithm.round_with(
    collector, key, state, federation.server, federation.num_clients
  )
  return result, collector.log


def _replayed(
  algorithm: FederatedAlgorithm,
  num_clients: int,
  key: jax.Array,
  server: Any,
  server_set: Any,
  totals: list[Any],
) -> Any:
  """Runs the server's side of a round on sums that came through bytes."""
  collector = Replaying(totals)
  state, _ = algorithm.round_with(
    collector, key, State(server), server_set, num_clients
  )
  return state.server


def largest_gap(one: Any, other: Any) -> float:
  """Finds the largest difference, relative to the size of each array or to one."""

  def relative(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    size = max(1.0, float(np.max(np.abs(b), initial=0.0)))
    return float(np.max(np.abs(a - b), initial=0.0)) / size

  return max(jax.tree.leaves(jax.tree.map(relative, one, other)), default=0.0)


def once_each(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Lets every exchange of a round happen once, in float64."""
  config = ml_collections.ConfigDict(config.to_dict())
  config.dtype, config.mesh = "float64", 1
  config.central.num_steps = config.fedloc.num_iterations = 1
  config.sparse.start_steps = config.sparse.num_steps = 1
  return config


def main() -> None:
  sites: dict[int, Sites] = {}
  rows, gaps = [], []
  for method in _METHODS.value:
    config = once_each(common.config())
    config.method = method
    num_clients = 1 if algorithms.method(method).pooled else config.num_clients
    if num_clients not in sites:
      sites[num_clients] = Sites(num_clients)
    found = compare(config, sites[num_clients])
    rows += found.rows
    gaps.append(
      {
        "method": method,
        "messages": f"{found.message_gap:.1e}",
        "state": f"{found.state_gap:.1e}",
      }
    )
  for processes in sites.values():
    processes.close()
  print(tables.markdown(pd.DataFrame(rows)))
  print("\nlargest difference from the simulation, relative:")
  print(tables.markdown(pd.DataFrame(gaps)))


if __name__ == "__main__":
  common.run(main)
