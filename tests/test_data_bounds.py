"""Declared bounds: how they are read, and a standardisation that knows no row."""

import json

import numpy as np
import pandas as pd
import pytest

import fedbnr_jax as fb
from fedbnr_jax import workflow
from fedbnr_jax.data import Preprocessor, load_table, read_bounds
from fedbnr_jax.run import experiment as experiment_lib
from tests.runs import assert_refused, table, tiny

DECLARED = {"size": [0, 10], "season": ["Winter", "Autumn"], "y": [-20, 20]}
FEATURES = pd.DataFrame(
  {"size": [1.0, 2.0, 6.0], "season": pd.Series(["Winter"] * 3, dtype=object)}
)
ON_TABLE = '{"a": [-4, 4], "b": [-4, 4], "y": [0, 200]}'  # Of tests.runs.table.


def _declared() -> Preprocessor:
  return Preprocessor.from_bounds(FEATURES, "y", read_bounds(DECLARED))


def test_mapping_text_and_file_say_the_same(tmp_path):
  file = tmp_path / "bounds.json"
  file.write_text(json.dumps(DECLARED))
  bounds = read_bounds(DECLARED)
  assert bounds == read_bounds(json.dumps(DECLARED)) == read_bounds(str(file))
  assert bounds == read_bounds(file) == read_bounds(bounds.text)
  assert bounds.intervals == {"size": (0.0, 10.0), "y": (-20.0, 20.0)}
  assert bounds.levels == {"season": ("Autumn", "Winter")}


@pytest.mark.parametrize(
  "declared, parts",
  [
    ("nowhere.json", ["nowhere.json", "does not exist"]),
    ("{'x': 1}", ["not readable JSON"]),
    ({}, ["must hold columns"]),
    ([1], ["must hold columns"]),
    ({"x": [2, 1]}, ["'x'", "low < high"]),
    ({"x": [1, 1]}, ["'x'", "low < high"]),
    ({"x": [0, float("inf")]}, ["'x'", "finite"]),
    ({"x": [1, 2, 3]}, ["'x'", "two finite"]),
    ({"x": [0, True]}, ["'x'", "two finite"]),
    ({"x": ["a"]}, ["'x'", "at least two"]),
    ({"x": ["a", 1]}, ["'x'"]),
    ({"x": "ab"}, ["'x'"]),
    ({"x": ["a", "a"]}, ["'a' twice", "'x'"]),
  ],
)
def test_what_declares_nothing_is_refused(declared, parts):
  assert_refused(lambda: read_bounds(declared), *parts)


def test_means_and_deviations_are_those_of_an_even_spread():
  made = _declared()
  even = np.linspace(0, 10, 100001)
  np.testing.assert_allclose(made.input_mean, [even.mean(), 0.5, 0.5])
  np.testing.assert_allclose(made.input_std, [even.std(), 0.5, 0.5], rtol=1e-4)
  assert made.input_names == ("size", "season=Autumn", "season=Winter")
  np.testing.assert_allclose(made.target_reach, np.sqrt(3))
  again = Preprocessor.from_json(json.loads(json.dumps(made.to_json())))
  assert again == made
  older = {k: v for k, v in made.to_json().items() if not k.endswith("bounds")}
  assert Preprocessor.from_json(older).target_bounds is None


def test_values_outside_are_clipped_and_counted():
  made = _declared()
  frame = pd.DataFrame({"size": [-1.0, 5.0, 11.0, 12.0], "season": ["Winter"] * 4})
  with pytest.warns(UserWarning, match=r"clipped: 'size' \(3 of 4\)"):
    inputs = made.transform(frame)
  np.testing.assert_allclose(inputs[:, 0], np.sqrt(3) * np.array([-1, 0, 1, 1]))
  np.testing.assert_allclose(made.standardise(np.array([30.0])), np.sqrt(3))
  np.testing.assert_allclose(made.standardise(np.array([40.0]), clip=False), 12**0.5)
  with pytest.warns(UserWarning, match=r"'y' \(1 of 2\)"):
    made.warn_of_clipped_targets(np.array([0.0, 21.0]))
  unknown = frame.iloc[1:2].assign(season="Spring")
  with pytest.warns(UserWarning, match="are not declared: 'Spring'"):
    assert np.all(made.transform(unknown)[:, 1:] == -1)


def test_every_column_must_be_declared_by_its_kind():
  def made(**changes):
    bounds = read_bounds({k: v for k, v in (DECLARED | changes).items() if v})
    return lambda: Preprocessor.from_bounds(FEATURES, "y", bounds)

  assert_refused(made(size=None), "none for column 'size'", '"size": [low, high]')
  assert_refused(made(y=None), "none for column 'y'")
  assert_refused(made(season=None), "none for column 'season'", '["a", "b"]')
  assert_refused(made(season=[0, 1]), "others for column 'season'", "text")
  assert_refused(made(size=["1", "2"]), "others for column 'size'", "numbers")
  assert made(unused=[0, 1])() == _declared()


def test_levels_make_a_column_of_numbers_a_category():
  frame = pd.DataFrame({"zone": [1, 2, 2], "y": [0.5, 1.0, 2.0]})
  bounds = read_bounds({"zone": ["1", "2", "3"], "elsewhere": ["a", "b"], "y": [0, 3]})
  dataset = load_table(frame, target="y", bounds=bounds)
  assert list(dataset.features["zone"]) == ["1", "2", "2"]


# ----------------------------------------------------------------------- in a training


def test_an_experiment_with_bounds_knows_nothing_of_its_rows():
  one = experiment_lib.build(tiny(data__bounds=ON_TABLE), table())
  features = one.dataset.features.copy()
  features.iloc[0] = [3.9, -3.9]
  other = experiment_lib.build(
    tiny(data__bounds=ON_TABLE),
    fb.data.Dataset("o", features, one.dataset.targets, "y"),
  )
  assert one.preprocessor == other.preprocessor
  assert one.error_scale == one.preprocessor.target_std
  # Where errors are in standard deviations, they are in those of the training rows.
  scaled = experiment_lib.build(
    tiny(data__bounds=ON_TABLE), table(standardised_error=True)
  )
  training_std = np.std(scaled.dataset.targets[scaled.split.train])
  np.testing.assert_allclose(scaled.error_scale, 200 / np.sqrt(12) / training_std)


def test_rows_to_learn_from_are_clipped_and_rows_to_score_by_are_not():
  config = tiny(data__bounds='{"a": [-4, 4], "b": [-4, 4], "y": [90, 110]}')
  with pytest.warns(UserWarning, match="clipped: 'y'"):
    made = experiment_lib.build(config, table())
  targets = np.asarray(made.federation.clients.y)[made.federation.clients.mask]
  np.testing.assert_allclose(np.max(np.abs(targets)), np.sqrt(3), rtol=1e-6)
  test = made.dataset.targets[made.split.test]
  wanted = (test - 100) / made.preprocessor.target_std
  np.testing.assert_allclose(made.test.y, wanted)
  assert np.max(np.abs(wanted)) > 2


def test_a_run_remembers_the_bounds_and_not_their_file(tmp_path):
  file, other = tmp_path / "bounds.json", tmp_path / "other.json"
  file.write_text('{"x": [-9, 9], "y": [-9, 9]}')
  other.write_text('{"y": [-9, 9], "x": [-9, 9]}')
  fields = {"kernel": "gaussian", "num_rounds": 1}
  workflow.train(tiny(data__bounds=str(file), **fields), tmp_path / "run")
  recorded = json.loads((tmp_path / "run" / "config.json").read_text())
  assert json.loads(recorded["data"]["bounds"]) == {"x": [-9, 9], "y": [-9, 9]}
  again = workflow.train(tiny(data__bounds=str(other), **fields), tmp_path / "run")
  assert again.was_finished
  file.write_text('{"x": [-9, 9], "y": [-8, 9]}')
  assert_refused(
    lambda: workflow.train(tiny(data__bounds=str(file), **fields), tmp_path / "run"),
    "another config",
    "data.bounds",
  )


def test_fit_takes_bounds():
  rng = np.random.default_rng(0)
  x = rng.uniform(-1, 1, size=(60, 1))
  model = fb.fit(
    x,
    x[:, 0] + 0.1 * rng.normal(size=60),
    bounds={"x0": (-1, 1), "y": (-2, 2)},
    method="fedbnr",
    kernel="gaussian",
    num_samples=4,
    num_rounds=1,
    num_local_steps=2,
    num_clients=2,
    progress=False,
  )
  assert model.preprocessor.input_bounds == ((-1.0, 1.0),)
  with pytest.warns(UserWarning, match="'x0'"):
    outside, edge = model.predict(np.array([[5.0], [1.0]]))["mean"]
  assert outside == edge
