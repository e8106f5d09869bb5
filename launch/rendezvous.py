"""Processes of one training find each other, or say in one line who did not come.

JAX's own runtime aborts the process, with a page of stack trace, when a peer is
missing. So they meet here first, over a plain socket at the coordinator's address: each
tells its number, and when all have come the first lets them go on to the runtime.
"""

import contextlib
import json
import selectors
import socket
import time
from typing import Any

from fedbnr_jax.errors import InputError

_GO = "go"
_MAX_LINE = 4096
# Between two attempts of a process to reach the first.
_PAUSE = 0.1


def meet(host: str, port: int, number: int, count: int, wait_seconds: float) -> None:
  """Returns when all `count` processes have come.

  Raises:
    InputError: If somebody does not come in time, or comes with other options.
  """
  deadline = time.monotonic() + wait_seconds
  if number == 0:
    _receive(host, port, count, deadline, wait_seconds)
  else:
    _report(host, port, number, count, deadline, wait_seconds)


def _receive(
  host: str, port: int, count: int, deadline: float, wait_seconds: float
) -> None:
  """The first process: waits for the others and answers them all at once."""
  with _listening(host, port) as server, _Gate(server, count) as gate:
    while gate.refusal is None and gate.missing:
      left = deadline - time.monotonic()
      if left <= 0:
        missing = ", ".join(map(str, gate.missing))
        gate.refusal = (
          f"process {missing} of {count} did not come to {host}:{port} within "
          f"{wait_seconds:g} s (--wait_seconds): start all processes, each with its "
          "own --process_id."
        )
      else:
        gate.attend(left)
    gate.answer()
  if gate.refusal is not None:
    raise InputError(gate.refusal)


class _Gate:
  """Who has come so far. Nobody is waited for in particular: all are listened to."""

  def __init__(self, server: socket.socket, count: int) -> None:
    self.refusal: str | None = None
    self._server = server
    self._count = count
    self._come: dict[int, socket.socket] = {}
    self._said: dict[socket.socket, bytes] = {}  # Of those not known yet.
    self._selector = selectors.DefaultSelector()
    server.setblocking(False)
    self._selector.register(server, selectors.EVENT_READ)

  def __enter__(self) -> "_Gate":
    return self

  def __exit__(self, *exception: object) -> None:
    self._selector.close()
    for peer in (*self._said, *self._come.values()):
      peer.close()

  @property
  def missing(self) -> list[int]:
    return [number for number in range(1, self._count) if number not in self._come]

  def attend(self, seconds: float) -> None:
    """Hears what there is to hear, for so long at most."""
    for key, _ in self._selector.select(seconds):
      if key.fileobj is self._server:
        with contextlib.suppress(OSError):  # Gone before it was let in.
          self._let_in(self._server.accept()[0])
      elif self.refusal is None:
        self._hear(key.fileobj)  # type: ignore[arg-type]

  def answer(self) -> None:
    """Tells all that have come to go on, or why not."""
    for peer in self._come.values():
      with contextlib.suppress(OSError):
        peer.settimeout(1.0)
        peer.sendall(json.dumps(self.refusal or _GO).encode() + b"\n")

  def _let_in(self, peer: socket.socket) -> None:
    peer.setblocking(False)
    self._said[peer] = b""
    self._selector.register(peer, selectors.EVENT_READ)

  def _hear(self, peer: socket.socket) -> None:
    try:
      part = peer.recv(_MAX_LINE)
    except BlockingIOError:
      return
    except OSError:
      part = b""
    if not part:  # Hung up; if it was known it may come again.
      self._forget(peer)
    elif peer in self._said:
      self._said[peer] += part
      if b"\n" in self._said[peer]:
        self._admit(peer, _parsed(self._said[peer]))
      elif len(self._said[peer]) > _MAX_LINE:
        self._forget(peer)

  def _admit(self, peer: socket.socket, told: Any) -> None:
    number, count = (
      (told.get("number"), told.get("count"))
      if isinstance(told, dict)
      else (None, None)
    )
    if type(number) is not int or type(count) is not int:
      self._forget(peer)  # A stranger: a port scan, or another program.
      return
    if count != self._count:
      self.refusal = (
        f"process {number} was started with --num_processes={count}, process 0 with "
        f"{self._count}: use the same."
      )
    elif not 0 < number < count:
      self._forget(peer)
      return
    elif number in self._come:
      self.refusal = f"two processes have --process_id={number}: give each its own."
    del self._said[peer]
    # Where it is refused it is told so too, under a number of nobody else.
    self._come[number if self.refusal is None else -1] = peer

  def _forget(self, peer: socket.socket) -> None:
    self._said.pop(peer, None)
    self._come = {n: one for n, one in self._come.items() if one is not peer}
    self._selector.unregister(peer)
    peer.close()


def _listening(host: str, port: int) -> socket.socket:
  try:
    return socket.create_server((host, port))
  except (OSError, UnicodeError) as error:
    raise InputError(
      f"process 0 cannot listen at --coordinator={host}:{port} ({error}): name an "
      "address of its machine and a port that is free."
    ) from error


def _report(
  host: str, port: int, number: int, count: int, deadline: float, wait_seconds: float
) -> None:
  """The other processes: tell who they are and wait for the answer."""
  answer: Any = None
  while not isinstance(answer, str):
    left = deadline - time.monotonic()
    if left <= 0:
      raise InputError(
        f"process {number} of {count}: no answer from process 0 at "
        f"--coordinator={host}:{port} within {wait_seconds:g} s (--wait_seconds): "
        "start it there, with all the others."
      )
    try:
      with socket.create_connection((host, port), timeout=min(left, 2.0)) as peer:
        told = {"number": number, "count": count}
        peer.sendall(json.dumps(told).encode() + b"\n")
        # The first answers, if only with a refusal, at its own deadline.
        answer = _read(peer, time.monotonic() + left + 5.0)
    except (OSError, UnicodeError):
      answer = None
    if not isinstance(answer, str):  # Not there yet, or somebody else is.
      time.sleep(_PAUSE)
  if answer != _GO:
    raise InputError(str(answer))


def _read(peer: socket.socket, deadline: float) -> Any:
  """One line of JSON; None if there is none by the deadline."""
  data = b""
  while b"\n" not in data and len(data) < _MAX_LINE:
    peer.settimeout(max(0.01, deadline - time.monotonic()))
    part = peer.recv(_MAX_LINE)
    if not part:
      return None
    data += part
  return _parsed(data)


def _parsed(data: bytes) -> Any:
  """The first line as JSON; None if it is none."""
  try:
    return json.loads(data.partition(b"\n")[0])
  except (ValueError, RecursionError):
    return None
