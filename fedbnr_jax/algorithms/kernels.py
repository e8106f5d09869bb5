"""The kernel that a config names, built from the fields that its builder asks for."""

import inspect

import ml_collections

from fedbnr_jax.gp import urk
from fedbnr_jax.names import require_choice


def from_config(config: ml_collections.ConfigDict) -> urk.FeatureMap:
  """Builds `config.kernel`.

  Its arguments are the config's fields of the same name, and those of the group that is
  named like the kernel, such as `config.polynomial.degree`.
  """
  options = {name: config[name] for name in field_names(config)}
  return urk.KERNELS[config.kernel](**options, **config.get(config.kernel, {}))


def field_names(config: ml_collections.ConfigDict) -> list[str]:
  """Names the config's own fields, not those of a group, that `config.kernel` takes."""
  require_choice("config.kernel", config.kernel, urk.KERNELS)
  names = inspect.signature(urk.KERNELS[config.kernel]).parameters
  return [name for name in names if name in config]
