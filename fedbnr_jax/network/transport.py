"""How messages travel: a transport carries bytes to sites and brings answers back."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

# A site's whole side: a message in, an answer out. It raises nothing.
Answer = Callable[[bytes], bytes]


class Failure(NamedTuple):
  """Why there is no answer of a site.

  Attributes:
    reason: A few words that follow the site's name.
    code: Of a site that refuses, one of `refusal.SENTENCES`; else "".
  """

  reason: str
  code: str = ""


class Transport(Protocol):
  """Carries messages to sites and brings their answers back."""

  @property
  def sites(self) -> tuple[str, ...]:
    """Names of the sites that can be reached, in a fixed order."""

  def ask(
    self, messages: Mapping[str, bytes], seconds: float
  ) -> dict[str, bytes | Failure]:
    """Sends a message to each site that is named, and waits for all answers.

    Args:
      messages: By name of the site.
      seconds: After which a site that has not answered has failed.

    Returns:
      An answer or a failure for each of them.
    """


class InProcess:
  """Reaches sites that are objects of this process, one after the other."""

  def __init__(self, sites: Mapping[str, Answer]) -> None:
    self._answers = dict(sites)

  @property
  def sites(self) -> tuple[str, ...]:
    return tuple(self._answers)

  def ask(
    self, messages: Mapping[str, bytes], seconds: float
  ) -> dict[str, bytes | Failure]:
    """Lets each site answer; there is no waiting, and so no limit."""
    del seconds
    return {name: self._answers[name](message) for name, message in messages.items()}
