"""Rows that join and leave against a posterior computed from scratch."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from fedbnr_jax import ledger_file, membership, model, workflow
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.data import load_table
from fedbnr_jax.gp import blr
from fedbnr_jax.ledger import make_part
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from launch import posterior as launch_posterior
from launch import predict as launch_predict
from launch import train as launch_train
from tests.runs import assert_refused, tiny


def _frame(num_rows, seed):
  rng = np.random.default_rng(seed)
  a, b = rng.normal(size=(2, num_rows))
  site = np.array(["north", "south"])[rng.integers(2, size=num_rows)]
  y = 100 + 30 * np.sin(a) + 5 * b + 3 * rng.normal(size=num_rows)
  return pd.DataFrame({"a": a, "b": b, "site": site, "y": y})


def _strange():
  """Rows whose targets are far from what the others have."""
  frame = _frame(30, 2)
  return frame.assign(y=400.0 - frame["y"])


def _trained(folder, method):
  """A trained run, its table, the rows it was trained on, and new ones."""
  table = _frame(80, 0)
  table.to_csv(folder / "table.csv", index=False)
  config = tiny(
    method=method,
    data__source="table",
    data__path=str(folder / "table.csv"),
    data__target="y",
    data__client="site",
  )
  launch_train.train(config, str(folder / "run"))
  experiment = experiment_lib.build(config)
  rows = {
    name: table.iloc[np.sort(part)]
    for name, part in zip(experiment.client_names, experiment.client_rows, strict=True)
  }
  for name, frame in {**rows, "new": _frame(37, 1), "strange": _strange()}.items():
    frame.to_csv(folder / f"{name}.csv", index=False)
  return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run with noise that varies."""
  return _trained(tmp_path_factory.mktemp("membership"), "fedbnr-ev")


def _update(folder, capsys, **tables):
  sources = {name: [str(folder / f"{one}.csv")] for name, one in tables.items()}
  launch_posterior.update(
    str(folder / "run"), sources.get("add", []), sources.get("remove", [])
  )
  return capsys.readouterr().out


def _from_scratch(folder, *tables):
  """The posterior of the rows of these tables, in one go."""
  trained = model.load(folder / "run")
  frame = pd.concat([pd.read_csv(folder / f"{name}.csv") for name in tables])
  stats = trained.statistics(trained.rows(frame.reset_index(drop=True)))
  base = ledger_file.read(folder / "run" / "posterior.npz")
  whole = base._replace(training=make_part("", stats, base.tags), joined=())
  return membership.with_posterior(trained.state, whole)


def _assert_posterior(state, wanted):
  for a, b in zip(
    jax.tree.leaves((state.server.stats, state.server.posterior)),
    jax.tree.leaves((wanted.server.stats, wanted.server.posterior)),
    strict=True,
  ):
    gap = np.linalg.norm(np.asarray(a) - np.asarray(b))
    assert gap <= 1e-8 * np.linalg.norm(np.asarray(b))


@pytest.mark.parametrize("draws", [0, 6])
def test_a_ledger_keeps_how_held_out_rows_have_scaled_error_bars(draws):
  """Those of the function too: σ and λ have the factor, as they had in training."""
  rows = load_table(_frame(80, 0), target="y", client="site")
  config = tiny(method="fedbnr-ard", sparse__posterior_samples=draws)
  config.sparse.noise, config.data.client = "rescaled", "site"
  run = experiment_lib.build(config, rows)
  state = training.train(run, workflow.program_for(run)).state
  ledger = membership.of_training(run, state)
  assert abs(ledger.scale - 1.0) > 0.01
  trained, again = (
    one.server.posterior for one in (state, membership.with_posterior(state, ledger))
  )
  evidence = blr.fit_evidence(jax.tree.map(jnp.asarray, ledger.stats))
  np.testing.assert_allclose(again.prior_std, ledger.scale * evidence[1], rtol=1e-6)
  # The noise is what it was, whatever σ.
  level = [one.noise_std**2 * np.exp(one.noise_offset) for one in (trained, again)]
  np.testing.assert_allclose(*level, rtol=1e-4)
  if draws:  # The trained σ and λ were those of the evidence.
    np.testing.assert_allclose(again.prior_std, trained.prior_std, rtol=1e-4)


@pytest.mark.parametrize("method", ["fedbnr-ev", "fedbnr-ard"])
def test_rows_join_and_leave_exactly(method, run, tmp_path, capsys):
  run = run if method == "fedbnr-ev" else _trained(tmp_path, method)
  trained = model.load(run / "run")
  at_first = (run / "run" / "posterior.npz").read_bytes()
  try:
    assert "rows in the posterior" in _update(run, capsys)
    # Nothing has changed: the trained model, to the bit.
    again = model.load(run / "run").state.server.posterior
    np.testing.assert_array_equal(again.mean, trained.state.server.posterior.mean)

    assert "37 rows" in _update(run, capsys, add="new")
    joined = model.load(run / "run").state
    _assert_posterior(joined, _from_scratch(run, "north", "south", "new"))

    _update(run, capsys, remove="south")
    left = model.load(run / "run").state
    _assert_posterior(left, _from_scratch(run, "north", "new"))

    told = _update(run, capsys, remove="new")
    assert told.count("remove") == 2
    _assert_posterior(model.load(run / "run").state, _from_scratch(run, "north"))
    # What predicts is the posterior of now.
    launch_predict.predict(
      str(run / "run"), str(run / "new.csv"), str(run / "predicted.csv")
    )
    predicted = pd.read_csv(run / "predicted.csv")
    wanted = model.load(run / "run").predict(pd.read_csv(run / "new.csv"))
    np.testing.assert_allclose(predicted["mean"], wanted["mean"], rtol=1e-6)
  finally:
    (run / "run" / "posterior.npz").write_bytes(at_first)


def test_a_site_of_the_table_leaves_but_for_its_rows_that_were_held_out(run, capsys):
  table = pd.read_csv(run / "table.csv")
  south = table[table["site"] == "south"]
  south.to_csv(run / "whole_south.csv", index=False)
  held_out = len(south) - len(pd.read_csv(run / "south.csv"))
  at_first = (run / "run" / "posterior.npz").read_bytes()
  try:
    told = _update(run, capsys, remove="whole_south")
    assert f"{held_out} of {len(south)} rows held out" in told
    assert held_out > 0
    _assert_posterior(model.load(run / "run").state, _from_scratch(run, "north"))
    # They are out now, and cannot leave again.
    assert_refused(lambda: _update(run, capsys, remove="south"), "row 1 of", "south")
    # But they can come back.
    _update(run, capsys, add="south")
    state = model.load(run / "run").state
    _assert_posterior(state, _from_scratch(run, "north", "south"))
    _update(run, capsys, remove="south")
  finally:
    (run / "run" / "posterior.npz").write_bytes(at_first)


def test_rows_that_join_from_far_outside_are_counted(run, capsys):
  far = _frame(5, 3)
  far.loc[[1, 4], "a"] += 100.0
  far.to_csv(run / "far.csv", index=False)
  at_first = (run / "run" / "posterior.npz").read_bytes()
  try:
    with pytest.warns(UserWarning, match=r"far\.csv: 2 of 5 rows .*'a'.* join") as said:
      told = _update(run, capsys, add="far")
    assert len(said) == 1
    assert "far.csv: 5 rows" in told  # They are in: the user decides.
    _update(run, capsys, remove="far")  # Who leaves is not warned of.
  finally:
    (run / "run" / "posterior.npz").write_bytes(at_first)


@pytest.mark.parametrize(
  "table, words",
  [
    ("strange", "row 1 of"),
    ("new", "row 1 of"),  # Of the same distribution: sums would not tell.
    ("table", "at least one row"),
    ("twice", "row 2 of"),
    ("held_out", "no row of"),
  ],
)
def test_rows_that_are_not_in_are_refused(run, capsys, table, words):
  first = pd.read_csv(run / "north.csv").iloc[[0, 0]]
  first.to_csv(run / "twice.csv", index=False)
  experiment = experiment_lib.build(model.load(run / "run").config)
  held_out = np.concatenate([experiment.split.validation, experiment.split.test])
  whole = pd.read_csv(run / "table.csv")
  whole.iloc[held_out].to_csv(run / "held_out.csv", index=False)
  before = (run / "run" / "posterior.npz").read_bytes()
  assert_refused(lambda: _update(run, capsys, remove=table), f"{table}.csv", words)
  assert (run / "run" / "posterior.npz").read_bytes() == before


def test_a_site_leaves_with_its_own_rows_also_where_others_have_the_same(
  tmp_path, capsys
):
  rng = np.random.default_rng(4)
  table = pd.DataFrame(rng.integers(3, size=(80, 2)), columns=["a", "y"])
  table["site"] = np.where(np.arange(80) % 2, "north", "south")
  table.to_csv(tmp_path / "table.csv", index=False)
  for name in ("north", "south"):
    table[table["site"] == name].to_csv(tmp_path / f"{name}.csv", index=False)
  fields = {"source": "table", "path": str(tmp_path / "table.csv"), "target": "y"}
  config = tiny(method="fedbnr-ev")
  config.data.update({**fields, "client": "site", "name": ""})
  launch_train.train(config, str(tmp_path / "run"))
  rows = experiment_lib.build(config).client_rows
  _update(tmp_path, capsys, remove="south")
  wanted = table.iloc[rows[0]].reset_index(drop=True)
  trained = model.load(tmp_path / "run")
  stats = trained.statistics(trained.rows(wanted))
  assert float(trained.state.server.stats.count) == len(wanted)
  np.testing.assert_allclose(trained.state.server.stats.gram, stats.gram, atol=1e-8)
  assert_refused(lambda: _update(tmp_path, capsys, remove="south"), "south")


def test_all_or_nothing(run, capsys):
  before = (run / "run" / "posterior.npz").read_bytes()
  assert_refused(lambda: _update(run, capsys, add="new", remove="strange"), "strange")
  assert (run / "run" / "posterior.npz").read_bytes() == before


def test_tables_that_cannot_be_used_are_refused(run, capsys):
  _frame(5, 3).drop(columns="y").to_csv(run / "no_target.csv", index=False)
  assert_refused(lambda: _update(run, capsys, add="no_target"), "'y'", "target")
  _frame(5, 3).drop(columns="a").to_csv(run / "no_input.csv", index=False)
  assert_refused(lambda: _update(run, capsys, add="no_input"), "'a'")


def test_a_damaged_or_foreign_file_is_refused(run, capsys):
  path = run / "run" / "posterior.npz"
  before = path.read_bytes()
  state = model.load(run / "run").state
  ledger = ledger_file.read(path)
  try:
    path.write_bytes(before[:-100])
    assert_refused(lambda: ledger_file.read(path), "damaged")
    ledger_file.write(path, ledger._replace(kernel="other"))
    other = ledger_file.read(path)
    assert_refused(
      lambda: membership.require_kernel(other, state, path), "another kernel"
    )
    assert_refused(lambda: _update(run, capsys, add="new"), "another kernel")
    path.unlink()
    assert_refused(lambda: ledger_file.read(path), "does not exist")
  finally:
    path.write_bytes(before)


def test_batches_give_the_statistics_of_all_rows(run, monkeypatch):
  trained = model.load(run / "run")
  clients = experiment_lib.build(trained.config).federation.clients
  frame = pd.concat([pd.read_csv(run / f"{name}.csv") for name in ("north", "south")])
  rows = trained.rows(frame.reset_index(drop=True))
  whole = trained.statistics(rows)
  monkeypatch.setattr(membership, "_CHUNK", 7)
  by_rows = trained.statistics(rows, transform=jax.jit)
  by_clients = membership.statistics(
    kernels.from_config(trained.config),
    trained.state,
    membership.client_batches(clients),
  )
  for stats in (by_rows, by_clients):
    for a, b in zip(jax.tree.leaves(stats), jax.tree.leaves(whole), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
