"""What the README shows in Python runs as it stands, with smaller numbers."""

import pathlib
import re

import numpy as np
import pandas as pd
import pytest

_README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
_SMALLER = {
  "num_samples=50, hidden_size=200": "num_samples=3, hidden_size=4",
  "num_local_steps=50": "num_local_steps=2",
  "range(20)": "range(2)",
  'client="site", seed=0': 'client="site", seed=0, progress=False, inputs="scores", '
  'num_rounds=1, auto__kernels="gaussian", data__calibration_folds=0, '
  "data__calibration=0.0",
}


def _blocks() -> list[str]:
  """Returns the README's blocks of Python, with smaller numbers."""
  blocks = re.findall(r"```python\n(.*?)```", _README.read_text(), re.DOTALL)
  text = "\0".join(blocks)
  for large, small in _SMALLER.items():
    assert text.count(large) == 1, large
    text = text.replace(large, small)
  return text.split("\0")


@pytest.mark.filterwarnings("ignore::fedbnr_jax.run.coverage.CoverageWarning")
def test_blocks_of_the_readme_run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(40, 2)).astype(np.float32)  # The type of a federation.
  y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=40)
  frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "price": y})
  frame["site"] = np.where(np.arange(40) % 2, "north", "south")
  names = {
    "frame": frame,
    "new": frame[["a", "b"]].clip(-1.0, 1.0),
    "x": x,
    "y": y,
    "parts": np.array_split(np.arange(40), 2),
  }
  front_door, compose = _blocks()
  exec(front_door, names)
  assert (tmp_path / "runs" / "mine" / "summary.json").exists()
  exec(compose, names)
  assert np.shape(names["mean"]) == (40,)
  assert int(names["state"].server.num_rounds) == 2
