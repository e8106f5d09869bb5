"""The processes of a training find each other before JAX connects them.

`jax.distributed.initialize` reports none of this to Python. In JAX 0.10.2 it ends the
process instead, whatever its options are:
  a process does not come in time   SIGABRT and a stack trace; nobody is named
  two have the same number          SIGABRT and a stack trace in all
  the port is taken                 SIGSEGV in the first
  another count in a later process  nothing: it trains with the first's count
So all meet here first, at the same address. Each says its number and count, and when
all are there, or at the deadline, the first tells everyone to go on or why not. Whoever
does not say the word that processes on one machine share is a stranger.
"""

import asyncio
import contextlib
import json
import time
from typing import Any, NamedTuple

from fedbnr_jax.errors import InputError

_GO = "go"
_MAX_LINE = 4096  # Bytes; a longer line is a stranger's.
_PAUSE = 0.1  # Seconds between two attempts to reach the first process.


class Place(NamedTuple):
  """Where the processes meet, and for how long they wait for each other."""

  host: str
  port: int
  wait_seconds: float
  word: str = ""  # All say the same.

  def __str__(self) -> str:
    return f"{self.host}:{self.port}"


def meet(place: Place, number: int, count: int) -> None:
  """Returns when all processes have come.

  Args:
    place: Address of the first process.
    number: Number of this process, from 0.
    count: How many processes there are.

  Raises:
    InputError: If a process does not come in time, or comes with another number or
      count than it should have. All that have come raise it.
  """
  meeting = _Host(place, count).meet() if number == 0 else _visit(place, number, count)
  answer = asyncio.run(meeting)
  if answer != _GO:
    raise InputError(answer)


class _Host:
  """The first process, which hears all connections at once and answers at the end."""

  def __init__(self, place: Place, count: int) -> None:
    self._place = place
    self._count = count
    self._present: dict[int, asyncio.StreamWriter] = {}
    self._refused: list[asyncio.StreamWriter] = []
    self._connections: list[asyncio.Task[None]] = []

  async def meet(self) -> str:
    """Waits for the other processes; returns what all of them are told."""
    self._answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    try:
      server = await asyncio.start_server(
        self._connect, self._place.host, self._place.port, limit=_MAX_LINE
      )
    except (OSError, UnicodeError) as error:
      return (
        f"process 0 cannot listen at coordinator {self._place} ({error}): name an "
        "address of its machine and a port that is free."
      )
    try:
      async with asyncio.timeout(self._place.wait_seconds):
        answer = await self._answer
    except TimeoutError:
      answer = self._who_is_missing()
    finally:
      server.close()
    for writer in (*self._present.values(), *self._refused):
      writer.write(_line(answer))
    return answer

  def _connect(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    # A task of our own, because Python 3.11 logs it as an error if one that it has
    # made from a coroutine is cancelled, as all are when the meeting is over.
    self._connections.append(asyncio.create_task(self._hear(reader, writer)))

  async def _hear(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    """Listens to one connection for as long as it lasts."""
    try:
      # A stranger, such as a port scan, sends other lines, endless ones, or nothing.
      with contextlib.suppress(OSError, ValueError):
        introduction = _parsed(await reader.readline())
        if _is_introduction(introduction, self._place.word):
          self._admit(introduction["number"], introduction["count"], writer)
          await reader.read(1)  # Returns when the process hangs up.
    finally:
      # Whoever hangs up before the end may come again under the same number.
      self._present = {n: one for n, one in self._present.items() if one is not writer}
      writer.close()

  def _admit(self, number: int, count: int, writer: asyncio.StreamWriter) -> None:
    """Counts a process as present, or refuses it, which ends the meeting."""
    refusal = None
    if count != self._count:
      refusal = (
        f"process {number} was started with num_processes={count}, process 0 with "
        f"{self._count}: use the same."
      )
    elif number in self._present:
      refusal = f"two processes have process_id={number}: give each its own."
    if refusal is None:
      self._present[number] = writer
    else:
      self._refused.append(writer)
    if not self._answer.done() and (refusal or len(self._present) == self._count - 1):
      self._answer.set_result(refusal or _GO)

  def _who_is_missing(self) -> str:
    missing = [n for n in range(1, self._count) if n not in self._present]
    return (
      f"process {', '.join(map(str, missing))} of {self._count} did not come to "
      f"{self._place} within {self._place.wait_seconds:g} s (wait_seconds): start all "
      "processes, each with its own process_id."
    )


async def _visit(place: Place, number: int, count: int) -> str:
  """Every other process: says who it is, and returns what the first answers."""
  deadline = time.monotonic() + place.wait_seconds
  while (left := deadline - time.monotonic()) > 0:
    # Errors: nobody is there yet, or somebody else is.
    with contextlib.suppress(OSError, ValueError):
      async with asyncio.timeout(min(left, 2.0)):
        reader, writer = await asyncio.open_connection(
          place.host, place.port, limit=_MAX_LINE
        )
      with contextlib.closing(writer):
        writer.write(_line({"number": number, "count": count, "word": place.word}))
        # The first answers, if only with a refusal, at its own deadline.
        async with asyncio.timeout(left + 5.0):
          answer = _parsed(await reader.readline())
      if isinstance(answer, str):
        return answer
    await asyncio.sleep(_PAUSE)
  return (
    f"process {number} of {count}: no answer from process 0 at coordinator {place} "
    f"within {place.wait_seconds:g} s (wait_seconds): start it there, with all the "
    "others."
  )


def _is_introduction(content: Any, word: str) -> bool:
  """Says whether this is what a process of the training sends."""
  if not isinstance(content, dict) or content.get("word", "") != word:
    return False
  number, count = content.get("number"), content.get("count")
  return type(number) is int and type(count) is int and 0 < number < count


def _line(content: Any) -> bytes:
  return json.dumps(content).encode() + b"\n"


def _parsed(line: bytes) -> Any:
  """Returns the line as JSON; None if it is none."""
  try:
    return json.loads(line)
  except (ValueError, RecursionError):
    return None
