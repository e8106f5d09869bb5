"""A Sphinx extension that shows the fields of a class with the comments beside them.

Classes that hold arrays tell the shape of each field in a comment, behind it or above
it, which autodoc does not read.
"""

import ast
import inspect
import textwrap
from typing import Any


def comments(source: str) -> dict[str, str]:
  """Reads the comment of each annotated field of a class off its source.

  Args:
    source: Of one class.

  Returns:
    By the field's name; a field without a comment has an empty one.
  """
  lines = source.splitlines()
  (node,) = ast.parse(source).body
  assert isinstance(node, ast.ClassDef)
  found: dict[str, str] = {}
  for field in node.body:
    if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
      continue
    assert field.end_lineno is not None
    behind = lines[field.end_lineno - 1].encode()[field.end_col_offset :].decode()
    words = [behind.partition("#")[2]]
    above = field.lineno - 2
    while lines[above].strip().startswith("#"):
      words.insert(0, lines[above].strip().lstrip("#"))
      above -= 1
    found[field.target.id] = " ".join(" ".join(words).split())
  return found


def _add_fields(
  app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
  """Adds a list of fields to the docstring of a class that has comments on some."""
  if what != "class" or any(line.startswith(":ivar") for line in lines):
    return
  try:
    found = comments(textwrap.dedent(inspect.getsource(thing)))
  except (OSError, TypeError):  # It was not written down in a file.
    return
  told = {field: words for field, words in found.items() if words}
  if told:
    lines += ["", "Fields:", ""]
    lines += [f"- ``{field}``: {_escaped(words)}" for field, words in told.items()]
    lines += [""]


def _is_noise(
  app: Any, what: str, name: str, thing: Any, skip: bool, options: Any
) -> bool | None:
  """Leaves out what tuples and Flax give every class; None leaves it to others."""
  told = inspect.getdoc(thing) or ""
  return name == "replace" or told.startswith("Alias for field number") or None


def _escaped(words: str) -> str:
  """Lets signs stand for themselves that reStructuredText would read."""
  return words.replace("*", "\\*").replace("|", "\\|")


def setup(app: Any) -> dict[str, bool]:
  """Is called by Sphinx."""
  # After Napoleon, which has an order of 500.
  app.connect("autodoc-process-docstring", _add_fields, priority=600)
  app.connect("autodoc-skip-member", _is_noise)
  return {"parallel_read_safe": True}
