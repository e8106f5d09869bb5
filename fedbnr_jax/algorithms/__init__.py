"""The registry of methods: one file each, one line here."""

from collections.abc import Callable
from typing import NamedTuple

import ml_collections

from fedbnr_jax.algorithms import (
  ard,
  central,
  exact,
  fedavg,
  fedbnr,
  fedloc,
  fedridge,
  local_kernels,
  local_layers,
  pfedgp,
)
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.algorithm import FederatedAlgorithm
from fedbnr_jax.federated.exchange import Exchange, Stage
from fedbnr_jax.federated.state import RoundInfo, ServerState, State
from fedbnr_jax.names import require_choice


class Method(NamedTuple):
  """How to build a method, and what it wants of the data."""

  build: Callable[[ml_collections.ConfigDict], FederatedAlgorithm]
  pooled: bool = False  # One client holds all rows, whatever num_clients says.
  distils: bool = False  # The server takes a share of the validation rows.
  # Rounds without a better validation score before stopping, unless the config says
  # how many; the paper's are 5. With 0, one round is all there is to it.
  patience: int = 5
  random_features: bool = (
    True  # Whether its kernel is the one that config.kernel names.
  )


# With σ and λ by evidence a kernel is as good as it can be at once, so that validation
# improves by small and noisy steps as long as the kernel does: five rounds without one
# say little.
_PATIENT = 30
# Their rounds may be of ten steps only, and their error jumps more than a mean's.
_POOLED = 20
# A round of L-BFGS that brings nothing is the last but a few.
_SPARSE = 2

CHOICE = "auto"  # Stands for whichever is best; see auto.py.
METHODS: dict[str, Method] = {
  "fedbnr": Method(fedbnr.from_config),
  "fedbnr-kd": Method(fedbnr.distilled_from_config, distils=True),
  "fedbnr-ev": Method(fedbnr.evidence_from_config, patience=_PATIENT),
  "fedbnr-kd-ev": Method(
    fedbnr.distilled_evidence_from_config, distils=True, patience=_PATIENT
  ),
  "fedbnr-exact": Method(exact.from_config, patience=_POOLED),
  "fedbnr-ard": Method(ard.from_config, patience=_SPARSE),
  "fedridge": Method(fedridge.from_config, patience=0),
  "central": Method(central.from_config, pooled=True, patience=_POOLED),
  "local+local": Method(local_kernels.local_from_config),
  "local+global": Method(local_kernels.local_global_from_config),
  "avg+local": Method(local_layers.average_from_config),
  "kd+local": Method(local_layers.distilled_from_config, distils=True),
  "fedavg": Method(fedavg.from_config, random_features=False),
  "fedprox": Method(fedavg.prox_from_config, random_features=False),
  "pfedgp": Method(pfedgp.from_config, random_features=False),
  "fedloc": Method(fedloc.from_config, random_features=False),
  "fedloc-poe": Method(fedloc.product_from_config, random_features=False),
}


def method(name: str) -> Method:
  """Looks a method up by name.

  Raises:
    InputError: If there is none; "auto" is none either, but a choice among them.
  """
  require_choice("config.method", name, (*METHODS, CHOICE))
  if name == CHOICE:
    raise InputError(
      f"method {CHOICE!r} chooses a method before anything is built: train by fit or "
      "workflow.train, or call auto.choose first."
    )
  return METHODS[name]


__all__ = [
  "METHODS",
  "Exchange",
  "FederatedAlgorithm",
  "Method",
  "RoundInfo",
  "ServerState",
  "Stage",
  "State",
  "method",
]
