"""The step function: both kernels trained, scored, drawn and told."""

import jax
import numpy as np
import pandas as pd
import pytest
from absl.testing import flagsaver

from fedbnr_jax import experiment as experiment_lib
from fedbnr_jax import model, training
from launch import common, step_function
from tests.runs import assert_refused


@pytest.fixture(scope="module", autouse=True)
def parsed():
  """Flags at their defaults, which only the programs parse."""
  flags = step_function.flags.FLAGS
  if not flags.is_parsed():
    flags.mark_as_parsed()


def tiny():
  with flagsaver.flagsaver(num_rows=40, num_samples=4, num_rounds=2):
    config = step_function.base_config()
  config.num_local_steps = 2
  return config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The folder of a comparison of two seeds."""
  folder = tmp_path_factory.mktemp("step") / "made" / "run"
  step_function.compare(tiny(), 2, folder)
  return folder


def test_flags_reach_the_config():
  config = tiny()
  assert (config.method, config.data.name) == ("central", "step")
  assert (config.data.num_rows, config.num_samples, config.num_rounds) == (40, 4, 2)
  assert config.hidden_size == 2


def test_every_training_is_told_and_summarised(run):
  seeds = pd.read_csv(run / "seeds.csv")
  assert seeds.kernel.tolist() == ["deep"] * 2 + ["replicate"] * 2
  assert seeds.seed.tolist() == [0, 1] * 2
  # f: 1 -> 2 -> 5 with one bias, σ and λ; h: 5 -> 10 -> 5 with biases, and its scale.
  assert seeds.parameters.tolist() == [16 + 116] * 2 + [16] * 2
  scores = pd.read_csv(run / "scores.csv")
  assert scores.kernel.tolist() == ["deep", "replicate"]
  assert scores.seeds.tolist() == [2, 2]
  for name in ("test_rmse", "test_nll", "test_ece"):
    values = seeds[name].to_numpy().reshape(2, 2)
    np.testing.assert_allclose(scores[f"{name}_mean"], values.mean(axis=1))
    spread = np.abs(values[:, 0] - values[:, 1]) / np.sqrt(2)
    np.testing.assert_allclose(scores[f"{name}_std"], spread, rtol=1e-9, atol=1e-12)
  assert (run / "step_function.png").stat().st_size > 5000
  assert sorted(path.name for path in run.iterdir()) == [
    *("scores.csv", "seeds.csv", "step_function.png")
  ]


def test_scores_are_those_of_the_model_on_raw_test_rows(run):
  """By another way: train, predict the table, compare with its targets."""
  config = tiny()
  config.kernel, config.seed = "replicate", 1
  experiment = experiment_lib.build(config)
  result = training.train(experiment, training.jit(training.make_program(experiment)))
  data, rows = experiment.dataset, experiment.split.test
  trained = model.from_result(experiment, result)
  predicted = trained.predict(data.features.iloc[rows], jax.jit)
  gap = data.targets[rows] - predicted["mean"].to_numpy()
  seeds = pd.read_csv(run / "seeds.csv").set_index(["kernel", "seed"])
  row = seeds.loc[("replicate", 1)]
  np.testing.assert_allclose(row.test_rmse, np.sqrt(np.mean(gap**2)), rtol=1e-5)
  std = predicted["std"].to_numpy()
  nll = np.mean(gap**2 / std**2 + np.log(2 * np.pi * std**2)) / 2
  np.testing.assert_allclose(row.test_nll, nll, rtol=1e-4)


def test_texts_of_the_terminal():
  rows = [("deep", 132), ("replicate", 16)]
  seeds = pd.DataFrame(
    [
      {"kernel": kernel, "parameters": size, "seed": seed}
      | {"test_rmse": index + seed, "test_nll": seed - 2.0 * index, "test_ece": 0.5}
      for index, (kernel, size) in enumerate(rows)
      for seed in (0, 2)
    ]
  )
  text = step_function.comparison(seeds)
  assert text.endswith("test_rmse in 0, test_nll in 2, test_ece in 0 of 2 seeds")
  table = step_function.readable(step_function.summary(seeds))
  assert table.test_rmse.tolist() == ["1.000 ± 1.414", "2.000 ± 1.414"]


@pytest.mark.parametrize(
  "changes, part",
  [
    ({"noise_std": 0.0}, "noise_std is 0.0"),
    ({"noise_std": float("nan")}, "noise_std is nan"),
    ({"workdir": None}, "--workdir is missing"),
  ],
)
def test_bad_values_are_refused_before_anything_is_written(tmp_path, changes, part):
  folder = tmp_path / "run"
  with flagsaver.flagsaver(**({"workdir": str(folder)} | changes)):
    assert_refused(step_function.main, part)
  assert not folder.exists()


def test_a_folder_that_is_a_file_is_refused(tmp_path):
  (tmp_path / "run").write_text("")
  assert_refused(lambda: step_function.compare(tiny(), 2, tmp_path / "run"), "workdir")


@pytest.mark.parametrize(
  "flag", ["seeds=1", "num_rows=9", "hidden_size=0", "num_samples=1", "num_rounds=x"]
)
def test_values_out_of_range_are_no_flags(flag, capsys):
  with pytest.raises(SystemExit) as caught, flagsaver.flagsaver():
    common._parse(["step_function", f"--{flag}"])
  assert caught.value.code == 2
  told = capsys.readouterr().err
  assert told.count("\n") == 1
  assert flag in told
