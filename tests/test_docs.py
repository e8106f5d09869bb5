"""The pages build without a warning: every link, name and formula of them is known."""

import subprocess
import sys

from tests import layout


def test_the_pages_build_without_a_warning(tmp_path):
  done = subprocess.run(
    [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    + ["-d", str(tmp_path / "trees"), "docs", str(tmp_path / "html")],
    cwd=layout.ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "html" / "index.html").exists()
  assert (tmp_path / "html" / "api.html").exists()
