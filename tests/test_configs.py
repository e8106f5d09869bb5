"""Every file in configs/ builds, says what it is for, and gives its command."""

import importlib
import math
import pathlib

import pytest

from configs import ard, grid_search, num_samples, paper_table, readings, uci
from fedbnr_jax import algorithms
from fedbnr_jax.data import uci as uci_data
from fedbnr_jax.errors import InputError
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import config_checks
from fedbnr_jax.run.records import as_json
from fedbnr_jax.sweep.grid import expand

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "configs"
STEMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
SWEEPS = ["ard", "grid_search", "num_samples", "paper_table", "readings"]
TRAINING = [stem for stem in STEMS if stem not in SWEEPS]


def test_the_public_configs_are_there():
  assert {"default", "uci", "csv", "paper_table"} <= set(STEMS)


@pytest.mark.parametrize("stem", STEMS)
def test_docstring_has_purpose_and_command(stem: str):
  text = importlib.import_module(f"configs.{stem}").__doc__
  first = text.splitlines()[0]
  assert first.endswith(".")
  assert not first.startswith("python")
  program = "launch.sweep" if stem in SWEEPS else "launch.train"
  command = f"python -m {program} --config=configs/{stem}.py"
  assert command in text
  assert "--workdir=" in text


@pytest.mark.parametrize("stem", TRAINING)
def test_config_is_valid_and_adds_no_field(stem: str):
  config = importlib.import_module(f"configs.{stem}").get_config()
  config_checks.validate(config)
  assert set(flat(config)) == set(flat(config_lib.base()))


@pytest.mark.parametrize("variant", ["", ",paper"])
@pytest.mark.parametrize("name", uci_data.NAMES)
def test_uci_builds_for_every_dataset(name: str, variant: str):
  config = uci.get_config(name + variant)
  config_checks.validate(config)
  presets = uci.PAPER if variant else uci.CPU
  assert (config.data.source, config.data.name) == ("uci", name)
  assert config.hidden_size == presets[name].hidden_size


def test_uci_knows_every_dataset():
  assert set(uci.PAPER) == set(uci.CPU) == set(uci_data.NAMES)


@pytest.mark.parametrize(
  "field, entry",
  [
    ("kd.alpha", "alpha"),
    ("fedprox.mu", "mu"),
    ("fedloc.rho", "rho"),
    ("learning_rate", "learning_rate"),
    ("pfedgp.learning_rate", "pfedgp_rate"),
  ],
)
@pytest.mark.parametrize("variant", ["", ",paper"])
@pytest.mark.parametrize("name", uci_data.NAMES)
def test_settings_follow_a_client_count_set_later(name, variant, field, entry):
  config = uci.get_config(name + variant).lock()
  found = {}
  for count in (10, 99, 100, 5000):
    config.num_clients = count
    found[count] = config_lib.get(config, field)
  few, many = getattr((uci.PAPER if variant else uci.CPU)[name], entry)
  assert found == {10: few, 99: few, 100: many, 5000: many}


@pytest.mark.parametrize("name", uci_data.NAMES)
def test_accurate_is_exact_training_with_its_own_features_and_noise(name: str):
  config = uci.get_config(f"{name},accurate")
  config_checks.validate(config)
  assert (config.method, config.exact.noise) == ("fedbnr-exact", "held-out")
  assert config.num_samples == uci.CPU[name].accurate_samples


def test_alpha_can_be_set_itself():
  config = uci.get_config("sml")
  config.kd.alpha = 3.0
  config.num_clients = 100
  assert config.kd.alpha == 3.0


@pytest.mark.parametrize("count", [0, -5, -200])
def test_bad_client_count_does_not_break_alpha(count: int):
  config = uci.get_config("sml")
  config.num_clients = count
  with pytest.raises(InputError, match=r"config\.num_clients"):
    config_checks.validate(config)


@pytest.mark.parametrize(
  "argument, part", [("smll", "did you mean 'sml'"), ("sml,papr", "'paper'")]
)
def test_unknown_argument_is_refused(argument: str, part: str):
  with pytest.raises(InputError, match=part):
    uci.get_config(argument)


@pytest.mark.parametrize("variant", ["", "paper"])
def test_the_paper_table_is_of_all_methods(variant: str):
  config = paper_table.get_config(variant)
  methods = config.grid.method
  assert len(methods) == 15  # The paper's eleven, fedloc-poe, and three of ours.
  assert set(methods) <= set(algorithms.METHODS)
  assert config.grid.seed == tuple(range(10))
  config.grid.seed = (0,)  # The others are of the same settings.
  runs = expand(config)
  # Five datasets, two client counts; central once for both.
  assert len(runs) == 5 * (2 * len(methods) - 1)
  width = 5000 if variant else 1000
  assert all(
    whole.hidden_size == width for whole in runs.values() if whole.data.name == "ccpp"
  )


def test_unknown_variant_of_the_paper_table_is_refused():
  with pytest.raises(InputError, match="paper"):
    paper_table.get_config("papr")


def flat(config, prefix: str = "") -> list[str]:
  """Dotted names of all fields."""
  names = []
  for name, value in config.items():
    if hasattr(value, "items"):
      names += flat(value, f"{prefix}{name}.")
    else:
      names.append(prefix + name)
  return names


@pytest.mark.parametrize("method", grid_search.GRIDS)
def test_every_search_is_a_grid_of_settings_and_cells(method: str):
  runs = expand(grid_search.get_config(method))
  num_settings = math.prod(len(v) for v in grid_search.GRIDS[method].values())
  assert len(runs) == num_settings * 2 * len(uci.PAPER)
  assert all(config.seed >= 100 for config in runs.values())


def test_unknown_search_is_refused():
  with pytest.raises(InputError, match="did you mean 'fedprox'"):
    grid_search.get_config("fedproxy")


@pytest.mark.parametrize("name", readings.READINGS)
def test_every_reading_differs_from_the_table_in_one_field(name: str):
  reading = readings.READINGS[name]
  for run, whole in expand(readings.get_config(name)).items():
    usual = uci.get_config(run.base.partition(":")[2])
    usual.method, usual.num_clients = whole.method, whole.num_clients
    changed = config_lib.differences(as_json(usual), as_json(whole))
    assert list(changed) == [reading.field]


def test_unknown_reading_is_refused():
  with pytest.raises(InputError, match="did you mean 'noise'"):
    readings.get_config("noises")


def test_features_are_counted_on_rows_that_no_table_reports():
  runs = expand(num_samples.get_config())
  assert len(runs) == 50
  assert all(config.seed >= 100 for config in runs.values())


@pytest.mark.parametrize("question, number", [("kernels", 20), ("width", 12)])
def test_parts_of_ard_are_compared_on_rows_that_no_table_reports(question, number):
  runs = expand(ard.get_config(question))
  assert len(runs) == number
  assert all(config.seed >= 100 for config in runs.values())
  with pytest.raises(InputError, match="did you mean 'width'"):
    ard.get_config("widths")
