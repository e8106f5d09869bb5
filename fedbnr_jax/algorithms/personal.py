"""What methods share in which every client has a model of its own."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.federation import Federation, Rows, ServerSet
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.federated.state import ServerState
from fedbnr_jax.gp import fitc


class OwnModelMessage(NamedTuple):
  """Up: that a client has its model, and how likely its rows are; summable."""

  nll: jax.Array  # [] negative log evidence per row.
  num_clients: jax.Array  # [] int32, one.


def own_model_message(nll: jax.Array) -> OwnModelMessage:
  """Writes a client's message from its negative log evidence [] per row."""
  return OwnModelMessage(nll, jnp.ones((), jnp.int32))


def note_models(
  state: ServerState, server_set: ServerSet | None, total: OwnModelMessage
) -> ServerState:
  """Notes, as the server function, how many models there are and their mean NLL."""
  del server_set
  count = jnp.maximum(total.num_clients, 1).astype(total.nll.dtype)
  return state.replace(num_clients=total.num_clients, client_nll=total.nll / count)


def check_everybody(participation: Participation) -> None:
  """Raises InputError if some clients are to be without a model."""
  if not participation.all_send_statistics:
    raise InputError(
      "config.statistics_from is 'answering', but every client has a model of its own "
      "in this method: use 'all'."
    )


def check_inducing(field: str, num_inducing: int, federation: Federation) -> None:
  """Raises InputError if there are more inducing inputs than rows to stand for."""
  num_rows = int(np.sum(federation.clients.mask))
  if num_inducing > num_rows:
    raise InputError(
      f"{field} is {num_inducing}, but all clients together have {num_rows} training "
      "rows: give at most that many."
    )


def own_process(
  x: jax.Array, rows: Rows, inducing: jax.Array, scales: fitc.KernelParams
) -> tuple[fitc.Sparse, jax.Array]:
  """Fits the sparse process of a client's rows, whose inputs are seen as x [N, E].

  Returns:
    The process, and the negative log evidence [] per row.
  """
  process, nll = fitc.condition(x, rows.y, inducing, scales, rows.mask)
  return process, nll / jnp.maximum(jnp.sum(rows.mask, dtype=nll.dtype), 1)
