"""The server's part of a masked sum: collect, ask for reveals, unmask the sum alone.

Until the first reveal is asked for, an attempt can be given up for another one without
the members that did not answer. From then on only the same members can finish: one that
was cut off reveals when it is back, or the run stops.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing
from fedbnr_jax.network import fixed_point, masks
from fedbnr_jax.network.attempt import FEWEST, Attempt

# (attempt, who has not answered yet) -> masked messages of those that now do, by name.
AskMasks = Callable[[Attempt, Sequence[str]], Mapping[str, bytes]]
# (attempt, everybody's receipts, who has not revealed yet) -> seeds, by name.
AskReveals = Callable[[Attempt, Mapping[str, str], Sequence[str]], Mapping[str, bytes]]
# (attempt, whether reveals begin): called before anything is asked, for a resume.
Keep = Callable[[Attempt, bool], None]


class MaskedSum:
  """One attempt at a sum. It holds the running total, not the messages."""

  def __init__(self, attempt: Attempt, size: int, revealing: bool = False) -> None:
    """Starts with no answers.

    Args:
      attempt: Which sum.
      size: n, the length of the sites' vectors.
      revealing: Whether a reveal has been asked for before, by a server that was
        stopped since: then the members are final.
    """
    self.attempt = attempt
    self.revealing = revealing
    self.receipts: dict[str, str] = {}  # Digests of the masked messages.
    self._size = size
    self._total = np.zeros((size + 1, 2), np.uint64)
    self._commitments: dict[str, bytes] = {}
    self._revealed: set[str] = set()

  @property
  def missing(self) -> tuple[str, ...]:
    """Members that have not answered."""
    return tuple(n for n in self.attempt.members if n not in self.receipts)

  @property
  def unrevealed(self) -> tuple[str, ...]:
    """Members that have not revealed their own mask."""
    return tuple(n for n in self.attempt.members if n not in self._revealed)

  def receive(self, site: str, message: bytes) -> None:
    """Adds a member's masked message; the same again changes nothing.

    Raises:
      InputError: If it is no answer to this attempt, or has another length.
    """
    self._require_member(site)
    receipt = masks.receipt(message)
    if site in self.receipts:
      if self.receipts[site] != receipt:
        raise InputError(f"site {site!r} gives two answers to {self.attempt}.")
      return
    content = masks.MaskedMessage.from_bytes(message, self.attempt, site)
    if len(content.limbs) != len(self._total):
      raise InputError(
        f"site {site!r} answers {self.attempt} with {len(content.limbs) - 1} numbers "
        f"instead of {self._size}: do all sites have the same config and columns?"
      )
    fixed_point.add(self._total, content.limbs)
    self._commitments[site] = content.commitment
    self.receipts[site] = receipt

  def retry(self, without: Sequence[str] | None = None) -> "MaskedSum":
    """Begins the next attempt, without those that did not answer or are named.

    Raises:
      InputError: If reveals have begun, or too few members are left.
    """
    left_out = tuple(self.missing if without is None else without)
    if self.revealing:
      raise InputError(
        f"masks of {self.attempt} are being revealed, and only its members can finish "
        f"it: start {listing(self.missing or self.unrevealed)} again, or stop the run."
      )
    members = tuple(n for n in self.attempt.members if n not in left_out)
    if len(members) < FEWEST:
      raise InputError(
        f"{listing(left_out)} did not answer {self.attempt}, and a masked sum takes "
        f"{FEWEST} members or more: start these sites again, then the run."
      )
    following = Attempt(self.attempt.broadcast, self.attempt.number + 1, members)
    return MaskedSum(following, self._size)

  def begin_reveals(self) -> None:
    """Makes the members final; comes before the first reveal is asked for.

    Raises:
      InputError: If a member has not answered.
    """
    if self.missing:
      raise InputError(
        f"{listing(self.missing)} did not answer {self.attempt}: until then no reveal "
        "can be asked for."
      )
    self.revealing = True

  def receive_reveal(self, site: str, seed: bytes) -> None:
    """Takes away a member's own mask; the same again changes nothing.

    Raises:
      InputError: If the seed is not the one that the member's message was made with.
    """
    self._require_member(site)
    if not self.revealing or site not in self.receipts:
      raise InputError(f"{site!r} reveals for {self.attempt}, but was not asked to.")
    if masks.commitment(seed, self.attempt, site) != self._commitments[site]:
      raise InputError(
        f"what site {site!r} reveals is not the mask of its answer to {self.attempt}."
      )
    if site not in self._revealed:
      masks.add_own_mask(self._total, seed, self.attempt, site, sign=-1)
      self._revealed.add(site)

  def result(self) -> np.ndarray:
    """Returns the sum [n] of the members' vectors, in float64.

    Raises:
      InputError: If a reveal is missing, or the ones that the members appended do not
        add up, because masks did not cancel.
    """
    if self.unrevealed:
      raise InputError(
        f"{listing(self.unrevealed)} did not reveal for {self.attempt}: only its "
        "members can finish it; start these sites again, or stop the run."
      )
    total = fixed_point.decode(self._total)
    if total[-1] != len(self.attempt.members):
      raise InputError(
        f"the masks of {self.attempt} do not cancel: do all its members have the same "
        "list of run keys?"
      )
    return total[:-1]

  def _require_member(self, site: str) -> None:
    if site not in self.attempt.members:
      raise InputError(f"{site!r} is no member of {self.attempt}.")


def collect(
  total: MaskedSum,
  ask_masks: AskMasks,
  ask_reveals: AskReveals,
  keep: Keep = lambda attempt, revealing: None,
  patience: int = 3,
) -> tuple[np.ndarray, MaskedSum]:
  """Goes from a first attempt to the sum, and past members that do not answer.

  Args:
    total: Where to begin: the first attempt, or the one that `keep` was told last.
    ask_masks: Reaches the sites, and returns when they have answered or their time is
      over. Members that it has no answer of are left out of the next attempt.
    ask_reveals: The same for reveals.
    keep: Notes where the server is, on disk, so that it can resume.
    patience: How many times members are asked that must not be left out any more.

  Returns:
    The sum [n], and the attempt that gave it.

  Raises:
    InputError: If too few sites answer, or one that must finish does not.
  """
  while True:
    keep(total.attempt, total.revealing)
    for _ in range(patience if total.revealing else 1):
      for site, message in ask_masks(total.attempt, total.missing).items():
        total.receive(site, message)
      if not total.missing:
        break
    if not total.missing:
      break
    total = total.retry()
  total.begin_reveals()
  keep(total.attempt, True)
  for _ in range(patience):
    seeds = ask_reveals(total.attempt, total.receipts, total.unrevealed)
    for site, seed in seeds.items():
      total.receive_reveal(site, seed)
    if not total.unrevealed:
      break
  return total.result(), total
