"""All of the cryptography: agreed secrets, derived keys and streams of random bytes.

The package `cryptography` does it: X25519, HKDF with SHA-256, ChaCha20. It is imported
when a function here is called, and is an extra: `pip install 'fedbnr-jax[network]'`.
"""

import contextlib
import secrets
from collections.abc import Iterator

import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import fixed_point

KEY_BYTES = 32  # Of an X25519 key, private or public, of a seed, and of a derived key.
INSTALL = "the network extra is not installed: pip install 'fedbnr-jax[network]'."
_CHUNK = 1 << 14  # Numbers: 256 kB of stream at a time stay in the processor's cache.
_NONCE = bytes(16)  # A key serves one stream, so its nonce and counter start at zero.


@contextlib.contextmanager
def network_extra() -> Iterator[None]:
  """Says what to install if an import in the block does not find `cryptography`."""
  try:
    yield
  except ModuleNotFoundError as error:
    raise InputError(INSTALL) from error


def new_seed() -> bytes:
  """Draws 32 bytes from the system's randomness."""
  return secrets.token_bytes(KEY_BYTES)


def new_private_key() -> bytes:
  """Makes the private half of an X25519 key."""
  with network_extra():
    from cryptography.hazmat.primitives.asymmetric import x25519
  return x25519.X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
  """Returns the public half of an X25519 key."""
  with network_extra():
    from cryptography.hazmat.primitives.asymmetric import x25519
  key = x25519.X25519PrivateKey.from_private_bytes(private)
  return key.public_key().public_bytes_raw()


def agreed_secret(private: bytes, public: bytes) -> bytes:
  """Returns the secret that only the holders of two private keys can compute.

  Raises:
    InputError: If the other's public key is none, or one that makes any secret zero.
  """
  with network_extra():
    from cryptography.hazmat.primitives.asymmetric import x25519
  own = x25519.X25519PrivateKey.from_private_bytes(private)
  try:
    return own.exchange(x25519.X25519PublicKey.from_public_bytes(public))
  except ValueError as error:
    raise InputError(
      f"no secret can be agreed on with the X25519 key {public.hex()}: its site must "
      "make another one."
    ) from error


def derived_key(secret: bytes, context: bytes) -> bytes:
  """Derives a key from a secret, another one for every context."""
  with network_extra():
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf import hkdf
  kdf = hkdf.HKDF(hashes.SHA256(), length=KEY_BYTES, salt=None, info=context)
  return kdf.derive(secret)


def add_stream(total: np.ndarray, key: bytes, sign: int) -> None:
  """Adds a key's random integers to `total` [n, 2] in place, or subtracts them.

  Args:
    total: [n, 2] uint64, integers modulo 2¹²⁸ as in `fixed_point`.
    key: The same key gives the same integers, and a longer vector begins with them.
    sign: 1 or -1.
  """
  with network_extra():
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
  stream = Cipher(algorithms.ChaCha20(key, _NONCE), mode=None).encryptor()
  zeros = bytes(16 * min(len(total), _CHUNK))
  buffer = bytearray(len(zeros))
  step = fixed_point.add if sign > 0 else fixed_point.subtract
  for start in range(0, len(total), _CHUNK):
    part = total[start : start + _CHUNK]
    # The stream is what zeros are encrypted to.
    stream.update_into(memoryview(zeros)[: 16 * len(part)], buffer)
    step(part, np.frombuffer(buffer, "<u8").reshape(-1, 2)[: len(part)])
