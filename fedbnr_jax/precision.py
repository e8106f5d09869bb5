"""64-bit types for a block of code, without touching the caller's settings."""

import contextlib
import functools
import os
import warnings

import jax
import numpy as np

TRAINING = (
  "all of the training is float32: after a few rounds, predictions may be a standard "
  "deviation of the target away from those in float64"
)
PREDICTIONS = (
  "predictions are computed in float32: their last digits are not those of float64, "
  "and more of them where rows have joined or left the model"
)
POSTERIOR = (
  "sums and posterior are computed in float32, and sums of rows that join are kept so: "
  "noise and predictions may differ from those of float64 in the third digit"
)


def float64() -> contextlib.AbstractContextManager[None]:
  """Enables JAX's 64-bit types in a `with` block, in this thread.

  Where the environment variable JAX_ENABLE_X64 is set, as for a device that has no
  float64, the user has decided, and the block changes nothing.
  """
  if "JAX_ENABLE_X64" in os.environ:
    return contextlib.nullcontext()
  return enable_x64(True)


def enable_x64(enabled: bool) -> contextlib.AbstractContextManager[None]:
  """Switches JAX's 64-bit types on or off in a `with` block, in this thread.

  This is `jax.enable_x64`, which had another name before JAX 0.8.
  """
  if not hasattr(jax, "enable_x64"):
    return jax.experimental.enable_x64(enabled)  # type: ignore[attr-defined]
  return jax.enable_x64(enabled)


def warn_of_float32(told: str = TRAINING, *, once: bool = False) -> None:
  """Warns that a computation is about to do without 64-bit types, if they are off.

  Args:
    told: Says what is computed, and how far that is from float64.
    once: Whether to say it once in a process, for what is called thousands of times.
  """
  if jax.dtypes.canonicalize_dtype(np.float64) == np.float32:
    (_tell_once if once else _tell)(told)


def _tell(told: str) -> None:
  warnings.warn(
    f"64-bit types are off (JAX_ENABLE_X64), so {told}; leave the variable unset where "
    "the device has float64",
    UserWarning,
    stacklevel=4,
  )


# Python's own memory of warnings is lost whenever someone changes a filter for a while.
_tell_once = functools.cache(_tell)
