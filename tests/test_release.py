"""Private release: integers, their sensitivity, noise, budget, what is handed over."""

import errno
import itertools
import json
import math
import os
import re
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.optimize
from absl.testing import flagsaver

import fedbnr_jax as fb
from fedbnr_jax import ledger_file, model, privacy, workflow
from fedbnr_jax.data import Preprocessor
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import read_arrays
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.lock import alone_in
from fedbnr_jax.precision import enable_x64
from fedbnr_jax.release import budget, noise
from fedbnr_jax.release import folder as release_folder
from fedbnr_jax.release.grid import Grid, IntegerSums, row_features
from fedbnr_jax.release.noise import Scales
from fedbnr_jax.release.publish import publish, statistics
from fedbnr_jax.release.trained import load_run
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import seal
from fedbnr_jax.run.records import RunFolder
from launch import predict as launch_predict
from launch import privacy as launch_privacy
from tests.runs import assert_refused, tiny

S = 4
FEATURE_MAP = urk.random_fourier(S)
PARAMS = FEATURE_MAP.init(jax.random.key(3), jnp.zeros((1, 2)))
FEATURES = row_features(FEATURE_MAP, PARAMS.theta, PARAMS.omega)
GRID = Grid(FEATURE_MAP.squared_norm, 3.0, 2 * S)
COARSE = Grid(FEATURE_MAP.squared_norm, 3.0, 2 * S, resolution=4)  # Rounding matters.
BOUNDS = {"age": [0, 120], "income": [0, 1e5], "y": [0, 12]}


# ------------------------------------------------------------- integers and their sum


def _spent(change: IntegerSums, scales: Scales) -> float:
  """ρ of neighbours whose sums differ by this: Σ dᵢ²/(2sᵢ²) over what is released."""
  rows, columns = np.tril_indices(len(change.gram), -1)
  beside = np.sum(change.gram[rows, columns].astype(float) ** 2) / scales.beside**2
  diagonal = np.sum(np.diagonal(change.gram).astype(float) ** 2) + change.count**2
  return float(beside + diagonal / scales.diagonal**2) / 2


@pytest.mark.parametrize("grid", [GRID, COARSE], ids=["fine", "coarse"])
def test_no_row_spends_more_than_the_scales_allow(grid):
  """By brute force: every table of up to four rows, with and without each of them."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4, 2))
  y = np.array([50.0, -50.0, 3.0, 0.1])  # Beyond the bound, on it, within.
  scales = Scales.of(grid, 0.05)
  largest = 0.0
  for chosen in itertools.product([False, True], repeat=4):
    for row in np.flatnonzero(chosen):
      rest = np.array(chosen)
      rest[row] = False
      with_row = grid.sums(FEATURES, x[list(chosen)], y[list(chosen)])
      without = grid.sums(FEATURES, x[rest], y[rest])
      change = IntegerSums(with_row.gram - without.gram, with_row.count - without.count)
      squares = np.sum(change.gram.astype(object) ** 2) + change.count**2
      assert squares <= grid.squared_sensitivity
      spent = _spent(change, scales)
      assert spent <= scales.rho(grid) <= 0.05
      largest = max(largest, spent)
  if grid is GRID:  # There a row with a clipped target attains the bound.
    assert largest > 0.999 * scales.rho(grid)


def test_rounding_is_in_the_sensitivity():
  """Entries that all round up leave the unrounded norm, but not the row's bound."""
  size = 17
  grid = Grid(1.0, 1.0, size - 1, resolution=7)
  # Just above one half: each of the entries is moved by nearly one half.
  unit = np.full(size, 1.5 + 1e-9) / 7
  assert np.linalg.norm(unit) < 1
  features, target = unit[None, :-1] * math.sqrt(2.0), unit[-1:] * math.sqrt(2.0)
  (row,) = grid.integers(features, target)
  assert row.tolist() == [2] * size
  assert 7**2 < np.sum(row**2) <= grid.row_bound


def test_a_row_that_is_too_large_or_not_finite_is_cut_down():
  for value in (1e3, 1e300, np.inf, -np.inf, np.nan):
    features = np.full((2, 2 * S), 0.1)
    features[0, :3] = value
    rows = GRID.integers(features, np.array([1.0, 1.0]))
    assert np.all(np.sum(rows**2, axis=1) <= GRID.row_bound)
    np.testing.assert_array_equal(rows[1], GRID.integers(features[1:], np.ones(1))[0])


def test_sums_are_exact_and_in_any_order_the_same():
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(600, 2)), rng.normal(size=600)
  got = GRID.sums(FEATURES, x, y)
  order = rng.permutation(600)
  again = GRID.sums(FEATURES, x[order], y[order])
  np.testing.assert_array_equal(got.gram, again.gram)
  features = np.concatenate([FEATURES(x[i : i + 1]) for i in range(600)])
  rows = GRID.integers(features, y).astype(object)
  np.testing.assert_array_equal(got.gram, (rows.T @ rows).astype(np.int64))
  assert got.count == 600 * GRID.count_unit


def test_without_noise_the_statistics_come_back():
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(100, 2)), rng.uniform(-3, 3, size=100)
  got = statistics(GRID.sums(FEATURES, x, y), GRID)
  wanted = blr.sufficient_stats(jnp.asarray(FEATURES(x)), jnp.asarray(y))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, atol=3e-3)


# ------------------------------------------------------------------------------- noise


def test_noise_is_of_integers_and_of_the_scale_it_says():
  for scale in (3, 10**10):
    draws = noise.discrete_gaussian([7] * 4000, scale)
    assert all(isinstance(value, int) for value in draws)
    np.testing.assert_allclose(np.std(draws), scale, rtol=0.05)
    np.testing.assert_allclose(np.mean(draws), 7, atol=4 * scale / math.sqrt(4000))
  # The probabilities are those of the discrete Gaussian, not of a rounded one.
  draws = np.array(noise.discrete_gaussian([0] * 20000, 1))
  support = np.arange(-9, 10)
  weights = np.exp(-(support**2) / 2)
  shares = [np.mean(draws == value) for value in (0, 1, 2)]
  np.testing.assert_allclose(shares, (weights / weights.sum())[9:12], atol=0.015)


def test_the_matrix_has_its_two_scales():
  scales = Scales(diagonal=2000, beside=1415)
  sums = IntegerSums(np.arange(9).reshape(3, 3) + np.arange(9).reshape(3, 3).T, 5)
  draws = [noise.with_noise(sums, scales, num_noises=4) for _ in range(400)]
  grams = np.array([one.gram - sums.gram for one in draws])
  np.testing.assert_array_equal(grams, grams.transpose(0, 2, 1))
  std = grams.std(axis=0)
  np.testing.assert_allclose(np.diagonal(std), 4000, rtol=0.2)
  np.testing.assert_allclose(std[np.tril_indices(3, -1)], 2830, rtol=0.2)
  np.testing.assert_allclose(np.std([one.count for one in draws]), 4000, rtol=0.2)


def test_opendp_agrees_on_what_noise_spends():
  from opendp import domains, measurements, metrics, mod

  mod.enable_features("contrib")
  domain = domains.vector_domain(domains.atom_domain(T="i64"))
  scales = Scales.of(GRID, 0.03)
  measurement = measurements.make_gaussian(
    domain, metrics.l2_distance(T="f64"), scale=float(scales.diagonal)
  )
  theirs = measurement.map(math.sqrt(GRID.squared_sensitivity))
  np.testing.assert_allclose(scales.rho(GRID), theirs, rtol=1e-9)
  assert scales.rho(GRID) <= 0.03
  assert 2 * scales.beside**2 >= scales.diagonal**2


def test_noise_of_any_size_is_repaired():
  rng = np.random.default_rng(0)
  sums = GRID.sums(FEATURES, rng.normal(size=(30, 2)), rng.normal(size=30))
  target_scale = math.sqrt(GRID.squared_norm) / GRID.target_bound
  for rho in (1e-6, 1e-2, 1.0):
    scales = Scales.of(GRID, rho)
    got = statistics(noise.with_noise(sums, scales), GRID)
    values = np.linalg.eigvalsh(blr.augmented_gram(got, target_scale))
    assert values[0] >= -1e-9 * values[-1]
    assert got.count >= 1
    fitted = privacy.private_posterior(got, scales.diagonal * GRID.unit)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(fitted))


# ------------------------------------------------------------------------------ budget


def _epsilon(rho: float, delta: float) -> float:
  """(ε, δ) of ρ-zCDP by Proposition 12 of Canonne, Kamath and Steinke, minimised."""

  def at(log_order):
    a = 1 + math.exp(log_order)
    return rho * a + math.log1p(-1 / a) - math.log(delta * a) / (a - 1)

  return scipy.optimize.minimize_scalar(at, bounds=(-3, 9), method="bounded").fun


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0, 8.0])
def test_a_promise_takes_the_noise_that_an_independent_calculation_says(epsilon):
  rho = budget.rho_of(epsilon, 1e-5)
  assert _epsilon(rho, 1e-5) <= epsilon * (1 + 1e-9)
  np.testing.assert_allclose(_epsilon(rho, 1e-5), epsilon, rtol=1e-3)
  # Never less than the least that a Gaussian takes, and not much more.
  ratio = 1 / math.sqrt(2 * rho) / privacy.noise_multiplier(epsilon, 1e-5)
  assert 1 < ratio < 1.1


def test_releases_add_up():
  together = budget.total_epsilon([0.01, 0.02], 1e-5)
  np.testing.assert_allclose(together, budget.total_epsilon([0.03], 1e-5))
  np.testing.assert_allclose(together, _epsilon(0.03, 1e-5), rtol=1e-3)


def test_an_epsilon_that_leaves_only_noise_is_refused():
  assert_refused(lambda: Scales.of(GRID, 1e-13), "nothing but noise")


# -------------------------------------------------------------------------- a release


def _table() -> pd.DataFrame:
  rng = np.random.default_rng(0)
  age, income = rng.normal(50, 9, 200), rng.normal(3e4, 4e3, 200)
  site = np.where(np.arange(200) % 2, "Northwick", "Southwick")
  y = age / 10 + 0.5 * rng.normal(size=200)
  return pd.DataFrame({"age": age, "income": income, "site": site, "y": y})


def _config(path, **fields):
  return tiny(
    kernel="gaussian",
    data__source="table",
    data__path=str(path),
    data__target="y",
    data__client="site",
    data__features="age,income",
    **fields,
  )


def _train(folder, table: pd.DataFrame) -> None:
  folder.mkdir()
  table.to_csv(folder / "patients.csv", index=False)
  config = _config(folder / "patients.csv", data__bounds=json.dumps(BOUNDS))
  workflow.train(config, folder / "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A run with declared bounds that nobody has released."""
  folder = tmp_path_factory.mktemp("release") / "one"
  _train(folder, _table())
  return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
  """A copy of it."""
  return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def command(run):
  """Calls the program on the run with these flags."""
  flags = launch_privacy.flags.FLAGS
  if not flags.is_parsed():
    flags.mark_as_parsed()

  def call(**changes):
    with flagsaver.flagsaver(workdir=str(run), **changes):
      launch_privacy.main()

  return call


def _last_row(record: dict, known: pd.DataFrame) -> np.ndarray:
  """The attack: who knows all training rows but one subtracts them from the mean."""
  means = np.array([*record["input_mean"], record["target_mean"]])
  return (len(known) + 1) * means - known.sum().to_numpy()


def test_the_last_row_cannot_be_told_from_what_is_released(run, tmp_path):
  publish(run, 1.0)
  table = _table()
  train = experiment_lib.build(model.load(run).config).split.train
  columns = table[["age", "income", "y"]]
  known, victim = columns.iloc[train[:-1]], columns.iloc[train[-1]].to_numpy()
  # Means of the rows, which a release used to hold, give that row away.
  fitted = Preprocessor.fit(
    columns.iloc[train][["age", "income"]], columns.y.to_numpy()[train], "y"
  )
  np.testing.assert_allclose(_last_row(fitted.to_json(), known), victim, rtol=1e-10)
  released = json.loads((run / "released" / "preprocessing.json").read_text())
  assert np.all(np.abs(_last_row(released, known) / victim - 1) > 1)
  # There is nothing else to work from: with another row in its place, every file but
  # the noisy model is the same to the last byte.
  other = table.copy()
  other.loc[train[-1], ["age", "income", "y"]] = [99.0, 9e4, 1.0]
  _train(tmp_path / "other", other)
  publish(tmp_path / "other" / "run", 1.0)
  names = sorted(path.name for path in (run / "released").iterdir())
  assert names == [
    "README.txt", "config.json", "model.npz", "preprocessing.json", "release.json",
  ]  # fmt: skip
  for name in set(names) - {"model.npz"}:
    mine, theirs = (
      (folder / "released" / name).read_bytes()
      for folder in (run, tmp_path / "other" / "run")
    )
    assert mine == theirs, name


def test_nothing_exact_is_handed_over(run, trained):
  publish(run, 1.0)
  everything = b"".join(path.read_bytes() for path in (run / "released").iterdir())
  texts = ["patients", "Northwick", "site", str(trained.parent), str(run), "train_rows"]
  for text in texts:
    assert text.encode() not in everything, text
  arrays, _ = read_arrays(run / "released" / "model.npz")
  exact = model.load(run).state.server.stats
  assert set(arrays) == {
    "gram", "moment", "energy", "count", "noise_std", "prior_std",
    *(f"kernel_{index}" for index in range(2)),
  }  # fmt: skip
  for name in ("gram", "moment", "energy", "count"):
    assert not np.any(np.isclose(arrays[name], getattr(exact, name), rtol=1e-6)), name


def test_a_release_says_what_it_promises(run, command, capsys):
  command(release="3")
  printed = capsys.readouterr().out
  assert "ε = 3, δ = 1e-05" in printed
  assert "Spent in all: ε = 3 in 1 release(s), added up by zCDP" in printed
  assert "Not covered: the kernel's parameters" in printed
  note = json.loads((run / "released" / "release.json").read_text())
  assert (note["epsilon"], note["delta"], note["noise"]) == (3.0, 1e-5, "central")
  assert note["sampler"].startswith("opendp ")
  assert "one training row" in note["protects"]
  assert len(note["not_covered"]) == 4
  # In the unit of the statistics: 2c and the count's share, but for the rounding.
  grid = Grid(S / (S - 1), math.sqrt(3), 2 * S)
  np.testing.assert_allclose(
    note["sensitivity"], math.hypot(1, 1 / 8) * 2 * S / (S - 1), rtol=1e-3
  )
  assert note["grid"]["squared_sensitivity"] == grid.squared_sensitivity
  np.testing.assert_allclose(
    note["rho"], (note["sensitivity"] / note["noise_std"]) ** 2 / 2
  )
  words = (run / "released" / "README.txt").read_text()
  for part in ("ε = 3", "δ = 1e-05", "Not covered", "trained on the rows", "one row"):
    assert part in words
  noted = json.loads((run / "summary.json").read_text())["privacy"]
  assert noted["releases"] == 1
  assert noted["last_release"]["epsilon"] == 3.0
  assert "test_rmse" in json.loads((run / "summary.json").read_text())


def test_what_is_spent_adds_up(run, command, capsys):
  command(release="1")
  first = (run / "released" / "model.npz").read_bytes()
  before = sorted(run.rglob("*"))
  assert_refused(
    lambda: command(release="1"), "has spent ε = 1 in 1", "ε = 1.46", "--budget=1.46"
  )
  assert_refused(lambda: command(release="1", budget=1.4), "more than 1.4")
  assert sorted(run.rglob("*")) == before
  command(release="1", budget=1.46)
  assert "ε = 1.46 in 2 release(s)" in capsys.readouterr().out
  assert (run / "released_1" / "model.npz").read_bytes() == first
  assert (run / "released" / "model.npz").read_bytes() != first
  rho = budget.rho_of(1.0, 1e-5)
  for noted in (
    json.loads((run / "budget.json").read_text()),
    json.loads((run / "summary.json").read_text())["privacy"],
    json.loads((run / "released" / "release.json").read_text())["spent_in_total"],
  ):
    np.testing.assert_allclose(noted["rho"], 2 * rho, rtol=1e-6)
  publish(run, 0.5, 1e-6, noise="client", budget=2.0)
  assert [one.noise for one in budget.read(run)] == ["central", "central", "client"]
  assert (run / "released_2").is_dir()


def test_the_budget_is_on_the_disk_before_there_is_noise(run, monkeypatch):
  def killed(*arguments):
    assert len(budget.read(run)) == 1
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(noise, "with_noise", killed)
    with pytest.raises(KeyboardInterrupt):
      publish(run, 1.0)
  assert not (run / "released").exists()
  # Whatever became of it, it is spent.
  assert_refused(lambda: publish(run, 1.0), "has spent ε = 1 in 1")


def _full(*arguments, **options):
  raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_on_a_full_disk_what_is_spent_is_said_to_be(run, monkeypatch):
  publish(run, 0.5)
  with monkeypatch.context() as patch:
    patch.setattr(release_folder.seal, "write_arrays", _full)
    with pytest.raises(InputError) as caught:
      publish(run, 1.0, budget=1.3)
  said = str(caught.value)
  assert "\n" not in said
  for part in ("no space is left", str(run), "ε = 1 of this release is spent", "free"):
    assert part in said, said
  assert "same command" not in said
  # The budget that it names is the one that a refusal names, and is enough.
  named = re.search(r"--budget=\d+\.\d+", said)[0]
  assert_refused(lambda: publish(run, 1.0, budget=1.3), named)
  done = publish(run, 1.0, budget=float(named.partition("=")[2]))
  assert done.num_releases == 3


def test_where_the_budget_cannot_be_written_nothing_is_spent(run, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(budget, "write_json", _full)
    assert_refused(lambda: publish(run, 1.0), "no space is left", "the same command")
  assert publish(run, 1.0).num_releases == 1


def test_other_failures_after_the_budget_say_that_it_is_spent(run, monkeypatch):
  def refused(*arguments):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

  monkeypatch.setattr(release_folder.seal, "write_arrays", refused)
  assert_refused(
    lambda: publish(run, 1.0), "Permission denied", "is spent", "--budget=1.46"
  )


def test_one_release_at_a_time(run):
  with alone_in(run):
    assert_refused(lambda: publish(run, 1.0), "another program", "is writing")
  assert not (run / "budget.json").exists()
  assert not (run / "released").exists()


def test_a_budget_that_is_gone_is_not_taken_for_an_empty_one(run):
  publish(run, 1.0)
  (run / "budget.json").unlink()
  assert_refused(lambda: publish(run, 1.0), "budget.json", "is not in", "restore it")


def test_a_damaged_budget_is_not_taken_for_an_empty_one(run):
  for content in ("", "{}", '{"releases": [{}]}', "[]"):
    (run / "budget.json").write_text(content)
    assert_refused(lambda: publish(run, 1.0), "budget.json is damaged", "restore it")
    assert (run / "budget.json").read_text() == content


@pytest.mark.parametrize(
  "change, parts",
  [
    ({"epsilon": math.inf}, ["no private release"]),
    ({"epsilon": -1.0}, ["epsilon"]),
    ({"delta": 0.0}, ["delta"]),
    ({"delta": 1 / 160}, ["δ = 0.00625", "1/n", "160 training rows"]),
    ({"delta": 0.1}, ["1/n"]),
    ({"noise": "local"}, ["noise", "'central'"]),
    ({"budget": math.nan}, ["--budget", "nan"]),
    ({"budget": math.inf}, ["--budget", "inf"]),
  ],
)
def test_what_is_no_promise_is_refused(run, change, parts):
  before = sorted(run.rglob("*"))
  assert_refused(lambda: publish(run, **({"epsilon": 1.0} | change)), *parts)
  assert set(run.rglob("*")) - set(before) <= {run / ".lock"}
  assert publish(run, 1.0, 0.99 / 160).num_releases == 1


def test_runs_without_bounds_are_refused(tmp_path):
  _table().to_csv(tmp_path / "t.csv", index=False)
  workflow.train(_config(tmp_path / "t.csv", num_rounds=1), tmp_path / "run")
  assert_refused(
    lambda: publish(tmp_path / "run", 1.0),
    "means and deviations",
    "--config.data.bounds",
  )
  assert not (tmp_path / "run" / "released").exists()


def test_without_float64_there_is_no_release(run, monkeypatch):
  monkeypatch.setenv("JAX_ENABLE_X64", "0")
  with enable_x64(False):
    assert_refused(lambda: publish(run, 1.0), "64-bit types", "JAX_ENABLE_X64")


def test_a_run_that_was_trained_without_float64_is_refused(run):
  ledger = ledger_file.read(run / "posterior.npz")
  sums = jax.tree.map(np.float32, ledger.training.sums)
  ledger = ledger._replace(training=ledger.training._replace(sums=sums))
  ledger_file.write(run / "posterior.npz", ledger)
  assert_refused(lambda: publish(run, 1.0), "64-bit types off", "float32")


def test_a_missing_extra_is_refused_before_anything_is_spent(run, monkeypatch):
  for module in ("opendp", "dp_accounting"):
    with monkeypatch.context() as patch:
      patch.setitem(__import__("sys").modules, module, None)
      assert_refused(lambda: publish(run, 1.0), "fedbnr-jax[privacy]")
  assert not (run / "budget.json").exists()


def test_released_folder_alone_is_enough_to_predict(run, tmp_path):
  assert_refused(lambda: release_folder.load(run), "no private release")
  publish(run, 8.0)
  table = tmp_path / "new.csv"
  _table()[["age", "income"]].head(5).to_csv(table, index=False)
  outputs = []
  for released in (False, True):
    output = tmp_path / f"out{released}.csv"
    launch_predict.predict(str(run), str(table), str(output), released)
    outputs.append(pd.read_csv(output))
  assert np.all(np.isfinite(outputs[1]["mean"]))
  assert not np.allclose(outputs[0]["mean"], outputs[1]["mean"])
  shutil.move(run / "released", tmp_path / "handed over")
  alone = release_folder.load(tmp_path / "handed over")
  again = alone.predict(pd.read_csv(table))
  np.testing.assert_allclose(again["mean"], outputs[1]["mean"], rtol=1e-6)


def test_a_release_of_another_kernel_is_refused(run):
  """As one that a version before wrote, whose kernel had fewer parameters."""
  publish(run, 8.0)
  folder = RunFolder(run / "released")
  arrays = seal.read_arrays(folder, "model.npz")
  kernel = [name for name in arrays if name.startswith("kernel_")]
  del arrays[kernel[-1]]
  seal.write_arrays(folder, "model.npz", arrays)
  assert_refused(lambda: release_folder.load(run), "another kernel", "release again")


def test_with_little_noise_a_release_predicts_as_the_statistics_do(run):
  """ε = 100, where noise is small: the same model by another way."""
  publish(run, 100.0)
  opened = load_run(run)
  x, y = opened.training_rows()
  features = opened.features(x.astype(opened.model.config.dtype))
  stats = blr.sufficient_stats(features, jnp.asarray(y))
  released = release_folder.load(run).state.server.stats
  for name in ("gram", "moment", "energy", "count"):
    got, wanted = getattr(released, name), np.asarray(getattr(stats, name))
    assert np.linalg.norm(got - wanted) < 0.1 * np.linalg.norm(wanted), name


def test_a_run_of_a_frame_is_released_with_that_frame(tmp_path):
  """Its folder names no file, and another frame than its own is refused."""
  frame, folder = _table(), tmp_path / "run"
  fields = {"method": "fedbnr", "kernel": "gaussian", "num_rounds": 1}
  fields |= {"num_local_steps": 1, "num_samples": 4, "data__calibration_folds": 0}
  with warnings.catch_warnings(action="ignore"):  # One round has no good error bars.
    fb.fit(
      frame,
      target="y",
      client="site",
      features=["age", "income"],
      bounds=BOUNDS,
      folder=folder,
      progress=False,
      **fields,
    )
  assert_refused(lambda: publish(folder, 1.0), "trained on a frame", "frame=")
  other = frame.assign(age=frame.age + 1)
  assert_refused(lambda: publish(folder, 1.0, frame=other), "are not those")
  assert publish(folder, 1.0, frame=frame).num_releases == 1
  predicted = release_folder.load(folder).predict(frame)
  assert np.all(np.isfinite(predicted["mean"]))
