"""Who takes part in a round: clients are sampled, and some of them do not answer."""

from typing import NamedTuple

import chex
import jax

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import require_choice

STATISTICS_FROM = ("all", "answering")


class Participation(NamedTuple):
  """The rule by which the clients of a round are drawn."""

  fraction: float = 1.0  # Share of the clients that is sampled each round.
  dropout: float = 0.0  # Probability that a sampled client does not answer.
  # Whether all clients send statistics for the last layer, or only those that answer.
  statistics_from: str = "all"

  @property
  def is_full(self) -> bool:
    """Whether every client answers in every round."""
    return self.fraction == 1.0 and self.dropout == 0.0

  @property
  def all_send_statistics(self) -> bool:
    """Whether clients that do not train in a round still send statistics."""
    return self.statistics_from == "all"

  def check(self) -> None:
    """Raises InputError for values that make no rule."""
    if not 0 < self.fraction <= 1:
      raise InputError(
        f"participation must lie above 0 and be at most 1, got {self.fraction}."
      )
    if not 0 <= self.dropout < 1:
      raise InputError(f"dropout must be at least 0 and below 1, got {self.dropout}.")
    require_choice("statistics_from", self.statistics_from, STATISTICS_FROM)

  def num_sampled(self, num_clients: int) -> int:
    """Counts the clients that are sampled in a round; at least one."""
    return max(1, round(self.fraction * num_clients))

  def draw(self, key: chex.PRNGKey, num_clients: int) -> jax.Array:
    """Draws the clients [K] bool that answer in the round of this key."""
    key_sample, key_drop = jax.random.split(key)
    rank = jax.random.permutation(key_sample, num_clients)
    sampled = rank < self.num_sampled(num_clients)
    if self.dropout == 0.0:
      return sampled
    return sampled & ~jax.random.bernoulli(key_drop, self.dropout, (num_clients,))
