"""The ledger: sums that lose no digits, rows that count once, a file that stays."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pandas as pd
import pytest

from fedbnr_jax import files, ledger, ledger_file, model
from fedbnr_jax.gp import blr
from fedbnr_jax.gp.blr import SufficientStats
from fedbnr_jax.lock import alone_in
from fedbnr_jax.posterior import change_rows
from fedbnr_jax.run import experiment as experiment_lib
from tests.runs import assert_refused, assert_same_bits, sites, train_sites


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp("ledger")
  train_sites(folder, method="fedbnr-ev")
  return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
  """A folder of a trained run, to be changed."""
  return shutil.copytree(trained, tmp_path / "run")


def new(num_rows=30, **columns):
  """Rows that none of the training is equal to, from the same ranges."""
  return sites(num_rows, seed=11).assign(**columns)


def ledger_of(run):
  return ledger_file.read(run / "posterior.npz")


@contextlib.contextmanager
def unchanged(run):
  """Checks that a block leaves all files of a folder as they are."""
  before = {path: path.read_bytes() for path in run.rglob("*.*") if path.is_file()}
  yield
  after = {path: path.read_bytes() for path in run.rglob("*.*") if path.is_file()}
  before.pop(run / ".lock", None)
  after.pop(run / ".lock", None)
  assert after == before


def assert_unchanged(run, call, *parts):
  with unchanged(run):
    assert_refused(call, *parts)


# ------------------------------------------------------------------------------ digits


def test_a_posterior_in_float32_says_so_once(run, x64_off, monkeypatch):
  wide = change_rows(run)  # Without a warning: float64 is switched on inside.
  monkeypatch.setenv("JAX_ENABLE_X64", "0")  # As on a device that has none.
  with pytest.warns(UserWarning, match="JAX_ENABLE_X64.*posterior.*float32") as caught:
    narrow = change_rows(run, add=[("a.csv", new(5)), ("b.csv", new(7))])
  assert len(caught) == 1
  assert narrow.num_rows == wide.num_rows + 12


def test_a_table_that_joins_and_leaves_takes_no_digits_with_it(run):
  at_first = ledger_of(run).stats
  noise = change_rows(run).noise_std
  # Far out, but not absurd: subtracting their energy again would leave the noise wrong.
  table = new(y=1e6)
  far = change_rows(run, add=[("far.csv", table), ("new.csv", new(20, a=0.0))])
  assert far.noise_std > 1e3 * noise
  change_rows(run, remove=[("far.csv", table)])
  both = change_rows(run, remove=[("new.csv", new(20, a=0.0))])
  assert both.noise_std == pytest.approx(noise, rel=1e-3)  # By evidence, no rounding.
  assert_same_bits(ledger_of(run).stats, at_first)


@pytest.mark.parametrize("target", [1e10, -1e39, 1e300])
def test_an_absurd_target_is_refused_by_its_row(run, target):
  table = new(4)
  table.loc[2, "y"] = target
  call = lambda: change_rows(run, add=[("far.csv", table)])  # noqa: E731
  assert_unchanged(run, call, "row 3 of far.csv", "target", "drop that row")


def test_some_rows_of_a_table_leave_only_while_the_rest_keeps_its_digits(run):
  table = new(30)
  table.loc[7, "y"] = 1e7  # Its energy is 1e10 times that of the others.
  change_rows(run, add=[("new.csv", table)])
  call = lambda: change_rows(run, remove=[("seven.csv", table.iloc[[7]])])  # noqa: E731
  assert_unchanged(run, call, "seven.csv", "digits", "remove new.csv as a whole")
  change_rows(run, remove=[("some.csv", table.iloc[:5])])  # The large one stays.
  assert len(ledger_of(run).joined[0].tags) == 25
  change_rows(run, remove=[("rest.csv", table.iloc[5:])])
  assert ledger_of(run).joined == ()


def random_stats(num_rows, scale):
  features = np.random.default_rng(num_rows).normal(size=(num_rows, 3)) * scale
  y = features.sum(axis=1)
  return SufficientStats(features.T @ features, features.T @ y, y @ y, np.array(1.0))


def test_rounding_is_that_of_all_that_ever_was_in():
  # Each time 1/300 is left: every step alone would cost less than three digits.
  tags = np.arange(4, dtype=np.uint64)
  sizes = [random_stats(7 + index, 10.0 ** (-1.25 * index)) for index in range(4)]
  total = sizes[0]
  for size in sizes[1:]:
    total = jax.tree.map(np.add, total, size)
  part = ledger.make_part("", total, tags)
  for index in range(2):
    part = ledger.less(part, sizes[index], tags[[index]], "one.csv")
  assert_refused(
    lambda: ledger.less(part, sizes[2], tags[[2]], "one.csv"), "digits", "train again"
  )
  # A single small feature counts as much as the others.
  scale = np.array([1.0, 1.0, 1e-5])
  part = ledger.make_part(
    "", jax.tree.map(np.add, random_stats(9, 1.0), random_stats(8, scale)), tags
  )
  assert_refused(
    lambda: ledger.less(part, random_stats(9, [1, 1, 1]), tags[:1], "one"), "digits"
  )


def test_rows_that_were_not_in_cannot_be_subtracted():
  tags = np.arange(2, dtype=np.uint64)
  part = ledger.make_part("", random_stats(9, 1.0), tags)
  other = random_stats(8, 0.9)
  assert_refused(lambda: ledger.less(part, other, tags[:1], "one.csv"), "one.csv")


def test_what_is_not_finite_is_never_written(run):
  path, whole = run / "posterior.npz", ledger_of(run)
  sums = whole.training.sums
  for bad in (np.nan, np.inf):
    broken = whole._replace(
      training=whole.training._replace(sums=sums.replace(energy=np.float64(bad)))
    )
    for write in (ledger_file.write, ledger_file.replace):
      assert_unchanged(run, lambda w=write, b=broken: w(path, b), "not finite")
  # The version before wrote such files: they are refused, by name.
  old_file(path, whole, energy=np.float64(np.nan))
  assert_refused(lambda: model.load(run), "not finite")
  assert_refused(lambda: ledger_file.read(path), str(path), "not finite", "train again")


def test_inputs_whose_features_overflow_are_refused(run, monkeypatch):
  infinite = lambda self, rows, transform=None: jax.tree.map(  # noqa: E731
    lambda leaf: np.full_like(leaf, np.inf), self.state.server.stats
  )
  monkeypatch.setattr(model.Model, "statistics", infinite)
  call = lambda: change_rows(run, add=[("new.csv", new())])  # noqa: E731
  assert_unchanged(run, call, "new.csv", "too large")


# ------------------------------------------------------------------- rows count once


def test_a_row_that_is_in_or_held_out_cannot_join(run):
  config = model.load(run).config
  experiment = experiment_lib.build(config)
  table = pd.read_csv(config.data.path)
  held_out = table.iloc[np.sort(experiment.split.test)]

  def call(frame):
    return lambda: change_rows(run, add=[("more.csv", frame)])

  assert_unchanged(run, call(table), "row 1 of more.csv", "64 are in and 16 held out")
  assert_unchanged(run, call(held_out), "row 1 of more.csv is held out", "8 held out")
  change_rows(run, add=[("new.csv", new())])
  mixed = pd.concat([new(3, a=9.0), new().iloc[[20]]])
  assert_unchanged(run, call(new()), "row 1 of more.csv is in", "30 are in")
  assert_unchanged(run, call(mixed), "row 4 of more.csv is in")
  twice = [("new2.csv", new(5, a=9.0)), ("again.csv", new(5, a=9.0))]
  assert_unchanged(run, lambda: change_rows(run, add=twice), "row 1 of again.csv")
  # A corrected table takes the place of the one before it.
  better = new().assign(y=lambda f: f["y"].where(f.index > 3, 100.0))
  changed = change_rows(run, add=[("better.csv", better)], remove=[("new.csv", new())])
  assert changed.num_rows == 64 + 30
  # Rows that left can come back.
  change_rows(run, remove=[("better.csv", better)])
  assert change_rows(run, add=[("new.csv", new())]).num_rows == 64 + 30


def test_equal_rows_of_one_table_and_of_other_owners_are_different_rows(run):
  at_first = ledger_of(run).stats
  rounded = pd.concat([new(5)] * 3, ignore_index=True)
  assert change_rows(run, add=[("new.csv", rounded)]).num_rows == 64 + 15
  elsewhere = rounded.assign(site="west")
  assert change_rows(run, add=[("west.csv", elsewhere)]).num_rows == 64 + 30
  once = rounded.iloc[:5]
  assert_refused(lambda: change_rows(run, add=[("once.csv", once)]), "row 1 of once")
  # Who says that they are other measurements is believed, and can take them back.
  assert change_rows(run, add=[("1.csv", once)], allow_equal=True).num_rows == 64 + 35
  assert change_rows(run, remove=[("1.csv", once)]).num_rows == 64 + 30
  assert len(ledger_of(run).joined) == 2
  change_rows(run, remove=[("west.csv", elsewhere), ("new.csv", rounded)])
  assert_same_bits(ledger_of(run).stats, at_first)


def test_rows_without_their_owner_cannot_join(run):
  # Without it, the training's own rows would not be known again.
  table = new().drop(columns="site")
  call = lambda: change_rows(run, add=[("new.csv", table)])  # noqa: E731
  assert_unchanged(run, call, "new.csv", "'site'")


# ---------------------------------------------------------------------------- the file


def old_file(path, whole, **fields):
  """Writes a ledger as the version before did."""
  arrays = vars(whole.stats) | fields
  arrays |= {"tags": whole.tags, "held_out": whole.held_out}
  note = {"kernel": whole.kernel, "noise_offset": whole.noise_offset}
  files.write_arrays(path, arrays, note | {"changes": whole.changes})


def test_the_ledger_before_is_kept(run):
  path = run / "posterior.npz"
  for table in (new(), new(a=0.5)):
    before = path.read_bytes()
    change_rows(run, add=[("new.csv", table)])
    assert ledger_file.previous(path).read_bytes() == before != path.read_bytes()
  path.write_bytes(path.read_bytes()[:-100])
  assert_refused(lambda: model.load(run), "damaged", "posterior.before.npz")
  os.replace(ledger_file.previous(path), path)
  assert len(model.load(run).predict(sites(80))) == 80


def test_a_ledger_is_read_as_it_was_written_in_triangles(run):
  change_rows(run, add=[("new.csv", new())])
  change_rows(run, remove=[("some.csv", new().iloc[:4])])
  whole = ledger_of(run)
  ledger_file.write(run / "again.npz", whole)
  again = ledger_file.read(run / "again.npz")
  assert_same_bits(again, whole)
  assert again.owners == whole.owners
  arrays, _ = files.read_arrays(run / "again.npz")
  size = len(whole.training.sums.moment)
  assert arrays["joined.0.gram"].shape == (size * (size + 1) // 2,)
  np.testing.assert_array_equal(blr.pack(whole.stats.gram).shape, (36,))


def test_a_ledger_of_the_version_before_is_read(run):
  path, whole = run / "posterior.npz", ledger_of(run)
  old_file(path, whole)
  assert_same_bits(ledger_of(run).stats, whole.stats)
  change_rows(run, add=[("new.csv", new())])
  change_rows(run, remove=[("new.csv", new())])
  assert_same_bits(ledger_of(run).stats, whole.stats)


def test_a_ledger_of_another_version_is_refused_in_a_line(run):
  path = run / "posterior.npz"
  arrays, note = files.read_arrays(path)
  files.write_arrays(path, arrays, note | {"version": 3})
  assert_refused(lambda: model.load(run), "another version")
  files.write_arrays(path, vars(ledger.make_part("", random_stats(3, 1), 0).sums), {})
  assert_refused(lambda: model.load(run), "another version")


# ------------------------------------------------------------------------- processes


def posterior_command(run, *flags):
  return [sys.executable, "-m", "launch.posterior", f"--workdir={run}", *flags]


def test_a_second_command_gets_one_line(run):
  with alone_in(run), unchanged(run):
    done = subprocess.run(posterior_command(run), capture_output=True, text=True)
  assert done.returncode == 2
  assert done.stderr.count("\n") == 1
  assert f"another program (process {os.getpid()})" in done.stderr


_KILLED = """
import os, pathlib, signal, sys
from fedbnr_jax import ledger_file
replace = os.replace
def killed(source, target):
  if target.name == "posterior.npz":  # All is written, and not yet in its place.
    os.kill(os.getpid(), signal.SIGKILL)
  replace(source, target)
os.replace = killed
path = pathlib.Path(sys.argv[1])
ledger_file.replace(path, ledger_file.read(path)._replace(kernel="other"))
"""


def test_a_kill_while_writing_leaves_the_ledger_as_it_was(run):
  path = run / "posterior.npz"
  before = path.read_bytes()
  command = [sys.executable, "-c", _KILLED, str(path)]
  assert subprocess.run(command).returncode == -signal.SIGKILL
  assert path.with_name("posterior.npz.tmp").exists()
  assert path.read_bytes() == before == ledger_file.previous(path).read_bytes()
  assert change_rows(run, add=[("new.csv", new())]).num_rows == 64 + 30
