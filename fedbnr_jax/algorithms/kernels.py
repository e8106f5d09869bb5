"""The kernel that a config names, built from the fields that its builder asks for."""

import inspect
from typing import Any

import ml_collections

from fedbnr_jax.gp import urk

# Methods whose kernel and draws are in a group of their own, such as `config.sparse`.
OWN_GROUPS = {"fedbnr-ard": "sparse", "fedridge": "ridge"}


def _own(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Collects the fields of the method's own group; there may be none."""
  name = OWN_GROUPS.get(config.method)
  return dict(config[name]) if name else {}


def _fields(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Collects the config's fields, as the method reads those of its kernel."""
  return {**config, **_own(config)}


def from_config(
  config: ml_collections.ConfigDict,
  num_samples: int | None = None,
  largest_input: float | None = None,
) -> urk.FeatureMap:
  """Builds the kernel as it is trained.

  The arguments of each part are the config's fields of the same name, and those of the
  part's own group, such as `config.polynomial.degree`, or `config.ard.basis` of the
  stationary kernels.

  Args:
    config: Of a run.
    num_samples: S, if not that of the config.
    largest_input: The largest size of an input of any row, if it is known; a linear
      part then has a bounded norm.
  """
  fields, own = _fields(config) | {"largest_input": largest_input}, _own(config)

  def options(part: str) -> dict[str, Any]:
    given = {**fields, **config.get(group(part), {})}
    given |= {name: own[name] for name in ("basis", "spread") if name in own}
    return given if num_samples is None else given | {"num_samples": num_samples}

  return urk.build(fields["kernel"], options)


def wide_from_config(
  config: ml_collections.ConfigDict, largest_input: float | None = None
) -> urk.FeatureMap | None:
  """Builds the kernel of the last layer, if that has draws of its own, else None."""
  wanted = _fields(config)["posterior_samples"]
  return from_config(config, wanted, largest_input) if wanted else None


def name_of(config: ml_collections.ConfigDict) -> str:
  """Names the kernel that the method has."""
  name: str = _fields(config)["kernel"]
  return name


def draws_field(config: ml_collections.ConfigDict) -> str:
  """Names the field that says how many draws the last layer has."""
  wide = _fields(config)["posterior_samples"]
  field = "posterior_samples" if wide else "num_samples"
  return f"{OWN_GROUPS[config.method]}.{field}" if field in _own(config) else field


def of_last_layer(
  config: ml_collections.ConfigDict, largest_input: float | None = None
) -> urk.FeatureMap:
  """Builds the kernel whose features the last layer has."""
  wide = wide_from_config(config, largest_input)
  return wide or from_config(config, largest_input=largest_input)


def group(part: str) -> str:
  """Names the config's group of options for a part of a kernel; there may be none."""
  return "ard" if part in (*urk.SPECTRA, urk.BLEND) else part


def field_names(config: ml_collections.ConfigDict) -> list[str]:
  """Names the fields and groups of the config that its kernel is built from."""
  names: list[str] = ["posterior_samples", *OWN_GROUPS.values()]
  for part in urk.parts(_fields(config)["kernel"]):
    names += [*inspect.signature(urk.KERNELS[part]).parameters, group(part)]
  return [name for name in dict.fromkeys(names) if name in config]
