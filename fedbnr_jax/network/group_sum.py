"""The one sum that a group of sites is asked for: of rows under a model's kernel.

It is an exchange of the training that has made the model, so that sites need nothing
else to answer it.
"""

import pathlib
import secrets
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fedbnr_jax import model
from fedbnr_jax.algorithms import last_layer
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp.blr import SufficientStats
from fedbnr_jax.names import listing
from fedbnr_jax.network import parts, vectors
from fedbnr_jax.network.agreement import Agreement
from fedbnr_jax.network.members import Members, stopped
from fedbnr_jax.network.question import Question
from fedbnr_jax.network.site import training_digest
from fedbnr_jax.network.sums import Sums
from fedbnr_jax.network.transport import Transport
from fedbnr_jax.run.records import as_json


class Group(NamedTuple):
  """Sites that join or leave together.

  Attributes:
    agreement: Of these sites alone, with all of them needed for a sum.
    transport: Reaches them; None where a group that has joined leaves as a whole.
  """

  agreement: Agreement
  transport: Transport | None = None

  @property
  def names(self) -> tuple[str, ...]:
    """Names of its sites, in order."""
    return tuple(sorted(self.agreement.members))


def reached(group: Group, seconds: float) -> Members:
  """Reaches all sites of a group, for a run of its own.

  Raises:
    InputError: If one is not there, or the agreement needs fewer than all.
  """
  agreement = group.agreement
  if group.transport is None:
    raise InputError(f"there is no connection to sites {listing(group.names)}.")
  if agreement.min_sites != len(agreement.members):
    raise InputError(
      "where sites join or leave, all of a group's sites are needed for its sum, or "
      "two tries at it would show a part: make the agreement with min_sites "
      f"{len(agreement.members)}. Nothing is changed."
    )
  members = Members(agreement, group.transport, secrets.token_hex(32), seconds)
  cards, failed = members.greet()
  if failed:
    raise stopped(failed, "nothing is changed")
  if agreement.masking:
    members.hand_out_keys(cards)
  return members


def statistics(members: Members, trained: model.Model, pause: float) -> SufficientStats:
  """Asks for the sum of sites' statistics under the model's kernel."""
  config = ml_collections.ConfigDict(trained.config.to_dict())
  config.num_clients = len(members.names)
  own, record = as_json(config), trained.preprocessor.to_json()
  training = training_digest(own, record)
  members.begin(training, own, record)
  with tempfile.TemporaryDirectory() as scratch:
    sums = Sums(members, pathlib.Path(scratch), pause)
    sums.named(Question("counts"))
    sums.answers.begin_training(training, config, trained.preprocessor)
    number, down = _kernel_message(config, trained)
    question = Question("exchange", training, number, (), vectors.to_arrays(down))
    total = last_layer.statistics_of(sums.tree(question))
  return jax.tree.map(np.asarray, total)


def _kernel_message(
  config: ml_collections.ConfigDict, trained: model.Model
) -> tuple[int, Any]:
  """Finds the exchange that made the posterior; returns its number and down message."""
  made = parts.of_config(config, config.num_clients, trained.preprocessor.num_inputs)
  server = jax.tree.map(jnp.asarray, trained.state.server)
  wanted = server.stats.moment.shape
  numbers = [
    number
    for number, part in enumerate(made.exchanges)
    if isinstance(part.up_like, last_layer.StatisticsMessage)
    and part.up_like.moment.shape == wanted
  ]
  exchange = made.exchanges[numbers[-1]].exchange
  return numbers[-1], exchange.broadcast(server, None)
