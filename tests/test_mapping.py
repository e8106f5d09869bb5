"""The map over clients against a plain loop, in any portions, on any devices."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedbnr_jax import federation, mapping
from fedbnr_jax.mapping import Placement, map_clients
from tests import four_devices
from tests.runs import assert_refused

NUM_CLIENTS = 5
OFFSET = jnp.asarray([0.5, -2.0])
BATCH_SIZES = [None, *range(1, NUM_CLIENTS + 5)]


def _clients(num_clients=NUM_CLIENTS):
  rng = np.random.default_rng(0)
  parts = np.split(rng.permutation(40), [3, 11, 18, 30])[:num_clients]
  inputs, targets = rng.normal(size=(40, 2)), rng.normal(size=40)
  return federation.build(inputs, targets, parts).clients


def _one(rows, k):
  return jax.tree.map(lambda leaf: leaf[k], rows)


def _fn(offset, one):
  """A message of several arrays, one without rank, and reports of two shapes."""
  kept = jnp.where(one.mask, one.y, jnp.zeros_like(one.y))
  shifted = one.x + offset[None].astype(one.x.dtype)
  message = {"sum": jnp.sum(shifted * kept[:, None], axis=0), "one": jnp.ones(())}
  return (message, None), (jnp.max(kept), kept**3)


@functools.cache
def _mapped(batch_size, with_asked):
  def mapped(rows, asked=None):
    return map_clients(_fn, OFFSET, rows, Placement(batch_size), asked)

  return jax.jit(mapped if with_asked else lambda rows: mapped(rows))


def _looped(rows, asked):
  """The sum over the asked, and the reports, zeros for the others."""
  results = [_fn(OFFSET, _one(rows, k)) for k in range(len(asked))]
  zeros = jax.tree.map(jnp.zeros_like, results[0])
  chosen = [result if a else zeros for result, a in zip(results, asked, strict=True)]
  messages, reports = zip(*chosen, strict=True)
  total = jax.tree.map(lambda *leaves: sum(leaves), *messages)
  return total, jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports)


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_any_batch_size_gives_the_plain_sum_and_every_report(batch_size):
  rows = _clients()
  got = _mapped(batch_size, False)(rows)
  chex.assert_trees_all_close(
    got, _looped(rows, [True] * NUM_CLIENTS), rtol=1e-5, atol=1e-6
  )
  assert float(got[0][0]["one"]) == NUM_CLIENTS


@given(
  st.sampled_from(BATCH_SIZES),
  st.lists(st.booleans(), min_size=NUM_CLIENTS, max_size=NUM_CLIENTS),
)
@example(3, [False] * NUM_CLIENTS)
@example(2, [True] * NUM_CLIENTS)
@example(1, [False, False, False, False, True])
def test_only_those_asked_are_in_the_sum_and_in_the_reports(batch_size, asked):
  """Whatever the others hold, be it no number at all."""
  rows, asked = _clients(), np.array(asked)
  expected = _looped(rows, asked)
  held = jnp.asarray(asked)
  spoilt = rows.replace(
    x=jnp.where(held[:, None, None], rows.x, jnp.full_like(rows.x, jnp.nan)),
    y=jnp.where(held[:, None], rows.y, jnp.full_like(rows.y, jnp.nan)),
    mask=rows.mask | ~held[:, None],
  )
  for given_rows in (rows, spoilt):
    got = _mapped(batch_size, True)(given_rows, jnp.asarray(asked))
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)
    assert float(got[0][0]["one"]) == asked.sum()


def test_the_clients_work_is_only_as_much_as_those_asked_fill():
  """Counted by a callback: two of five, one at a time, are two calls."""
  calls = []

  def fn(_, one):
    jax.debug.callback(lambda: calls.append(1))
    return one.y, None

  asked = jnp.asarray([False, True, False, False, True])
  jax.block_until_ready(
    jax.jit(lambda rows: map_clients(fn, None, rows, Placement(1), asked))(_clients())
  )
  jax.effects_barrier()
  assert len(calls) == 2


def test_one_client_is_mapped_too():
  rows = _clients(1)
  total, reports = map_clients(lambda _, one: (one.y, one.x), None, rows)
  chex.assert_trees_all_equal((total, reports), (rows.y[0], rows.x))


@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_padding_is_zero_for_whoever_computes(batch_size):
  rows = _clients()
  dirty = rows.replace(
    x=jnp.where(rows.mask[..., None], rows.x, jnp.full_like(rows.x, jnp.nan)),
    y=jnp.where(rows.mask, rows.y, jnp.full_like(rows.y, jnp.nan)),
  )
  _, reports = map_clients(
    lambda _, one: (one.y, (one.x, one.y)), None, dirty, Placement(batch_size)
  )
  chex.assert_trees_all_equal(reports, (rows.x, rows.y))


def test_clients_of_unequal_number_are_refused():
  rows = _clients()
  with pytest.raises((ValueError, AssertionError)):
    map_clients(lambda _, one: (one.y, None), None, rows.replace(y=rows.y[:3]))


def test_asked_of_another_length_is_refused():
  with pytest.raises((ValueError, AssertionError)):
    map_clients(lambda _, one: (one.y, None), None, _clients(), asked=jnp.ones(3, bool))


@pytest.mark.parametrize("batch_size", [0, -1])
def test_impossible_batch_size_is_refused(batch_size):
  assert_refused(
    lambda: map_clients(_fn, OFFSET, _clients(), Placement(batch_size)),
    "at least 1",
    str(batch_size),
  )


def test_mesh_of_more_devices_than_there_are_is_refused():
  available = len(jax.devices())
  assert_refused(
    lambda: mapping.client_mesh(available + 1),
    "config.mesh",
    str(available + 1),
    f"{available} devices",
  )


@pytest.mark.skipif(len(jax.devices()) > 1, reason="of one device")
@pytest.mark.parametrize("num_devices", [0, 1])
def test_one_device_needs_no_mesh(num_devices):
  assert mapping.client_mesh(num_devices) is None


@given(*[st.integers(1, 10**6)] * 3, st.integers(0, 2), st.integers(1, 10**6))
def test_automatic_batch_is_smaller_for_larger_clients(
  num_params, num_rows, num_inputs, which, more
):
  size = mapping.automatic_batch_size(num_params, num_rows, num_inputs)
  assert size >= 1
  larger = [num_params, num_rows, num_inputs]
  larger[which] += more
  other = mapping.automatic_batch_size(*larger)
  if which == 2:  # More inputs: of as many parameters, fewer are hidden units.
    assert other >= size
  else:
    assert 1 <= other <= size


def test_automatic_batch_of_small_clients_is_many_and_of_huge_ones_one():
  assert mapping.automatic_batch_size(100, 10, 5) > 10
  assert mapping.automatic_batch_size(10**8, 10**4, 5) == 1


# ----------------------------------------------------------------- several devices


@pytest.mark.parametrize("name", four_devices.TRAININGS)
def test_devices_and_portions_do_not_change_a_training(name, on_four_devices):
  """Float64; per array, in norm, relative: another order of the same sums."""
  assert on_four_devices["trainings"][name] < 1e-6


def test_float32_predicts_the_same_but_for_rounding(on_four_devices):
  """Where a gradient is nothing but rounding, as that of a bias that only shifts what
  a stationary kernel sees, Adam makes whole steps of it: so much for the state."""
  found = on_four_devices["float32"]
  print(f"float32 on 4 devices and on 1, in norm: {found}")
  assert found["predictions"] < 1e-2
