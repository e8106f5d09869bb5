"""federation.json: all that people agree on before a run, and the digest that names it.

A site answers runs of a digest that its people have approved, and no others. People
tell each other the digest by another way than the server, such as the telephone.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing
from fedbnr_jax.network import attempt, deployable, site_rows, strict_json
from fedbnr_jax.network.framing import digest
from fedbnr_jax.network.identity import PublicIdentity
from fedbnr_jax.network.schema import Schema

FORMAT = "fedbnr-jax federation 2"
# Of one run. A method that follows a gradient takes a sum a step: 100 rounds of 50
# steps are 5,000, and scores and a search along a line come to it. A training without
# each fold of the rows takes as many again.
MOST_SUMS = 20_000
_LARGEST = 2**31  # Of most_sums: more than anybody waits for.
_WHAT = "federation"
_MEMBER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_GROUP = 4  # Digits of a digest that people read in one breath.


@dataclasses.dataclass(frozen=True)
class Agreement:
  """What the members of a federation have agreed on; made by `make` or `read`.

  Attributes:
    name: Name of the federation.
    config: The whole config, as the sites run it.
    schema: What each member's table has.
    members: By name, in the order of names, the public identity as PEM.
    masking: Whether sums are masked, so that nobody sees a member's part.
    min_sites: A sum over fewer members is not used.
    most_sums: How many sums a site answers in a run.
    tell_scores: Whether in the end each site tells its own error over its test rows,
      unmasked, which then stands in the report of all.
  """

  name: str
  config: ml_collections.FrozenConfigDict
  schema: Schema
  members: Mapping[str, str]
  masking: bool
  min_sites: int
  most_sums: int
  tell_scores: bool

  def __post_init__(self) -> None:
    """Raises an InputError if no federation can run it."""
    strict_json.require_text(self.name, "the name of the federation")
    _require_names(self.members)
    object.__setattr__(self, "members", _readable(self.members))
    deployable.require(self.config, self.schema, len(self.members))
    for field in ("masking", "tell_scores"):
      value = getattr(self, field)
      if not isinstance(value, bool):
        raise InputError(f"{field} is {value!r}: give true or false.")
    if self.masking:
      attempt.require_enough(tuple(self.members))
    least = attempt.FEWEST if self.masking else 1
    strict_json.require_whole(
      self.min_sites, least, len(self.members), f"min_sites{_masked(self.masking)}"
    )
    strict_json.require_whole(self.most_sums, 1, _LARGEST, "most_sums")

  def digest(self) -> str:
    """Returns the digest that names this agreement, 64 hexadecimal digits."""
    return digest(FORMAT, strict_json.canonical(self.to_json()))

  def identities(self) -> dict[str, PublicIdentity]:
    """Returns the members' public identities by name."""
    return {
      name: PublicIdentity.from_pem(pem.encode()) for name, pem in self.members.items()
    }

  def to_json(self) -> dict[str, Any]:
    """Returns what `from_json` reads, of JSON types."""
    return {
      "format": FORMAT,
      "name": self.name,
      "members": dict(self.members),
      "masking": self.masking,
      "min_sites": self.min_sites,
      "most_sums": self.most_sums,
      "tell_scores": self.tell_scores,
      "schema": self.schema.to_json(),
      "config": self.config.to_dict(),
    }

  @classmethod
  def from_json(cls, content: Mapping[str, Any], where: str = _WHAT) -> "Agreement":
    """Reads what `to_json` returned.

    Args:
      content: An object of JSON.
      where: How messages call it, such as the name of its file.

    Raises:
      InputError: If a field is missing, unknown, or cannot be right.
    """
    fields = ("format", *(field.name for field in dataclasses.fields(cls)))
    strict_json.require_fields(content, fields, where)
    if content["format"] != FORMAT:
      raise InputError(
        f"{where}: format is {content['format']!r}, and this version reads {FORMAT!r}: "
        "let all sites have the same version."
      )
    members = content["members"]
    if not isinstance(members, dict) or not all(
      isinstance(pem, str) for pem in members.values()
    ):
      raise InputError(f"{where}: members are no names with an identity each, as text.")
    config = deployable.from_json(content["config"], f"{where}: config")
    schema = Schema.from_json(content["schema"], f"{where}: schema")
    try:
      return cls(
        content["name"],
        ml_collections.FrozenConfigDict(config),
        schema,
        members,
        content["masking"],
        content["min_sites"],
        content["most_sums"],
        content["tell_scores"],
      )
    except InputError as error:
      raise InputError(f"{where}: {error}") from error


def make(
  config: ml_collections.ConfigDict,
  schema: Schema,
  members: Mapping[str, bytes],
  *,
  name: str | None = None,
  masking: bool | None = None,
  min_sites: int | None = None,
  most_sums: int | None = None,
  tell_scores: bool = False,
) -> Agreement:
  """Puts an agreement together.

  Args:
    config: Its number of clients, target and missing cells are filled in.
    schema: What each member's table has.
    members: By name, a public key or a certificate as PEM.
    name: Name of the federation; None for that of the table.
    masking: None for masked sums where there are three members or more.
    min_sites: None for all members: the model is of all of them, or there is none.
    most_sums: How many sums a site answers in a run; None for `MOST_SUMS` for each
      training that the config has.
    tell_scores: Whether each site tells its own error in the end.

  Raises:
    InputError: If it is nothing that can be deployed.
  """
  _require_names(members)
  fitted = deployable.fitted(config, schema, len(members))
  if most_sums is None:
    most_sums = MOST_SUMS * (1 + site_rows.num_folds(fitted))
  return Agreement(
    schema.name if name is None else name,
    ml_collections.FrozenConfigDict(fitted),
    schema,
    {member: pem.decode("utf-8", "replace") for member, pem in members.items()},
    len(members) >= attempt.FEWEST if masking is None else masking,
    len(members) if min_sites is None else min_sites,
    most_sums,
    tell_scores,
  )


def read(path: str | os.PathLike[str]) -> Agreement:
  """Reads an agreement.

  Raises:
    InputError: If the file is missing, damaged, or nothing that can be deployed.
  """
  return Agreement.from_json(strict_json.read(path, _WHAT), str(path))


def write(path: str | os.PathLike[str], agreement: Agreement) -> None:
  """Writes an agreement as a file that people can read.

  Raises:
    InputError: If the file cannot be written.
  """
  strict_json.write(path, agreement.to_json(), _WHAT)


def fingerprint(digest: str) -> str:
  """Writes a digest in groups of four digits, for people to read out."""
  return " ".join(
    digest[start : start + _GROUP] for start in range(0, len(digest), _GROUP)
  )


def _require_names(members: Iterable[str]) -> None:
  names = list(members)
  if not names:
    raise InputError("a federation has no members: name at least one site.")
  for name in names:
    if not _MEMBER.fullmatch(name):
      raise InputError(
        f"a member is called {name!r}: take up to 64 letters, digits, - and _, which "
        "every system has in the name of a folder."
      )
  folded = [name.casefold() for name in names]
  twice = [n for n, fold in zip(names, folded, strict=True) if folded.count(fold) > 1]
  if twice:
    raise InputError(
      f"members {listing(twice)} differ in upper and lower case only: rename one."
    )


def _readable(members: Mapping[str, str]) -> dict[str, str]:
  """Writes identities in the one way that stands for a key, members by name.

  Raises:
    InputError: If one cannot be read, or two members have the same.
  """
  result: dict[str, str] = {}
  holders: dict[str, str] = {}
  for name in sorted(members):
    try:
      identity = PublicIdentity.from_pem(members[name].encode("utf-8", "replace"))
    except InputError as error:
      reason = " ".join(str(error).split())
      raise InputError(f"member {name!r} has no identity: {reason}") from error
    holder = holders.setdefault(identity.fingerprint(), name)
    if holder != name:
      raise InputError(
        f"members {holder!r} and {name!r} have the same identity: each site makes a "
        "key of its own."
      )
    result[name] = identity.pem().decode()
  return result


def _masked(masking: bool) -> str:
  return f" (of masked sums, which take {attempt.FEWEST} or more)" if masking else ""
