"""An unknown name is answered with the nearest known one."""

import difflib
from collections.abc import Iterable

from fedbnr_jax.errors import InputError

_MOST_LISTED = 20


def listing(names: Iterable[str]) -> str:
  """Quotes names and joins them by commas, cut where the list grows unreadable."""
  names = list(names)
  shown = ", ".join(repr(name) for name in names[:_MOST_LISTED])
  hidden = len(names) - _MOST_LISTED
  return f"{shown} and {hidden} more" if hidden > 0 else shown


def suggestion(name: str, known: Iterable[str]) -> str:
  """Says which known name was probably meant, and which there are.

  Args:
    name: What the user wrote.
    known: What the user could have written.

  Returns:
    The end of an error message, on one line.
  """
  known = list(known)
  near = nearest(name, known)
  choice = f"choose from {listing(known)}"
  return f"did you mean {near!r}? {choice}" if near else choice


def nearest(name: str, known: Iterable[str]) -> str | None:
  """Returns the known name that was probably meant, if one is near enough."""
  # Upper and lower case is the commonest slip, so it must not count as distance.
  by_fold = {candidate.casefold(): candidate for candidate in known}
  near = difflib.get_close_matches(name.casefold(), by_fold, n=1)
  return by_fold[near[0]] if near else None


def require_choice(what: str, value: str, choices: Iterable[str]) -> None:
  """Raises InputError unless `value` is one of `choices`, and names the nearest one.

  Args:
    what: How the message calls the value, such as "config.method".
    value: What the user wrote.
    choices: What the user could have written.
  """
  choices = tuple(choices)
  if value not in choices:
    raise InputError(f"{what} is {value!r}: {suggestion(value, choices)}.")
