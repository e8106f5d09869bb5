"""Compiled programs are kept on disk for the next start; damaged ones are made anew."""

import contextlib
import glob
import re
import warnings
import zlib

import jax

from fedbnr_jax.files import cache_folder

# Matches the warning in which JAX names a program that it cannot read.
_UNREADABLE = re.compile("Error reading persistent compilation cache entry for '(.*?)'")


def keep() -> None:
  """Has JAX keep what it compiles, and read it where it was kept before."""
  jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
  # Also the small ones: a start has a hundred of them, a quarter of its time.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  warnings.filterwarnings("always", _UNREADABLE.pattern)  # Each is told to `mend`.
  warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")


def mend(warning: str) -> bool:
  """Removes the files of a program that JAX warns it cannot read.

  JAX writes files in place, so that a kill or a full disk leaves parts of them, and it
  never replaces one that is there: such a program would be compiled at every start. It
  compiles after it has warned, and then finds the place free.

  Returns:
    Whether the warning is of this kind.
  """
  program = _UNREADABLE.match(warning)
  if not program:
    return False
  # JAX does not say which of the files, one for every shape of the program's arrays.
  for path in (cache_folder() / "xla").glob(f"{glob.escape(program[1])}-*-cache"):
    with contextlib.suppress(OSError):
      try:
        zlib.decompress(path.read_bytes())
      except zlib.error:  # Also of a sound file if JAX compresses in another way.
        path.unlink()
  return True
