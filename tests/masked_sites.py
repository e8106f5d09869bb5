"""Sites of a masked sum on disk, for tests, and a server that keeps what it is sent."""

import pathlib

import numpy as np

from fedbnr_jax.network import keys, masked_site, masks, site_memory
from fedbnr_jax.network.attempt import Attempt, Broadcast
from fedbnr_jax.network.identity import PrivateIdentity
from fedbnr_jax.network.masked_sum import MaskedSum

RUN = "run 7"
BROADCAST = Broadcast.of(RUN, 5, "statistics", b"kernel")


def attempt(members, number=1, broadcast=BROADCAST):
  """An attempt at a step of the tests' run."""
  return Attempt(broadcast, number, tuple(members))


class Sites:
  """Some sites of one run, each with a folder of its own."""

  def __init__(self, folder: pathlib.Path, names: str = "abcd", run: str = RUN):
    self.names = tuple(names)
    self.identities = {name: PrivateIdentity.new() for name in names}
    self.known = {name: self.identities[name].public for name in names}
    self.paths = {name: folder / name / "memory.json" for name in names}
    for path in self.paths.values():
      path.parent.mkdir(parents=True)
    self.cards = [
      keys.signed_card(
        self.identities[name], run, name, site_memory.start(self.paths[name], run, name)
      )
      for name in names
    ]
    self.keys = keys.verified(self.cards, run, self.known)
    self.sites = {name: self.new(name) for name in names}

  def new(self, name: str) -> masked_site.MaskedSite:
    """The site as it is after a restart: from its disk alone."""
    return masked_site.MaskedSite(self.paths[name], self.keys)

  def restart(self, *names: str) -> None:
    """Forgets what is not on the disk of these sites."""
    for name in names:
      self.sites[name] = self.new(name)

  def masked(self, which: Attempt, vectors) -> dict[str, bytes]:
    """All members' answers to an attempt."""
    return {n: self.sites[n].mask(which, vectors[n]) for n in which.members}

  def summed(self, which: Attempt, vectors) -> np.ndarray:
    """The sum, by a server to which nothing happens."""
    total = MaskedSum(which, len(vectors[which.members[0]]))
    for name, message in self.masked(which, vectors).items():
      total.receive(name, message)
    total.begin_reveals()
    for name in which.members:
      total.receive_reveal(name, self.sites[name].reveal(which, total.receipts))
    return total.result()


def receipts(messages) -> dict[str, str]:
  """What a server that has all these messages tells of them."""
  return {name: masks.receipt(message) for name, message in messages.items()}


def vectors(names, size=4, seed=0) -> dict[str, np.ndarray]:
  """Different numbers for each site."""
  rng = np.random.default_rng(seed)
  return {name: rng.normal(size=size) * 10.0 ** rng.integers(-3, 4) for name in names}
