"""Erasure: no file gives the sums of rows that left, and what stays is named."""

import itertools
import json
import os
import shutil

import numpy as np
import pytest

from fedbnr_jax import files, ledger_file, model, workflow
from fedbnr_jax.data import load_table
from fedbnr_jax.gp import blr
from fedbnr_jax.gp.blr import triangle
from fedbnr_jax.posterior import change_rows
from fedbnr_jax.run.checkpoints import Checkpoints
from fedbnr_jax.run.records import RunFolder
from fedbnr_jax.tags import paired, row_tags
from launch import posterior as launch_posterior
from tests.runs import assert_refused, sites, train_sites


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A trained run, by the method whose server also keeps a covariance; and a site."""
  folder = tmp_path_factory.mktemp("erasure")
  table = train_sites(folder, method="fedbnr-exact", exact__noise="varying")
  return folder / "run", table[table["site"] == "south"]


@pytest.fixture
def run(trained, tmp_path):
  return shutil.copytree(trained[0], tmp_path / "run")


@pytest.fixture
def south(trained):
  return [("south.csv", trained[1])]


def gram_of(run, table, rows_in):
  """The Gram matrix of the rows of a table that are in."""
  loaded = model.load(run)
  rows = loaded.rows(table)
  return loaded.statistics(rows.where(rows_in)).gram


def matrices(folder, size):
  """All symmetric matrices that can be read from files of a folder, by their names."""
  found = {}
  for path in folder.rglob("*"):
    if not path.is_file() or ".npz" not in path.name:
      continue
    for name, array in files.read_arrays(path)[0].items():
      where = f"{path.relative_to(folder)}:{name}"
      if array.ndim == 1 and len(array) > 1 and triangle.side(len(array)) == size:
        array = blr.unpack(array)
      if array.shape != (size, size) or not array.any():
        continue
      found[where] = array
      found[f"{where} squared"] = array @ array.T  # Of a Cholesky factor.
      if np.linalg.matrix_rank(array) == size:
        found[f"{where} inverse"] = np.linalg.inv(array)  # Of a covariance.
  return found


def leaks(folder, secret):
  """Pairs of matrices of which a secret one is a sum, in parts, with the identity."""
  found, basis = [], np.eye(len(secret)).ravel()
  for one, other in itertools.combinations(matrices(folder, len(secret)).items(), 2):
    columns = np.stack([one[1].ravel(), other[1].ravel(), basis], axis=1)
    columns = columns / np.linalg.norm(columns, axis=0)
    weights = np.linalg.lstsq(columns, secret.ravel(), rcond=None)[0]
    gap = np.linalg.norm(columns @ weights - secret.ravel())
    if gap < 1e-3 * np.linalg.norm(secret):
      found.append((one[0], other[0]))
  return found


def predictions(run):
  return model.load(run).predict(sites(80).head(9))[["mean", "std"]]


def in_posterior(run, table):
  """Marks the rows of a table that are in."""
  inside = ledger_file.read(run / "posterior.npz").tags
  return paired(row_tags(model.load(run).rows(table)), inside)


def test_removed_sums_cannot_be_had_by_subtraction_once_erased(run, south):
  table = south[0][1]
  secret = gram_of(run, table, in_posterior(run, table))
  told = change_rows(run, remove=south)
  last = run / "checkpoint" / "2.npz"
  shutil.copyfile(last, last.with_suffix(".npz.tmp"))  # As a kill may leave it.
  found = str(leaks(run, secret))
  # So the search would see them.
  for place in ("2.npz:", "2.npz.tmp:", "posterior.before.npz:"):
    assert place in found
  for name in ("best.server.stats.gram", "cholesky squared", "covariance inverse"):
    assert name in found
  assert any("checkpoint/" in line for line in told.traces.erasable)
  erased = change_rows(run, erase=True)
  assert leaks(run, secret) == []
  assert [path.name for path in last.parent.iterdir()] == ["2.npz"]
  assert erased.traces.erasable == ()
  assert "kernel" in erased.traces.lasting[0]
  assert len(erased.traces.lasting) == 5


def test_an_erased_run_predicts_as_the_changed_posterior(run, south, tmp_path):
  change_rows(shutil.copytree(run, tmp_path / "other"), remove=south)
  change_rows(run, remove=south, erase=True)
  wanted = predictions(tmp_path / "other")
  np.testing.assert_allclose(predictions(run), wanted, rtol=1e-6)
  got = model.load(run)
  # Also without the ledger, by what the checkpoint holds.
  (run / "posterior.npz").rename(tmp_path / "ledger.npz")
  np.testing.assert_allclose(predictions(run), wanted, rtol=1e-6)
  saved = Checkpoints(run / "checkpoint").restore(got.state)
  np.testing.assert_array_equal(
    saved.state.server.stats.gram, got.state.server.stats.gram
  )
  # Rows join and leave as before.
  (tmp_path / "ledger.npz").rename(run / "posterior.npz")
  more = [("new.csv", sites(20, 11))]
  count = change_rows(run, add=more).num_rows
  assert change_rows(run).traces.erasable == ()  # Who joined has not left.
  assert change_rows(run, remove=more).num_rows == count - 20


def test_names_tags_and_figures_go_too(run, south, capsys):
  folder, table = RunFolder(run), south[0][1]
  held_out = len(ledger_file.read(folder.posterior).held_out)
  passed = int(np.sum(~in_posterior(run, table)))
  told = change_rows(run, remove=south)
  assert "clients.json: the names 'south'" in told.traces.erasable
  assert (run / "figures" / "predicted.png").exists()
  launch_posterior.update(str(run), [], [], erase=True)
  assert "south" not in capsys.readouterr().out
  for path in run.rglob("*"):
    assert path.is_dir() or b"south" not in path.read_bytes(), path
  assert folder.clients()[0] == ("north", "erased 2")
  assert not list((run / "figures").iterdir())
  assert not ledger_file.previous(folder.posterior).exists()
  assert len(ledger_file.read(folder.posterior).held_out) == held_out - passed
  # Whoever still has the training in memory cannot bring them back.
  config = model.load(run).config
  dataset = load_table(config.data.path, target="y", client="site")
  before = (run / "clients.json").read_text()
  assert_refused(lambda: workflow.save(config, dataset, None, run), "joined or left")
  assert (run / "clients.json").read_text() == before


def test_a_client_that_keeps_some_rows_keeps_its_name(run, south):
  table = south[0][1]
  some = table[in_posterior(run, table)].iloc[:5]
  change_rows(run, remove=[("some.csv", some)], erase=True)
  assert RunFolder(run).clients()[0] == ("north", "south")


def test_a_table_that_joined_and_left_is_in_nothing_that_was_learnt(run):
  more = [("new.csv", sites(20, 11).assign(site="west"))]
  change_rows(run, add=more)
  assert change_rows(run).traces == ((), ())
  told = change_rows(run, remove=more)
  assert any("before" in line for line in told.traces.erasable)
  assert not any("kernel" in line for line in told.traces.lasting)


def test_there_is_nothing_to_erase_before_rows_leave(run):
  before = (run / "posterior.npz").read_bytes()
  assert_refused(lambda: change_rows(run, erase=True), "nothing to erase", "--remove")
  assert (run / "posterior.npz").read_bytes() == before


class Stopped(BaseException):
  """Stands for a kill."""


def test_erasure_that_was_interrupted_is_completed_by_asking_again(
  run, south, tmp_path, monkeypatch
):
  table = south[0][1]
  secret = gram_of(run, table, in_posterior(run, table))
  change_rows(run, remove=south)
  wanted = predictions(run)
  for step in itertools.count():
    copy = shutil.copytree(run, tmp_path / f"copy{step}")
    with monkeypatch.context() as patched:
      calls = itertools.count()

      def stopping(real, calls=calls, step=step):
        def call(*arguments, **options):
          if next(calls) == step:
            raise Stopped
          return real(*arguments, **options)

        return call

      patched.setattr(os, "replace", stopping(os.replace))
      patched.setattr("pathlib.Path.unlink", stopping(type(run).unlink))
      try:
        change_rows(copy, erase=True)
        break
      except Stopped:
        pass
    np.testing.assert_allclose(predictions(copy), wanted, rtol=1e-6)
    change_rows(copy, erase=True)
    assert leaks(copy, secret) == []
    assert json.loads((copy / "clients.json").read_text())["names"][1] == "erased 2"
  assert step > 5
