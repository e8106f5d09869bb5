"""What README and docs show in Python runs as it stands, with smaller numbers."""

import pathlib
import re

import numpy as np
import pandas as pd
import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGES = ("README.md", "docs/howto/compose.md")
_SMALLER = {
  "num_samples=50, hidden_size=200": "num_samples=3, hidden_size=4",
  "num_local_steps=50": "num_local_steps=2",
  "range(20)": "range(2)",
  'client="site", seed=0': 'client="site", seed=0, progress=False, inputs="scores", '
  'num_rounds=1, auto__kernels="gaussian", data__calibration_folds=0, '
  "data__calibration=0.0",
}


def _pages() -> list[pathlib.Path]:
  """Returns README and all pages of the docs, but for those that Sphinx has made."""
  pages = sorted((_ROOT / "docs").rglob("*.md"))
  return [_ROOT / "README.md", *(page for page in pages if "_build" not in page.parts)]


def _blocks() -> list[str]:
  """Returns the blocks of Python, page by page, with smaller numbers."""
  pages = "".join((_ROOT / page).read_text() for page in _PAGES)
  blocks = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
  text = "\0".join(blocks)
  for large, small in _SMALLER.items():
    assert text.count(large) == 1, large
    text = text.replace(large, small)
  return text.split("\0")


@pytest.mark.filterwarnings("ignore::fedbnr_jax.run.coverage.CoverageWarning")
def test_blocks_of_the_pages_run(tmp_path, monkeypatch):
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


def test_links_lead_somewhere():
  """Those to files, from README and from every page."""
  missing = [
    f"{page.relative_to(_ROOT)}: {target}"
    for page in _pages()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)\)", page.read_text())
    if not (page.parent / target).exists()
  ]
  assert missing == []


def test_the_readme_is_short():
  assert len((_ROOT / "README.md").read_text().splitlines()) <= 150


def test_pages_with_python_are_run():
  shown = [page for page in _pages() if "```python" in page.read_text()]
  assert [str(page.relative_to(_ROOT)) for page in shown] == list(_PAGES)
