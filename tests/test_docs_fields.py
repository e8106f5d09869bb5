"""The page of the API shows fields with the comments that tell their shapes."""

import importlib.util
import pathlib

_PATH = pathlib.Path(__file__).resolve().parents[1] / "docs" / "fields.py"
_SPEC = importlib.util.spec_from_file_location("docs_fields", _PATH)
fields = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(fields)

_CLASS = '''class Both:
  """Docstring."""

  # [N] above, in
  # two lines.
  above: int
  behind: str = "#"  # [M] Φᵀy.
  both: tuple[
    int, ...
  ] = ()  # and behind.
  # A comment on nothing.

  bare: int
'''


def test_comments_stand_above_or_behind():
  assert fields.comments(_CLASS) == {
    "above": "[N] above, in two lines.",
    "behind": "[M] Φᵀy.",
    "both": "and behind.",
    "bare": "",
  }


def test_what_would_be_markup_is_escaped():
  told = fields._escaped("a*b |x|")
  assert told == r"a\*b \|x\|"
