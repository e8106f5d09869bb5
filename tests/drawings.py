"""What tests of figures share: PNG files taken apart."""

import pathlib
import struct


def png_chunks(path: pathlib.Path) -> dict[str, bytes]:
  """The chunks of a PNG file by their type; fails unless the file is whole."""
  content = path.read_bytes()
  assert content.startswith(b"\x89PNG\r\n\x1a\n")
  chunks: dict[str, bytes] = {}
  place = 8
  while place < len(content):
    (length,) = struct.unpack_from(">I", content, place)
    name = content[place + 4 : place + 8].decode()
    chunks[name] = chunks.get(name, b"") + content[place + 8 : place + 8 + length]
    place += 12 + length
  assert place == len(content)
  assert list(chunks)[-1] == "IEND"
  return chunks


def png_size(path: pathlib.Path) -> tuple[int, int]:
  """Width and height in pixels."""
  return struct.unpack_from(">II", png_chunks(path)["IHDR"])
