"""Ctrl-C ends a program soon, in one line at most, at whatever moment it comes.

Python raises KeyboardInterrupt, and loses it where it comes amid a finaliser or a
callback of the garbage collector, of which JAX has one; and while compiled code runs,
as when XLA compiles, it raises nothing at all.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

STATUS = 128 + signal.SIGINT
MESSAGE = "stopped. The same command takes the run up again."

# Seconds in which a program that was interrupted may put its things in order.
_GRACE = 15.0
_PAUSE = 0.1


def ends_at_once() -> None:
  """Lets Ctrl-C end the process without a word, as while it imports its modules.

  Where Ctrl-C is ignored, as under nohup, it stays so.
  """
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def raised() -> Iterator[None]:
  """Has Ctrl-C raise KeyboardInterrupt in the block; where that does not help, end.

  It does nothing unless `ends_at_once` was called before.
  """
  if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
    yield
    return
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  lost = threading.Event()
  threading.Thread(target=_watch, args=(reader, lost), daemon=True).start()
  # Whatever the main thread does, the number of a signal is written there.
  signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  sys.unraisablehook = lambda what: _note_if_lost(what, lost)
  signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _note_if_lost(what: "sys.UnraisableHookArgs", lost: threading.Event) -> None:
  if issubclass(what.exc_type, KeyboardInterrupt):
    lost.set()
  else:
    sys.__unraisablehook__(what)


def _watch(reader: int, lost: threading.Event) -> None:
  """Once there is an interrupt, raises it again if it is lost, and ends at the last."""
  while signal.SIGINT not in os.read(reader, 64):
    pass
  deadline = time.monotonic() + _GRACE
  while time.monotonic() < deadline:
    time.sleep(_PAUSE)
    if lost.is_set():
      lost.clear()
      _thread.interrupt_main()
  with contextlib.suppress(OSError):
    os.write(2, f"error: {MESSAGE}\n".encode())
  os._exit(STATUS)
