"""Kits: the folder from which a server or a site starts the engine.

A site's kit comes without a key: the site makes one, sends a request, and gets a
certificate. What else is in a kit follows from its plan, and is compared before each
start: a kit that somebody has edited is refused.
"""

import dataclasses
import os
import pathlib
import re
import stat
from collections.abc import Sequence

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors
from fedbnr_jax.names import listing, suggestion
from fedbnr_jax.network import certificates, engine_files, strict_json
from fedbnr_jax.network.certificates import Authority
from fedbnr_jax.network.engine_files import SERVER, Plan
from fedbnr_jax.network.identity import PrivateIdentity, PublicIdentity

_PLAN = "kit.json"
_WHAT = "kit"
_AUTHORITY = "authority"
_CERTIFICATES = "certificates"
REQUEST = "request.pem"
_PRIVATE = 0o077  # What nobody else may do with a folder or a key.
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_TAKEN = (SERVER, engine_files.COORDINATOR, _AUTHORITY, _CERTIFICATES, "server", "all")


@dataclasses.dataclass(frozen=True)
class Kit:
  """A kit that has been looked over.

  Attributes:
    folder: Where it lies, as an absolute path.
    plan: What it is for.
  """

  folder: pathlib.Path
  plan: Plan

  @property
  def key(self) -> pathlib.Path:
    """Where its private key is."""
    return self.folder / "startup" / f"{_side(self.plan)}.key"

  @property
  def certificate(self) -> pathlib.Path:
    """Where its certificate is."""
    return self.folder / "startup" / f"{_side(self.plan)}.crt"

  def identity(self) -> PrivateIdentity:
    """Reads the private key, with which a site also signs its keys of a run."""
    return PrivateIdentity.from_pem(_read(self.key))


def init(
  folder: str | os.PathLike[str],
  sites: Sequence[str],
  server: str,
  *,
  federation: str = "federation",
  keys_here: bool = False,
) -> None:
  """Writes an authority, the server's kit, and a kit a site.

  Args:
    folder: To make; it holds nothing yet.
    sites: Their names.
    server: HOST:PORT under which sites reach the server.
    federation: Its name.
    keys_here: Whether to make the sites' keys too, for a trial on one machine. Else
      each site makes its own, and only its public half leaves it.

  Raises:
    InputError: If a name or the address cannot be, or the folder is not empty.
  """
  host, port = _address(server)
  _require_sites(sites)
  folder = pathlib.Path(folder)
  with explain_os_errors(folder, "the folder of kits"):
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
      raise InputError(f"{folder} is not empty: name a folder that is not there yet.")
    folder.chmod(0o700)
    authority = certificates.new_authority(federation)
    (folder / _AUTHORITY).mkdir(mode=0o700)
    (folder / _CERTIFICATES).mkdir(mode=0o700)
    _write_private(folder / _AUTHORITY / "ca.key", authority.key)
    _write(folder / _AUTHORITY / "ca.crt", authority.certificate)
    plan = Plan(SERVER, federation, host, port, tuple(sites))
    kit = _write_kit(folder / "server", plan, authority)
    _give_key(kit, authority, hosts=[host])
    person = certificates.new_key()
    admin = kit.folder / "admin" / "startup"
    _write(admin / "rootCA.pem", authority.certificate)
    _write_private(admin / "client.key", person)
    public = certificates.public_of(person)
    role = engine_files.role()
    issued = certificates.issue(authority, engine_files.COORDINATOR, public, role=role)
    _write(admin / "client.crt", issued)
    for site in sites:
      kit = _write_kit(
        folder / site, Plan(site, federation, host, port, (site,)), authority
      )
      if keys_here:
        _give_key(kit, authority)
        _write(folder / _CERTIFICATES / f"{site}.crt", _read(kit.certificate))


def make_request(folder: str | os.PathLike[str]) -> tuple[pathlib.Path, str]:
  """Makes a site's key, where it has none, and its request for a certificate.

  Returns:
    The file to send to who has made the kit, and the fingerprint of the key.

  Raises:
    InputError: If this is no site's kit.
  """
  kit = opened(folder, ready=False)
  if kit.plan.serves:
    raise InputError(f"{folder} is the server's kit, which has a certificate.")
  if not kit.key.exists():
    _write_private(kit.key, certificates.new_key())
  path = kit.folder / REQUEST
  _write(path, certificates.request(_read(kit.key), kit.plan.name))
  return path, kit.identity().public.fingerprint()


def approve(
  folder: str | os.PathLike[str], request: str | os.PathLike[str]
) -> tuple[str, pathlib.Path, str]:
  """Makes a certificate for a site that has asked for one.

  Args:
    folder: What `init` has made.
    request: The file that the site has sent.

  Returns:
    The site's name, the file to send back, and the fingerprint of its key, which people
    compare with what the site's people read on their screen.

  Raises:
    InputError: If the request is damaged, or of a site that has another key.
  """
  folder = pathlib.Path(folder)
  authority = _authority(folder)
  name, public = certificates.requested(_read(pathlib.Path(request)), str(request))
  sites = opened(folder / "server").plan.sites
  if name not in sites:
    raise InputError(
      f"{request} is of site {name!r}, which is not in this federation: "
      f"{suggestion(name, sites)}."
    )
  fingerprint = PublicIdentity(public).fingerprint()
  path = folder / _CERTIFICATES / f"{name}.crt"
  if path.exists():
    had = PublicIdentity.from_pem(_read(path)).fingerprint()
    if had != fingerprint:
      raise InputError(
        f"site {name!r} has a certificate for another key: if its key is lost, remove "
        f"{path}, and let all sites approve a new federation.json."
      )
  else:
    _write(path, certificates.issue(authority, name, public))
  return name, path, fingerprint


def take_certificate(
  folder: str | os.PathLike[str], certificate: str | os.PathLike[str]
) -> None:
  """Puts the certificate that came back into a site's kit.

  Raises:
    InputError: If it is of another federation, site or key.
  """
  kit = opened(folder, ready=False)
  content = _read(pathlib.Path(certificate))
  _require_certificate(kit, content, str(certificate))
  _write(kit.certificate, content)


def members(folder: str | os.PathLike[str]) -> dict[str, bytes]:
  """Returns the certificates of all sites by name, for `agreement.make`.

  Raises:
    InputError: If some are missing.
  """
  folder = pathlib.Path(folder)
  sites = opened(folder / "server").plan.sites
  paths = {site: folder / _CERTIFICATES / f"{site}.crt" for site in sites}
  missing = [site for site, path in paths.items() if not path.exists()]
  if missing:
    raise InputError(
      f"sites {listing(missing)} have no certificate yet: approve their requests first."
    )
  return {site: _read(path) for site, path in paths.items()}


def opened(folder: str | os.PathLike[str], *, ready: bool = True) -> Kit:
  """Looks a kit over.

  Args:
    folder: The kit's.
    ready: Whether it must have a key and a certificate.

  Raises:
    InputError: If it was edited, is open to others, or is not complete.
  """
  path = pathlib.Path(folder).absolute()
  kit = Kit(path, _read_plan(path))
  _require_settings(kit)
  _require_private(kit)
  if ready:
    if not kit.certificate.exists():
      raise InputError(
        f"{folder} has no certificate: make a request for one, send it to who has made "
        "the kit, and give what comes back with --certificate."
      )
    _require_certificate(kit, _read(kit.certificate), str(kit.certificate))
  return kit


def _require_settings(kit: Kit) -> None:
  """Raises InputError unless the engine would read what `engine_files` says."""
  wanted = engine_files.settings(kit.plan)
  for name, text in wanted.items():
    if _read(kit.folder / name).decode("utf-8", "replace") != text:
      raise InputError(
        f"{kit.folder / name} was edited: with other settings a job might run code "
        "here, or read files. Put it back as it was, or get the kit anew."
      )
  own = {f"startup/{_side(kit.plan)}.{end}" for end in ("key", "crt")}
  own |= {"startup/rootCA.pem", "admin/startup/rootCA.pem"}
  own |= {"admin/startup/client.key", "admin/startup/client.crt"}
  own |= set(engine_files.written_at_start(kit.plan, ""))
  for part in ("startup", "local", "admin/startup", "admin/local"):
    folder = kit.folder / part
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
      name = f"{part}/{path.name}"
      if name not in wanted and name not in own:
        raise InputError(
          f"{path} is not part of a kit, and the engine may read or run it: remove it."
        )


def _require_private(kit: Kit) -> None:
  """Raises InputError if others on this machine can read what is in a kit."""
  for path in (kit.folder, kit.key):
    if path.exists() and stat.S_IMODE(path.stat().st_mode) & _PRIVATE:
      mode = "700" if path.is_dir() else "600"
      raise InputError(
        f"others on this machine can open {path}: chmod {mode} {path}, and if it was "
        "open to people you do not trust, make a new key."
      )


def _require_certificate(kit: Kit, content: bytes, where: str) -> None:
  if not kit.key.exists():
    raise InputError(f"{kit.folder} has no key: make a request for a certificate.")
  root = _read(kit.folder / "startup" / "rootCA.pem")
  certificates.require_issued(content, root, _read(kit.key), where)
  name = certificates.subject_of(content)
  if name != kit.plan.name:
    raise InputError(
      f"{where} is for {name!r}, and this is the kit of {kit.plan.name!r}."
    )


def _write_kit(folder: pathlib.Path, plan: Plan, authority: Authority) -> Kit:
  folder.mkdir(mode=0o700)
  strict_json.write(folder / _PLAN, dataclasses.asdict(plan), _WHAT)
  for name, text in engine_files.settings(plan).items():
    _write(folder / name, text.encode())
  _write(folder / "startup" / "rootCA.pem", authority.certificate)
  return Kit(folder.absolute(), plan)


def _give_key(kit: Kit, authority: Authority, hosts: Sequence[str] = ()) -> None:
  key = certificates.new_key()
  _write_private(kit.key, key)
  public = certificates.public_of(key)
  _write(
    kit.certificate, certificates.issue(authority, kit.plan.name, public, hosts=hosts)
  )


def _read_plan(folder: pathlib.Path) -> Plan:
  path = folder / _PLAN
  if not path.exists():
    raise InputError(f"{folder} is no kit: name a folder that `init` has made.")
  content = strict_json.read(path, _WHAT)
  strict_json.require_fields(
    content, [field.name for field in dataclasses.fields(Plan)], str(path)
  )
  for name in ("name", "federation", "host"):
    strict_json.require_text(content[name], f"{path}: {name}")
  strict_json.require_whole(content["port"], 1, 65535, f"{path}: port")
  sites = content["sites"]
  if not isinstance(sites, list) or not all(isinstance(site, str) for site in sites):
    raise InputError(f"{path}: sites are no names: get the kit anew.")
  return Plan(**{**content, "sites": tuple(sites)})


def _authority(folder: pathlib.Path) -> Authority:
  place = folder / _AUTHORITY
  if not place.is_dir():
    raise InputError(
      f"{folder} has no authority: name the folder that `init` has made."
    )
  return Authority(_read(place / "ca.key"), _read(place / "ca.crt"))


def _require_sites(sites: Sequence[str]) -> None:
  if not sites:
    raise InputError("a federation has no sites: name them, as in --sites=north,south.")
  for site in sites:
    if not _SITE.fullmatch(site) or site.casefold() in _TAKEN:
      raise InputError(
        f"a site is called {site!r}: take up to 63 letters, digits, - and _, and none "
        f"of {listing(_TAKEN)}."
      )
  folded = [site.casefold() for site in sites]
  if len(set(folded)) < len(folded):
    raise InputError(f"a site is named twice among {listing(sites)}: name it once.")


def _address(server: str) -> tuple[str, int]:
  host, _, port = server.rpartition(":")
  if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
    raise InputError(
      f"the server's address is {server!r}: give HOST:PORT, under which sites reach it."
    )
  return host, int(port)


def _side(plan: Plan) -> str:
  return "server" if plan.serves else "client"


def _read(path: pathlib.Path) -> bytes:
  try:
    return path.read_bytes()
  except OSError as error:
    raise InputError(
      f"{path} cannot be read ({error.strerror}): check the path, or get it anew."
    ) from error


def _write(path: pathlib.Path, content: bytes) -> None:
  path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
  path.write_bytes(content)


def _write_private(path: pathlib.Path, content: bytes) -> None:
  """Writes a file that nobody else may read, from its first moment."""
  path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
  handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
  with open(handle, "wb") as file:
    file.write(content)
