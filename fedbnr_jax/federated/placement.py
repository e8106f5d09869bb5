"""Where clients are computed: devices of a mesh, and how many clients at a time."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedbnr_jax.errors import InputError
from fedbnr_jax.federated.federation import Federation, Rows

AXIS = "clients"  # Name of the mesh axis.

# How many floats the clients that are batched together should need. On a CPU they
# should stay in a core's cache; elsewhere they fill the device.
_CPU_FLOATS = 400_000
_DEVICE_FLOATS = 400_000_000
# How many floats the messages of clients that are batched together may have. They are
# written before they are summed, and with wide last layers they are most of the memory.
_MESSAGE_FLOATS = 16_000_000


class Placement(NamedTuple):
  """The devices and batch size of a computation; no result depends on them."""

  # Clients batched at a time on each device; None lets `sized` choose.
  batch_size: int | None = None
  mesh: Mesh | None = None  # Devices along `AXIS`; None is the default device alone.

  @property
  def num_devices(self) -> int:
    """The number of devices that share the clients."""
    return 1 if self.mesh is None else self.mesh.size

  def sized(self, num_params: int, rows: Rows, message_floats: int = 0) -> "Placement":
    """Chooses the batch size, if it is open.

    Args:
      num_params: What each client trains.
      rows: [K, N, D] of all clients.
      message_floats: The length of the largest message that a client sends.
    """
    if self.batch_size is not None:
      return self
    _, num_rows, num_inputs = rows.x.shape
    size = automatic_batch_size(num_params, num_rows, num_inputs)
    if message_floats:
      size = min(size, max(1, _MESSAGE_FLOATS // message_floats))
    return self._replace(batch_size=size)

  def replicated(self, tree: Any) -> Any:
    """Lets every device hold the whole of each array; for use inside jit."""
    if self.mesh is None:
      return tree
    whole = NamedSharding(self.mesh, PartitionSpec())
    return jax.tree.map(
      lambda leaf: jax.lax.with_sharding_constraint(leaf, whole), tree
    )


def automatic_batch_size(num_params: int, num_rows: int, num_inputs: int) -> int:
  """Estimates how many clients to batch from what one of them needs.

  A client needs its parameters with their gradient and two moments, and the hidden
  units of its rows forward and backward; the number of hidden units is estimated as
  parameters over inputs.
  """
  hidden_units = num_rows * max(1, num_params // (num_inputs + 1))
  floats = 4 * num_params + 2 * hidden_units
  cached = jax.default_backend() == "cpu"
  return max(1, (_CPU_FLOATS if cached else _DEVICE_FLOATS) // floats)


def client_mesh(num_devices: int) -> Mesh | None:
  """Makes a mesh of the first `num_devices` devices; 0 takes all, in all processes.

  Returns:
    None where one device computes everything; with several processes, each its own.
  """
  available = jax.devices()
  if num_devices > len(available):
    raise InputError(
      f"config.mesh is {num_devices}, but there are {len(available)} devices "
      f"({available[0].platform}): use at most as many, or 0 for all."
    )
  if 1 < num_devices < len(available) and jax.process_count() > 1:
    raise InputError(
      f"config.mesh is {num_devices}, but {jax.process_count()} processes have "
      f"{len(available)} devices, and all must take part: use 0."
    )
  num_devices = num_devices or len(available)
  if num_devices == 1:
    return None
  return Mesh(np.array(available[:num_devices]), (AXIS,))


# -------------------------------------------------------------- arrays onto devices


def pad_clients(tree: Any, num_clients: int) -> Any:
  """Appends zeros to the client axis of [K, ...] leaves until K is `num_clients`."""

  def pad(leaf: Any) -> Any:
    missing = num_clients - leaf.shape[0]
    if not missing:
      return leaf
    widths = [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)
    return (
      np.pad(leaf, widths) if isinstance(leaf, np.ndarray) else jnp.pad(leaf, widths)
    )

  return jax.tree.map(pad, tree)


def round_up(number: int, multiple: int) -> int:
  """Returns the smallest multiple of `multiple` that is not below `number`."""
  return -(-number // multiple) * multiple


def put_federation(federation: Federation, mesh: Mesh | None) -> Federation:
  """Puts a federation on the devices of a mesh, or on the default device.

  Each device, and so each process, holds the rows of its own share of the clients only.
  Clients without rows make the shares equal.
  """
  if mesh is None:
    return jax.device_put(federation)
  num_clients = federation.clients.y.shape[0]
  padded = round_up(num_clients, mesh.shape[AXIS])
  clients = jax.tree.map(np.asarray, federation.clients)
  return Federation(
    clients=share(pad_clients(clients, padded), mesh),
    server=replicate(federation.server, mesh),
    inputs=replicate(federation.inputs, mesh),
    num_padding=federation.num_padding + padded - num_clients,
  )


def share(tree: Any, mesh: Mesh | None) -> Any:
  """Gives each device its part of arrays [K, ...]; K is a multiple of the devices."""
  if mesh is None:
    return jax.device_put(tree)
  return _put(tree, NamedSharding(mesh, PartitionSpec(AXIS)))


def replicate(tree: Any, mesh: Mesh | None) -> Any:
  """Puts the whole of each array on every device."""
  if mesh is None:
    return jax.device_put(tree)
  return _put(tree, NamedSharding(mesh, PartitionSpec()))


def replicate_key(key: chex.PRNGKey, mesh: Mesh | None) -> chex.PRNGKey:
  """Puts a random key, which is no plain array, on every device."""
  if mesh is None:
    return key
  data = replicate(np.asarray(jax.random.key_data(key)), mesh)
  return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def _put(tree: Any, sharding: NamedSharding) -> Any:
  def put(leaf: Any) -> jax.Array:
    array = np.asarray(leaf)
    # The callback reads what this process's devices hold, and no more.
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

  return jax.tree.map(put, tree)
