"""The map of the rooms is true, and every module says what it is about."""

import ast
import importlib
import re

import pytest
from absl import flags

from tests import layout


def test_list_of_files_is_up_to_date():
  text = layout.LAYOUT.read_text()
  assert layout.with_listing(text) == text, "run python -m tests.layout"


def test_docstrings_are_sentences_about_something():
  """None begins as if somebody else's sentence went on."""
  fragment = re.compile(r"(Of|Which|That|With|Whose)\b")
  for folder in ("fedbnr_jax", "launch", "configs"):
    for path in (layout.ROOT / folder).rglob("*.py"):
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
          docstring = ast.get_docstring(node) or ""
          name = getattr(node, "name", "module")
          assert not fragment.match(docstring), f"{path}: {name}: {docstring[:60]}"


@pytest.mark.parametrize("folder", ["launch", "configs", "benchmarks"])
def test_every_script_can_be_imported(folder):
  """They are not in the package, and so nothing else may notice what they miss."""
  for path in sorted((layout.ROOT / folder).glob("*.py")):
    try:
      importlib.import_module(f"{folder}.{path.stem}")
    except ModuleNotFoundError as error:
      # Of extras that are not always there.
      if (error.name or "").partition(".")[0] not in ("torch", "nvflare"):
        raise


def _programs():
  """Files of launch/ that people start."""
  found = [
    path
    for path in sorted((layout.ROOT / "launch").glob("*.py"))
    if "common.run(main)" in path.read_text()
  ]
  assert len(found) >= 11
  return found


def test_help_of_every_program_lists_the_flags_that_it_reads():
  """Those too that are defined in common.py, which absl does not list by itself."""
  for path in _programs():
    importlib.import_module(f"launch.{path.stem}")
    listed = flags.FLAGS.get_key_flags_for_module(f"launch.{path.stem}")
    read = re.findall(r"common\.(config|workdir|OUTPUT|SEEDS)\b", path.read_text())
    assert {name.lower() for name in read} <= {flag.name for flag in listed}, path.name


def test_help_of_every_program_has_an_example():
  """Which --help prints, because absl prints the docstring of the module."""
  for path in _programs():
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"\npython -m launch.{path.stem}" in docstring, path.name
