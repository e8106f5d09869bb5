"""What test rows tell of the 95 % intervals, and who says so."""

import json

import numpy as np
import pytest
import scipy.stats

import fedbnr_jax as fb
from fedbnr_jax.run.coverage import (
  FEWEST_ROWS,
  CoverageWarning,
  exact_range,
  warn_of_coverage,
)
from launch import train as launch_train
from tests.runs import tiny

# An error also of what conftest.py lets pass.
pytestmark = pytest.mark.filterwarnings(
  "error::fedbnr_jax.run.coverage.CoverageWarning"
)


@pytest.mark.parametrize("inside, rows", [(0, 5), (5, 5), (18, 20), (95, 100), (1, 1)])
def test_range_is_that_of_scipy(inside: int, rows: int):
  wanted = scipy.stats.binomtest(inside, rows).proportion_ci(method="exact")
  assert exact_range(inside / rows, rows) == pytest.approx(tuple(wanted), abs=1e-9)


def test_enough_rows_find_bad_error_bars_in_four_cases_of_five():
  def power(rows: int) -> float:
    """The probability that 95 % is excluded, if in truth 80 % are covered."""
    counts = [k for k in range(rows + 1) if exact_range(k / rows, rows)[1] < 0.95]
    return scipy.stats.binom.cdf(max(counts), rows, 0.8)

  assert all(power(rows) > 0.8 for rows in range(FEWEST_ROWS, 101))
  assert power(FEWEST_ROWS - 5) < 0.8
  assert power(20) == pytest.approx(0.6, abs=0.02)
  assert power(10) == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize(
  "share, rows, said",
  [
    (0.81, 100, "too narrow: 95 % intervals cover 81% of 100 test rows"),
    (0.5, 10, "too narrow"),
    (1.0, 500, "too wide"),
    (0.9, 10, "^10 test rows are too few to judge"),
    (0.95, FEWEST_ROWS - 1, "too few"),
  ],
)
def test_bad_or_unknown_coverage_is_warned_of(share: float, rows: int, said: str):
  with pytest.warns(CoverageWarning, match=said):
    warn_of_coverage({"test_coverage95": share, "test_rows": rows})


def test_bad_coverage_is_told_with_what_helps():
  bad = {"test_coverage95": 0.81, "test_rows": 100}
  with pytest.warns(CoverageWarning, match=r"config\.data\.calibration"):
    warn_of_coverage(bad)
  with pytest.warns(CoverageWarning, match="conformal intervals allow for it"):
    warn_of_coverage(bad | {"test_coverage95_conformal": 0.96})


def test_rows_that_calibrated_judge_too():
  few = {"test_coverage95": 0.9, "test_rows": 10}
  scored = {"calibration_rows": 80, "test_coverage95_conformal": 0.9}
  warn_of_coverage(few | scored | {"calibration_coverage95": 0.95})
  said = "too narrow: 95 % intervals cover 81% of 90 unseen rows, .* allow for it"
  with pytest.warns(CoverageWarning, match=said):
    warn_of_coverage(few | scored | {"calibration_coverage95": 0.8})


def test_good_coverage_and_unfinished_runs_are_passed_over():
  warn_of_coverage({"test_coverage95": 0.95, "test_rows": FEWEST_ROWS})
  warn_of_coverage({})


def test_the_command_line_says_what_scores_rest_on(tmp_path, capsys):
  config = tiny(kernel="gaussian", num_rounds=1, compare_clients=False)
  with pytest.warns(CoverageWarning, match="of 20 test rows"):
    launch_train.train(config, str(tmp_path / "run"))
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  low, high = (summary[f"test_coverage95_{end}"] for end in ("low", "high"))
  assert (low, high) == exact_range(summary["test_coverage95"], summary["test_rows"])
  assert f"of 20 test rows, so probably {low:.1%} to {high:.1%}" in (
    capsys.readouterr().out
  )


def test_a_fit_says_it_too():
  x = np.random.default_rng(0).normal(size=(60, 2))
  fields = {"kernel": "gaussian", "num_rounds": 1, "num_samples": 4, "num_clients": 2}
  fields |= {"method": "fedbnr-ev", "inputs": "standard"}
  with pytest.warns(CoverageWarning, match="of 54 unseen rows"):
    fitted = fb.fit(x, x[:, 0], progress=False, num_local_steps=1, **fields)
  assert fitted.summary["test_coverage95_low"] <= fitted.summary["test_coverage95"]
  assert "of 6 rows" in repr(fitted)
