"""Masks: random integers that vanish from the sum, and one that only its site knows.

Each pair of members agrees on random integers; the lower-named adds them and the
higher-named subtracts them. Each member also adds integers of its own, which it reveals
by their seed when all have answered. To whoever lacks either kind, a message is a
uniformly random one.
"""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import primitives
from fedbnr_jax.network.attempt import Attempt
from fedbnr_jax.network.framing import digest, frame

_DIGEST_BYTES = 32
HEADER_BYTES = 2 * _DIGEST_BYTES


class MaskedMessage(NamedTuple):
  """What leaves a site; in bytes a header of 64, and 16 for each number."""

  commitment: bytes  # Digest of the own mask's seed, by which its reveal is checked.
  limbs: np.ndarray  # [n, 2] uint64, masked.

  def to_bytes(self, attempt: Attempt, site: str) -> bytes:
    """Writes the message, with a digest that says whose answer to what it is."""
    content = self.limbs.astype("<u8", copy=False).tobytes()
    return _address(attempt, site) + self.commitment + content

  @classmethod
  def from_bytes(cls, data: bytes, attempt: Attempt, site: str) -> "MaskedMessage":
    """Reads the answer of a site to an attempt.

    Raises:
      InputError: If it is an answer to something else, or not whole.
    """
    if data[:_DIGEST_BYTES] != _address(attempt, site):
      raise InputError(
        f"what came from site {site!r} is no answer to {attempt}: it belongs to "
        "another run, message, attempt or site, and is not used."
      )
    content = data[HEADER_BYTES:]
    if len(data) < HEADER_BYTES or len(content) % 16:
      raise InputError(f"the answer of site {site!r} to {attempt} is cut off.")
    limbs = np.frombuffer(content, "<u8").reshape(-1, 2)
    return cls(data[_DIGEST_BYTES:HEADER_BYTES], limbs)


def commitment(seed: bytes, attempt: Attempt, site: str) -> bytes:
  """Returns what tells that a revealed seed is the one that was used."""
  return bytes.fromhex(digest("seed", attempt.context(), site, seed))


def receipt(message: bytes) -> str:
  """Returns the digest of a masked message, as 64 hexadecimal digits."""
  return hashlib.sha256(message).hexdigest()


def add_own_mask(
  limbs: np.ndarray, seed: bytes, attempt: Attempt, site: str, sign: int = 1
) -> None:
  """Adds the mask that a site's seed gives to `limbs` [n, 2], or takes it away."""
  context = frame("own mask", attempt.context(), site)
  primitives.add_stream(limbs, primitives.derived_key(seed, context), sign)


def add_pair_masks(
  limbs: np.ndarray,
  secrets: Mapping[str, bytes],
  public: Mapping[str, bytes],
  attempt: Attempt,
  site: str,
) -> None:
  """Adds a site's masks with each other member to `limbs` [n, 2].

  Args:
    limbs: Changed in place.
    secrets: The secret that the site has agreed on with each other member.
    public: Run keys of all members.
    attempt: Any other attempt, broadcast or set of members has other masks.
    site: The site's name.
  """
  context = attempt.context()
  for other in attempt.members:
    if other == site:
      continue
    low, high = sorted((site, other))
    # The keys are in it as well, so that a pair that was not given the same two keys
    # has nothing in common.
    pair = frame("pair mask", context, low, high, public[low], public[high])
    key = primitives.derived_key(secrets[other], pair)
    primitives.add_stream(limbs, key, 1 if site == low else -1)


def _address(attempt: Attempt, site: str) -> bytes:
  return bytes.fromhex(digest("message", attempt.context(), site))
