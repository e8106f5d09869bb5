"""The synthetic study: whose rows each method predicts from, and what is written."""

import functools

import jax
import numpy as np
import pandas as pd
import pytest
from absl.testing import flagsaver

from fedbnr_jax.data.synthetic import bumps
from fedbnr_jax.report import bands
from fedbnr_jax.studies import fixed_kernels, synthetic
from launch import synthetic as launch_synthetic
from tests.drawings import png_size
from tests.runs import assert_refused, tiny

SEEDS = (0, 1)
GRID = np.linspace(-5.0, 5.0, 400)  # Of the study: the same programs serve.


@functools.cache
def _learnt():
  """What both seeds learn, of all methods."""
  config = tiny(num_clients=1, num_rounds=2, kernel="gaussian")
  config.pfedgp.num_inducing = config.fedloc.num_inducing = 8
  config.fedloc.num_iterations = 3
  return config, list(fixed_kernels.learn(config, SEEDS))


@functools.cache
def _rows():
  """The rows of both clients, of a third one and of all, padded to one length."""
  _, ((_, run), _) = _learnt()
  left, right = synthetic.two_clients(run)
  size = len(left.mask)
  x = run.dataset.features["x"].to_numpy()[run.split.train]
  prepare = functools.partial(synthetic.standardised, run.preprocessor, size=size)
  pooled = prepare(x, run.dataset.targets[run.split.train])
  third = prepare(x[::3] + 0.1, bumps(x[::3, None] + 0.1))
  nobody = prepare(x[:0], x[:0])
  return left, right, third, pooled, nobody


def _predict(method, *clients):
  _, ((models, run), _) = _learnt()
  x = run.preprocessor.transform(pd.DataFrame({"x": GRID})).astype(np.float32)
  return jax.device_get(models[method](clients, x))


def test_clients_hold_the_two_halves():
  _, ((_, run), _) = _learnt()
  left, right, *_ = _rows()
  assert int(left.mask.sum()) + int(right.mask.sum()) == len(run.split.train)
  middle = run.preprocessor.transform(pd.DataFrame({"x": [0.0]}))[0, 0]
  assert np.all(np.asarray(left.x[:, 0])[np.asarray(left.mask)] < middle)
  assert np.all(np.asarray(right.x[:, 0])[np.asarray(right.mask)] >= middle)


def test_fedbnr_is_the_model_of_pooled_rows():
  left, right, _, pooled, nobody = _rows()
  split = _predict("fedbnr", left, right, nobody)
  for got, wanted in zip(
    split, _predict("fedbnr", nobody, pooled, nobody), strict=True
  ):
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-9)
  # And not that of one client.
  alone = _predict("fedbnr", left, nobody, nobody)
  assert not np.allclose(alone[0], split[0], atol=1e-2)


def test_pfedgp_predicts_from_the_rows_of_the_last_client_alone():
  left, right, third, *_ = _rows()
  mean, _ = _predict("pfedgp", left, right, third)
  np.testing.assert_allclose(_predict("pfedgp", right, left, third)[0], mean, rtol=1e-6)
  assert not np.allclose(_predict("pfedgp", left, third, right)[0], mean, atol=1e-2)


@pytest.mark.parametrize("method", ["fedloc", "fedloc-poe"])
def test_fedloc_fuses_all_in_any_order(method):
  left, right, third, *_ = _rows()
  mean, _ = _predict(method, left, right, third)
  other, _ = _predict(method, third, left, right)
  np.testing.assert_allclose(mean, other, rtol=1e-6, atol=1e-8)
  for clients in ((right, right, third), (left, left, third), (left, right, right)):
    assert not np.allclose(mean, _predict(method, *clients)[0], atol=1e-2)


def test_seeds_have_rows_kernels_and_models_of_their_own():
  _, ((models, one), (others, other)) = _learnt()
  assert not np.array_equal(one.dataset.targets, other.dataset.targets)
  left, right, third, *_ = _rows()
  x = np.zeros((len(GRID), 1), np.float32)
  for method in fixed_kernels.METHODS:
    means = [kind[method]((left, right, third), x)[0] for kind in (models, others)]
    assert not np.allclose(*means, atol=1e-4)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
  """The folder of a study of both seeds, its errors, and the panels that it drew."""
  config, learnt = _learnt()
  folder, panels = tmp_path_factory.mktemp("synthetic") / "made" / "run", []
  draw = bands.two_panels
  counts = [2, len(_rows()[0].mask)]

  def learn(base, seeds):
    assert base is config
    assert tuple(seeds) == SEEDS
    return iter(learnt)

  def two_panels(left, right):
    panels.extend((left, right))
    return draw(left, right)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(fixed_kernels, "learn", learn)  # They are trained once.
    patch.setattr(bands, "two_panels", two_panels)
    errors = synthetic.run(config, len(SEEDS), counts, folder)
  return folder, errors, counts, panels


def test_errors_are_those_of_a_third_client(study):
  folder, errors, counts, _ = study
  pd.testing.assert_frame_equal(pd.read_csv(folder / "mse.csv"), errors)
  assert len(errors) == 2 * 2 * 2 * len(synthetic.METHODS)
  assert np.all(errors.mse > 0)
  # By another way: the first seed's new client on [5, 15], with all its rows.
  _, ((_, run), _) = _learnt()
  rng, size = np.random.default_rng([0, 101]), counts[-1]
  x = rng.uniform(5.0, 15.0, size)
  y = bumps(x[:, None]) + run.config.data.noise_std * rng.standard_normal(size)
  own = synthetic.standardised(run.preprocessor, x, y, size)
  left, right, *_ = _rows()
  mean, _ = _predict("fedloc", left, right, own)
  gap = run.preprocessor.unstandardise_mean(mean) - bumps(GRID[:, None])
  cell = (errors.seed == 0) & (errors["range"] == "[5, 15]") & (errors["rows"] == size)
  (mse,) = errors.mse[cell & (errors.method == "fedloc")]
  np.testing.assert_allclose(mse, np.mean(gap**2), rtol=1e-6)


def test_table_has_mean_and_spread_over_seeds(study):
  _, errors, counts, _ = study
  table = synthetic.error_table(errors)
  assert list(table["rows"]) == counts * 2
  mse = errors[(errors.method == "fedbnr") & (errors["rows"] == 2)]
  mse = mse[mse["range"] == "[-5, 5]"].mse
  assert table["fedbnr"].iloc[0] == f"{mse.mean():.3f} ± {mse.std():.3f}"


def test_bands_are_of_the_first_client_and_of_both(study):
  folder, _, _, (first, second) = study
  _, ((_, run), _) = _learnt()
  assert png_size(folder / "bands.png")[0] > png_size(folder / "bands.png")[1] > 500
  np.testing.assert_array_equal(first.used, first.train_client == 0)
  assert second.used is None
  left, right, _, _, nobody = _rows()
  mean, variance = _predict("fedbnr", left, right, nobody)
  scaler = run.preprocessor
  np.testing.assert_allclose(second.x, GRID)
  np.testing.assert_allclose(second.mean, scaler.unstandardise_mean(mean), rtol=1e-5)
  np.testing.assert_allclose(
    second.variance, variance * scaler.target_std**2, rtol=1e-5
  )
  # Client 1 is unsure where it has no rows.
  there = first.x > 1.0
  assert first.variance[there].mean() > first.variance[~there].mean()


def test_the_command_hands_its_flags_on_and_prints_the_table(
  tmp_path, capsys, monkeypatch
):
  rows = [
    {"seed": seed, "range": "[-5, 5]", "rows": 7, "method": method, "mse": 1.0 + seed}
    for seed in (0, 2)
    for method in synthetic.METHODS
  ]
  calls = []

  def run(*arguments):
    calls.append(arguments)
    return pd.DataFrame(rows)

  monkeypatch.setattr(launch_synthetic.study, "run", run)
  if not launch_synthetic.flags.FLAGS.is_parsed():
    launch_synthetic.flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(workdir=str(tmp_path), seeds=3, counts=["7", " 9"]):
    launch_synthetic.main()
  ((config, *rest),) = calls
  assert config.to_dict() == synthetic.base_config().to_dict()
  assert rest == [3, [7, 9], tmp_path]
  *_, line, last = capsys.readouterr().out.splitlines()
  assert line == "| [-5, 5] | 7 |" + " 2.000 ± 1.414 |" * 4
  assert last == f"written to {tmp_path}"


@pytest.mark.parametrize("text", ["0", "-3", "many", "1.5"])
def test_bad_counts_are_refused(text):
  assert_refused(lambda: launch_synthetic._count(text), text)
