"""The kernel that a config names, built from the fields that its builder asks for."""

import inspect
from typing import Any

import ml_collections

from fedbnr_jax.gp import urk


def from_config(
  config: ml_collections.ConfigDict, num_samples: int | None = None
) -> urk.FeatureMap:
  """Builds `config.kernel`.

  The arguments of each part are the config's fields of the same name, and those of the
  part's own group, such as `config.polynomial.degree`, or `config.ard.basis` of the
  stationary kernels.

  Args:
    config: Of a run.
    num_samples: S, if not `config.num_samples`.
  """

  def options(part: str) -> dict[str, Any]:
    given = {**config, **config.get(group(part), {})}
    return given if num_samples is None else given | {"num_samples": num_samples}

  return urk.build(config.kernel, options)


def group(part: str) -> str:
  """Names the config's group of options for a part of a kernel; there may be none."""
  return "ard" if part in urk.SPECTRA else part


def field_names(config: ml_collections.ConfigDict) -> list[str]:
  """Names the fields and groups of the config that `config.kernel` is built from."""
  names: list[str] = []
  for part in urk.parts(config.kernel):
    names += [*inspect.signature(urk.KERNELS[part]).parameters, group(part)]
  return [name for name in dict.fromkeys(names) if name in config]
