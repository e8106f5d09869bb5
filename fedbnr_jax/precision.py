"""64-bit types for a block of code, without touching the caller's settings."""

import contextlib
import os
import warnings

import jax
import numpy as np


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


def warn_of_float32() -> None:
  """Warns that a training is about to do without 64-bit types, if they are off."""
  if jax.dtypes.canonicalize_dtype(np.float64) == np.float32:
    warnings.warn(
      "64-bit types are off (JAX_ENABLE_X64), so all of the training is float32: after "
      "a few rounds, predictions may be a standard deviation of the target away from "
      "those in float64; leave the variable unset where the device has float64",
      UserWarning,
      stacklevel=3,
    )
