"""One-shot ridge: the pooled ridge of fixed features, after one round."""

import jax
import numpy as np
import pytest

from fedbnr_jax import fit, load, posterior
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import memory, training
from fedbnr_jax.run.program import make_program
from tests import methods
from tests.runs import assert_refused, table, tiny

QUERY = np.random.default_rng(9).normal(size=(4, 2))


@pytest.mark.parametrize("basis", ["fourier", "inducing"])
def test_it_is_the_ridge_of_pooled_rows_under_the_kernel_of_its_seed(basis):
  fields = {"ridge__basis": basis}
  program = methods.compiled("fedridge", **fields)
  state = methods.run(program, methods.small(), 1).last
  kernel = kernels.of_last_layer(methods.config("fedridge", **fields))
  inputs = methods.inputs_summary() if basis == "inducing" else ()
  x, y = methods.table()
  params = kernel.init(methods.KEY, x, inputs)  # Which nobody has trained.
  features, at_query = (np.asarray(kernel.apply(params, r)) for r in (x, QUERY))
  noise_std, prior_std = blr.fit_evidence(blr.sufficient_stats(features, y))
  ratio = (noise_std / prior_std) ** 2
  inverse = np.linalg.inv(features.T @ features + ratio * np.eye(features.shape[1]))
  mean, variance = program.predict(state, QUERY)
  np.testing.assert_allclose(mean, at_query @ inverse @ features.T @ y, rtol=1e-6)
  spread = np.sum((at_query @ inverse) * at_query, axis=1)
  np.testing.assert_allclose(variance, noise_std**2 * (1 + spread), rtol=1e-6)


def test_who_holds_which_rows_does_not_matter():
  program = methods.compiled("fedridge")
  parts = np.array_split(np.arange(methods.NUM_ROWS), 5)
  some = methods.run(program, methods.small(), 1).last
  other = methods.run(program, methods.small(parts, num_padded_rows=12), 1).last
  a, b = (program.predict(state, QUERY) for state in (some, other))
  np.testing.assert_allclose(a, b, rtol=1e-9)


def _history(**fields):
  config = tiny(method="fedridge", num_rounds=9, **fields)
  run = experiment_lib.build(config)
  return training.train(run, make_program(run.algorithm, transform=jax.jit)).history


def test_one_round_is_all():
  (record,) = _history()
  # Two Fourier features a draw, a constant and an input.
  assert record["floats_up"] == 10 * 11 // 2 + 10 + 3


def test_rounds_go_on_until_somebody_answers():
  """With this seed, nobody does in the first two."""
  *before, last = _history(dropout=0.8, seed=1)
  assert [record["clients_answered"] for record in before] == [0] * len(before)
  assert len(before) > 0
  assert last["clients_answered"] > 0


def test_a_run_of_it_is_saved_loaded_and_changed(tmp_path):
  whole = table(80)
  frame = whole.features.assign(y=whole.targets)
  model = fit(
    frame.head(60), target="y", method="fedridge", num_clients=2, progress=False,
    ridge__num_samples=6,
  )  # fmt: skip
  assert len(model.history) == 1
  model.save(tmp_path / "run")
  new = frame.tail(20)
  before = model.predict(new, warn=False)
  added = posterior.change_rows(tmp_path / "run", add=[("new", new)])
  assert added.num_rows == 48 + 20
  posterior.change_rows(tmp_path / "run", remove=[("new", new)])
  back = load(tmp_path / "run").predict(new, warn=False)
  np.testing.assert_allclose(back["mean"], before["mean"], rtol=1e-5)


def test_draws_that_do_not_fit_are_named_by_their_own_field(monkeypatch):
  monkeypatch.setattr(memory, "available", lambda: 1000)
  for fields, name in (
    ({}, "config.ridge.num_samples is 4,"),
    ({"posterior_samples": 7}, "config.posterior_samples is 7,"),
  ):
    config = tiny(method="fedridge", **fields)
    assert_refused(lambda config=config: experiment_lib.build(config), name)


def test_its_kernel_is_that_of_its_own_group():
  config = tiny(method="fedridge", kernel="deep", ridge__kernel="gaussian")
  row = np.zeros((1, 3))
  assert urk.num_features(kernels.of_last_layer(config), row) == 8
  config = tiny(method="fedridge", ridge__kernel="matern32+liner")
  assert_refused(lambda: experiment_lib.build(config), "'linear'")
