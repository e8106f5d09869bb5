"""Method `auto`: what is tried, what is taken, and what a folder keeps of it."""

import json
import types
import warnings

import numpy as np
import pandas as pd
import pytest

from configs import csv as csv_config
from fedbnr_jax import auto, candidates, fit, load, workflow
from fedbnr_jax.data import load_table
from fedbnr_jax.progress import ProgressBar
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import experiment, training
from fedbnr_jax.run.records import RunFolder
from launch import train as launch_train
from tests.runs import assert_refused, assert_same_bits, table, timeless

FIELDS = {"auto__kernels": "matern32+linear,gaussian+linear"}


def config_of(**fields):
  """A config of method auto, whose own fields are as they come."""
  config = config_lib.base()
  config.method, config.num_clients = "auto", 2
  config.sparse.num_steps = 2
  for name, value in fields.items():
    config.update_from_flattened_dict({name.replace("__", "."): value})
  return config


@pytest.fixture
def quick(monkeypatch):
  """Trials and trainings of a few inducing inputs."""
  monkeypatch.setattr(auto, "_START", 4)
  monkeypatch.setattr(auto, "_START_STEPS", 2)
  monkeypatch.setattr(auto, "_SMALL", 10)
  monkeypatch.setattr(auto, "_MOST", 5)
  monkeypatch.setattr(auto, "_WIDEST", 6)


def scored(monkeypatch, scores):
  """Makes trials cost nothing and have these scores, by name; lists their names."""
  names = []

  def tried(candidate, *_):
    names.append(candidate.name)
    score = scores.get(candidate.name)
    return candidates.Trial(candidate.name, score, score, score, score, 1.0), None

  monkeypatch.setattr(auto, "_try", tried)
  return names


def chosen(config, dataset=None):
  return auto.choose(
    config, auto.of_rows(dataset or table(80)), workflow.program_for
  ).config


# ------------------------------------------------------------------------- the choice


@pytest.mark.parametrize("reading", ["standard", "scores"])
def test_kernels_are_tried_under_the_better_reading(monkeypatch, reading):
  scores = {
    "standard matern32+linear": 1.0,
    "scores matern32+linear": 2.0 if reading == "standard" else 0.5,
    f"{reading} gaussian+linear": 0.3,
  }
  names = scored(monkeypatch, scores)
  config = chosen(config_of(**FIELDS))
  assert names == list(scores)
  assert (config.method, config.data.inputs) == ("fedbnr-ard", reading)
  assert config.sparse.kernel == "gaussian+linear"


def test_a_candidate_that_diverged_is_not_taken(monkeypatch):
  scored(monkeypatch, {"scores matern32+linear": 7.0})
  config = chosen(config_of(**FIELDS))
  assert (config.data.inputs, config.sparse.kernel) == ("scores", "matern32+linear")
  scored(monkeypatch, {})
  assert_refused(lambda: chosen(config_of(**FIELDS)), "every candidate diverged")


def test_a_cell_far_from_all_others_leaves_scores_only(monkeypatch):
  rng = np.random.default_rng(0)
  frame = pd.DataFrame({"a": rng.normal(size=900), "y": rng.normal(size=900)})
  names = scored(monkeypatch, {"scores matern32+linear": 1.0, "x": 1.0})
  config = config_of(auto__kernels="matern32+linear")
  frame.loc[3:5, "a"] = 1e6  # Not all of them are held out.
  assert chosen(config, load_table(frame, target="y")).data.inputs == "scores"
  assert names == []  # With one kernel, there is nothing to choose.
  config = config_of(auto__kernels="matern32+linear,gaussian+linear")
  chosen(config, load_table(frame, target="y"))
  assert names == ["scores matern32+linear", "scores gaussian+linear"]


def test_scores_have_an_advantage(monkeypatch):
  """Standardised inputs must be better by more than chance may make them."""
  for standard, taken in ((1.0 - 0.04, "scores"), (1.0 - 0.06, "standard")):
    names = ("standard matern32+linear", "scores matern32+linear")
    scored(monkeypatch, dict(zip(names, (standard, 1.0), strict=True)))
    config = config_of(auto__kernels="matern32+linear")
    assert chosen(config).data.inputs == taken


def test_no_trial_begins_when_time_is_up(monkeypatch):
  names = scored(monkeypatch, {"standard matern32+linear": 1.0})
  clock = iter([0.0, *np.arange(30.0, 300.0, 30.0)])
  # Not that of everybody: other threads look at the clock, too.
  stub = types.SimpleNamespace(monotonic=lambda: next(clock))
  monkeypatch.setattr(auto, "time", stub)
  config = chosen(config_of(auto__seconds=40.0, **FIELDS))
  assert names == ["standard matern32+linear"]
  assert config.data.inputs == "standard"


@pytest.mark.parametrize(
  ("num_rows", "sizes"),
  [
    (60, (0, 60, 0)),
    (500, (200, 500, 500)),
    (10_000, (200, 632, 2000)),
    (100_000, (200, 200, 1000)),
  ],
)
def test_sizes_fit_the_table(num_rows, sizes):
  config = auto._sized(config_of(), num_rows)
  sparse = config.sparse
  assert (
    sparse.start_samples,
    sparse.num_samples,
    sparse.posterior_samples,
  ) == sizes


@pytest.mark.parametrize(("given", "rounds"), [({}, 2), ({"num_rounds": 7}, 7)])
def test_rounds_that_were_asked_for_are_taken(given, rounds):
  assert auto._sized(config_of(**given), 500).num_rounds == rounds


def test_few_held_out_rows_are_judged_with_the_evidence(quick):
  """Of all rows: the evidence of those trained on, and the likelihood of the others."""
  config = config_of(**FIELDS | {"auto__kernels": "matern32+linear"})
  trial, _ = auto.choose(config, auto.of_rows(table(80)), workflow.program_for).trials
  expected = (64 * trial.train_nll + 8 * trial.val_nll) / 72
  assert trial.score == pytest.approx(expected)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"num_seeds": 2}, ("num_seeds",)),
    ({"auto__seconds": 3.0}, ("auto.seconds is 3", "at least 20")),
    ({"auto__seconds": -1.0}, ("auto.seconds",)),
    ({"auto__kernels": " , "}, ("auto.kernels",)),
    ({"auto__kernels": "matern33"}, ("matern33", "matern32")),
    ({"data__inputs": "score"}, ("score", "scores")),
    ({"kernel": "gaussian"}, ("config.kernel is 'gaussian'", "config.auto.kernels")),
    ({"sparse__kernel": "gaussian"}, ("config.sparse.kernel", "config.auto.kernels")),
    ({"num_samples": 7}, ("config.num_samples is 7", "does not read it")),
    ({"hidden_size": 7, "data__source": "table"}, ("config.hidden_size is 7",)),
    ({"compare_clients": True}, ("config.compare_clients", "'fedbnr-ev'")),
    ({"auto__kernels": "gaussian,matern33"}, ("matern33", "matern32")),
    ({"sparse__posterior_samples": 7}, ("posterior_samples", "'fedbnr-ard'")),
  ],
)
def test_what_it_cannot_do_is_refused(fields, words):
  assert_refused(lambda: chosen(config_of(**FIELDS | fields)), *words)


@pytest.mark.parametrize(
  ("fields", "reading"),
  [
    ({"data__inputs": "standard"}, "standard"),
    ({"data__inputs": "scores"}, "scores"),
  ],
)
def test_a_reading_that_is_given_is_not_compared(monkeypatch, fields, reading):
  names = scored(monkeypatch, {})
  config = chosen(config_of(auto__kernels="matern32+linear", **fields))
  assert (config.method, config.data.inputs) == ("fedbnr-ard", reading)
  assert names == []


def test_declared_bounds_leave_nothing_to_choose(monkeypatch):
  """Sizes by the number of rows, or quantiles, would tell what bounds are to keep."""
  names = scored(monkeypatch, {})
  given = config_of(data__bounds='{"x1": [-4, 4], "x2": [-4, 4], "y": [-9, 9]}')
  given.hidden_size, given.kernel = 7, "gaussian"  # Which the method reads.
  rows = pd.DataFrame(np.random.default_rng(0).normal(size=(80, 3)))
  rows.columns = ["x1", "x2", "y"]
  config = chosen(given, load_table(rows, target="y"))
  assert names == []
  assert (config.method, config_lib.inputs_of(config)) == ("fedbnr-ev", "standard")
  config.method = given.method
  assert config == given


def test_a_training_goes_on_from_its_trial_to_the_same_bits(quick):
  config, rows = config_of(auto__kernels="matern32+linear"), table(80)
  choice = auto.choose(config, auto.of_rows(rows), workflow.program_for)
  assert choice.begun is not None
  run = experiment.build(choice.config, rows)
  program, rounds = workflow.program_for(run), []

  def step(*arguments):
    rounds.append(1)
    return program.step(*arguments)

  counted = program._replace(step=step)
  whole = training.train(run, counted)
  assert len(rounds) == len(whole.history) == 2
  rest = training.train(run, counted, begun=choice.begun)
  assert len(rounds) == 3
  assert timeless(rest.history) == timeless(whole.history)
  assert_same_bits(rest.last, whole.last)
  assert_same_bits(rest.state, whole.state)


# ------------------------------------------------------------------ models and folders


@pytest.mark.parametrize("small", [False, True])
def test_a_model_of_it_is_like_any_other(quick, monkeypatch, tmp_path, small):
  if small:
    monkeypatch.setattr(auto, "_SMALL", 100)
  whole = table(80)
  frame = whole.features.assign(y=whole.targets)
  options = {"auto__kernels": "matern32+linear", "num_clients": 2, "progress": False}
  model = fit(frame, target="y", **options)  # It is the default.
  assert model.config.method == "fedbnr-ard"
  model.save(tmp_path / "saved")
  fit(frame, target="y", method="auto", folder=tmp_path / "run", **options)
  for name in ("saved", "run"):
    got = load(tmp_path / name).predict(frame.head(5), warn=False)
    expected = model.predict(frame.head(5), warn=False)
    np.testing.assert_allclose(got["mean"], expected["mean"], rtol=1e-9)
  content = json.loads((tmp_path / "run" / "candidates.json").read_text())
  assert [trial["name"] for trial in content["trials"]] == [
    "standard matern32+linear",
    "scores matern32+linear",
  ]
  assert content["chosen"]["data"]["inputs"] == model.config.data.inputs
  # What was saved is found finished, as what was trained in its folder is.
  for name in ("saved", "run"):
    monkeypatch.setattr(training, "train", None)
    again = fit(frame, target="y", folder=tmp_path / name, **options)
    assert again.summary == load(tmp_path / name).summary


def test_what_was_tried_is_shown_and_printed(quick, monkeypatch, tmp_path, capsys):
  rows = table(80)
  rows.features.assign(y=rows.targets).to_csv(tmp_path / "t.csv", index=False)
  config = csv_config.get_config()
  config.auto.kernels, config.num_clients = "matern32+linear", 2
  config.data.update({"path": str(tmp_path / "t.csv"), "target": "y"})
  config.data.calibration_folds = 0
  shown = []
  monkeypatch.setattr(ProgressBar, "trying", lambda self, name: shown.append(name))
  with warnings.catch_warnings(action="ignore"):  # Of eight test rows.
    launch_train.train(config, str(tmp_path / "run"))
  assert shown == ["standard matern32+linear", "scores matern32+linear"]
  told = capsys.readouterr().out
  assert [line.split(":")[0] for line in told.splitlines()[:2]] == [
    f"tried {name}" for name in shown
  ]
  taken = [line for line in told.splitlines() if line.endswith(", taken")]
  inputs = load(tmp_path / "run").config.data.inputs
  assert [line.split(":")[0] for line in taken] == [f"tried {inputs} matern32+linear"]


def test_a_stopped_choice_goes_on_and_a_finished_run_is_known(
  quick, monkeypatch, tmp_path
):
  config, rows = config_of(**FIELDS), table(80)
  scores = {"standard matern32+linear": 0.8, "scores matern32+linear": 1.0}
  scores["standard gaussian+linear"] = 0.5
  names = scored(monkeypatch, scores)
  with monkeypatch.context() as patch:
    _interrupt_after(patch, 2)
    with pytest.raises(KeyboardInterrupt):
      workflow.train(config, tmp_path, dataset=rows)
  assert len(candidates.read(config, RunFolder(tmp_path))[1]) == 2
  names.clear()
  outcome = workflow.train(config, tmp_path, dataset=rows)
  assert names == ["standard gaussian+linear"]
  assert outcome.result is not None
  assert workflow.train(config, tmp_path, dataset=rows).was_finished
  other = config_of(**FIELDS, seed=5)
  assert_refused(
    lambda: workflow.train(other, tmp_path, dataset=rows), "config.seed differs"
  )
  (tmp_path / "candidates.json").write_text("{}")
  assert_refused(
    lambda: workflow.train(config, tmp_path, dataset=rows), "candidates.json is damaged"
  )


def _interrupt_after(patch, count):
  """Lets the user stop the choice when it is about to begin another trial."""
  real, begun = auto._try, []

  def tried(*arguments):
    if len(begun) == count:
      raise KeyboardInterrupt
    begun.append(1)
    return real(*arguments)

  patch.setattr(auto, "_try", tried)
