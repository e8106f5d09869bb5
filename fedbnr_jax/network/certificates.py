"""Certificates of a federation: one authority vouches for the server and each site.

A site makes its own key and sends a request; only the certificate comes back. Keys are
RSA of 2048 bits: NVFLARE's encryption from end to end can take no other length.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedbnr_jax.errors import InputError
from fedbnr_jax.network.primitives import network_extra

_KEY_BITS = 2048
_DAYS = 3 * 365
# A clock that is a little slow must not find a new certificate not yet valid.
_SLACK = datetime.timedelta(hours=1)


class Authority(NamedTuple):
  """Who vouches for server and sites: a key and its own certificate, both PEM."""

  key: bytes
  certificate: bytes


def new_key() -> bytes:
  """Makes a private key, as PEM."""
  with network_extra():
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
  key = rsa.generate_private_key(public_exponent=65537, key_size=_KEY_BITS)
  return key.private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.TraditionalOpenSSL,
    serialization.NoEncryption(),
  )


def new_authority(name: str) -> Authority:
  """Makes an authority."""
  key = new_key()
  public = _private(key).public_key()
  return Authority(key, _signed(name, name, public, key, authority=True))


def request(key: bytes, name: str) -> bytes:
  """Writes a request for a certificate, which proves that its sender has the key."""
  with network_extra():
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding
  builder = x509.CertificateSigningRequestBuilder().subject_name(_name(name))
  return builder.sign(_private(key), hashes.SHA256()).public_bytes(Encoding.PEM)


def requested(content: bytes, where: str) -> tuple[str, Any]:
  """Reads a request; returns the name that it is for and the public key.

  Raises:
    InputError: If it is none, or its sender does not have the key.
  """
  with network_extra():
    from cryptography import x509
  try:
    read = x509.load_pem_x509_csr(content)
    name = read.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value
    valid = read.is_signature_valid
  except (ValueError, IndexError) as error:
    raise InputError(
      f"{where} is no request for a certificate: let the site make it anew."
    ) from error
  if not valid:
    raise InputError(f"{where} is not signed by the key that it names: refuse it.")
  return str(name), read.public_key()


def issue(
  authority: Authority,
  name: str,
  public: Any,
  *,
  hosts: Sequence[str] = (),
  role: str | None = None,
) -> bytes:
  """Makes a certificate.

  Args:
    authority: Who vouches.
    name: For whom.
    public: The public key.
    hosts: Under which names or addresses a server is reached.
    role: What a person may do; see `engine_files`.
  """
  issuer = subject_of(authority.certificate)
  return _signed(name, issuer, public, authority.key, hosts=hosts, role=role)


def public_of(key: bytes) -> Any:
  """Returns the public half of a private key."""
  return _private(key).public_key()


def subject_of(certificate: bytes) -> str:
  """Returns for whom a certificate is.

  Raises:
    InputError: If it is none.
  """
  with network_extra():
    from cryptography import x509
  try:
    subject = x509.load_pem_x509_certificate(certificate).subject
    return str(subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)
  except (ValueError, IndexError) as error:
    raise InputError("this is no readable certificate in PEM.") from error


def require_issued(
  certificate: bytes, authority: bytes, key: bytes, where: str
) -> None:
  """Raises InputError unless an authority has made a certificate for this key."""
  with network_extra():
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
  try:
    leaf = x509.load_pem_x509_certificate(certificate)
    leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
  except (ValueError, TypeError, InvalidSignature) as error:
    raise InputError(f"{where} is no certificate of this federation.") from error
  if leaf.public_key() != _private(key).public_key():
    raise InputError(f"{where} is for another key than the one in this kit.")
  if leaf.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
    raise InputError(
      f"{where} ended on {leaf.not_valid_after_utc:%Y-%m-%d}: request a new one."
    )


def _signed(
  name: str,
  issuer: str,
  public: Any,
  signer: bytes,
  *,
  hosts: Sequence[str] = (),
  role: str | None = None,
  authority: bool = False,
) -> bytes:
  with network_extra():
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding
  private, now = _private(signer), datetime.datetime.now(datetime.UTC)
  builder = (
    x509.CertificateBuilder()
    .subject_name(_name(name, role))
    .issuer_name(_name(issuer))
    .public_key(public)
    .serial_number(x509.random_serial_number())
    .not_valid_before(now - _SLACK)
    .not_valid_after(now + datetime.timedelta(days=_DAYS))
    .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    .add_extension(
      x509.AuthorityKeyIdentifier.from_issuer_public_key(private.public_key()),
      critical=False,
    )
    .add_extension(
      x509.BasicConstraints(ca=authority, path_length=0 if authority else None),
      critical=True,
    )
    .add_extension(
      x509.SubjectAlternativeName([_host(host) for host in (hosts or (name,))]),
      critical=False,
    )
  )
  if authority:
    usage = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
    builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
  return builder.sign(private, hashes.SHA256()).public_bytes(Encoding.PEM)


_USAGES = (
  *("digital_signature", "content_commitment", "key_encipherment"),
  *("data_encipherment", "key_agreement", "key_cert_sign", "crl_sign"),
  *("encipher_only", "decipher_only"),
)


def _private(pem: bytes) -> Any:
  with network_extra():
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
  try:
    return load_pem_private_key(pem, None)
  except (ValueError, TypeError) as error:
    raise InputError("this is no readable private key in PEM.") from error


def _name(name: str, role: str | None = None) -> Any:
  with network_extra():
    from cryptography import x509
  oids = x509.NameOID
  parts = [
    x509.NameAttribute(oids.COMMON_NAME, name),
    x509.NameAttribute(oids.ORGANIZATION_NAME, "federation"),
  ]
  if role is not None:  # Where NVFLARE looks for it.
    parts.append(x509.NameAttribute(oids.UNSTRUCTURED_NAME, role))
  return x509.Name(parts)


def _host(host: str) -> Any:
  with network_extra():
    from cryptography import x509
  try:
    return x509.IPAddress(ipaddress.ip_address(host))
  except ValueError:
    return x509.DNSName(host)
