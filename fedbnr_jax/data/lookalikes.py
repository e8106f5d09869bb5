"""Tells text that people read as a number or a date from text that is a label.

Such text would silently become a category. Only whole cells count: `12,5 %` is a number
and `2024-03-01` a date, but `A12`, `3-4 rooms` and `1.2.10` are labels.
"""

import re
from typing import Literal

Lookalike = Literal["number", "date"]

# Between thousands, spreadsheets may put a narrow or an unbreakable space.
_SPACES = " \u00a0\u2009\u202f"
_PLAIN = r"(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:e[+-]?\d+)?"
_GROUPED = (
  rf"\d{{1,3}}(?P<mark>[,.'’_{_SPACES}])\d{{3}}(?:(?P=mark)\d{{3}})*(?:[.,]\d+)?"
)
_AMOUNT = rf"[+\-−]?(?:{_GROUPED}|{_PLAIN})"
_CURRENCY = r"(?:[$€£¥₹]|eur|usd|gbp|chf|jpy|cny|inr|cad|aud|sek|nok|dkk|pln)"
_NUMBERS = (
  _AMOUNT,
  rf"{_AMOUNT}[{_SPACES}]?[%‰]",
  rf"{_AMOUNT}[{_SPACES}]?{_CURRENCY}",
  rf"[+\-−]?{_CURRENCY}[{_SPACES}]?{_AMOUNT}",
  r"[+-]?0x[0-9a-f]+",
)

# A number with a unit behind it, such as `12 kg`, or a bound before it, such as `<5`.
_MEASURED = (
  rf"{_AMOUNT}[{_SPACES}]?(?P<unit>[^\W\d_]{{1,6}}(?:/[^\W\d_]{{1,3}})?)",
  rf"(?P<unit>[<>≤≥~≈]=?)[{_SPACES}]?{_AMOUNT}",
)

_YEAR = r"(?:1[5-9]|2[01])\d\d"
_MONTH = r"(?:0?[1-9]|1[0-2])"
_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
_NAME = (
  r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
  r"sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_TIME = (
  r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?(?: ?[ap]m)?"
  r"(?: ?(?:z|utc|[+-]\d\d(?::?\d\d)?))?"
)
_DAYS = (
  rf"{_YEAR}(?P<mark>[-/.]){_MONTH}(?P=mark){_DAY}",
  rf"{_DAY}(?P<mark>[-/.]){_MONTH}(?P=mark){_YEAR}",
  rf"{_MONTH}(?P<mark>[-/.]){_DAY}(?P=mark){_YEAR}",
  # Two digits each where the year has two, or it may be a version such as 1.2.10.
  r"[0-3]\d(?P<mark>[-/.])[0-3]\d(?P=mark)\d\d",
  rf"{_DAY}[- ]{_NAME}[- ](?:{_YEAR}|\d\d)",
  rf"{_NAME} {_DAY},? {_YEAR}",
)
_DATES = (
  *(rf"{day}(?:[t ]{_TIME})?" for day in _DAYS),
  r"(?:19|20)\d\d-(?:0[1-9]|1[0-2])",
  rf"{_NAME}[- ]{_YEAR}",
  _TIME,
)


def looks_like(text: str) -> Lookalike | None:
  """Says what a person takes a trimmed cell for; None for a label."""
  for kind, patterns in _PATTERNS.items():
    if any(pattern.fullmatch(text) for pattern in patterns):
      return kind
  return None


def unit_of(text: str) -> str | None:
  """Returns the unit or the bound of a trimmed cell that has a number beside it.

  A cell alone may well be a label (`12A`, `<18`); many different ones with the same
  unit are measurements.
  """
  for pattern in _WITH_UNIT:
    found = pattern.fullmatch(text)
    if found:
      return found["unit"]
  return None


def _compiled(patterns: tuple[str, ...]) -> list[re.Pattern[str]]:
  return [re.compile(pattern, re.ASCII | re.IGNORECASE) for pattern in patterns]


_WITH_UNIT = [re.compile(pattern, re.IGNORECASE) for pattern in _MEASURED]
_PATTERNS: dict[Lookalike, list[re.Pattern[str]]] = {
  "number": _compiled(_NUMBERS),
  "date": _compiled(_DATES),
}
