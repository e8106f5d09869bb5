"""Kernels by name, such as "deep" or "matern32+linear", for configs."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fedbnr_jax.errors import InputError
from fedbnr_jax.gp.urk.additive_inputs import additive
from fedbnr_jax.gp.urk.base import FeatureMap
from fedbnr_jax.gp.urk.deep_kernels import deep, replicate
from fedbnr_jax.gp.urk.fourier import SPECTRA, random_fourier
from fedbnr_jax.gp.urk.inducing_inputs import BLEND, inducing
from fedbnr_jax.gp.urk.products import exponential, linear, polynomial
from fedbnr_jax.gp.urk.sums import add
from fedbnr_jax.names import require_choice

BASES = ("fourier", "inducing")


def ard(
  num_samples: int,
  spectrum: str,
  *,
  length_scale: float = 1.0,
  basis: str = "fourier",
  isotropic: bool = False,
  orthogonal: bool = False,
  spread: float = 0.0,
) -> FeatureMap:
  """A stationary kernel with a length-scale for each input.

  Args:
    num_samples: S: frequencies, of two features each, or inducing inputs.
    spectrum: One of `SPECTRA`, or, with inducing inputs, of `INDUCED`.
    length_scale: Initial ℓ of every input, in units of √D; of a Laplacian with inducing
      inputs, of D.
    basis: "fourier" for random frequencies, "inducing" for inducing inputs.
    isotropic: Whether all inputs share one ℓ after all.
    orthogonal: Whether frequencies are orthogonal in blocks.
    spread: Deviation of log ℓ under its prior, around the start; 0: no prior.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from fedbnr_jax import urk
    >>> kernel, x = urk.ard(100, "matern32"), jnp.zeros((5, 3))
    >>> params = kernel.init(jax.random.key(0), x)
    >>> params.theta["log_length_scale"].shape, kernel.apply(params, x).shape
    ((3,), (5, 200))
  """
  require_choice("basis", basis, BASES)
  if basis == "inducing":
    if orthogonal:
      raise InputError("orthogonal draws are of frequencies: choose basis 'fourier'.")
    return inducing(
      num_samples, spectrum, length_scale, isotropic=isotropic, spread=spread
    )
  if spectrum == BLEND:
    raise InputError(f"kernel {BLEND!r} has no Fourier features: use basis 'inducing'.")
  return random_fourier(
    num_samples,
    spectrum,
    length_scale,
    isotropic=isotropic,
    orthogonal=orthogonal,
    spread=spread,
  )


# Every kernel by name, with the function that builds it.
KERNELS: dict[str, Callable[..., FeatureMap]] = {
  "deep": deep,
  "replicate": replicate,
  "exponential": exponential,
  "polynomial": polynomial,
  "linear": linear,
  "additive": additive,
  **{name: functools.partial(ard, spectrum=name) for name in (*SPECTRA, BLEND)},
}


def parts(name: str) -> list[str]:
  """Splits the name of a sum of kernels, "a+b", into those of its parts.

  Raises:
    InputError: If a part is no kernel; it names the nearest one.
  """
  names = [part.strip() for part in name.split("+")]
  for part in names:
    what = "config.kernel" if len(names) == 1 else f"a part of kernel {name!r}"
    require_choice(what, part, KERNELS)
  return names


def build(name: str, options: Callable[[str], Mapping[str, Any]]) -> FeatureMap:
  """Builds the kernel of a name.

  Args:
    name: A kernel, or several joined by "+".
    options: Gives for the name of a part what its builder may be passed; arguments that
      the builder does not have are left out.
  """
  built = []
  for part in parts(name):
    builder = KERNELS[part]
    wanted = inspect.signature(builder).parameters
    given = options(part).items()
    fixed = getattr(builder, "keywords", {})  # The spectrum that a name stands for.
    built.append(builder(**{k: v for k, v in given if k in wanted and k not in fixed}))
  return built[0] if len(built) == 1 else add(*built)
