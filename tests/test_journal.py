"""What a training has reached: its best round, whether it is finished, its units."""

import math

import numpy as np
import pytest
import scipy.stats

from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import journal
from fedbnr_jax.run.training import Result
from tests.runs import table, tiny


def history_of(*errors: float) -> list[dict]:
  return [
    {"round": i, "val_rmse": e, "clients_answered": 1}
    for i, e in enumerate(errors, start=1)
  ]


@pytest.mark.parametrize(
  "errors, best",
  [((3.0,), 1), ((3.0, 2.0, 1.0), 3), ((3.0, 1.0, 2.0), 2), ((2.0, 1.0, 1.0, 1.0), 2)],
)
def test_best_round_is_the_first_lowest(errors, best: int):
  assert journal.best_round(history_of(*errors)) == best


@pytest.mark.parametrize(
  "errors, done",
  [
    ((), False),
    ((1.0, 2.0), False),
    ((1.0, 2.0, 3.0), True),  # Two rounds without improvement.
    ((1.0, 1.0, 1.0), True),  # A tie is none.
    ((3.0, 3.5, 2.0, 2.5), False),
    ((3.0, 3.5, 2.0, 2.5, 2.1), True),
    ((6.0, 5.0, 4.0, 3.0, 2.0), False),
    ((6.0, 5.0, 4.0, 3.0, 2.0, 1.0), True),  # Rounds are used up.
  ],
)
def test_finished_after_patience_or_all_rounds(errors, done: bool):
  assert journal.finished(history_of(*errors), num_rounds=6, patience=2) is done


def test_rounds_are_compared_by_the_score_that_is_named():
  history = history_of(3.0, 1.0, 2.0, 4.0)
  for record, value in zip(history, (0.5, 0.6, 0.4, 0.3), strict=True):
    record["val_nll"] = value
  assert journal.best_round(history, "val_nll") == 4
  assert journal.finished(history, 9, patience=2)
  assert not journal.finished(history, 9, patience=2, score="val_nll")
  assert Result(None, history, "val_nll").best_round == 4


def test_rounds_with_the_most_sites_are_compared():
  """Without a site whose rows are hard to predict, a round looks better than it is."""
  history = history_of(3.0, 2.0, 0.5, 2.5, 0.4)
  for record, south in zip(history, (1, 1, 0, 1, 0), strict=True):
    record |= {"in_north": 1, "in_south": south}
  assert journal.best_round(history) == 2
  assert journal.best_round(history[2:]) == 2
  assert journal.best_round(history[2:3]) == 1
  assert journal.finished(history, num_rounds=9, patience=3)
  assert not journal.finished(history, num_rounds=9, patience=4)


def test_rounds_in_which_nobody_answered_do_not_try_patience():
  history = history_of(1.0, 1.0, 1.0, 1.0)
  for record in history[1:3]:
    record["clients_answered"] = 0
  assert not journal.finished(history, num_rounds=9, patience=2)
  assert journal.finished([*history, history[-1]], num_rounds=9, patience=2)
  assert journal.finished(history, num_rounds=4, patience=2)


def test_without_patience_the_first_answer_is_the_last():
  history = history_of(1.0, 1.0)
  history[0]["clients_answered"] = 0
  assert not journal.finished(history[:1], num_rounds=9, patience=0)
  assert journal.finished(history, num_rounds=9, patience=0)


def test_in_unit_scales_a_gaussian():
  rng = np.random.default_rng(0)
  mean, std, y = rng.normal(size=20), rng.uniform(0.5, 2, 20), rng.normal(size=20)
  scale = 7.5

  def scores(unit: float) -> dict[str, float]:
    gaussian = scipy.stats.norm(unit * mean, unit * std)
    z = (y - mean) / std
    phi, cdf = scipy.stats.norm.pdf(z), scipy.stats.norm.cdf(z)
    crps = unit * std * (z * (2 * cdf - 1) + 2 * phi - 1 / math.sqrt(math.pi))
    return {
      "rmse": math.sqrt(np.mean((unit * (y - mean)) ** 2)),
      "nll": -gaussian.logpdf(unit * y).mean(),
      "crps": crps.mean(),
      "ece": 0.25,
    }

  standardised = scores(1.0)
  before = dict(standardised)
  assert journal.in_unit(standardised, scale) == pytest.approx(scores(scale))
  assert standardised == before


def test_unit_of_a_target_that_happens_to_have_unit_deviation():
  dataset = table()
  split = experiment_lib.build(tiny(), dataset).split
  dataset.targets[split.train] = np.where(np.arange(48) % 2, 1.0, -1.0)
  experiment = experiment_lib.build(tiny(), dataset)
  assert experiment.preprocessor.target_std == 1.0
  record = dict.fromkeys(
    ("noise_std", "prior_std", "floats_up", "floats_down", "seconds"), 1.0
  )
  for name in ("rmse", "ece", "mce", "bri", "nll", "crps", "coverage95", "ece10"):
    record |= {f"val_{name}": 1.0, f"test_{name}": 1.0}
  assert journal.summarise(experiment, [record])["rmse_unit"] == "target"
