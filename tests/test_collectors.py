"""Clients inside one program against a plain loop, in any portions, on any devices."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedbnr_jax import workflow
from fedbnr_jax.data import load_table
from fedbnr_jax.federated import federation
from fedbnr_jax.federated.collectors import OnDevice, map_clients
from fedbnr_jax.federated.exchange import Exchange
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.run import experiment, training
from tests import four_devices, methods
from tests.runs import assert_refused, assert_same_bits, tiny

NUM_CLIENTS = 5
OFFSET = np.array([0.5, -2.0])
BATCH_SIZES = [None, *range(1, NUM_CLIENTS + 5)]


def _rows(num_clients=NUM_CLIENTS):
  rng = np.random.default_rng(0)
  parts = np.split(rng.permutation(40), [3, 11, 18, 30])[:num_clients]
  inputs, targets = rng.normal(size=(40, 2)), rng.normal(size=40)
  return federation.build(
    inputs, targets, parts, dtype=np.float64, on_host=True
  ).clients


def _own(num_clients=NUM_CLIENTS):
  """What clients keep: a number and a vector."""
  return {"scale": 1.0 + np.arange(num_clients), "seen": np.zeros((num_clients, 2))}


def _fn(down, own, rows):
  """A message of several arrays, of two types; own states and reports of two shapes."""
  shifted = rows.x + down[None]
  total = jnp.sum(shifted * rows.y[:, None], axis=0) * own["scale"]
  message = {"sum": total, "one": jnp.ones((), jnp.int32)}
  kept = {"scale": -own["scale"], "seen": own["seen"] + total}
  return (message, ()), kept, {"most": jnp.max(rows.y), "cube": rows.y**3}


@functools.cache
def _mapped(batch_size, some):
  def mapped(own, rows, members=None):
    return map_clients(
      _fn, jnp.asarray(OFFSET), own, rows, Placement(batch_size), members
    )

  return jax.jit(mapped if some else lambda own, rows: mapped(own, rows))


def _looped(own, rows, members):
  """The sum over members; own states and reports, of others as before or zero."""
  x, y = (np.where(rows.mask[..., None], rows.x, 0), np.where(rows.mask, rows.y, 0))
  total, one = np.zeros(2), 0
  own = {name: leaf.copy() for name, leaf in own.items()}
  reports = {"most": np.zeros(NUM_CLIENTS), "cube": np.zeros(y.shape)}
  for k in np.flatnonzero(members):
    message = own["scale"][k] * np.sum((x[k] + OFFSET) * y[k][:, None], axis=0)
    total, one = total + message, one + 1
    own["scale"][k] *= -1
    own["seen"][k] += message
    reports["most"][k], reports["cube"][k] = y[k].max(), y[k] ** 3
  return ({"sum": total, "one": np.int32(one)}, ()), own, reports


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_any_batch_size_gives_the_plain_sum_and_every_report(batch_size):
  own, rows = _own(), _rows()
  got = _mapped(batch_size, False)(own, rows)
  expected = _looped(own, rows, [True] * NUM_CLIENTS)
  chex.assert_trees_all_close(tuple(got), expected, rtol=1e-12, atol=1e-12)
  assert got.total[0]["one"].dtype == np.int32


@given(
  st.sampled_from(BATCH_SIZES),
  st.lists(st.booleans(), min_size=NUM_CLIENTS, max_size=NUM_CLIENTS),
)
@example(3, [False] * NUM_CLIENTS)
@example(2, [True] * NUM_CLIENTS)
@example(1, [False, False, False, False, True])
def test_only_members_are_in_the_sum_and_the_reports_and_keep_anything_new(
  batch_size, members
):
  """Whatever the others hold, be it no number at all."""
  own, rows, members = _own(), _rows(), np.array(members)
  spoilt = rows.replace(
    x=np.where(members[:, None, None], rows.x, np.nan),
    y=np.where(members[:, None], rows.y, np.nan),
    mask=rows.mask | ~members[:, None],
  )
  expected = _looped(own, rows, members)
  for held in (rows, spoilt):
    got = _mapped(batch_size, True)(own, held, members)
    chex.assert_trees_all_close(tuple(got), expected, rtol=1e-12, atol=1e-12)
  # Of those who are not asked, to the bit.
  kept = jax.tree.map(lambda leaf: np.asarray(leaf)[~members], got.own)
  assert_same_bits(kept, jax.tree.map(lambda leaf: leaf[~members], own))


def test_the_clients_work_is_only_as_much_as_the_members_fill():
  """Counted by a callback: two of five, one at a time, are two calls."""
  calls = []

  def fn(down, own, rows):
    jax.debug.callback(lambda: calls.append(1))
    return rows.y, own, {}

  members = np.array([False, True, False, False, True])

  @jax.jit
  def mapped(rows):
    return map_clients(fn, (), (), rows, Placement(1), jnp.asarray(members))

  jax.block_until_ready(mapped(_rows()))
  jax.effects_barrier()
  assert len(calls) == 2


def _echo(down, own, rows):
  return rows.y, own, {"x": rows.x, "y": rows.y}


def test_one_client_is_mapped_too():
  rows = _rows(1)
  got = jax.jit(lambda rows: map_clients(_echo, (), (), rows))(rows)
  chex.assert_trees_all_equal(tuple(got), (rows.y[0], (), {"x": rows.x, "y": rows.y}))


@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_padding_is_zero_for_whoever_computes(batch_size):
  rows = _rows()
  dirty = rows.replace(
    x=np.where(rows.mask[..., None], rows.x, np.nan),
    y=np.where(rows.mask, rows.y, np.nan),
  )
  mapped = jax.jit(lambda rows: map_clients(_echo, (), (), rows, Placement(batch_size)))
  chex.assert_trees_all_equal(mapped(dirty).reports, {"x": rows.x, "y": rows.y})


@pytest.mark.parametrize(
  "own, rows, members",
  [
    ((), _rows().replace(y=_rows().y[:3]), None),
    ((), _rows(), np.ones(3, bool)),
    (np.zeros(3), _rows(), None),
  ],
  ids=["targets", "members", "own state"],
)
def test_clients_of_unequal_number_are_refused(own, rows, members):
  with pytest.raises((ValueError, AssertionError)):
    map_clients(_echo, (), own, rows, members=members)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_impossible_batch_size_is_refused(batch_size):
  assert_refused(
    lambda: map_clients(_fn, OFFSET, _own(), _rows(), Placement(batch_size)),
    "at least 1",
    str(batch_size),
  )


# ----------------------------------------------------------------- several devices


def _reference(method, dtype="float64", **fields):
  """The same rounds on one device, with a program that other tests have too."""
  plain = {name: v for name, v in fields.items() if name not in four_devices.LAYOUT}
  if dtype != "float64":
    plain["dtype"] = dtype
  program, data = methods.compiled(method, **plain), methods.small(dtype=dtype)
  (*_, state), _ = methods.run(program, data)
  return state, program.predict(state, data.clients.x[3])


@pytest.mark.parametrize("name", four_devices.ROUNDS)
def test_devices_and_portions_do_not_change_a_round(name, on_four_devices):
  """Float64; per array, in norm, relative: another order of the same sums."""
  reference = four_devices.of_weight(*_reference(**four_devices.ROUNDS[name]))
  assert four_devices.difference(on_four_devices["rounds"][name], reference) < 1e-6


def test_devices_do_not_change_a_training(on_four_devices):
  experiment, program, result = methods.some_rounds()
  predictions = program.predict(result.state, experiment.test.x)
  reference = four_devices.of_weight(result.state, predictions)
  assert four_devices.difference(on_four_devices["training"], reference) < 1e-6


def test_float32_predicts_the_same_but_for_rounding(on_four_devices):
  """Where a gradient is nothing but rounding, as that of a bias that only shifts what
  a stationary kernel sees, Adam makes whole steps of it: so much for the state."""
  state, predictions = _reference(**four_devices.FLOAT32)
  found = on_four_devices["float32"]
  whole = four_devices.difference(found, four_devices.of_weight(state, predictions))
  error = four_devices.difference(found[-2:], predictions)
  print(f"float32 on 4 devices and on 1, in norm: {whole}, of predictions {error}")
  # How far it goes depends on the order in which a compiler adds: 0.02 with XLA's older
  # emitters, which conftest.py takes.
  assert error < 0.05


# --------------------------------------------------------------- clients in groups


def _answer(down, own, rows):
  (message, _), kept, report = _fn(down, own, rows)
  return message, kept, {"most": report["most"]}


@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_groups_of_clients_give_what_all_at_once_give(batch_size):
  """Each with padding of its own; in float64, to the last digits."""
  own, rows = _own(), _rows()
  sizes = rows.mask.sum(axis=1)
  groups = (
    federation.Group(int(max(sizes[[0, 3]])), (0, 3)),
    federation.Group(int(max(sizes[[1, 2, 4]])), (1, 2, 4)),
  )
  exchange = Exchange("test", None, _answer, None, any_length=True)

  def collected(groups, exchange=exchange):
    whole = federation.Federation(rows, groups=groups)
    collector = OnDevice(whole, Placement(batch_size))
    return jax.jit(lambda own: collector(exchange, jnp.asarray(OFFSET), own, None))(own)

  plain = collected(())
  chex.assert_trees_all_close(collected(groups), plain, rtol=1e-12)
  # An exchange that keeps something of the length of the rows is not divided.
  whole = exchange._replace(client=_fn, any_length=False)
  assert collected(groups, whole).reports["cube"].shape == rows.y.shape


def test_a_method_does_not_notice_groups(monkeypatch):
  monkeypatch.setattr(federation, "_SAVED_ROWS", 10)
  rows = np.random.default_rng(1).normal(size=(90, 3))
  frame = pd.DataFrame(rows, columns=["a", "b", "y"])
  frame["site"] = ["large"] * 60 + ["s", "t", "u"] * 10
  config = tiny(method="fedbnr-ard", num_rounds=2, data__client="site")
  run = experiment.build(config, load_table(frame, target="y", client="site"))
  assert len(run.federation.groups) == 2
  plain = dataclasses.replace(run, federation=run.federation.replace(groups=()))
  program = workflow.program_for(run)
  scores = [training.train(one, program).history[-1] for one in (run, plain)]
  for name in ("train_nll", "val_rmse", "test_nll"):
    assert scores[0][name] == pytest.approx(scores[1][name], rel=1e-5)
