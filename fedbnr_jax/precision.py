"""64-bit types for a block of code, without touching the caller's settings."""

import contextlib
import os

import jax


def float64() -> contextlib.AbstractContextManager[None]:
  """Enables JAX's 64-bit types in a `with` block, in this thread.

  Where the environment variable JAX_ENABLE_X64 is set, as for a device that has no
  float64, the user has decided, and the block changes nothing.
  """
  if "JAX_ENABLE_X64" in os.environ:
    return contextlib.nullcontext()
  if not hasattr(jax, "enable_x64"):  # Before JAX 0.8, as in some notebook services.
    return jax.experimental.enable_x64(True)  # type: ignore[attr-defined]
  return jax.enable_x64(True)
