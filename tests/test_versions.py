"""The versions that pyproject.toml allows are those that were tested."""

import pathlib
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"]
_EXTRAS = _PROJECT["optional-dependencies"]
# Of benchmarks alone, which no test installs.
_NOT_TESTED = {"benchmark", "comparators"}


def _pins(name: str) -> dict[str, str]:
  lines = (_ROOT / name).read_text("utf-8").splitlines()
  pins = [line.split("==") for line in lines if line and not line.startswith("#")]
  return {canonicalize_name(package): version for package, version in pins}


def _requirements() -> list[Requirement]:
  tested = [rows for extra, rows in _EXTRAS.items() if extra not in _NOT_TESTED]
  return [
    Requirement(row) for rows in (_PROJECT["dependencies"], *tested) for row in rows
  ]


def test_every_bound_is_the_version_that_the_floor_installs():
  pins = _pins("constraints-floor.txt")
  for one in _requirements():
    floor = pins[canonicalize_name(one.name)]
    # The engine is pinned: see pyproject.toml.
    assert str(one.specifier) in (f">={floor}", f"=={floor}"), one.name


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-floor.txt"])
def test_pinned_versions_are_allowed(name):
  pins = _pins(name)
  for one in _requirements():
    assert one.specifier.contains(pins[canonicalize_name(one.name)]), one.name


def test_style_is_that_of_one_ruff_before_a_commit_and_in_make_lint():
  text = (_ROOT / ".pre-commit-config.yaml").read_text("utf-8")
  assert f"rev: v{_pins('constraints.txt')['ruff']}\n" in text
