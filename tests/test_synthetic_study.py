"""The synthetic study: whose rows each method predicts from, and what is written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from fedbnr_jax.report import curves
from launch import synthetic
from tests.runs import assert_refused


@functools.cache
def _study():
  config = synthetic.base_config()
  sizes = {"num_rounds": 2, "num_local_steps": 5, "hidden_size": 8, "num_samples": 5}
  config.update(sizes)
  config.data.num_rows = 40
  config.pfedgp.num_inducing = config.fedloc.num_inducing = 8
  config.fedloc.num_iterations = 3
  models, run = synthetic.learn_kernels(config, 0)
  return models, run, synthetic.two_clients(run)


def _told(method, clients):
  models, _, _ = _study()
  x = jnp.linspace(-1.5, 1.5, 9, dtype=jnp.float32)[:, None]
  return jax.device_get(models[method](clients, x))


def _concatenated(clients):
  return synthetic.Rows(*(jnp.concatenate(part) for part in zip(*clients, strict=True)))


def test_clients_hold_the_two_halves():
  _, run, (left, right) = _study()
  assert int(left.mask.sum()) + int(right.mask.sum()) == len(run.split.train)
  middle = run.preprocessor.transform(pd.DataFrame({"x": [0.0]}))[0, 0]
  assert np.all(np.asarray(left.x[:, 0])[np.asarray(left.mask)] < middle)
  assert np.all(np.asarray(right.x[:, 0])[np.asarray(right.mask)] >= middle)


def test_fedbnr_is_the_model_of_pooled_rows():
  _, _, clients = _study()
  for got, wanted in zip(
    _told("fedbnr", clients), _told("fedbnr", (_concatenated(clients),)), strict=True
  ):
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-9)


def test_pfedgp_has_the_rows_of_who_asks():
  _, _, (left, right) = _study()
  alone = _told("pfedgp", (left,))
  np.testing.assert_allclose(_told("pfedgp", (right, left))[0], alone[0], rtol=1e-6)
  assert not np.allclose(_told("pfedgp", (left, right))[0], alone[0], atol=1e-2)


@pytest.mark.parametrize("method", ["fedloc", "fedloc-poe"])
def test_fedloc_fuses_all_in_any_order(method):
  _, _, (left, right) = _study()
  one, other = _told(method, (left, right)), _told(method, (right, left))
  np.testing.assert_allclose(one[0], other[0], rtol=1e-6, atol=1e-8)
  assert not np.allclose(one[0], _told(method, (left,))[0], atol=1e-2)


def test_errors_of_a_new_client_and_their_table():
  models, run, clients = _study()
  rows = synthetic.new_client(models, run, clients, [2, 6], 0)
  rows += [row | {"seed": 1} for row in rows]
  errors = pd.DataFrame(rows)
  assert len(errors) == 2 * 2 * 2 * len(synthetic.METHODS)
  assert np.all(errors.mse > 0)
  table = synthetic.readable(errors)
  assert list(table["rows"]) == [2, 6, 2, 6]
  mse = errors[errors.method == "fedbnr"].mse.iloc[0]
  assert table["fedbnr"].iloc[0] == f"{mse:.3f} ± 0.000"


def test_figures_are_drawn(tmp_path):
  models, run, clients = _study()
  synthetic.draw_bands(models, run, clients, tmp_path)
  errors = pd.DataFrame(synthetic.new_client(models, run, clients, [2, 6], 0))
  curves.new_client(errors, tmp_path / "new_client.png")
  for name in ("bands.png", "new_client.png"):
    assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize("text", ["0", "-3", "many", "1.5"])
def test_bad_counts_are_refused(text):
  assert_refused(lambda: synthetic._count(text), text)
