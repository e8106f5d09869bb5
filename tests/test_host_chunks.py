"""Clients that pass the device in chunks: the same round, and little memory."""

import contextlib
import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

from fedbnr_jax.federated import federation, placement
from fedbnr_jax.federated.host_chunks import streamed
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from fedbnr_jax.run.program import make_program
from tests import methods
from tests.methods import KEY, NUM_CLIENTS, small
from tests.runs import (
  StopError,
  assert_refused,
  assert_same_bits,
  claimed,
  stop_after,
  timeless,
  tiny,
)

SOME = {"participation": 0.6, "dropout": 0.3}
# Method, fields, and chunk sizes.
CASES = {
  "plain": ("fedbnr", {}, (2, NUM_CLIENTS + 3)),
  "some": ("fedbnr", SOME, (3,)),
  "answering": ("fedbnr", SOME | {"statistics_from": "answering"}, (2,)),
  "distilled": ("fedbnr-kd", {}, (2,)),
  "pooled": ("central", {}, (2,)),
  # Clients keep something, and of some of them it stays as it is.
  "own kernels": ("local+local", SOME, (2,)),
  "own kernels that all see": ("local+global", {}, (3,)),
  "own layers": ("avg+local", {}, (1,)),
  "experts": ("fedloc", {}, (2,)),
}


@functools.cache
def _streamed(name, chunk_size):
  method, fields, _ = CASES[name]
  # In two portions where a chunk is of three: as in memory, which has them at once.
  algorithm = methods.built(method, client_batch_size=2, **fields)
  return streamed(algorithm, chunk_size, jax.jit)


def _rounds(round_, state, data, num_rounds=2):
  infos = []
  for number in range(num_rounds):
    state, info = round_(jax.random.key(number), state, data)
    infos.append(info)
  return jax.device_get((state, infos))


@pytest.mark.parametrize(
  "name, chunk_size",
  [(name, size) for name, (_, _, sizes) in CASES.items() for size in sizes],
)
def test_streamed_round_is_the_one_in_memory(name, chunk_size):
  method, fields, _ = CASES[name]
  states, infos = methods.two_rounds(method, **fields)
  got = _rounds(_streamed(name, chunk_size), states[0], small())
  chex.assert_trees_all_close(got, (states[-1], infos), rtol=1e-8, atol=1e-8)
  for info, other in zip(got[1], infos, strict=True):
    np.testing.assert_array_equal(info.answered, other.answered)
    np.testing.assert_array_equal(info.floats_up, other.floats_up)


@functools.cache
def _key_of_nobody(name):
  """A key in whose round no client answers."""
  method, fields, _ = CASES[name]
  draw = methods.built(method, **fields).draw
  keys = jax.random.split(jax.random.key(1), 400)
  answers = jax.jit(jax.vmap(lambda key: draw(key, NUM_CLIENTS)))(keys)
  return keys[int(np.flatnonzero(~np.any(answers, axis=1))[0])]


def test_round_without_an_answer_changes_no_bit():
  name, chunk_size = "own kernels", 2
  method, fields, _ = CASES[name]
  state = methods.two_rounds(method, **fields).last
  after, info = _streamed(name, chunk_size)(_key_of_nobody(name), state, small())
  assert int(after.server.num_rounds) == 3
  server = after.server.replace(num_rounds=state.server.num_rounds)
  assert_same_bits(after.replace(server=server), state)
  assert not np.any(info.answered)


def test_later_rounds_trace_no_client_again():
  """The host calls them one by one: a trace in each would be most of its time."""
  algorithm, traces = methods.built("fedbnr"), []

  def counted(exchange):
    def client(*arguments):
      traces.append(exchange.name)
      return exchange.client(*arguments)

    return exchange._replace(client=client)

  (stage,) = algorithm.stages
  stage = stage._replace(exchanges=tuple(map(counted, stage.exchanges)))
  round_ = streamed(dataclasses.replace(algorithm, stages=(stage,)), 2, jax.jit)
  state, data = methods.two_rounds("fedbnr").states[0], small()
  state, _ = round_(jax.random.key(0), state, data)
  # Once more where the first state is of other arrays than the next.
  state, _ = round_(jax.random.key(1), state, data)
  num_traces = len(traces)
  round_(jax.random.key(2), state, data)
  assert len(traces) == num_traces <= 8


@pytest.mark.parametrize("chunk_size", [0, -2])
def test_impossible_chunk_is_refused(chunk_size):
  assert_refused(
    lambda: streamed(methods.built("fedbnr"), chunk_size), "chunk size", str(chunk_size)
  )


# ------------------------------------------------------------------ what it holds


class _Meter:
  """Sees every chunk that goes to the device, and which of them are still there."""

  def __init__(self, monkeypatch) -> None:
    self.sizes: list[int] = []
    self.most = 0
    before, share = self.held(), placement.share

    def watched(tree, mesh):
      put = share(tree, mesh)
      _, rows, _ = put
      self.sizes.append(rows.x.shape[0])
      self.most = max(self.most, self.held() - before)
      return put

    monkeypatch.setattr(placement, "share", watched)

  @staticmethod
  def held() -> int:
    """Clients whose inputs are on the device, told by the shape of `small`."""
    return sum(a.shape[0] for a in jax.live_arrays() if a.shape[1:] == (12, 2))


def test_device_holds_at_most_two_chunks(monkeypatch):
  num_clients, chunk_size = 24, 2
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(num_clients, 12, 2)), rng.normal(size=(num_clients, 12))
  mask = np.ones((num_clients, 12), bool)
  data = federation.Federation(federation.Rows(x, y, mask))
  before = _Meter.held()
  state = methods.compiled("fedbnr").init(KEY, data)
  assert _Meter.held() == before  # Not even `init` has put rows there.
  meter = _Meter(monkeypatch)
  _streamed("plain", chunk_size)(KEY, state, data)
  assert meter.sizes == [chunk_size] * (2 * num_clients // chunk_size)
  assert chunk_size <= meter.most <= 2 * chunk_size


def test_only_members_go_to_the_device(monkeypatch):
  """Three of five train, if they answer; then all five send their statistics."""
  states, infos = methods.two_rounds("fedbnr", **SOME)
  answered = int(infos[0].answered.sum())
  assert 1 <= answered <= 3
  meter = _Meter(monkeypatch)
  _streamed("some", 4)(jax.random.key(0), states[0], small())
  # One chunk of the three that may answer, whoever does; then all, in chunks of four.
  assert meter.sizes == [3, 4, 4]


# ---------------------------------------------------------------------- from disk


def test_federation_on_disk_is_the_one_in_memory(tmp_path):
  data = small()
  federation.save_clients(data.clients, tmp_path / "rows")
  mapped = federation.map_from_disk(tmp_path / "rows")
  assert all(isinstance(leaf, np.memmap) for leaf in jax.tree.leaves(mapped.clients))
  assert_same_bits(mapped.clients, data.clients)
  assert mapped.num_clients == NUM_CLIENTS
  (start, *_, last), infos = methods.two_rounds("fedbnr")
  assert_same_bits(methods.compiled("fedbnr").init(KEY, mapped), start)
  got = _rounds(_streamed("plain", 2), start, mapped)
  chex.assert_trees_all_close(got, (last, infos), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["x", "y", "mask"])
def test_missing_file_is_refused(tmp_path, name):
  federation.save_clients(small().clients, tmp_path)
  (tmp_path / f"{name}.npy").unlink()
  assert_refused(
    lambda: federation.map_from_disk(tmp_path), f"{name}.npy", "save_clients"
  )


@pytest.mark.parametrize(
  "content", [b"", b"not an array", b"PK\x03\x04", b"\x93NUMPY\x01\x00"]
)
def test_damaged_file_is_refused(tmp_path, content):
  federation.save_clients(small().clients, tmp_path)
  (tmp_path / "y.npy").write_bytes(content)
  assert_refused(lambda: federation.map_from_disk(tmp_path), "y.npy")


def test_truncated_file_is_refused(tmp_path):
  federation.save_clients(small().clients, tmp_path)
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
  federation.save_clients(small().clients, tmp_path)
  for name, array in changed.items():
    np.save(tmp_path / f"{name}.npy", array)
  assert_refused(
    lambda: federation.map_from_disk(tmp_path), "x.npy", "y.npy", "mask.npy"
  )


# ------------------------------------------------------------------- the training


@functools.cache
def _streamed_training():
  """A training by SOME_ROUNDS, of which two clients at a time are on the device."""
  fields = methods.SOME_ROUNDS | {"stream_clients": 2}
  experiment = experiment_lib.build(tiny(**fields))
  program = make_program(experiment.algorithm, stream_clients=2, transform=jax.jit)
  return experiment, program, training.train(experiment, program)


def test_streamed_training_stops_and_goes_on_to_the_same_bits(tmp_path):
  experiment, program, straight = _streamed_training()
  folder = claimed(tmp_path / "run", experiment)
  with contextlib.suppress(StopError):
    training.train(experiment, program, folder, stop_after(2))
  assert len(folder.metrics()) == 2
  resumed = training.train(experiment, program, folder)
  assert timeless(resumed.history) == timeless(straight.history)
  assert_same_bits(resumed.state, straight.state)
  # And it is the training of clients that are all on the device.
  _, _, plain = methods.some_rounds()
  chex.assert_trees_all_close(straight.state, plain.state, rtol=1e-8, atol=1e-9)


def test_streamed_training_reads_rows_from_disk(tmp_path):
  experiment, program, straight = _streamed_training()
  federation.save_clients(experiment.federation.clients, tmp_path)
  mapped = dataclasses.replace(
    experiment, federation=federation.map_from_disk(tmp_path)
  )
  other = training.train(mapped, program)
  assert timeless(straight.history) == timeless(other.history)
  assert_same_bits(straight.state, other.state)
