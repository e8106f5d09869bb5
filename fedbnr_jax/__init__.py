"""Federated Bayesian neural regression: one global Gaussian process, data unshared.

    import fedbnr_jax as fb

    model = fb.fit(frame, target="price", client="site")
    model.predict(new)
    model.save("runs/mine")
    fb.load("runs/mine")

`fit`, `load`, `Model` and `FederatedGPRegressor` are the way in; the modules are what
people compose methods of their own with. Names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
  from fedbnr_jax import algorithms, data
  from fedbnr_jax.errors import InputError
  from fedbnr_jax.estimator import FederatedGPRegressor
  from fedbnr_jax.federated import aggregation, federation
  from fedbnr_jax.fitting import fit
  from fedbnr_jax.gp import blr, metrics, networks, urk
  from fedbnr_jax.model import Model, load

# By public name, the module that defines it; a module of that name stands for itself.
_HOMES = {
  "FederatedGPRegressor": "fedbnr_jax.estimator",
  "InputError": "fedbnr_jax.errors",
  "Model": "fedbnr_jax.model",
  "aggregation": "fedbnr_jax.federated.aggregation",
  "algorithms": "fedbnr_jax.algorithms",
  "blr": "fedbnr_jax.gp.blr",
  "data": "fedbnr_jax.data",
  "federation": "fedbnr_jax.federated.federation",
  "fit": "fedbnr_jax.fitting",
  "load": "fedbnr_jax.model",
  "metrics": "fedbnr_jax.gp.metrics",
  "networks": "fedbnr_jax.gp.networks",
  "urk": "fedbnr_jax.gp.urk",
}

__all__ = [
  "FederatedGPRegressor",
  "InputError",
  "Model",
  "__version__",
  "aggregation",
  "algorithms",
  "blr",
  "data",
  "federation",
  "fit",
  "load",
  "metrics",
  "networks",
  "urk",
]


def __getattr__(name: str) -> Any:
  """Imports a public name on first use, so that `import fedbnr_jax` takes no time."""
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  home = importlib.import_module(_HOMES[name])
  value = home if _HOMES[name].endswith(f".{name}") else getattr(home, name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
