"""What README and the pages of the docs show: blocks of Python, commands, names."""

import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_SHELL = ("", "sh", "bash", "console")  # What a fence of commands is called.
# How commands within a sentence begin.
_PROGRAMS = ("python -m ", "make ", "launch.", "pip install ")


def pages() -> list[pathlib.Path]:
  """Returns README and all pages of the docs, but for those that Sphinx has made."""
  found = sorted((ROOT / "docs").rglob("*.md"))
  return [ROOT / "README.md", *(page for page in found if "_build" not in page.parts)]


def name(page: pathlib.Path) -> str:
  """Names a page by its path from the project's root."""
  return page.relative_to(ROOT).as_posix()


def python_blocks(page: pathlib.Path) -> list[str]:
  """Returns what the page shows in Python."""
  fences = _FENCE.findall(page.read_text())
  return [body for _, kind, body in fences if kind == "python"]


def prose(page: pathlib.Path) -> str:
  """Returns the page without its fences and formulas."""
  text = _FENCE.sub("", page.read_text())
  return re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", "", text, flags=re.DOTALL)


def spans(page: pathlib.Path) -> list[str]:
  """Returns what stands in backquotes within sentences, each on one line."""
  return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(page))]


def commands(page: pathlib.Path) -> list[list[str]]:
  """Returns the words of every command that the page shows, without placeholders."""
  lines = [code for code in spans(page) if code.startswith(_PROGRAMS)]
  for _, kind, body in _FENCE.findall(page.read_text()):
    if kind.strip() in _SHELL:
      lines += body.replace("\\\n", " ").splitlines()
  split = [shlex.split(line, comments=True) for line in lines]
  return [words for words in map(_bare, split) if words]


def _bare(words: list[str]) -> list[str]:
  """Leaves out variables that are set for a command, and dots for what is left out."""
  while words and re.match(r"[A-Z_]+=", words[0]):
    words = words[1:]
  return [word for word in words if word != "..."]
