"""Arrays onto devices: clients shared out over a mesh, everything else on each."""

from typing import Any

import chex
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedbnr_jax.federation import Federation
from fedbnr_jax.mapping import AXIS


def put_federation(federation: Federation, mesh: Mesh | None) -> Federation:
  """The same federation on the devices of a mesh, or on the default one.

  Each device, and so each process, holds the rows of its own share of the clients only.
  Clients without rows make the shares equal.
  """
  if mesh is None:
    return jax.device_put(federation)
  missing = -federation.clients.y.shape[0] % mesh.shape[AXIS]
  padded = jax.tree.map(
    lambda leaf: _padded(np.asarray(leaf), missing), federation.clients
  )
  return Federation(
    clients=share(padded, mesh),
    server=replicate(federation.server, mesh),
    num_padding=federation.num_padding + missing,
  )


def share(tree: Any, mesh: Mesh | None) -> Any:
  """Arrays [K, ...], K a multiple of the devices, each device with its part."""
  if mesh is None:
    return jax.device_put(tree)
  return _put(tree, NamedSharding(mesh, PartitionSpec(AXIS)))


def replicate(tree: Any, mesh: Mesh | None) -> Any:
  """The same arrays, whole, on every device."""
  if mesh is None:
    return jax.device_put(tree)
  return _put(tree, NamedSharding(mesh, PartitionSpec()))


def replicate_key(key: chex.PRNGKey, mesh: Mesh | None) -> chex.PRNGKey:
  """The same for a random key, which is no plain array."""
  if mesh is None:
    return key
  data = replicate(np.asarray(jax.random.key_data(key)), mesh)
  return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def _put(tree: Any, sharding: NamedSharding) -> Any:
  def put(leaf: Any) -> jax.Array:
    array = np.asarray(leaf)
    # Reads what this process's devices hold, and no more.
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

  return jax.tree.map(put, tree)


def _padded(array: np.ndarray, missing: int) -> np.ndarray:
  if not missing:
    return array
  return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
