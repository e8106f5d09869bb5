"""Fields, their checks, and how two configs are compared."""

import math

import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import listing, require_choice, suggestion
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import config_checks


def test_base_is_valid():
  config_checks.validate(config_lib.base())


BAD = [
  ("num_rounds", 0),
  ("num_rounds", -1),
  ("patience", -1),
  ("num_local_steps", 0),
  ("hidden_size", 0),
  ("hidden_size", -5),
  ("num_hidden_layers", 0),
  ("latent_size", 0),
  ("shifter_size", 0),
  *(("learning_rate", value) for value in (0.0, -1e-3, math.nan, math.inf)),
  ("length_scale", 0.0),
  ("initial_noise_std", 0.0),
  ("initial_prior_std", -1.0),
  ("min_noise_std", 0.0),
  ("num_clients", 0),
  ("num_clients", -3),
  ("num_samples", 1),
  ("ridge.num_samples", 1),
  ("ridge.basis", "fourrier"),
  *(("participation", value) for value in (0.0, 1.5, -1.0, math.nan)),
  *(("dropout", value) for value in (1.0, -0.1, math.nan)),
  ("statistics_from", "answring"),
  ("client_batch_size", -1),
  ("mesh", -1),
  ("stream_clients", -1),
  ("num_seeds", 0),
  ("num_seeds", -2),
  ("seed", -1),
  ("kd.num_steps", 0),
  ("kd.learning_rate", 0.0),
  ("kd.alpha", -0.5),
  ("kd.alpha", math.nan),
  ("kd.fraction", 0.0),
  ("kd.fraction", 1.0),
  ("dtype", "float16"),
  ("partition", "sort"),
  ("mean.scales", "geometric"),
  ("data.source", "csv"),
]


@pytest.mark.parametrize("name, value", BAD)
def test_bad_value_names_field_and_value(name: str, value: object):
  config = config_lib.base()
  config.update_from_flattened_dict({name: value})
  with pytest.raises(InputError) as caught:
    config_checks.validate(config)
  assert f"config.{name}" in str(caught.value)
  assert str(value) in str(caught.value)
  assert "\n" not in str(caught.value)


EDGES = [
  ("num_samples", 2),
  ("num_clients", 1),
  ("seed", 0),
  ("seed", 2**32 - 1),
  ("kd.fraction", 0.999),
  ("participation", 1.0),
  ("participation", 1e-9),
  ("dropout", 0.0),
  ("dropout", 0.999),
  ("statistics_from", "answering"),
  ("client_batch_size", 1),
  ("mesh", 1),
  ("stream_clients", 1),
  ("num_seeds", 2),
]


@pytest.mark.parametrize("name, value", EDGES)
def test_edge_value_is_valid(name: str, value: object):
  config = config_lib.base()
  config.update_from_flattened_dict({name: value})
  config_checks.validate(config)


@pytest.mark.parametrize(
  "name, value", [("compare_clients", True), ("stream_clients", 4)]
)
def test_what_batched_seeds_cannot_do_is_refused(name: str, value: object):
  config = config_lib.base()
  config.update_from_flattened_dict({name: value, "num_seeds": 2})
  with pytest.raises(InputError, match=rf"config\.num_seeds and config\.{name}"):
    config_checks.validate(config)
  config.num_seeds = 1
  config_checks.validate(config)


def test_last_of_the_seeds_must_fit_too():
  config = config_lib.base()
  config.seed, config.num_seeds = 2**32 - 3, 3
  config_checks.validate(config)
  config.seed += 1
  with pytest.raises(InputError, match=r"config\.seed must be .*2\*\*32 - 3"):
    config_checks.validate(config)


def test_seed_beyond_what_a_key_holds_is_refused():
  config = config_lib.base()
  config.seed = 2**63
  with pytest.raises(InputError, match=r"config\.seed"):
    config_checks.validate(config)


def test_misspelt_field_cannot_be_set():
  config = config_lib.base().lock()
  with pytest.raises(AttributeError, match="num_rounds"):
    config.num_round = 3
  with pytest.raises(AttributeError, match="path"):
    config.data.pth = "table.csv"


def test_field_keeps_its_type():
  with pytest.raises(TypeError):
    config_lib.base().num_rounds = "many"


def test_get_follows_dots():
  assert config_lib.get(config_lib.base(), "kd.alpha") == 1.0


def test_near_name_is_suggested():
  with pytest.raises(InputError, match="did you mean 'sorted'"):
    require_choice("config.partition", "Sortd", ("auto", "sorted"))
  require_choice("config.partition", "auto", ("auto", "sorted"))


def test_far_name_lists_the_choices_only():
  text = suggestion("zzz", ["auto", "sorted"])
  assert "did you mean" not in text
  assert "'auto', 'sorted'" in text


def test_case_does_not_count_as_distance():
  assert "did you mean 'SML'" in suggestion("sml", ["SML", "small-and-long"])


def test_long_listing_is_cut():
  text = listing([f"column{i}" for i in range(25)])
  assert "'column19' and 5 more" in text
  assert "column20" not in text


def test_differences_names_nested_added_and_removed_fields():
  one = {"a": 1, "data": {"path": "x", "same": 2}, "gone": 3}
  other = {"a": 1, "data": {"path": "y", "same": 2}, "new": 4}
  assert config_lib.differences(one, other) == ["data.path", "gone", "new"]
  assert config_lib.differences(one, one) == []
