"""What is carried from round to round: the server's state, and what clients keep."""

from typing import Any

import jax
from flax import struct


class ServerState(struct.PyTreeNode):
  """What the server knows. A method leaves the fields that it does not use at ()."""

  num_rounds: jax.Array  # [] int32, rounds that are done.
  num_clients: jax.Array  # [] int32, clients whose rows are in the prediction.
  params: Any  # What is trained; for kernel methods ModelParams: θ, σ and λ.
  omega: Any = ()  # [S, ...] random draws of the kernel; constants.
  seed: Any = ()  # [2] uint32, what ω was drawn from; sent in place of ω.
  # What is publicly known of the inputs, an `urk.InputSummary`, if draws depend on it.
  inputs: Any = ()
  stats: Any = ()  # SufficientStats under `params`, summed over clients.
  posterior: Any = ()  # Posterior of the last layer; before the first round, the prior.
  # [] mean over clients of their negative log evidence per row, for methods with a
  # model for each client.
  client_nll: Any = ()
  optimizer: Any = ()  # What a server that takes steps of its own remembers of them.


class State(struct.PyTreeNode):
  """A simulated federation between two rounds."""

  server: ServerState
  # [K, ...] what each client keeps for itself. In a real federation it is on the
  # client's own disk; in the simulation it stands here, beside the server's state.
  own: Any = ()


class RoundInfo(struct.PyTreeNode):
  """Diagnostics of a round; they are not carried on."""

  answered: jax.Array  # [K] bool, the clients that trained in this round.
  # [K] each client's loss before its last step, nats per row; () where reports stay
  # with the clients.
  client_loss: Any
  train_nll: jax.Array  # [] negative log evidence per row; see `train_nll` of a method.
  floats_up: jax.Array  # [] int32, numbers that an answering client sends in the round.
  floats_down: jax.Array  # [] int32, numbers that it receives.
