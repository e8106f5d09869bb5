"""The noise of predictions, for every method with one last layer of all rows.

It is one σ ("constant"); or follows the residuals of the rows in the posterior, and so
varies with the input ("varying"); or does, and all error bars are then scaled to the
errors of validation rows ("rescaled"); or follows the residuals of validation rows
alone ("held-out"). The last two are for kernels that learn their own rows by heart.
"""

from typing import NamedTuple

from fedbnr_jax.algorithms import held_out, last_layer
from fedbnr_jax.federated.exchange import Exchange
from fedbnr_jax.gp import urk
from fedbnr_jax.names import require_choice

NOISES = ("constant", "varying", "rescaled", "held-out")


class Noise(NamedTuple):
  """What a method does about its noise."""

  varies: bool  # Whether the posterior has weights of the noise.
  exchanges: tuple[Exchange, ...]  # They follow the exchange of statistics.
  held_out: tuple[Exchange, ...]  # Over validation rows, after each round.


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
  after: tuple[Exchange, ...] = ()
  if kind == "held-out":
    after = held_out.held_out_noise(feature_map)
  elif kind == "rescaled":
    after = held_out.rescaled_bars(feature_map)
  return Noise(kind != "constant", exchanges, after)
