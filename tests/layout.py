"""Writes the list of files in docs/layout.md: python -m tests.layout.

A line is the first line of the module's docstring, so that the list is true as long as
the modules are.
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
LAYOUT = ROOT / "docs" / "layout.md"
_BEGIN = "<!-- files:begin (python -m tests.layout) -->"
_END = "<!-- files:end -->"
_FOLDERS = ("fedbnr_jax", "launch", "configs")


def listing() -> str:
  """Lists every module, by folder, with the first line of its docstring."""
  lines: list[str] = []
  for top in _FOLDERS:
    folders = sorted({path.parent for path in (ROOT / top).rglob("*.py")})
    for folder in folders:
      lines += ["", f"**{folder.relative_to(ROOT)}/**", ""]
      for path in sorted(folder.glob("*.py")):
        lines.append(f"- `{path.name}`: {first_line(path)}")
  return "\n".join(lines).strip()


def first_line(path: pathlib.Path) -> str:
  """Reads the first line of a module's docstring."""
  docstring = ast.get_docstring(ast.parse(path.read_text()))
  assert docstring, f"{path} has no docstring"
  return docstring.splitlines()[0]


def with_listing(text: str) -> str:
  """Replaces what stands between the two marks."""
  before, _, rest = text.partition("<!-- files:begin")
  _, _, after = rest.partition(_END)
  return f"{before}{_BEGIN}\n\n{listing()}\n\n{_END}{after}"


if __name__ == "__main__":
  LAYOUT.write_text(with_listing(LAYOUT.read_text()))
