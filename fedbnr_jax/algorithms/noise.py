"""The noise of predictions, for every method with one last layer of all rows.

It is one σ ("constant"); or follows the residuals of the rows in the posterior, and so
varies with the input ("varying"); or does, and all error bars are then scaled to the
errors of validation rows ("rescaled"); or follows the residuals of validation rows
alone ("held-out"). The last two are for kernels that learn their own rows by heart.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from fedbnr_jax.algorithms import last_layer
from fedbnr_jax.federated.algorithm import no_calibration
from fedbnr_jax.federated.exchange import Exchange
from fedbnr_jax.federated.state import ServerState
from fedbnr_jax.gp import urk
from fedbnr_jax.names import require_choice

NOISES = ("constant", "varying", "rescaled", "held-out")


class Noise(NamedTuple):
  """What a method does about its noise."""

  varies: bool  # Whether the posterior has weights of the noise.
  exchanges: tuple[Exchange, ...]  # They follow the exchange of statistics.
  # The method's `calibrate`: (state, x [N, D], y [N]) -> state.
  calibrate: Callable[[ServerState, jax.Array, jax.Array], ServerState]


def learnt(kind: str, feature_map: urk.FeatureMap, *, everybody: bool) -> Noise:
  """Says how noise of a kind is learnt under a kernel.

  Args:
    kind: One of `NOISES`.
    feature_map: The kernel of the last layer.
    everybody: Whether clients that do not train in the round take part.
  """
  require_choice("noise", kind, NOISES)
  exchanges: tuple[Exchange, ...] = ()
  if kind in ("varying", "rescaled"):
    exchanges = last_layer.learn_noise(feature_map, everybody=everybody)
  calibrate = no_calibration
  if kind == "held-out":
    calibrate = last_layer.held_out_noise(feature_map)
  elif kind == "rescaled":
    calibrate = last_layer.rescaled_by_held_out(feature_map)
  return Noise(kind != "constant", exchanges, calibrate)
