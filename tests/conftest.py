"""One place that fixes how every test runs: threads, precision, strictness.

Variables that jax and the linear algebra libraries read only once are set before
anything imports them. Several test processes share a machine, so each keeps to
one thread. Promotion between types or ranks is an error under test, because in
numerical code it is most often a slip.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator

os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAGS = ["--xla_cpu_multi_thread_eigen=false"]
# Nearly all of the suite's time is compilation, and its programs run for moments: code
# that is quick to make is wanted, here and in processes that tests start.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# XLA's older way to write a fusion takes half as long to compile. Later versions do not
# have it, and a flag that XLA does not know ends the process.
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
  _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
_GIVEN = os.environ.get("XLA_FLAGS", "").split()
os.environ["XLA_FLAGS"] = " ".join([*_GIVEN, *(f for f in _FLAGS if f not in _GIVEN)])
# Tests start dozens of programs, each of which would compile the package's sources.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Most of a test's time is compilation, and most programs return unchanged; the kernels
# of notebooks find them by these.
_CACHE = os.environ.get("FEDBNR_CACHE_DIR") or "~/.cache/fedbnr_jax"
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(_CACHE).expanduser() / "xla")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from fedbnr_jax.precision import enable_x64  # noqa: E402

_ROOT = pathlib.Path(__file__).resolve().parents[1]

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Without the extra `network` its tests cannot be read; one remains that says so.
collect_ignore = (
  []
  if importlib.util.find_spec("cryptography")
  else [
    path.name
    for path in pathlib.Path(__file__).parent.glob("test_*network*.py")
    if path.name != "test_network_engine.py"
  ]
)

_COUNT = pytest.StashKey[int]()  # Tests that this process has run.

# Fixed examples: a failure seen once is seen by everyone, every time.
hypothesis.settings.register_profile(
  "fedbnr", deadline=None, derandomize=True, max_examples=25, database=None
)
hypothesis.settings.load_profile("fedbnr")


def pytest_configure(config: pytest.Config) -> None:
  """Lets what is no fault of a test pass, such as a half-written cache entry.

  Test processes share the compilation cache, and jax writes its entries in
  place, so one process may meet an entry that another is still writing.
  """
  for verb in ("reading", "writing"):
    config.addinivalue_line(
      "filterwarnings", f"ignore:Error {verb} persistent compilation cache entry"
    )
  # Tiny runs have a handful of test rows, and say so; test_coverage.py looks at it.
  config.addinivalue_line(
    "filterwarnings", "ignore::fedbnr_jax.run.coverage.CoverageWarning"
  )


@pytest.fixture(scope="session", autouse=True)
def no_power_cut() -> Iterator[None]:
  """Lets no file wait for the disk: a process may die here, but not the machine."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("os.fsync", lambda handle: None)
    yield


@pytest.fixture(params=[False, True], ids=["x64_off", "x64_on"])
def any_x64(request: pytest.FixtureRequest) -> Iterator[bool]:
  """Runs a test twice, without and with 64-bit types; gives which."""
  with enable_x64(request.param):
    yield request.param


@pytest.fixture
def x64_off() -> Iterator[None]:
  """Runs a test as on a device that has no 64-bit types."""
  with enable_x64(False):
    yield


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
  """The folder of the real datasets; tests that need it are skipped without."""
  named = os.environ.get("FEDBNR_DATA_DIR")
  folder = pathlib.Path(named) if named else _ROOT.parent / "shared" / "data"
  if not folder.is_dir():
    pytest.skip(f"no real data: {folder} is not a folder; set FEDBNR_DATA_DIR")
  return folder.resolve()


@pytest.fixture(scope="session")
def on_four_devices(tmp_path_factory: pytest.TempPathFactory) -> dict:
  """What tests/four_devices.py finds, which takes a minute."""
  from tests import four_devices
  from tests.runs import once

  return once(tmp_path_factory, "on_four_devices", four_devices.results)


# A compiled program is some dozens of memory maps, of which Linux lets a process have
# 65,530 by default; the next program would abort it.
_MOST_MAPS = 45_000
_CHECKED_EVERY = 10  # Tests: counting the maps takes milliseconds.


@pytest.fixture(autouse=True)
def few_memory_maps(request: pytest.FixtureRequest) -> Iterator[None]:
  """Forgets compiled programs before a process has too many of them."""
  yield
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists():
    request.config.stash[_COUNT] = count = request.config.stash.get(_COUNT, 0) + 1
    if count % _CHECKED_EVERY == 0 and maps.read_bytes().count(b"\n") > _MOST_MAPS:
      jax.clear_caches()
      # Programs would be traced again, which tests of traces would count twice, and
      # results that outlive their program would leave it without a trace.
      for shared in getattr(sys.modules.get("tests.methods"), "__dict__", {}).values():
        if hasattr(shared, "cache_clear"):
          shared.cache_clear()


def pytest_terminal_summary(
  terminalreporter: pytest.TerminalReporter,
) -> None:
  """Says how many tests were skipped, also when none was."""
  terminalreporter.write_line(
    f"skipped: {len(terminalreporter.stats.get('skipped', []))}"
  )
