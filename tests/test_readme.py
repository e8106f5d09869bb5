"""What README and docs show is true: Python runs, commands parse, links and names lead.

Python runs as it stands, page by page, with smaller numbers. Commands are not run:
their programs, flags, config files and fields must exist, by the programs' own parsers.
"""

import copy
import importlib
import importlib.util
import pathlib
import re

import numpy as np
import pandas as pd
import pytest
from absl import flags
from ml_collections import config_flags

from fedbnr_jax.data import synthetic
from fedbnr_jax.run import config as config_lib
from tests import pages

_ROOT = pages.ROOT
_SHORT_FIT = (
  'client="site", seed=0, progress=False, inputs="scores", num_rounds=1, '
  'auto__kernels="gaussian", data__calibration_folds=0, data__calibration=0.0'
)
_SMALLER = {
  "README.md": {'client="site", seed=0': _SHORT_FIT},
  "docs/howto/compose.md": {
    "num_samples=50, hidden_size=200": "num_samples=3, hidden_size=4",
    "num_local_steps=50": "num_local_steps=2",
    "range(20)": "range(2)",
  },
}
# Rooms of the package, and groups of a config, whose names pages have in backquotes.
_ROOMS = ("gp", "federated", "algorithms", "data", "run", "sweep", "privacy")
_GROUPS = {path.split(".")[0] for path in config_lib.field_names(config_lib.base())}
_FILES = ("json", "npz", "csv", "png", "py", "md", "npy")


def _shown_python() -> list[pathlib.Path]:
  """Returns the pages with Python of their own: what two of them show is run once."""
  found: list[pathlib.Path] = []
  seen: set[str] = set()
  for page in pages.pages():
    blocks = set(pages.python_blocks(page))
    if blocks - seen:
      found.append(page)
    seen |= blocks
  return found


def _smaller(page: pathlib.Path) -> list[str]:
  """Returns the blocks of a page with smaller numbers."""
  text = "\0".join(pages.python_blocks(page))
  for large, small in _SMALLER.get(pages.name(page), {}).items():
    assert text.count(large) == 1, large
    text = text.replace(large, small)
  return text.split("\0")


def _given() -> dict[str, object]:
  """Returns what blocks take for granted: a frame, rows to predict, arrays, sites."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(40, 2)).astype(np.float32)  # The type of a federation.
  y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=40)
  frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "price": y})
  return {
    "frame": frame.assign(site=np.where(np.arange(40) % 2, "north", "south")),
    "new": frame[["a", "b"]].clip(-1.0, 1.0),
    "north": frame[1::2],
    "south": frame[::2],
    "x": x,
    "y": y.astype(np.float32),
    "parts": np.array_split(np.arange(40), 2),
  }


@pytest.mark.filterwarnings("ignore::fedbnr_jax.run.coverage.CoverageWarning")
@pytest.mark.parametrize("page", _shown_python(), ids=pages.name)
def test_blocks_of_a_page_run(page, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").symlink_to(_ROOT / "configs")
  monkeypatch.setattr(synthetic, "TASKS", dict(synthetic.TASKS))
  names = _given()
  for block in _smaller(page):
    exec(block, names)
  _CHECKS.get(pages.name(page), lambda names, folder: None)(names, tmp_path)


def _check_readme(names, folder):
  assert (folder / "runs" / "prices" / "summary.json").exists()
  assert len(names["model"].predict(names["new"])) == 40


def _check_compose(names, folder):
  assert np.shape(names["mean"]) == (40,)
  # Of the method that the page writes: all targets, whoever holds them.
  mean, std = names["state"].server.params
  np.testing.assert_allclose([mean, std], [names["y"].mean(), names["y"].std()], 1e-5)
  assert int(names["info"].floats_up) == 3


def _check_kernel(names, folder):
  assert names["features"].shape == (40, 2 * 50 + 3)
  error = np.sqrt(np.mean(np.square(np.asarray(names["mean"]) - names["y"])))
  assert error < 0.3 * names["y"].std()


def _check_own_dataset(names, folder):
  assert names["dataset"].num_rows == 40
  assert sorted(set(names["dataset"].clients)) == ["north", "south"]
  assert names["table"].name == "valley"


def _check_sweeps(names, folder):
  assert len(names["grid"].expand(names["get_config"]())) == 8


_CHECKS = {
  "README.md": _check_readme,
  "docs/howto/compose.md": _check_compose,
  "docs/howto/kernel.md": _check_kernel,
  "docs/howto/own_dataset.md": _check_own_dataset,
  "docs/howto/sweeps.md": _check_sweeps,
}


# ------------------------------------------------------------------------- commands


def _all_commands() -> list[tuple[str, list[str]]]:
  return [
    (pages.name(page), words)
    for page in pages.pages()
    for words in pages.commands(page)
  ]


def _check_command(words: list[str]) -> None:
  """Raises unless the command could be started."""
  program, *rest = words
  if program == "make":
    assert re.search(rf"^{rest[0]}:", (_ROOT / "Makefile").read_text(), re.MULTILINE)
  elif program == "pip":
    _check_extra(rest[-1])
  elif program.startswith("launch."):
    _check_program(program, rest)
  elif program == "python":
    assert rest[0] == "-m", words
    _check_program(rest[1], rest[2:])
  else:
    raise AssertionError(f"{program} is no program of the project")


def _check_extra(requirement: str) -> None:
  extras = re.findall(r"\[(\w+)\]", requirement)
  known = (_ROOT / "pyproject.toml").read_text()
  assert all(re.search(rf"^{extra} = \[", known, re.MULTILINE) for extra in extras)


def _check_program(module: str, arguments: list[str]) -> None:
  assert importlib.util.find_spec(module) is not None, module
  if not module.startswith("launch."):
    # Their parsers are made when they run; a config is read as a program reads it.
    source = importlib.util.find_spec(module).origin
    text = pathlib.Path(source).read_text()
    for argument in arguments:
      flag = argument.removeprefix("--").partition("=")[0]
      assert re.search(rf"[\"'](--)?{flag}[\"']", text), argument
    return
  known = _flags_of(module, [module, *map(_concrete, arguments)])
  known([module, *map(_concrete, arguments)])


def _concrete(argument: str) -> str:
  """Takes the config's default where the page has NAME for its argument."""
  return re.sub(r"(\.py):NAME\b.*", r"\1", argument)


def _flags_of(module: str, argv: list[str]) -> flags.FlagValues:
  """Copies the flags that a program has, so that parsing leaves no trace."""
  loaded = importlib.import_module(module)
  homes = [module, "launch.common"]
  homes += ["launch.distributed"] if hasattr(loaded, "distributed") else []
  own = flags.FlagValues()
  for home in homes:
    for flag in flags.FLAGS.flags_by_module_dict().get(home, ()):
      if flag.name not in ("config", *own):
        own[flag.name] = copy.deepcopy(flag)
  config_flags.DEFINE_config_file(
    "config", lock_config=True, flag_values=own, sys_argv=argv
  )
  return own


# ml_collections loads config files in a way that Python is about to leave behind.
_old_loader = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


@_old_loader
def test_every_command_could_be_started(monkeypatch):
  monkeypatch.chdir(_ROOT)
  shown = _all_commands()
  assert len(shown) > 40
  wrong = {}
  for page, words in shown:
    try:
      _check_command(words)
    except (AssertionError, flags.Error, AttributeError, KeyError, TypeError) as error:
      wrong[f"{page}: {' '.join(words)}"] = error
  assert wrong == {}


@_old_loader
@pytest.mark.parametrize(
  "command",
  [
    "python -m launch.trane --config=configs/default.py",
    "python -m launch.predict --workdir=w --shard=1/2",
    "python -m launch.train --config=configs/default.py --config.lerning_rate=1.0",
    "python -m launch.train --config=configs/default.py --config.learning_rate=fast",
    "python -m benchmarks.coverage --sites=3",
    "make coffee",
  ],
)
def test_a_wrong_command_is_found_out(command, monkeypatch):
  monkeypatch.chdir(_ROOT)
  with pytest.raises((AssertionError, flags.Error, AttributeError, TypeError)):
    _check_command(command.split())


# --------------------------------------------------------------------- names, links


def _is_known(path: str) -> bool:
  """Tells whether a dotted name is a field of a config, or something of the package."""
  try:
    config_lib.get(config_lib.base(), path)
  except (KeyError, AttributeError, TypeError):
    pass
  else:
    return True
  parts = path.removeprefix("fedbnr_jax.").split(".")
  for count in range(len(parts), -1, -1):
    module = ".".join(["fedbnr_jax", *parts[:count]])
    try:
      value = importlib.import_module(module)
    except ModuleNotFoundError:
      continue
    for part in parts[count:]:
      value = getattr(value, part, None)
    return value is not None
  return False


def test_names_in_backquotes_exist():
  """Those of config fields, and of functions by their path in the package."""
  unknown = []
  for page in pages.pages():
    for code in pages.spans(page):
      dotted = re.match(r"(?:--config\.)?([a-z_]+(?:\.\w+)+)", code)
      if dotted is None or dotted[1].rpartition(".")[2] in _FILES:
        continue
      path = dotted[1].removeprefix("config.")
      known_start = path.split(".")[0] in {*_ROOMS, *_GROUPS, "fedbnr_jax"}
      if known_start and not _is_known(path):
        unknown.append(f"{pages.name(page)}: {code}")
  assert unknown == []


def test_links_lead_somewhere():
  """Those to files, from README and from every page."""
  missing = [
    f"{pages.name(page)}: {target}"
    for page in pages.pages()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", pages.prose(page))
    if not (page.parent / target).exists()
  ]
  assert missing == []


def test_the_readme_is_short():
  assert len((_ROOT / "README.md").read_text().splitlines()) <= 150
