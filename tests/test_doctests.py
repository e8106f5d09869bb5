"""The examples in docstrings give what they say, and the main functions have one."""

import doctest
import importlib
import pathlib

import pytest

_PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "fedbnr_jax"
# Functions that people compose methods with: each shows how it is called.
_SHOWN = (
  *("gp.blr.sufficient_stats", "gp.blr.posterior", "gp.blr.predict"),
  *("gp.blr.fit_evidence", "gp.blr.negative_log_marginal_likelihood"),
  *("gp.urk.random_fourier", "gp.urk.ard", "gp.urk.add", "gp.urk.from_function"),
  *("gp.urk.deep", "gp.urk.linear", "gp.experts.fuse"),
  *("gp.metrics.rmse", "gp.metrics.calibration", "gp.metrics.evaluate"),
  *("federated.federation.build", "federated.partition.partition"),
  *("data.load_table", "data.synthetic.load"),
)


def _modules() -> list[str]:
  """Names the modules with an example."""
  paths = [p for p in sorted(_PACKAGE.rglob("*.py")) if ">>> " in p.read_text()]
  names = [path.relative_to(_PACKAGE.parent).with_suffix("") for path in paths]
  return [".".join(name.parts).removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", _modules())
def test_examples_give_what_they_say(name):
  result = doctest.testmod(importlib.import_module(name))
  assert result.attempted > 0
  assert result.failed == 0


@pytest.mark.parametrize("path", _SHOWN)
def test_main_functions_have_an_example(path):
  module, _, name = f"fedbnr_jax.{path}".rpartition(".")
  assert ">>> " in getattr(importlib.import_module(module), name).__doc__
