"""Messages as bytes: versioned, typed, sized and digested, and never code.

A message is a head of JSON and some arrays of numbers. Whoever reads one believes
nothing: lengths, types and shapes must fit each other, and the digest must be that of
all other bytes. It finds damage and mistakes; who has sent the bytes is the transport's
to know.
"""

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedbnr_jax.errors import InputError

VERSION = 1
_MAGIC = b"fedbnr-jax message\n"
_SIZES = struct.Struct(">HQQ")  # Version, bytes of the head, bytes of the arrays.
_DIGEST = 32
_TYPES = ("float64", "float32", "int64", "int32", "uint32", "uint8", "bool")
_MOST_DIMENSIONS = 8
_ARRAYS = "arrays"  # The field of the head that says what the arrays are.


class Message(NamedTuple):
  """What was read of a message."""

  head: dict[str, Any]
  arrays: tuple[np.ndarray, ...]


def encode(head: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
  """Writes a message.

  Args:
    head: What JSON can hold; numbers in it are finite.
    arrays: Of numbers or truth values.
  """
  kept = [np.asarray(array) for array in arrays]
  for array in kept:
    if array.dtype.name not in _TYPES:
      raise InputError(f"a message cannot hold an array of type {array.dtype}.")
  told = [[array.dtype.name, list(array.shape)] for array in kept]
  text = json.dumps({**head, _ARRAYS: told}, allow_nan=False).encode()
  # Little-endian, whatever the machine.
  body = b"".join(a.astype(a.dtype.newbyteorder("<")).tobytes() for a in kept)
  content = _MAGIC + _SIZES.pack(VERSION, len(text), len(body)) + text + body
  return content + hashlib.sha256(content).digest()


def decode(data: bytes) -> Message:
  """Reads a message.

  Raises:
    InputError: If it is none, is damaged, or of another version.
  """
  start = len(_MAGIC) + _SIZES.size
  if not data.startswith(_MAGIC) or len(data) < start + _DIGEST:
    raise InputError("these bytes are no message of fedbnr-jax.")
  version, head_size, body_size = _SIZES.unpack_from(data, len(_MAGIC))
  if version != VERSION:
    raise InputError(
      f"a message has version {version} of the protocol, and here is {VERSION}: "
      "install the same version of fedbnr-jax everywhere."
    )
  if len(data) != start + head_size + body_size + _DIGEST:
    raise InputError("a message has not the length that it says: it is damaged.")
  view = memoryview(data)
  if hashlib.sha256(view[:-_DIGEST]).digest() != data[-_DIGEST:]:
    raise InputError("a message has not the digest that it says: it is damaged.")
  try:
    head = json.loads(bytes(view[start : start + head_size]))
    told = head.pop(_ARRAYS)
    arrays = _arrays(told, view[start + head_size : -_DIGEST])
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
    raise InputError("the head of a message does not fit its content.") from error
  return Message(head, arrays)


def digest(data: bytes) -> str:
  """Returns by which digest an answer names the message that it answers."""
  return hashlib.sha256(data).hexdigest()


def _arrays(told: Any, body: memoryview) -> tuple[np.ndarray, ...]:
  """Reads the arrays that a head tells of.

  Raises:
    ValueError: If they are not what the bytes hold.
  """
  arrays, place = [], 0
  for name, shape in told:
    if name not in _TYPES or len(shape) > _MOST_DIMENSIONS:
      raise ValueError("this is no array")
    if not all(type(size) is int and size >= 0 for size in shape):
      raise ValueError("this is no shape")
    dtype = np.dtype(name).newbyteorder("<")
    end = place + math.prod(shape) * dtype.itemsize
    array = np.frombuffer(body[place:end], dtype).reshape(shape)
    arrays.append(array.astype(np.dtype(name)))
    place = end
  if place != len(body):
    raise ValueError("there are bytes that belong to no array")
  return tuple(arrays)
