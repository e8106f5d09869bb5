"""Messages: what a client function can see, and that what it sends can be summed.

Everything here is traced and nothing compiled: a trace shows all that a function reads.
"""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax import algorithms
from fedbnr_jax.federated.exchange import num_floats
from fedbnr_jax.federated.federation import Rows
from tests import methods
from tests.methods import KEY, NUM_CLIENTS, SIZES, small

# With what each option adds to its exchanges.
VARIANTS = {
  "pfedgp, predictive": ("pfedgp", {"pfedgp__objective": "predictive"}),
  "fedbnr-exact, bound": ("fedbnr-exact", {"exact__local_steps": 2}),
  "fedbnr-exact, lbfgs": ("fedbnr-exact", {"exact__optimizer": "lbfgs"}),
  "fedbnr-exact, varying": ("fedbnr-exact", {"exact__noise": "varying"}),
  "fedbnr-exact, warm": ("fedbnr-exact", {"exact__warm_start_rounds": 1}),
  "fedbnr-kd, cold": ("fedbnr-kd", {"kd__warm_start": False}),
}
CASES = {name: (name, {}) for name in algorithms.METHODS} | VARIANTS


@functools.cache
def _case(name):
  """A method, what it sees of the federation, and the shapes of its first state."""
  method, fields = CASES[name]
  algorithm = methods.built(method, **fields)
  data = algorithm.view(small())
  return algorithm, data, jax.eval_shape(algorithm.init, KEY, small())


def _one(tree):
  """The shapes of one client's part of a tree [K, ...]."""
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree
  )


def _down(exchange, state, data):
  return jax.eval_shape(exchange.broadcast, state.server, data.server)


def _read(jaxpr) -> set[int]:
  """Which inputs of a traced function its outputs depend on, by position."""
  needed = {id(v) for v in jaxpr.outvars}
  for equation in reversed(jaxpr.eqns):
    if any(id(v) in needed for v in equation.outvars) or equation.effects:
      needed |= {id(v) for v in equation.invars}
  return {i for i, v in enumerate(jaxpr.invars) if id(v) in needed}


@pytest.mark.parametrize("name", CASES)
def test_no_message_down_depends_on_the_servers_targets(name):
  """They serve the server alone; its inputs go down where clients need them."""
  algorithm, data, state = _case(name)
  for exchange in algorithm.exchanges:
    traced = jax.make_jaxpr(exchange.broadcast)(state.server, data.server)
    leaves = jax.tree_util.tree_leaves_with_path((state.server, data.server))
    read = [jax.tree_util.keystr(leaves[i][0]) for i in _read(traced.jaxpr)]
    assert "[1].y" not in read
    assert ("[1].x" in read) == (exchange.name == "kernel" and "kd" in name), read


@pytest.mark.parametrize("name", CASES)
def test_a_client_computes_from_its_arguments_alone(name):
  """Its trace holds no constant that could be data, and data only comes by argument.

  Were the rows or the own state of another client within its reach, or the state of
  the server, then the trace would hold their numbers.
  """
  algorithm, data, state = _case(name)
  for exchange in algorithm.exchanges:
    arguments = _down(exchange, state, data), _one(state.own), _one(data.clients)
    traced = jax.make_jaxpr(exchange.answer)(*arguments)
    for constant in _constants(traced):  # Those of a triangle are places in it.
      assert np.asarray(constant).dtype in (np.int64, np.int32, bool)
    assert len(traced.jaxpr.invars) == len(jax.tree.leaves(arguments))


def _constants(traced: jax.extend.core.ClosedJaxpr) -> list:
  """All arrays that a traced function holds, those of functions in it too."""
  held = list(traced.consts)
  for equation in traced.jaxpr.eqns:
    inner = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_traced)
    for one in filter(_is_traced, inner):
      closed = isinstance(one, jax.extend.core.ClosedJaxpr)
      held += _constants(one if closed else jax.extend.core.ClosedJaxpr(one, ()))
  return held


def _is_traced(value) -> bool:
  return isinstance(value, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr)


def test_data_within_reach_of_a_client_would_be_seen():
  """As of a client function that closes over a federation's rows."""
  rows = small().clients

  def leaking(down, own, mine):
    return jax.jit(lambda x: jnp.sum(x * rows.x[1]))(mine.x), own, {}

  traced = jax.make_jaxpr(leaking)((), (), methods.rows_of(small(), 0))
  assert any(np.array_equal(held, rows.x[1]) for held in _constants(traced))


@pytest.mark.parametrize("name", CASES)
def test_messages_up_are_summable(name):
  """One tree of numbers, of the same shapes and types, however many rows a client has.

  And the server makes of their sum a state like the one before.
  """
  algorithm, data, state = _case(name)
  num_inputs = data.clients.x.shape[2]
  for exchange in algorithm.exchanges:
    down = _down(exchange, state, data)
    messages = []
    for num_rows in (min(SIZES), max(SIZES)):
      x = jax.ShapeDtypeStruct((num_rows, num_inputs), np.float64)
      y, mask = (jax.ShapeDtypeStruct((num_rows,), t) for t in (np.float64, bool))
      up, own, _ = jax.eval_shape(
        exchange.answer, down, _one(state.own), Rows(x, y, mask)
      )
      messages.append(up)
      assert jax.tree.structure(own) == jax.tree.structure(_one(state.own))
    leaves = [
      [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(m)] for m in messages
    ]
    assert all(one == leaves[0] for one in leaves)
    assert len({jax.tree.structure(m) for m in messages}) == 1
    for _, dtype in leaves[0]:
      assert dtype in (np.float64, np.int32)
    total = jax.eval_shape(
      lambda a, b: jax.tree.map(jnp.add, a, b), messages[0], messages[1]
    )
    after = jax.eval_shape(exchange.server, state.server, data.server, total)
    assert _shapes(after) == _shapes(state.server)


def _shapes(tree):
  return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def test_what_stays_with_a_client_is_not_sent():
  """Whose rows, and how many of them, no message tells but by sums.

  An expert's inducing inputs are rows of its own. The messages of FedLoc are as many
  numbers as it has scales, three for two inputs and one of σ, with a weight.
  """
  algorithm, data, state = _case("fedloc")
  iterate, processes = algorithm.exchanges
  up = [
    jax.eval_shape(
      exchange.answer, _down(exchange, state, data), _one(state.own), _one(data.clients)
    )[0]
    for exchange in (iterate, processes)
  ]
  assert [num_floats(message) for message in up] == [4 + 1, 2]


def test_every_kernel_goes_to_every_client_in_local_global_alone():
  """What it broadcasts says so: K kernels, of two length-scales, and a seed."""
  for name in ("local+local", "local+global"):
    algorithm, data, state = _case(name)
    down = [num_floats(_down(e, state, data)) for e in algorithm.exchanges]
    assert down == [2, 2 + (2 * NUM_CLIENTS if name == "local+global" else 0)]


def test_a_local_kernel_sends_only_how_likely_its_rows_are():
  algorithm, data, state = _case("local+local")
  up = [
    jax.eval_shape(e.answer, _down(e, state, data), _one(state.own), _one(data.clients))
    for e in algorithm.exchanges
  ]
  assert [num_floats(message) for message, *_ in up] == [0, 2]
