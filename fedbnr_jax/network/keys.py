"""Run keys: each site's X25519 key for one run, signed by the site's identity.

A server that could put keys of its own in the place of the sites' would agree on a
secret with each of them and read every message. So a site's card says run, site and
key and is signed, and whoever receives the cards of a run verifies all of them.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import suggestion
from fedbnr_jax.network.framing import frame
from fedbnr_jax.network.identity import Signer, Verifier
from fedbnr_jax.network.primitives import KEY_BYTES

_PURPOSE = "fedbnr-jax run key 1"


class KeyCard(NamedTuple):
  """What a site says of its run key; the server passes it on to all sites."""

  site: str
  public: bytes  # Of X25519.
  signature: bytes


@dataclasses.dataclass(frozen=True)
class RunKeys:
  """The public keys of a run's sites by name; made by `verified`."""

  run: str
  public: Mapping[str, bytes]


def signed_card(identity: Signer, run: str, site: str, public: bytes) -> KeyCard:
  """Signs the public half of a site's run key.

  Args:
    identity: The site's own.
    run: Digest of the run.
    site: The site's name.
    public: The key; see `site_memory.start`.
  """
  return KeyCard(site, public, identity.sign(_statement(run, site, public)))


def verified(
  cards: Iterable[KeyCard], run: str, identities: Mapping[str, Verifier]
) -> RunKeys:
  """Checks the cards of all sites of a run.

  Args:
    cards: One of each site.
    run: Digest of the run.
    identities: By name, of all sites that people have agreed on. They come from the
      people at the sites, not from the server.

  Raises:
    InputError: If a site is not known, comes twice, or has not signed this key for
      this run, or if two sites have the same key.
  """
  public: dict[str, bytes] = {}
  for card in cards:
    if card.site not in identities:
      raise InputError(
        f"a run key came for site {card.site!r}, whose identity is not known here: "
        f"{suggestion(card.site, identities)}."
      )
    if card.site in public:
      raise InputError(f"two run keys came for site {card.site!r}: nothing is sent.")
    statement = _statement(run, card.site, card.public)
    if not identities[card.site].verify(statement, card.signature):
      raise InputError(
        f"the run key of site {card.site!r} is not signed by that site for this run: "
        "somebody may be in between; compare fingerprints with its people."
      )
    if len(card.public) != KEY_BYTES or card.public in public.values():
      raise InputError(
        f"the run key of site {card.site!r} is not {KEY_BYTES} bytes of its own: it "
        "must make another one."
      )
    public[card.site] = card.public
  return RunKeys(run, public)


def _statement(run: str, site: str, public: bytes) -> bytes:
  """What a site signs."""
  return frame(_PURPOSE, run, site, public)
