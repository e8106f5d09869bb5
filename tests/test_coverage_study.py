"""The study of coverage: thresholds are those of crepes, and no table is made twice."""

import sys

import pandas as pd
import pytest

from benchmarks import coverage
from tests.runs import quick_compiler

SMALL = {"method": "fedbnr", "kernel": "gaussian", "num_rounds": 2, "num_samples": 4}


@pytest.mark.filterwarnings("ignore:.*outside")
def test_study_appends_what_is_missing(tmp_path, monkeypatch, capsys):
  output = tmp_path / "coverage.csv"
  fields = [f"--config.{name}={value}" for name, value in SMALL.items()]
  fields += ["--rows=60", "--laws=heavy", f"--output={output}"]
  monkeypatch.setattr(coverage.os, "nice", lambda _: None)
  monkeypatch.setattr(coverage.common, "set_up_jax", lambda: None)
  calls = []
  measured = coverage.measured
  monkeypatch.setattr(
    coverage, "measured", lambda *given: calls.append(given) or measured(*given)
  )
  with quick_compiler():
    for last in ("0", "1"):
      monkeypatch.setattr(sys, "argv", ["coverage", f"--seeds=0-{last}", *fields])
      coverage.main()
  assert len(calls) == 2
  table = pd.read_csv(output)
  assert list(table["seed"]) == [0, 1]
  assert set(table["calibrated by"]) == {"folds"}
  assert table["conformal coverage"].between(0.5, 1).all()
  ratio = table["threshold"] / table["of crepes"]
  assert ratio.between(1, 1.024).all()
  assert "| heavy | 60 | 2 |" in capsys.readouterr().out
