"""What every program does first and last: set up JAX, print errors in one line."""

import contextlib
import io
import itertools
import os
import pathlib
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import TEXT
from fedbnr_jax.run import local_processes
from fedbnr_jax.run.training import NonFiniteError
from launch import compiled, interruption

CONFIG = config_flags.DEFINE_config_file(
  "config",
  help_string="File of configs/. Any field of it is a flag too, such as "
  "--config.seed=1 or --config.data.target=price: fedbnr_jax/run/config.py has them.",
  lock_config=True,
)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
# Several programs have these: defined once, for tests import them into one process.
# A program declares those that it reads, for --help would not list them otherwise.
OUTPUT = flags.DEFINE_string("output", None, "File or folder to write.")
SEEDS = flags.DEFINE_integer("seeds", 10, "Repetitions: seeds 0, 1, ...", 2)

_WRONG_INPUT = 2
_NOT_FINITE = 3
_NOBODY_READS = 141  # What a shell says of a program that SIGPIPE has ended.
# Matches JAX's errors when a process that it sums with has gone.
_COLLECTIVE = re.compile("(?i)gloo|collective|coordination|connection (closed|reset)")


def set_up_jax() -> None:
  """Float64 for phase 2, and compiled programs kept on disk for the next start."""
  if "JAX_ENABLE_X64" not in os.environ:  # It is set to 0 where there is no float64.
    jax.config.update("jax_enable_x64", True)
  compiled.keep()
  logging.set_verbosity(logging.ERROR)  # JAX logs every step of joining processes.
  warnings.showwarning = _one_line_warning


def workdir() -> str:
  """The value of --workdir."""
  if not WORKDIR.value:
    raise InputError("--workdir is missing: name the folder of the run.")
  return WORKDIR.value


def config() -> ml_collections.ConfigDict:
  """The value of --config."""
  if CONFIG.value is None:
    raise InputError("--config is missing: name one of the files in configs/.")
  return CONFIG.value


def run(main: Callable[[], None]) -> NoReturn:
  """Runs `main` as `absl.app.run` does, with errors of input in one line."""
  set_up_jax()
  _open_outputs()
  _print_all_characters()

  def guarded(argv: Sequence[str]) -> None:
    if len(argv) > 1:
      fail(f"unexpected argument {argv[1]!r}: options start with '--'.")
    try:
      with interruption.raised():
        main()
        sys.stdout.flush()
    except InputError as error:
      fail(str(error))
    except NonFiniteError as error:
      fail(str(error), _NOT_FINITE)
    except KeyboardInterrupt:
      # Ctrl-C reaches whoever started this process too, who says it for all of them.
      if local_processes.shared_word():
        _end(interruption.STATUS)
      fail(interruption.MESSAGE, interruption.STATUS)
    except Exception as error:
      if isinstance(error, OSError):
        _end_if_unprintable(error)
      if not jax.distributed.is_initialized():
        raise
      # An orderly end would wait for the other processes.
      if _COLLECTIVE.search(str(error)):
        fail("another process is gone. The same command takes the run up again.", 1)
      traceback.print_exc()
      fail(f"{type(error).__name__}: {str(error)[:200]}", 1)

  app.run(guarded, flags_parser=_parse)


def _print_all_characters() -> None:
  """Prints UTF-8, also where the locale has ASCII only; names of files as they are."""
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper) and stream.encoding in ("ascii", "utf-8"):
      stream.reconfigure(**TEXT)


def _open_outputs() -> None:
  """Lets what is printed to a closed output go nowhere, rather than fail."""
  for name in ("stdout", "stderr"):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _end_if_unprintable(error: OSError) -> None:
  """Ends the program if the error is that its output can no longer be written to."""
  try:
    print(flush=True)
    return
  except OSError:
    pass
  if isinstance(error, BrokenPipeError):  # Closed by who has seen enough, as `| head`.
    _end(_NOBODY_READS)
  fail(f"cannot print ({error.strerror}): make room, or print elsewhere.", 1)


def fail(message: str, status: int = _WRONG_INPUT) -> NoReturn:
  """Prints one line and exits."""
  _say(f"error: {' '.join(message.split())}")
  _end(status)


def _say(line: str) -> None:
  with contextlib.suppress(OSError):  # Such as a full disk: there is no other way.
    print(line, file=sys.stderr)


def _end(status: int) -> NoReturn:
  try:
    sys.stdout.flush()
  except OSError:  # Python would try again when it ends, and complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  # An orderly end would wait for the other processes, and they for this one. After an
  # interruption, it may crash on what is still computed.
  if jax.distributed.is_initialized() or status == interruption.STATUS:
    os._exit(status)
  sys.exit(status)


def _parse(argv: Sequence[str]) -> list[str]:
  """Parses the flags; a misspelt config field is one line, not a traceback."""
  for argument, following in itertools.pairwise([*argv, ""]):
    name, equals, value = argument.partition("=")
    path = (value if equals else following).partition(":")[0]
    if name in ("--config", "-config") and not pathlib.Path(path).is_file():
      fail(f"config file {path!r} does not exist: see the files in configs/.")
    in_ascii = sys.getfilesystemencoding() == "ascii"
    if in_ascii and name.startswith("--config.") and not value.isascii():
      # It would neither name a column nor be what another program reads and compares.
      fail(f"{argument} is not in ASCII, and PYTHONUTF8=0 forbids more: unset it.")
  try:
    return flags.FLAGS(argv)
  except OSError as error:
    _end_if_unprintable(error)  # By --help.
    fail(str(error))
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
    fail(_reason(error))


def _reason(error: BaseException) -> str:
  """The part of an error of parsing that helps its reader."""
  text = str(error.args[0]) if error.args else str(error)
  # A config file's own refusal comes wrapped, with its traceback as text.
  refusal = re.search(rf"{InputError.__name__}: (.*)", text)
  if refusal:
    return refusal[1]
  misspelt = re.search(r'Did you mean "(.+?)" instead of "(.+?)"', text)
  if misspelt:
    return f"there is no config field {misspelt[2]!r}: did you mean {misspelt[1]!r}?"
  if isinstance(error, KeyError | AttributeError):
    return f"there is no config field {text}."
  return text


def _one_line_warning(
  message: Warning | str,
  category: type[Warning],
  filename: str,
  lineno: int,
  file: object = None,
  line: str | None = None,
) -> None:
  del filename, lineno, file, line
  shown = issubclass(category, UserWarning | RuntimeWarning)
  if not compiled.mend(str(message)) and shown:
    _say(f"warning: {message}")
