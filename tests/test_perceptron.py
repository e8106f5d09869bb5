"""The hand-written layer pair against automatic differentiation of the plain one."""

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fedbnr_jax.gp import perceptron
from fedbnr_jax.gp.perceptron import hidden_then_linear

NARROW, WIDE = 3, 9  # On either side of where products become multiply-adds.
EVERY = (0, 1, 2, 3)


def _plain(x, kernel, bias, output):
  return jax.nn.relu(x @ kernel + bias[None, :]) @ output.T


def _arguments(num_rows, num_inputs, size, latent, seed=0, dtype="float64", batch=()):
  rng = np.random.default_rng(seed)
  shapes = [(num_rows, num_inputs), (num_inputs, size), (size,), (latent, size)]
  return [rng.normal(size=(*batch, *shape)).astype(dtype) for shape in shapes]


def _loss(layer):
  """A scalar that weighs every entry differently, and is curved in all of them."""

  def loss(*arguments):
    latent = layer(*arguments)
    weight = jnp.cos(jnp.arange(latent.size, dtype=latent.dtype))
    return jnp.sum(weight * jnp.sin(latent.ravel()))

  return loss


def _of_both(transform, arguments):
  """What a transformation of the hand-written and of the plain layer gives.

  The program is traced anew at each call, so that it sees the sizes of blocks that the
  test has set.
  """

  def run(*arguments):
    return [transform(layer)(*arguments) for layer in (hidden_then_linear, _plain)]

  return jax.tree.map(np.asarray, jax.jit(run)(*arguments))


def _check(arguments, rtol=1e-12):
  """Value and all four gradients."""

  def transform(layer):
    return lambda *a: (layer(*a), jax.grad(_loss(layer), EVERY)(*a))

  got, expected = _of_both(transform, arguments)
  np.testing.assert_allclose(got[0], expected[0], rtol=rtol, atol=rtol)
  for mine, plain in zip(got[1], expected[1], strict=True):
    scale = max(1.0, float(np.max(np.abs(plain))))
    np.testing.assert_allclose(mine, plain, rtol=0, atol=rtol * scale)
    assert np.any(plain != 0)


@pytest.fixture
def blocks(monkeypatch):
  """Makes small shapes go in blocks; tells of how many rows [B, n]."""
  monkeypatch.setattr(perceptron, "_MAX_UNITS", 40)
  monkeypatch.setattr(perceptron, "_BLOCK_UNITS", 30)

  def sizes(x, size):
    rows = perceptron._row_blocks(x, size)
    return None if rows is None else rows.shape[:2]

  return sizes


@pytest.mark.parametrize("num_inputs", [1, NARROW, WIDE])
@pytest.mark.parametrize("latent", [1, NARROW, WIDE])
def test_value_and_every_gradient_are_the_plain_ones(num_inputs, latent):
  assert NARROW <= perceptron._NARROW < WIDE
  arguments = _arguments(12, num_inputs, 20, latent)
  _check(arguments)


@pytest.mark.parametrize("num_inputs", [NARROW, WIDE])
def test_blocks_of_rows_change_nothing(num_inputs, blocks):
  arguments = _arguments(11, num_inputs, 8, NARROW)
  assert blocks(arguments[0], 8) == (3, 4)  # Twelve rows for eleven.
  _check(arguments)


def test_rows_few_enough_go_at_once(blocks):
  assert blocks(jnp.ones((5, 2)), 8) is None
  assert blocks(jnp.ones((6, 2)), 8) is not None


def test_units_wider_than_a_block_go_row_by_row(blocks):
  arguments = _arguments(3, NARROW, 50, 2)
  assert blocks(arguments[0], 50) == (3, 1)
  _check(arguments)


def test_blocks_are_a_loop_in_the_program(blocks):
  """What the tests of blocks rest on: the sizes are read at every trace."""
  few, many = (_arguments(num_rows, NARROW, 8, 2) for num_rows in (4, 11))
  gradient = jax.grad(_loss(hidden_then_linear), EVERY)
  assert "scan" not in str(jax.make_jaxpr(gradient)(*few))
  assert str(jax.make_jaxpr(gradient)(*many)).count("scan[") == 2


@pytest.mark.parametrize("num_rows", [4, 11], ids=["whole", "blocks"])
def test_gradient_of_the_gradient_is_the_plain_one(num_rows, blocks):
  arguments = _arguments(num_rows, NARROW, 8, 2)
  assert (blocks(arguments[0], 8) is None) == (num_rows == 4)
  direction = _arguments(num_rows, NARROW, 8, 2, seed=1)

  def slope(layer):
    def along(*point):
      gradient = jax.grad(_loss(layer), EVERY)(*point)
      return sum(jnp.vdot(g, d) for g, d in zip(gradient, direction, strict=True))

    return jax.grad(along, EVERY)

  chex.assert_trees_all_close(*_of_both(slope, arguments), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("num_rows", [4, 11], ids=["whole", "blocks"])
def test_clients_with_their_own_weights_are_a_loop(num_rows, blocks):
  arguments = _arguments(num_rows, NARROW, 8, 2, batch=(3,))
  gradient = jax.value_and_grad(_loss(hidden_then_linear), EVERY)
  got = jax.jit(jax.vmap(gradient))(*arguments)
  plain = jax.jit(jax.value_and_grad(_loss(_plain), EVERY))
  loop = [plain(*(a[k] for a in arguments)) for k in range(3)]
  expected = jax.tree.map(lambda *leaves: np.stack(leaves), *loop)
  chex.assert_trees_all_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_rows", [4, 11], ids=["whole", "blocks"])
def test_clients_that_share_weights_add_their_gradients(num_rows, blocks):
  x, *weights = _arguments(num_rows, NARROW, 8, 2)
  rows = jnp.asarray(np.stack([x, 2 * x, -x]))

  def total(layer):
    losses = jax.vmap(_loss(layer), (0, None, None, None))
    return jax.grad(lambda *w: jnp.sum(losses(rows, *w)), (0, 1, 2))

  chex.assert_trees_all_close(*_of_both(total, weights), rtol=1e-12, atol=1e-12)


def test_unit_at_exactly_zero_passes_no_gradient():
  """The convention of jax.nn.relu."""
  x, kernel, output = np.ones((1, 2)), np.ones((2, 3)), np.ones((1, 3))
  bias = np.array([-2.0, -2.0 + 1e-9, -2.0 - 1e-9])  # x·kernel = 2.
  gradients = _of_both(
    lambda layer: jax.grad(lambda *a: jnp.sum(layer(*a)), EVERY),
    (x, kernel, bias, output),
  )
  chex.assert_trees_all_close(*gradients, rtol=1e-12)
  np.testing.assert_array_equal(gradients[0][2], [0.0, 1.0, 0.0])


def test_float32_stays_float32(any_x64):
  arguments = _arguments(7, NARROW, 20, 4, dtype="float32")
  run = jax.value_and_grad(_loss(hidden_then_linear), EVERY)
  chex.assert_type(jax.tree.leaves(jax.eval_shape(run, *arguments)), jnp.float32)
  _check(arguments, rtol=1e-5)


@pytest.mark.parametrize(
  "shapes",
  [[(3,), (3, 4), (4,), (2, 4)], [(5, 3), (3, 4), (1, 4), (2, 4)]],
  ids=["one row", "bias"],
)
def test_wrong_ranks_are_refused(shapes):
  with pytest.raises(AssertionError, match="rank"):
    hidden_then_linear(*(jnp.ones(shape) for shape in shapes))


sizes = st.integers(1, 9)


@hypothesis.settings(max_examples=10)
@hypothesis.given(sizes, sizes, sizes, sizes, st.integers(0, 2**31 - 1))
def test_any_shape_is_the_plain_layer_whole_and_in_blocks(
  num_rows, num_inputs, size, latent, seed
):
  arguments = _arguments(num_rows, num_inputs, size, latent, seed)

  def value_and_gradients(layer):
    value, pull = jax.vjp(layer, *arguments)
    return value, pull(jnp.cos(value))

  @jax.jit
  def every_way():
    ways = [value_and_gradients(_plain)]
    with pytest.MonkeyPatch.context() as patch:
      for max_units in (10**6, 5):
        patch.setattr(perceptron, "_MAX_UNITS", max_units)
        patch.setattr(perceptron, "_BLOCK_UNITS", max_units)
        ways.append(value_and_gradients(hidden_then_linear))
    return ways

  expected, whole, in_blocks = every_way()
  chex.assert_trees_all_close(whole, expected, rtol=1e-11, atol=1e-11)
  chex.assert_trees_all_close(in_blocks, expected, rtol=1e-11, atol=1e-11)
