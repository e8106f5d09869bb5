"""Clients that pass the device in chunks: the same round, and little memory."""

import contextlib
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax import aggregation, devices, federation, streaming, training, urk
from fedbnr_jax import experiment as experiment_lib
from fedbnr_jax.algorithms import central, fedbnr
from fedbnr_jax.optimizers import adam
from fedbnr_jax.participation import Participation
from tests.runs import (
  StopError,
  assert_refused,
  assert_same_bits,
  claimed,
  stop_after,
  timeless,
  tiny,
)

NUM_CLIENTS = 5
KEY = jax.random.key(0)
FEATURE_MAP = urk.random_fourier(3)


def _federation(on_host=True):
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(40, 2))
  targets = np.sin(2 * inputs.sum(1)) + 0.1 * rng.normal(size=40)
  parts = np.split(rng.permutation(40), np.cumsum([3, 11, 7, 12]))
  built = federation.build(inputs, targets, parts, dtype=np.float64, on_host=on_host)
  server = federation.ServerSet(
    jnp.asarray(rng.normal(size=(6, 2))), jnp.asarray(rng.normal(size=6))
  )
  return built.replace(server=server)


def _algorithm(method="fedbnr", rule=Participation()):  # noqa: B008  Immutable.
  aggregator = aggregation.mean()
  if method == "fedbnr-kd":
    aggregator = aggregation.distillation(
      FEATURE_MAP, adam(0.05), num_steps=2, alpha=1.0, min_noise_std=1e-2
    )
  built = fedbnr.fedbnr(
    FEATURE_MAP, adam(0.05), aggregator, num_local_steps=2, participation=rule
  )
  return central.central(built) if method == "central" else built


def _rounds(round_, state, data, num_rounds=2):
  infos = []
  for number in range(num_rounds):
    state, info = round_(jax.random.key(number), state, data)
    infos.append(info)
  return jax.device_get((state, infos))


CASES = {
  "plain": ("fedbnr", Participation(), (1, 2, NUM_CLIENTS, NUM_CLIENTS + 3)),
  "some": ("fedbnr", Participation(0.6, 0.3), (2,)),
  "answering": ("fedbnr", Participation(0.6, 0.3, True), (2,)),
  "distilled": ("fedbnr-kd", Participation(0.6), (2,)),
  "pooled": ("central", Participation(), (2,)),
}


@functools.cache
def _in_memory(name):
  """The initial state, and state and infos after two rounds of the plain round."""
  method, rule, _ = CASES[name]
  algorithm, data = _algorithm(method, rule), _federation(on_host=False)
  state = algorithm.init(KEY, data)
  return state, _rounds(jax.jit(algorithm.round), state, data)


@pytest.mark.parametrize(
  "name, chunk_size",
  [(name, size) for name, (_, _, sizes) in CASES.items() for size in sizes],
)
def test_streamed_round_is_the_one_in_memory(name, chunk_size):
  method, rule, _ = CASES[name]
  state, expected = _in_memory(name)
  streamed = streaming.streamed(_algorithm(method, rule), chunk_size).jit()
  got = _rounds(streamed, state, _federation())
  chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-9)
  for info, other in zip(got[1], expected[1], strict=True):
    np.testing.assert_array_equal(info.answered, other.answered)


def test_round_without_an_answer_changes_no_bit():
  algorithm = _algorithm("fedbnr", Participation(0.4, 0.5))
  state, _ = _in_memory("plain")
  keys = (jax.random.key(n) for n in range(400))
  nobody = next(k for k in keys if not algorithm.draw(k, NUM_CLIENTS).any())
  streamed = streaming.streamed(algorithm, 2).jit()
  after, info = streamed(nobody, state, _federation())
  assert_same_bits(after.replace(num_rounds=state.num_rounds), state)
  assert not np.any(info.answered)


# ------------------------------------------------------------------ what it holds


class _Meter:
  """Sees every chunk that goes to the device, and which of them are still there."""

  def __init__(self, monkeypatch) -> None:
    self.sizes: list[int] = []
    self.most = 0
    share = devices.share

    def watched(tree, mesh):
      put = share(tree, mesh)
      rows, _ = put
      self.sizes.append(rows.x.shape[0])
      self.most = max(self.most, self._held(rows.x.shape))
      return put

    monkeypatch.setattr(devices, "share", watched)

  @staticmethod
  def _held(shape) -> int:
    """Clients whose inputs are on the device."""
    return sum(a.shape[0] for a in jax.live_arrays() if a.shape[1:] == shape[1:])


def test_device_holds_at_most_two_chunks(monkeypatch):
  num_clients, chunk_size = 24, 2
  rng = np.random.default_rng(0)
  # Rows of a number that nothing else has: arrays are told by their shape.
  x, y = rng.normal(size=(num_clients, 17, 2)), rng.normal(size=(num_clients, 17))
  mask = np.ones((num_clients, 17), bool)
  data = federation.Federation(federation.Clients(x, y, mask))
  algorithm = _algorithm()
  state = algorithm.init(KEY, data)
  meter = _Meter(monkeypatch)
  assert meter._held((1, 17, 2)) == 0  # Not even `init` has put rows there.
  streaming.streamed(algorithm, chunk_size).jit()(KEY, state, data)
  assert meter.sizes == [chunk_size] * (2 * num_clients // chunk_size)
  assert chunk_size <= meter.most <= 2 * chunk_size


def test_only_those_asked_go_to_the_device(monkeypatch):
  """Two of five train; then all five send their statistics."""
  state, _ = _in_memory("plain")
  meter = _Meter(monkeypatch)
  streamed = streaming.streamed(_algorithm("fedbnr", Participation(0.4)), 1).jit()
  streamed(KEY, state, _federation())
  assert meter.sizes == [1] * (2 + NUM_CLIENTS)


# ---------------------------------------------------------------------- from disk


def test_federation_on_disk_is_the_one_in_memory(tmp_path):
  data = _federation()
  federation.save_clients(data.clients, tmp_path / "rows")
  mapped = federation.map_from_disk(tmp_path / "rows")
  assert all(isinstance(leaf, np.memmap) for leaf in jax.tree.leaves(mapped.clients))
  assert_same_bits(mapped.clients, data.clients)
  assert mapped.num_clients == NUM_CLIENTS
  algorithm = _algorithm()
  state = algorithm.init(KEY, mapped)
  _, expected = _in_memory("plain")
  streamed = streaming.streamed(algorithm, 2).jit()
  got = _rounds(streamed, state, mapped)
  chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["x", "y", "mask"])
def test_missing_file_is_refused(tmp_path, name):
  federation.save_clients(_federation().clients, tmp_path)
  (tmp_path / f"{name}.npy").unlink()
  assert_refused(
    lambda: federation.map_from_disk(tmp_path), f"{name}.npy", "save_clients"
  )


@pytest.mark.parametrize(
  "content", [b"", b"not an array", b"PK\x03\x04", b"\x93NUMPY\x01\x00"]
)
def test_damaged_file_is_refused(tmp_path, content):
  federation.save_clients(_federation().clients, tmp_path)
  (tmp_path / "y.npy").write_bytes(content)
  assert_refused(lambda: federation.map_from_disk(tmp_path), "y.npy")


def test_truncated_file_is_refused(tmp_path):
  federation.save_clients(_federation().clients, tmp_path)
  whole = (tmp_path / "x.npy").read_bytes()
  (tmp_path / "x.npy").write_bytes(whole[:-100])
  assert_refused(lambda: federation.map_from_disk(tmp_path), "x.npy")


@pytest.mark.parametrize(
  "changed",
  [
    {"y": np.zeros((4, 12))},
    {"mask": np.ones((5, 11), bool)},
    {"mask": np.ones((5, 12))},
    {"x": np.zeros((5, 12))},
  ],
)
def test_files_that_do_not_go_together_are_refused(tmp_path, changed):
  federation.save_clients(_federation().clients, tmp_path)
  for name, array in changed.items():
    np.save(tmp_path / f"{name}.npy", array)
  assert_refused(
    lambda: federation.map_from_disk(tmp_path), "x.npy", "y.npy", "mask.npy"
  )


# ------------------------------------------------------------------- the training


def test_streamed_training_stops_and_goes_on_to_the_same_bits(tmp_path):
  config = tiny(
    num_clients=5,
    kernel="gaussian",
    stream_clients=2,
    participation=0.6,
    num_rounds=3,
    patience=9,
    dtype="float64",
  )
  experiment = experiment_lib.build(config)
  program = training.jit(training.make_program(experiment))
  straight = training.train(experiment, program)
  folder = claimed(tmp_path / "run", experiment)
  with contextlib.suppress(StopError):
    training.train(experiment, program, folder, stop_after(2))
  assert len(folder.metrics()) == 2
  resumed = training.train(experiment, program, folder)
  assert timeless(resumed.history) == timeless(straight.history)
  assert_same_bits(resumed.state, straight.state)

  # And it is the training of clients that are all on the device.
  plain = tiny(**{k: config[k] for k in ("num_clients", "kernel", "participation")})
  plain.update(num_rounds=3, patience=9, dtype="float64")
  plain = experiment_lib.build(plain)
  assert not plain.config.stream_clients
  result = training.train(plain, training.jit(training.make_program(plain)))
  chex.assert_trees_all_close(straight.state, result.state, rtol=1e-8, atol=1e-9)


def test_streamed_training_reads_rows_from_disk(tmp_path):
  config = tiny(kernel="gaussian", stream_clients=1, num_rounds=2, dtype="float64")
  experiment = experiment_lib.build(config)
  federation.save_clients(experiment.federation.clients, tmp_path)
  mapped = dataclasses.replace(
    experiment, federation=federation.map_from_disk(tmp_path)
  )
  program = training.jit(training.make_program(experiment))
  one, other = (training.train(e, program) for e in (experiment, mapped))
  assert timeless(one.history) == timeless(other.history)
  assert_same_bits(one.state, other.state)
