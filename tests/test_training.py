"""The host loop: early stopping, records in raw units, resuming to the same bits."""

import collections
import dataclasses
import functools
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedbnr_jax import algorithms
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from fedbnr_jax.run.checkpoints import Checkpoints
from fedbnr_jax.run.journal import NonFiniteError, summarise
from fedbnr_jax.run.program import Program, make_program
from fedbnr_jax.run.records import RunFolder
from tests.runs import (
  SUMMARY,
  StopError,
  assert_same_bits,
  claimed,
  stop_after,
  table,
  timeless,
  tiny,
)

ROOT = pathlib.Path(__file__).resolve().parents[1]


# A kernel without a network: the loop around a round is the subject.
SIZES = {"num_rounds": 4, "kernel": "gaussian"}
TRACES: collections.Counter[str] = collections.Counter()


def counted_jit(function, **options):
  """jax.jit, with a count of how often each function is traced."""

  @functools.wraps(function)
  def traced(*arguments):
    TRACES[function.__name__] += 1
    return function(*arguments)

  return jax.jit(traced, **options)


@pytest.fixture(scope="module")
def four():
  """Four rounds on a table in raw units: experiment, compiled program, result."""
  experiment = experiment_lib.build(tiny(**SIZES), table())
  program = make_program(experiment.algorithm, transform=counted_jit)
  return experiment, program, training.train(experiment, program)


def build(**fields) -> experiment_lib.Experiment:
  """An experiment of the same shapes, for the same program."""
  return experiment_lib.build(tiny(**(SIZES | fields)), table())


# ------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("stopped_after", [1, 2, 4])
def test_resuming_is_not_stopping(four, tmp_path, stopped_after: int):
  experiment, program, straight = four
  whole = claimed(tmp_path / "whole", experiment)
  training.train(experiment, program, whole)
  folder = claimed(tmp_path / "stopped", experiment)
  with pytest.raises(StopError):
    training.train(experiment, program, folder, stop_after(stopped_after))
  assert len(folder.metrics()) == stopped_after
  seen = []
  resumed = training.train(experiment, program, folder, seen.append)
  assert [r["round"] for r in seen] == list(range(stopped_after + 1, 5))
  assert timeless(folder.metrics()) == timeless(straight.history)
  assert timeless(resumed.history) == timeless(straight.history)
  assert_same_bits(resumed.state, straight.state)
  like = jax.tree.map(np.asarray, straight.state)
  assert_same_bits(
    tuple(restored(folder, like)), tuple(restored(whole, like))
  )  # Round, last state and best state.


def restored(folder: RunFolder, like):
  return Checkpoints(folder.checkpoints).restore(like)


def rounds_of_best(folder: RunFolder, like) -> int:
  """The round of the best state that a folder holds."""
  return int(restored(folder, like).best.server.num_rounds)


def test_seconds_of_the_rounds_before_the_stop_are_kept(four, tmp_path):
  experiment, program, _ = four
  folder = claimed(tmp_path / "run", experiment)
  with pytest.raises(StopError):
    training.train(experiment, program, folder, stop_after(2))
  before = folder.metrics()
  training.train(experiment, program, folder)
  assert folder.metrics()[:2] == before


LONG = {"num_rounds": 40, "patience": 40}
# Trains in the folder that it is given, until somebody kills it.
TRAIN = """
import jax, pathlib, sys
from tests import conftest, runs, test_training
from fedbnr_jax.run import training
from fedbnr_jax.run.program import make_program
one = test_training.build(**test_training.LONG)
folder = runs.claimed(pathlib.Path(sys.argv[1]), one)
training.train(one, make_program(one.algorithm, transform=jax.jit), folder)
"""


def test_killed_run_ends_as_if_it_had_not_been(four, tmp_path):
  _, program, _ = four
  workdir = tmp_path / "run"
  process = subprocess.Popen(
    [sys.executable, "-c", TRAIN, workdir],
    cwd=ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  metrics = workdir / "metrics.csv"
  try:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
      if metrics.exists() and metrics.read_text().count("\n") >= 3:
        break
      time.sleep(0.002)
  finally:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
  assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
  assert 2 <= len(RunFolder(workdir).metrics()) < 40
  experiment = build(**LONG)
  folder = claimed(workdir, experiment)  # It is the same config: it may go on.
  training.train(experiment, program, folder)
  straight = training.train(experiment, program)
  assert timeless(RunFolder(workdir).metrics()) == timeless(straight.history)


# --------------------------------------------------------------------------- seeds


def test_same_seed_same_bits_other_seed_other(four):
  _, program, straight = four
  same = training.train(build(), program)
  assert timeless(same.history) == timeless(straight.history)
  assert_same_bits(same.state, straight.state)
  history = training.train(build(seed=1), program).history
  assert history[0]["test_rmse"] != straight.history[0]["test_rmse"]


def test_step_is_traced_once_for_all_rounds(four):
  """Of two trainings, that is.

  Both are of this test: between tests, compiled programs may be forgotten.
  """
  experiment, *_ = four
  program = make_program(experiment.algorithm, transform=counted_jit)
  TRACES.clear()
  for _ in range(2):
    training.train(experiment, program)
  assert TRACES["init"] == TRACES["step"] == 1


# ------------------------------------------------------------------ early stopping


def with_val_rmse(program: Program, errors) -> Program:
  """The program with made-up validation errors."""
  made_up = iter(errors)

  def step(*arguments):
    state, info, validation, test = program.step(*arguments)
    return state, info, validation | {"rmse": jnp.asarray(next(made_up))}, test

  return program._replace(step=step)


def test_result_is_the_best_round_and_not_the_last(four):
  _, program, _ = four
  patient = build(num_rounds=9, patience=2)
  result = training.train(patient, with_val_rmse(program, [3.0, 1.0, 2.0, 2.0]))
  assert len(result.history) == 4
  assert result.best_round == 2
  assert result.best is result.history[1]
  assert int(result.state.server.num_rounds) == 2
  two = training.train(build(num_rounds=2), program)
  assert_same_bits(result.state, two.state)


def test_best_state_survives_a_stop(four, tmp_path):
  _, program, _ = four
  patient = build(num_rounds=9, patience=2)
  folder = claimed(tmp_path / "run", patient)
  with pytest.raises(StopError):
    training.train(
      patient, with_val_rmse(program, [3.0, 1.0, 2.0]), folder, stop_after(3)
    )
  result = training.train(patient, with_val_rmse(program, [2.0]), folder)
  assert len(result.history) == 4
  assert int(result.state.server.num_rounds) == 2
  assert rounds_of_best(folder, result.state) == 2


# ----------------------------------------------------------------------- non-finite


def spoilt(program: Program, number: int, spoil) -> Program:
  """The program, but `spoil` changes what the step of a round returns."""

  def step(*arguments):
    state, *rest = program.step(*arguments)
    if int(state.server.num_rounds) == number:
      rest = spoil(*rest)
    return state, *rest

  return program._replace(step=step)


def nan_loss(info, validation, test):
  loss = info.client_loss.at[1].set(jnp.nan)
  return info.replace(client_loss=loss), validation, test


def inf_test_score(info, validation, test):
  return info, validation, test | {"crps": jnp.asarray(jnp.inf)}


def nan_train_nll(info, validation, test):
  return info.replace(train_nll=jnp.asarray(jnp.nan)), validation, test


@pytest.mark.parametrize(
  "spoil, part",
  [(nan_loss, "client 2"), (inf_test_score, "crps"), (nan_train_nll, "train_nll")],
)
def test_non_finite_value_stops_with_round_and_place(four, tmp_path, spoil, part: str):
  experiment, program, straight = four
  folder = claimed(tmp_path / "run", experiment)
  with pytest.raises(NonFiniteError) as caught:
    training.train(experiment, spoilt(program, 3, spoil), folder)
  assert "round 3" in str(caught.value)
  assert part in str(caught.value)
  assert experiment.algorithm.remedy in str(caught.value)
  # The good rounds are kept: usable as they are, and for going on.
  assert timeless(folder.metrics()) == timeless(straight.history[:2])
  assert rounds_of_best(folder, straight.state) <= 2
  resumed = training.train(experiment, program, folder)
  assert timeless(resumed.history) == timeless(straight.history)


@pytest.mark.parametrize("method", algorithms.METHODS)
def test_what_to_try_is_fields_of_the_config(method: str):
  built = algorithms.METHODS[method].build(tiny(method=method))
  fields = config_lib.base()
  for word in re.findall(r"(?:\w+\.)?\w+_\w+|\w+\.\w+", built.remedy):
    assert functools.reduce(getattr, word.split("."), fields) is not None


def test_fedloc_that_diverges_says_what_it_has():
  """By itself: with such a ρ its steps are far too long."""
  run = experiment_lib.build(
    tiny(method="fedloc", fedloc__rho=1e-6, fedloc__num_inducing=4)
  )
  with pytest.raises(NonFiniteError) as caught:
    training.train(run, make_program(run.algorithm, transform=jax.jit))
  said = str(caught.value)
  assert re.match(r"round \d: the loss of client [12] is not finite", said), said
  assert "try a larger fedloc.rho" in said


def test_what_to_try_is_the_methods_own(four):
  experiment, program, _ = four
  fedloc = algorithms.METHODS["fedloc"].build(tiny(method="fedloc"))
  other = dataclasses.replace(experiment, algorithm=fedloc)
  with pytest.raises(NonFiniteError, match=r"try a larger fedloc\.rho"):
    training.train(other, spoilt(program, 1, nan_loss))


def test_one_bad_client_of_two_is_counted(four):
  experiment, program, _ = four
  with pytest.raises(NonFiniteError, match="1 of 2 clients"):
    training.train(experiment, spoilt(program, 1, nan_loss))


# --------------------------------------------------------------- records and summary


def test_summary_has_every_public_field(four):
  experiment, _, result = four
  summary = summarise(experiment, result.history)
  assert set(summary) >= SUMMARY
  assert summary["rounds"] == 4
  assert summary["num_clients"] == 2
  assert summary["rmse_unit"] == "target"
  assert summary["test_rmse"] == result.best["test_rmse"]


def test_summary_takes_test_scores_at_the_validation_choice_and_their_minimum(four):
  experiment, _, result = four
  history = [dict(record) for record in result.history]
  for record, val, test in zip(history, (2, 1, 3, 4), (9, 8, 7, 6), strict=True):
    record |= {"val_rmse": float(val), "test_rmse": float(test), "seconds": 2.0}
    record["test_crps"] = 10.0 * test
  summary = summarise(experiment, history)
  assert summary["best_round"] == 2
  assert (summary["test_rmse"], summary["min_test_rmse"]) == (8.0, 6.0)
  assert summary["test_crps"] == 80.0
  assert summary["seconds"] == 8.0


def test_record_has_every_public_column(four):
  record = four[2].history[0]
  assert list(record)[:7] == [
    "round", "train_nll", "val_rmse", "val_nll", "val_ece", "test_rmse", "test_ece",
  ]  # fmt: skip
  assert list(record)[-5:] == [
    "clients_answered", "clients_in_posterior", "floats_up", "floats_down", "seconds",
  ]  # fmt: skip
  assert record["clients_answered"] == record["clients_in_posterior"] == 2
  assert all(math.isfinite(value) for value in record.values())


def test_scores_are_of_raw_predictions_in_the_targets_unit(four):
  experiment, program, result = four
  rows, preprocessor = experiment.split.test, experiment.preprocessor
  targets = experiment.dataset.targets[rows]
  inputs = preprocessor.transform(experiment.dataset.features.iloc[rows])
  mean, variance = jax.device_get(
    program.predict(result.state, inputs.astype(np.float32))
  )
  mean = preprocessor.target_mean + preprocessor.target_std * mean
  std = preprocessor.target_std * np.sqrt(variance)
  best = result.best
  error = math.sqrt(np.mean((mean - targets) ** 2))
  assert best["test_rmse"] == pytest.approx(error, rel=1e-5)
  assert best["test_rmse"] > 1.0  # Not standardised: the target's std is about 30.
  density = scipy.stats.norm(mean, std).logpdf(targets)
  assert best["test_nll"] == pytest.approx(-density.mean(), rel=1e-5)
  inside = np.abs(targets - mean) <= scipy.stats.norm.ppf(0.975) * std
  assert best["test_coverage95"] == pytest.approx(inside.mean())
  assert (std >= best["noise_std"] * (1 - 1e-5)).all()


def test_standardised_dataset_reports_in_deviations(four):
  experiment, program, result = four
  bike_like = experiment_lib.build(tiny(**SIZES), table(standardised_error=True))
  scaled = training.train(bike_like, program)
  std = experiment.preprocessor.target_std
  for one, other in zip(scaled.history, result.history, strict=True):
    for name in ("val_rmse", "test_rmse", "test_crps", "noise_std", "prior_std"):
      assert one[name] * std == pytest.approx(other[name], rel=1e-12)
    for name in ("train_nll", "val_nll", "test_nll"):
      assert one[name] + math.log(std) == pytest.approx(other[name], rel=1e-12)
    for name in ("test_ece", "test_mce", "test_bri", "test_coverage95"):
      assert one[name] == other[name]
  summary = summarise(bike_like, scaled.history)
  assert summary["rmse_unit"] == "std of target"


def test_other_method_name_reaches_the_summary(four):
  experiment, _, result = four
  central = dataclasses.replace(
    experiment, config=tiny(method="central"), num_clients=100
  )
  summary = summarise(central, result.history)
  assert (summary["method"], summary["num_clients"]) == ("central", 100)
