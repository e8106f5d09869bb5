"""One run at a site: its rows stay the same, its key and its masks are its own.

All of it is on the site's disk, so that a site that was restarted goes on.
"""

import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedbnr_jax import files
from fedbnr_jax.errors import InputError
from fedbnr_jax.network import keys, primitives, site_memory
from fedbnr_jax.network.agreement import Agreement
from fedbnr_jax.network.attempt import Attempt
from fedbnr_jax.network.framing import digest
from fedbnr_jax.network.identity import Signer
from fedbnr_jax.network.keys import KeyCard
from fedbnr_jax.network.masked_site import MaskedSite
from fedbnr_jax.network.question import Question
from fedbnr_jax.network.refusal import RefusalError
from fedbnr_jax.network.schema import SiteTable


def run_digest(federation: str, run: str) -> str:
  """Returns what names a run in masks and signatures."""
  return digest("run", federation, run)


def table_digest(table: SiteTable) -> str:
  """Returns a digest of a site's rows, which stays at the site."""
  total = hashlib.sha256(repr(list(table.features.columns)).encode())
  by_row = pd.util.hash_pandas_object(table.features, index=False)
  total.update(by_row.to_numpy().tobytes())
  total.update(np.asarray(table.targets, np.float64).tobytes())
  return total.hexdigest()


class SiteRun:
  """What a site knows of one run beside its rows."""

  def __init__(
    self, folder: pathlib.Path, agreement: Agreement, name: str, run: str, rows: str
  ) -> None:
    """Takes up a run, for the first time or after a restart.

    Args:
      folder: Of the site's memory of runs.
      agreement: What its people have approved.
      name: The site's.
      run: The run's number.
      rows: Digest of the site's rows.

    Raises:
      RefusalError: If the rows are not those that the run began with.
    """
    self.name, self._agreement = name, agreement
    self._run = run_digest(agreement.digest(), run)
    self._memory = folder / f"{run}.json"
    self._told = folder / f"{run}.told.json"
    self._masked: MaskedSite | None = None
    noted = folder / f"{run}.rows.json"
    if not noted.exists():
      folder.mkdir(parents=True, exist_ok=True)
      files.write_json(noted, {"rows": rows})
    elif files.read_object(noted).get("rows") != rows:
      raise RefusalError("other-rows")

  def card(self, signer: Signer) -> KeyCard:
    """Returns the site's signed key of the run; the first time it is made."""
    if self._memory.exists():
      with site_memory.opened(self._memory) as memory:
        public = primitives.public_key(memory.private)
    else:
      public = site_memory.start(self._memory, self._run, self.name)
    return keys.signed_card(signer, self._run, self.name, public)

  def take_keys(self, told: Sequence[Sequence[str]]) -> None:
    """Takes all sites' keys of the run, which their identities have signed.

    Raises:
      InputError: If one is not, or is another one than before.
      RefusalError: If there is not one of each member.
    """
    try:
      cards = [
        KeyCard(site, bytes.fromhex(public), bytes.fromhex(signature))
        for site, public, signature in told
      ]
    except (TypeError, ValueError) as error:
      raise RefusalError("unreadable", "these are no cards") from error
    identities = self._agreement.identities()
    verified = keys.verified(cards, self._run, identities)
    if set(verified.public) != set(identities):
      raise RefusalError("rule", "keys of some members are missing")
    self._masked = MaskedSite(self._memory, verified)

  def mask(
    self, head: Mapping[str, Any], asked: Question, vector: np.ndarray
  ) -> np.ndarray:
    """Masks the answer to a question, for the attempt in the message's head.

    Raises:
      RefusalError: If a rule forbids it.
    """
    try:
      attempt = Attempt.from_note(head["attempt"])
      broadcast = attempt.broadcast
      if (broadcast.run, broadcast.question) != (self._run, asked.digest()):
        raise RefusalError("rule", "the attempt is of another run or question")
      return np.frombuffer(self._sums().mask(attempt, vector), np.uint8)
    except (KeyError, TypeError, InputError) as error:
      raise RefusalError("rule", str(error)) from error

  def tell_once(self, asked: Question) -> None:
    """Notes that own scores leave; those of other models could tell of single rows.

    Raises:
      RefusalError: If other ones have left before.
    """
    told = {"question": asked.digest()}
    if not self._told.exists():
      files.write_json(self._told, told)
    elif files.read_object(self._told) != told:
      raise RefusalError("told")

  def reveal(self, head: Mapping[str, Any]) -> np.ndarray:
    """Gives the seed of the own mask, if all members have answered.

    Raises:
      RefusalError: If a rule forbids it.
    """
    try:
      attempt = Attempt.from_note(head["attempt"])
      seed = self._sums().reveal(attempt, dict(head["receipts"]))
    except (KeyError, TypeError, ValueError, InputError) as error:
      raise RefusalError("rule", str(error)) from error
    return np.frombuffer(seed, np.uint8)

  def _sums(self) -> MaskedSite:
    if self._masked is None:
      raise RefusalError("unknown-run")
    return self._masked
