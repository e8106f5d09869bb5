"""What every program does first and last: set up JAX, print errors in one line."""

import contextlib
import io
import itertools
import os
import pathlib
import re
import select
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
from fedbnr_jax.files import TEXT, cache_folder
from fedbnr_jax.run.training import NonFiniteError

CONFIG = config_flags.DEFINE_config_file("config", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
# Several programs have these: defined once, for tests import them into one process.
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
  jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
  # Also the small ones: a start has a hundred of them, a quarter of its time.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  # jax writes in place: an entry that another process is writing is a miss.
  warnings.filterwarnings("ignore", "Error .* persistent compilation cache entry")
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
  _print_all_characters()

  def guarded(argv: Sequence[str]) -> None:
    if len(argv) > 1:
      fail(f"unexpected argument {argv[1]!r}: options start with '--'.")
    try:
      main()
      if sys.stdout:  # None where it is closed.
        sys.stdout.flush()
    except InputError as error:
      fail(str(error))
    except NonFiniteError as error:
      fail(str(error), _NOT_FINITE)
    except KeyboardInterrupt:
      fail("stopped. The same command takes the run up again.", 130)
    except BrokenPipeError:
      if not _nobody_reads():
        raise
      _end(_NOBODY_READS)
    except Exception as error:
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


def _nobody_reads() -> bool:
  """Whether the output goes to a pipe that was closed, as by `| head`."""
  waiting = select.poll()
  waiting.register(sys.stdout, 0)  # Errors are reported whatever is asked for.
  if not waiting.poll(0):
    return False
  # The last flush, when Python ends, would fail again.
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  return True


def fail(message: str, status: int = _WRONG_INPUT) -> NoReturn:
  """Prints one line and exits."""
  print(f"error: {' '.join(message.split())}", file=sys.stderr)
  _end(status)


def _end(status: int) -> NoReturn:
  if jax.distributed.is_initialized():
    # An orderly end would wait for the other processes, and they for this one.
    with contextlib.suppress(OSError):
      sys.stdout.flush()
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
  except BrokenPipeError:  # Nobody reads what --help prints.
    _nobody_reads()
    sys.exit(_NOBODY_READS)
  except (
    flags.Error,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    OSError,
  ) as error:
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
  if issubclass(category, UserWarning | RuntimeWarning):
    print(f"warning: {message}", file=sys.stderr)
