"""A last layer of more draws than the kernel was trained with."""

import jax
import numpy as np
import pytest

from fedbnr_jax import fit, load, posterior
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import memory
from tests import methods
from tests.runs import assert_refused, table, tiny

QUERY = np.random.default_rng(9).normal(size=(4, 2))
# With one σ, whose noise does not vary.
CONSTANT = {"evidence__noise": "constant", "sparse__noise": "constant"}
WIDE = {"posterior_samples": 7, **CONSTANT}
METHODS = ["fedbnr", "fedbnr-kd", "fedbnr-ev", "fedbnr-exact"]


@pytest.mark.parametrize("method", [*METHODS, "fedbnr-ard"])
def test_it_is_the_layer_of_all_rows_under_the_trained_kernel(method):
  """Against statistics of the pooled rows."""
  fields = CONSTANT if method == "fedbnr-ard" else WIDE
  program = methods.compiled(method, **fields)
  state = methods.run(program, methods.small(), 2).last
  server = state.server
  wide = kernels.of_last_layer(methods.config(method, **fields))
  params = urk.FeatureParams(server.omega, server.params.theta)
  x, y = methods.table()
  stats = blr.sufficient_stats(wide.apply(params, x), y)
  np.testing.assert_allclose(server.stats.gram, stats.gram, rtol=1e-9, atol=1e-9)
  scales = server.posterior.noise_std, server.posterior.prior_std
  if method in ("fedbnr-ev", "fedbnr-exact", "fedbnr-ard"):
    np.testing.assert_allclose(scales, blr.fit_evidence(stats), rtol=1e-6)
  expected = blr.predict(blr.posterior(stats, *scales), wide.apply(params, QUERY))
  got = program.predict(state, QUERY)
  np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_the_kernel_is_trained_as_without_it(method):
  plain = methods.two_rounds(method).last.server.params
  wide = methods.run(methods.compiled(method, **WIDE), methods.small(), 2).last.server
  jax.tree.map(np.testing.assert_array_equal, wide.params.theta, plain.theta)


def test_a_run_of_it_is_saved_loaded_and_changed(tmp_path):
  whole = table(80)
  frame = whole.features.assign(y=whole.targets)
  options = {"sparse__num_samples": 6, "sparse__posterior_samples": 9}
  options |= {"sparse__start_samples": 4, "sparse__num_steps": 3}
  model = fit(
    frame.head(60), target="y", method="fedbnr-ard", num_rounds=2, num_clients=2,
    seed=0, progress=False, **options,
  )  # fmt: skip
  model.save(tmp_path / "run")
  new = frame.tail(20)
  before = model.predict(new, warn=False)
  again = load(tmp_path / "run").predict(new, warn=False)
  np.testing.assert_array_equal(before["mean"], again["mean"])
  # Inducing inputs, 16 knots for each of two inputs, a constant and the inputs.
  assert model.state.server.stats.gram.shape == (9 + 32 + 3, 9 + 32 + 3)
  added = posterior.change_rows(tmp_path / "run", add=[("new", new)])
  assert added.num_rows == 48 + 20
  joined = load(tmp_path / "run").predict(new, warn=False)
  assert np.max(np.abs(joined["mean"] - before["mean"])) > 1e-3
  posterior.change_rows(tmp_path / "run", remove=[("new", new)])
  back = load(tmp_path / "run").predict(new, warn=False)
  np.testing.assert_allclose(back["mean"], before["mean"], rtol=1e-6)


def test_feedback_of_other_draws_is_refused():
  config = methods.config("fedbnr-ev", evidence__feedback=True, **WIDE)
  assert_refused(lambda: experiment_lib.build(config), "feedback", "posterior_samples")


@pytest.mark.parametrize("name", ["posterior_samples", "sparse.posterior_samples"])
@pytest.mark.parametrize("value", [-1, 1])
def test_bad_numbers_of_draws_are_refused(name, value):
  config = tiny(**{name: value})
  assert_refused(lambda: experiment_lib.build(config), f"config.{name}", str(value))


def test_a_layer_that_does_not_fit_is_refused_with_one_that_does(monkeypatch):
  monkeypatch.setattr(memory, "available", lambda: 8 * 8 * 1000**2)
  fields = {"kernel": "gaussian", "num_rounds": 1}
  assert_refused(
    lambda: experiment_lib.build(tiny(posterior_samples=600, **fields)),
    "config.posterior_samples is 600", "1200 features", "at most 500",
  )  # fmt: skip
  experiment_lib.build(tiny(posterior_samples=500, **fields))
  monkeypatch.setattr(memory, "available", lambda: None)
  experiment_lib.build(tiny(posterior_samples=600, **fields))
