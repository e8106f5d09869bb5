"""No honest sum is refused, under any kernel; what no rows could have made is."""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fedbnr_jax import prediction
from fedbnr_jax.algorithms import kernels, last_layer
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.federation import Rows
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.kernel_model import ready_kernel
from fedbnr_jax.network import checks, row_norms
from fedbnr_jax.network.checks import Known
from fedbnr_jax.run.config import base
from tests import methods

NUM_ROWS, NUM_INPUTS = 6, 2
LARGEST = 3.0  # Of an input, where inputs are normal scores.
KERNELS = (*urk.KERNELS, "deep+linear", "matern32+linear")
UNBOUNDED = ("exponential", "polynomial")
# Kernels whose squared norm is the same for every row.
CONSTANT = ("deep", "replicate", *urk.SPECTRA)


def _config(kernel, basis="fourier", dtype="float64"):
  config = base()
  config.update(method="fedbnr", kernel=kernel, num_samples=4, dtype=dtype)
  config.update(hidden_size=3, latent_size=2, num_hidden_layers=1, mesh=1)
  config.ard.basis = "inducing" if kernel == urk.BLEND else basis
  return config


@functools.cache
def _made(kernel, basis="fourier", dtype="float64"):
  """A compiled message of a kernel, and its norms with and without bounded inputs."""
  config = _config(kernel, basis, dtype)
  feature_map = kernels.from_config(config)
  inputs = methods.inputs_summary() if feature_map.needs_inputs else ()
  start = feature_map.init(jax.random.key(0), jnp.zeros((1, 2), dtype), inputs)
  source = urk.Source(jax.random.key_data(jax.random.key(0)), inputs)
  lossy = feature_map.missing is not None

  @jax.jit
  def message(theta, rows):
    ready = ready_kernel(feature_map, source, theta, rows.x[:1])
    return last_layer.statistics_message(feature_map, ready, rows, with_missing=lossy)

  key = prediction.method_key(config)
  norms = {
    bound: row_norms.by_number(key, NUM_INPUTS, bound) for bound in (None, LARGEST)
  }
  return message, start.theta, norms


def _drawn(kernel, seed, spread=1.0, basis="fourier", dtype="float64"):
  """An honest message of some rows, and what is known of it, twice."""
  message, theta, norms = _made(kernel, basis, dtype)
  rng = np.random.default_rng(seed)
  theta = jax.tree.map(lambda a: a + rng.normal(size=a.shape).astype(a.dtype), theta)
  x = np.clip(spread * rng.normal(size=(NUM_ROWS, NUM_INPUTS)), -LARGEST, LARGEST)
  y, mask = rng.normal(size=NUM_ROWS), rng.random(NUM_ROWS) < 0.8
  rows = Rows(x.astype(dtype), y.astype(dtype), mask)
  made = jax.device_get(message(theta, rows))
  num_features = len(made.moment)
  squares = float(np.sum(x[mask] ** 2)) / NUM_INPUTS
  known = [
    Known(
      rows=float(mask.sum()),
      most_rows=NUM_ROWS,
      norm=of_kernel[num_features].of_sum(theta, squares),
      energy=float(np.sum(y[mask] ** 2)),
    )
    for of_kernel in norms.values()
  ]
  return made, known


@pytest.mark.parametrize("kernel", KERNELS)
@hypothesis.settings(max_examples=10)
@hypothesis.given(st.integers(0, 2**32), st.sampled_from([0.0, 1e-3, 1.0, 10.0]))
def test_honest_statistics_pass(kernel, seed, spread):
  message, both = _drawn(kernel, seed, spread)
  for known in both:
    checks.require_possible(message, known)


@pytest.mark.parametrize(
  "kernel", ["gaussian", "laplacian", "matern12+additive+linear"]
)
@hypothesis.settings(max_examples=10)
@hypothesis.given(st.integers(0, 2**32), st.sampled_from([1e-3, 1.0, 10.0]))
def test_honest_statistics_of_inducing_inputs_pass(kernel, seed, spread):
  message, both = _drawn(kernel, seed, spread, "inducing", "float32")
  for known in both:
    checks.require_possible(message, known)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gram_times_a_million_is_seen_where_features_are_bounded(kernel):
  message, both = _drawn(kernel, 0)
  large = message.replace(gram=message.gram * 1e6)
  for known in both:
    if kernel in UNBOUNDED:
      assert known.norm == checks.Norm()
      continue
    with pytest.raises(InputError, match="has a Gram matrix with a trace of"):
      checks.require_possible(large, known)
  if kernel in CONSTANT:
    small = message.replace(gram=message.gram * 0.9, moment=message.moment * 0.0)
    with pytest.raises(InputError, match="at least"):
      checks.require_possible(small, both[0])


def _without_direction(message):
  """The same trace and a negative direction: the order of eigenvalues' signs."""
  gram = np.asarray(blr.unpack(message.gram))
  values, vectors = np.linalg.eigh(gram)
  values[0] -= 0.1 * values[-1]
  values[-1] *= 1.1
  return message.replace(gram=blr.pack((vectors * values) @ vectors.T))


BAD = {
  "not finite": (
    lambda m: m.replace(energy=np.float64(np.nan)),
    "has numbers that are not finite",
  ),
  "infinite": (
    lambda m: m.replace(moment=m.moment + math.inf),
    "has numbers that are not finite",
  ),
  "indefinite": (_without_direction, "that is no sum of squares"),
  "moment": (lambda m: m.replace(moment=m.moment * 1e3), "that is no sum of squares"),
  "no energy": (lambda m: m.replace(energy=m.energy * 0.0), "no sum of squares"),
  "negative": (lambda m: m.replace(energy=-m.energy), "has a negative sum of squares"),
  "energy": (lambda m: m.replace(energy=m.energy * 1e3), "squares of targets with"),
  "one row more": (lambda m: m.replace(count=m.count + 1), "rows instead of"),
  "half a row": (lambda m: m.replace(count=m.count + 0.5), "no whole numbers"),
  "rows below zero": (lambda m: m.replace(count=-m.count), "negative number of rows"),
  "two sites": (
    lambda m: m.replace(num_clients=m.num_clients + 1),
    "has the statistics of 2 sites instead of 1",
  ),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kernel", ["gaussian", "matern32+linear"])
def test_what_no_rows_could_have_made_is_named(kernel, bad):
  message, both = _drawn(kernel, 1)
  change, words = BAD[bad]
  for known in both:
    with pytest.raises(InputError, match=words) as caught:
      checks.require_possible(change(message), known)
    assert str(caught.value).startswith("has ")
    assert "\n" not in str(caught.value)


def test_a_gradient_shows_no_more_than_that_it_is_finite():
  """What the first line of the module says is not seen, is not seen."""
  theta = {"w": np.ones(3)}
  honest = checks.GradientMessage(theta, np.float64(2.0))
  checks.require_possible(honest, Known())
  checks.require_possible(honest._replace(theta={"w": np.full(3, 1e9)}), Known())
  with pytest.raises(InputError, match="finite"):
    checks.require_possible(honest._replace(theta={"w": np.full(3, np.nan)}), Known())
  with pytest.raises(InputError, match="negative sum of squares of residuals"):
    checks.require_possible(honest._replace(squares=np.float64(-1.0)), Known())


@hypothesis.given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 12))
def test_sums_of_squares_are_told_by_eigenvalues(seed, size, rank):
  """The oracle is what the rule says, computed as it says it."""
  rng = np.random.default_rng(seed)
  rows = rng.normal(size=(rank, size)) * 10.0 ** rng.integers(-6, 7, size)
  gram = rows.T @ rows
  assert checks.is_sum_of_squares(gram)
  values, vectors = np.linalg.eigh(gram)
  for share in (1e-12, 1e-8):  # Either side of the limit, by more than rounding.
    shifted = gram - (values[0] + share * values[-1]) * np.outer(
      vectors[:, 0], vectors[:, 0]
    )
    shifted = 0.5 * (shifted + shifted.T)
    if size > 1:
      assert checks.is_sum_of_squares(shifted) == (share < checks.NEGATIVE)


def test_a_sum_over_no_rows_is_a_sum_of_squares():
  assert checks.is_sum_of_squares(np.zeros((3, 3)))
  assert not checks.is_sum_of_squares(-np.eye(3))
  assert not checks.is_sum_of_squares(np.array([[0.0, 1.0], [1.0, 0.0]]))
  with pytest.raises(InputError, match="not symmetric"):
    checks.require_sum_of_squares(np.array([[1.0, 0.1], [0.0, 1.0]]), "a matrix")


@pytest.mark.parametrize(
  "counts, words",
  [
    ([1.0, 2.5], "has rows that are no whole numbers"),
    ([1.0, -1.0], "has a negative number of rows"),
    ([1.0, 9.0], "has 9 rows, of 5 at the most"),
  ],
)
def test_counts_are_whole_and_not_negative(counts, words):
  with pytest.raises(InputError, match=words):
    checks.require_whole(counts, "rows", 5)


def test_a_histogram_has_the_rows_that_were_told():
  checks.require_total([1.0, 2.0], "rows in bins", 3.0)
  checks.require_total([1.0, 2.0], "rows in bins", None)
  with pytest.raises(InputError, match="has 3 rows in bins in all instead of 4"):
    checks.require_total([1.0, 2.0], "rows in bins", 4.0)
