"""The benchmark: its fields, and the operations that it counts."""

import json
import pathlib
import subprocess
import sys

import numpy as np

from launch import benchmark

ROOT = pathlib.Path(__file__).resolve().parents[1]
FIELDS = {
  *("sec_per_round", "flops", "peak_gflops", "gemm_sec_per_round", "efficiency"),
  *("dtype", "compile_sec", "peak_rss_mb"),
}


def test_operations_are_those_of_the_matrix_products():
  shape = benchmark.Shape(100, 34, 18, 200)
  network, likelihood = 6 * 3400 * 200 * (18 + 5), 6 * 3400 * 100 * 34
  assert shape.flops == 50 * (network + likelihood)


def test_a_small_shape_prints_a_line_of_json():
  shape = {"clients": 3, "rows": 5, "inputs": 2, "width": 8, "local_steps": 2}
  done = subprocess.run(
    [sys.executable, "-m", "launch.benchmark", "--json", "--repeats=1"]
    + ["--local_processes=1", *(f"--{name}={value}" for name, value in shape.items())],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  result = json.loads(done.stdout)
  assert result.keys() >= FIELDS | shape.keys()
  assert {name: result[name] for name in shape} == shape
  bound = result["flops"] / (1e9 * result["peak_gflops"])
  np.testing.assert_allclose(result["gemm_sec_per_round"], bound)
  np.testing.assert_allclose(result["efficiency"], bound / result["sec_per_round"])
