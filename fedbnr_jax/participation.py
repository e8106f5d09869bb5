"""Who takes part in a round: clients are sampled, and some of them do not answer."""

from typing import NamedTuple

import chex
import jax

from fedbnr_jax.errors import InputError


class Participation(NamedTuple):
  """Rule by which the clients of a round are drawn."""

  fraction: float = 1.0  # Of the clients, sampled without replacement each round.
  dropout: float = 0.0  # Probability that a sampled one does not answer.
  # Whether those that train locally are also the only ones that send statistics; by
  # default all clients do.
  statistics_too: bool = False

  @property
  def is_full(self) -> bool:
    return self.fraction == 1.0 and self.dropout == 0.0

  def check(self) -> None:
    """Raises InputError for what is not a rule."""
    if not 0 < self.fraction <= 1:
      raise InputError(
        f"participation must lie above 0 and be at most 1, got {self.fraction}."
      )
    if not 0 <= self.dropout < 1:
      raise InputError(f"dropout must be at least 0 and below 1, got {self.dropout}.")

  def num_sampled(self, num_clients: int) -> int:
    """How many are sampled in a round; at least one."""
    return max(1, round(self.fraction * num_clients))

  def draw(self, key: chex.PRNGKey, num_clients: int) -> jax.Array:
    """[K] bool: the clients that answer in the round of this key."""
    key_sample, key_drop = jax.random.split(key)
    rank = jax.random.permutation(key_sample, num_clients)
    sampled = rank < self.num_sampled(num_clients)
    if self.dropout == 0.0:
      return sampled
    return sampled & ~jax.random.bernoulli(key_drop, self.dropout, (num_clients,))
