"""Who a site is: a key that signs, and the public half by which others know it.

Ed25519 keys, and the EC or RSA keys of certificates, are all taken. Whoever hands out
public halves can pretend to be any site, so they must not come from the server alone:
people compare fingerprints by another way, such as the telephone.
"""

import hashlib
from typing import Any, Protocol

from fedbnr_jax.errors import InputError
from fedbnr_jax.network.primitives import network_extra


class Signer(Protocol):
  """A site's own identity: it signs what the site says."""

  def sign(self, content: bytes) -> bytes: ...


class Verifier(Protocol):
  """Another site's identity: it tells whether that site has signed something."""

  def verify(self, content: bytes, signature: bytes) -> bool: ...


class PrivateIdentity:
  """An identity with its private key, which stays at the site."""

  def __init__(self, key: Any) -> None:
    """Takes an Ed25519, EC or RSA private key of `cryptography`."""
    self._key = key
    self.public = PublicIdentity(key.public_key())

  @classmethod
  def new(cls) -> "PrivateIdentity":
    """Makes an Ed25519 identity."""
    with network_extra():
      from cryptography.hazmat.primitives.asymmetric import ed25519
    return cls(ed25519.Ed25519PrivateKey.generate())

  @classmethod
  def from_pem(cls, pem: bytes, password: bytes | None = None) -> "PrivateIdentity":
    """Reads a private key, such as that of a site's certificate.

    Raises:
      InputError: If it is no private key, or of a kind that does not sign.
    """
    with network_extra():
      from cryptography.exceptions import UnsupportedAlgorithm
      from cryptography.hazmat.primitives.serialization import load_pem_private_key
    try:
      return cls(load_pem_private_key(pem, password))
    except InputError:
      raise
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
      raise InputError(f"this is no readable private key in PEM: {error}.") from error

  def sign(self, content: bytes) -> bytes:
    """Signs bytes."""
    return self._key.sign(content, *_scheme(self._key.public_key()))


class PublicIdentity:
  """The public half of an identity."""

  def __init__(self, key: Any) -> None:
    """Takes an Ed25519, EC or RSA public key of `cryptography`.

    Raises:
      InputError: If it is a key of another kind.
    """
    _scheme(key)
    self._key = key

  @classmethod
  def from_pem(cls, pem: bytes) -> "PublicIdentity":
    """Reads a public key, or the certificate that holds it; its issuer is not checked.

    Raises:
      InputError: If it is neither.
    """
    with network_extra():
      from cryptography import x509
      from cryptography.exceptions import UnsupportedAlgorithm
      from cryptography.hazmat.primitives.serialization import load_pem_public_key
    try:
      if b"BEGIN CERTIFICATE" in pem:
        return cls(x509.load_pem_x509_certificate(pem).public_key())
      return cls(load_pem_public_key(pem))
    except InputError:
      raise
    except (ValueError, UnsupportedAlgorithm) as error:
      raise InputError(
        f"this is no readable public key or certificate in PEM: {error}."
      ) from error

  def pem(self) -> bytes:
    """Writes the public key as PEM."""
    return self._bytes(pem=True)

  def fingerprint(self) -> str:
    """Returns the SHA-256 of the public key, for people to compare."""
    return hashlib.sha256(self._bytes(pem=False)).hexdigest()

  def verify(self, content: bytes, signature: bytes) -> bool:
    """Tells whether the holder of the private half has signed these bytes."""
    with network_extra():
      from cryptography.exceptions import InvalidSignature
    try:
      self._key.verify(signature, content, *_scheme(self._key))
    except InvalidSignature:
      return False
    return True

  def _bytes(self, pem: bool) -> bytes:
    with network_extra():
      from cryptography.hazmat.primitives import serialization
    encoding = serialization.Encoding.PEM if pem else serialization.Encoding.DER
    return self._key.public_bytes(
      encoding, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _scheme(public: Any) -> tuple[Any, ...]:
  """What a key's sign and verify take beside the bytes."""
  with network_extra():
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
  if isinstance(public, ed25519.Ed25519PublicKey):
    return ()
  if isinstance(public, ec.EllipticCurvePublicKey):
    return (ec.ECDSA(hashes.SHA256()),)
  if isinstance(public, rsa.RSAPublicKey):
    pss = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
    return (pss, hashes.SHA256())
  raise InputError(
    f"an identity cannot be a key of type {type(public).__name__}: take Ed25519, EC or "
    "RSA."
  )
