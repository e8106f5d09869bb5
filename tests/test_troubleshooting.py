"""Messages that the page on troubleshooting quotes are those that the code has."""

import ast
import functools
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGE = _ROOT / "docs" / "troubleshooting.md"
_ANYTHING = "…"  # What stands in a quotation for what varies.
_VARIES = "\0"  # What stands in a template for the values of an f-string.


def _quoted() -> list[str]:
  """Returns the messages that the page quotes, each on one line."""
  blocks = re.findall(r"^ *```text\n(.*?)^ *```", _PAGE.read_text(), re.DOTALL | re.M)
  return [" ".join(block.split()) for block in blocks]


def _template(node: ast.AST) -> str:
  """Writes the text of a string, with a sign for what an f-string puts in."""
  if isinstance(node, ast.JoinedStr):
    return "".join(_template(value) for value in node.values)
  if isinstance(node, ast.Constant) and isinstance(node.value, str):
    return node.value
  return _VARIES


@functools.cache
def _templates() -> tuple[str, ...]:
  """Returns all texts of the library and the programs."""
  return tuple(
    " ".join(_template(node).split())
    for folder in ("fedbnr_jax", "launch")
    for path in sorted((_ROOT / folder).rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.JoinedStr | ast.Constant)
  )


def _occurs(message: str) -> bool:
  """Tells whether a text of the sources has all words of a message, in order."""
  # Where the quotation leaves something out, there must be something that varies.
  words = [re.escape(part) for part in message.split(_ANYTHING)]
  pattern = re.compile(f".*{_VARIES}.*".join(words))
  return any(pattern.search(template) for template in _templates())


def test_the_page_quotes_messages():
  assert len(_quoted()) >= 20


@pytest.mark.parametrize("message", _quoted())
def test_quoted_message_is_in_the_sources(message):
  assert _occurs(message), "the code says something else now"


def test_a_message_that_nobody_has_is_found_out():
  assert not _occurs("round …: the loss of … is quite finite")
