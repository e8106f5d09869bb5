"""What methods share in which every client keeps something for itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbnr_jax import fitc
from fedbnr_jax.algorithms.base import Floats, ServerState
from fedbnr_jax.errors import InputError
from fedbnr_jax.federation import Clients, Federation, ServerSet
from fedbnr_jax.participation import Participation


def copies(own: Any, num_clients: int) -> Any:
  """The same start [K, ...] for every client."""
  return jax.tree.map(
    lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), own
  )


def count_clients(
  state: ServerState, server: ServerSet | None, total: jax.Array
) -> ServerState:
  """The server's side where each client sends a one, and keeps the rest."""
  del server
  return state.replace(num_clients=total)


def no_floats(state: ServerState, server: ServerSet | None) -> Floats:
  """Of an exchange in which nothing goes over the wire that has not gone already."""
  del state, server
  return Floats(0, 0)


def check_everybody(participation: Participation) -> None:
  """Raises InputError for methods in which every client has a model of its own."""
  if participation.statistics_too:
    raise InputError(
      "config.statistics is 'answering', but every client has a model of its own in "
      "this method: use 'all'."
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
  x: jax.Array, rows: Clients, inducing: jax.Array, scales: fitc.KernelParams
) -> tuple[fitc.Sparse, jax.Array]:
  """The sparse process of a client's rows, seen as x [N, E], and its NLL [] per row."""
  process, nll = fitc.condition(x, rows.y, inducing, scales, rows.mask)
  return process, nll / jnp.maximum(jnp.sum(rows.mask, dtype=nll.dtype), 1)
