"""Strings, numbers and bytes as one string of bytes that can be read in one way only.

What is signed, hashed or used to derive a key is written like this. If parts were
merely put one after the other, ("ab", "c") and ("a", "bc") would be the same.
"""

import hashlib

Part = str | bytes | int


def frame(*parts: Part) -> bytes:
  """Writes each part as a letter for its kind, its length in 8 bytes, and itself."""
  return b"".join(map(_framed, parts))


def digest(*parts: Part) -> str:
  """Returns the SHA-256 digest of framed parts, as 64 hexadecimal digits."""
  return hashlib.sha256(frame(*parts)).hexdigest()


def _framed(part: Part) -> bytes:
  if isinstance(part, bytes):
    kind, content = b"b", part
  elif isinstance(part, str):
    kind, content = b"s", part.encode("utf-8", "surrogatepass")
  else:
    kind, content = b"i", str(int(part)).encode()
  return kind + len(content).to_bytes(8, "big") + content
