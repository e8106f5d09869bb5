"""The registry of methods: one file each, one line here."""

from collections.abc import Callable
from typing import NamedTuple

import ml_collections

from fedbnr_jax.algorithms import central, exact, fedbnr
from fedbnr_jax.algorithms.base import (
  Exchange,
  FederatedAlgorithm,
  RoundInfo,
  ServerState,
  Stage,
)
from fedbnr_jax.config import require_choice


class Method(NamedTuple):
  """How to build a method, and what it wants of the data."""

  build: Callable[[ml_collections.ConfigDict], FederatedAlgorithm]
  pooled: bool = False  # One client holds all rows, whatever num_clients says.
  distils: bool = False  # The server takes a share of the validation rows.


METHODS: dict[str, Method] = {
  "fedbnr": Method(fedbnr.from_config),
  "fedbnr-kd": Method(fedbnr.distilled_from_config, distils=True),
  "fedbnr-ev": Method(fedbnr.evidence_from_config),
  "fedbnr-kd-ev": Method(fedbnr.distilled_evidence_from_config, distils=True),
  "fedbnr-exact": Method(exact.from_config),
  "central": Method(central.from_config, pooled=True),
}


def method(name: str) -> Method:
  """Looks a method up by name."""
  require_choice("config.method", name, tuple(METHODS))
  return METHODS[name]


__all__ = [
  "METHODS",
  "Exchange",
  "FederatedAlgorithm",
  "Method",
  "RoundInfo",
  "ServerState",
  "Stage",
  "method",
]
