"""The step function: kernels trained, scored, drawn and compared."""

import jax
import numpy as np
import pandas as pd
import pytest
from absl.testing import flagsaver

from fedbnr_jax import model
from fedbnr_jax.report import bands
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from fedbnr_jax.run.program import make_program
from fedbnr_jax.studies import step_function
from launch import common
from launch import step_function as launch_step_function
from tests.drawings import png_size
from tests.runs import assert_refused


@pytest.fixture(scope="module", autouse=True)
def parsed():
  """Flags at their defaults, which only the programs parse."""
  flags = launch_step_function.flags.FLAGS
  if not flags.is_parsed():
    flags.mark_as_parsed()


def tiny():
  config = step_function.base_config(num_rows=40, num_samples=4, num_rounds=2)
  config.num_local_steps = 2
  return config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The folder of a comparison of two seeds, and the panels that it drew."""
  folder, panels = tmp_path_factory.mktemp("step") / "made" / "run", []
  draw = bands.two_panels

  def two_panels(left, right):
    panels.extend((left, right))
    return draw(left, right)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(bands, "two_panels", two_panels)
    compared = step_function.compare(tiny(), 2, folder)
  return folder, compared, panels


def test_every_training_is_scored_and_summarised(run):
  folder, compared, _ = run
  seeds = pd.read_csv(folder / "seeds.csv")
  pd.testing.assert_frame_equal(seeds, compared.seeds)
  assert seeds.kernel.tolist() == ["deep"] * 2 + ["replicate"] * 2
  assert seeds.seed.tolist() == [0, 1] * 2
  # f: 1 -> 2 -> 5 with one bias, σ and λ; h: 5 -> 10 -> 5 with biases, and its scale.
  assert seeds.parameters.tolist() == [16 + 116] * 2 + [16] * 2
  scores = pd.read_csv(folder / "scores.csv")
  pd.testing.assert_frame_equal(scores, compared.scores)
  assert scores.kernel.tolist() == ["deep", "replicate"]
  assert scores.seeds.tolist() == [2, 2]
  for name in ("test_rmse", "test_nll", "test_ece"):
    values = seeds[name].to_numpy().reshape(2, 2)
    np.testing.assert_allclose(scores[f"{name}_mean"], values.mean(axis=1))
    spread = np.abs(values[:, 0] - values[:, 1]) / np.sqrt(2)
    np.testing.assert_allclose(scores[f"{name}_std"], spread, rtol=1e-9, atol=1e-12)
  assert sorted(path.name for path in folder.iterdir()) == [
    *("scores.csv", "seeds.csv", "step_function.png")
  ]


def test_panels_are_of_the_first_seed(run):
  folder, compared, panels = run
  width, height = png_size(folder / "step_function.png")
  assert width > height > 500
  first = compared.seeds[compared.seeds.seed == 0]
  titles = step_function.KERNELS.values()
  for panel, title, rmse in zip(panels, titles, first.test_rmse, strict=True):
    assert panel.title == f"{title}: test RMSE {rmse:.3f}"
    assert panel.client_names == ("training rows",)
    assert len(panel.train_x) == 40
    assert len(np.unique(panel.truth)) > 1


def test_scores_are_those_of_the_model_on_raw_test_rows(run):
  """By another way: train, predict the table, compare with its targets."""
  config = tiny()
  config.kernel, config.seed = "replicate", 1
  experiment = experiment_lib.build(config)
  result = training.train(
    experiment, make_program(experiment.algorithm, transform=jax.jit)
  )
  data, rows = experiment.dataset, experiment.split.test
  trained = model.from_result(experiment, result)
  predicted = trained.predict(data.features.iloc[rows])
  gap = data.targets[rows] - predicted["mean"].to_numpy()
  seeds = pd.read_csv(run[0] / "seeds.csv").set_index(["kernel", "seed"])
  row = seeds.loc[("replicate", 1)]
  np.testing.assert_allclose(row.test_rmse, np.sqrt(np.mean(gap**2)), rtol=1e-5)
  std = predicted["std"].to_numpy()
  nll = np.mean(gap**2 / std**2 + np.log(2 * np.pi * std**2)) / 2
  np.testing.assert_allclose(row.test_nll, nll, rtol=1e-4)


def _compared():
  """What a study of two seeds could return."""
  rows = [("deep", 132), ("replicate", 16)]
  seeds = pd.DataFrame(
    [
      {"kernel": kernel, "parameters": size, "seed": seed}
      | {"test_rmse": index + seed, "test_nll": seed - 2.0 * index, "test_ece": 0.5}
      for index, (kernel, size) in enumerate(rows)
      for seed in (0, 2)
    ]
  )
  return step_function.Comparison(seeds, step_function.summary(seeds))


def test_the_command_hands_its_flags_on_and_prints_both_texts(
  tmp_path, capsys, monkeypatch
):
  calls = []

  def compare(*arguments):
    calls.append(arguments)
    return _compared()

  monkeypatch.setattr(launch_step_function.study, "compare", compare)
  changes = {"num_rows": 40, "num_samples": 4, "num_rounds": 2, "seeds": 3}
  with flagsaver.flagsaver(workdir=str(tmp_path), **changes):
    launch_step_function.main()
  ((config, *rest),) = calls
  assert rest == [3, tmp_path]
  assert (config.method, config.data.name) == ("central", "step")
  assert (config.data.num_rows, config.num_samples, config.num_rounds) == (40, 4, 2)
  assert (config.hidden_size, config.data.noise_std) == (2, 0.2)
  *_, first, second, wins, last = capsys.readouterr().out.splitlines()
  assert first.startswith("| deep | 132 | 2 | 1.000 ± 1.414 |")
  assert second.startswith("| replicate | 16 | 2 | 2.000 ± 1.414 |")
  assert wins.endswith("test_rmse in 0, test_nll in 2, test_ece in 0 of 2 seeds")
  assert last == f"written to {tmp_path}"


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
    assert_refused(launch_step_function.main, part)
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
  message = capsys.readouterr().err
  assert message.count("\n") == 1
  assert flag in message
