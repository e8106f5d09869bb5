"""A config that was changed in its file is refused by the field, in one line."""

import pytest

from fedbnr_jax import files
from fedbnr_jax.run import config_file
from fedbnr_jax.run.records import as_json
from tests.runs import assert_refused, tiny


@pytest.fixture
def path(tmp_path):
  return tmp_path / "config.json"


def test_what_was_written_is_read(path):
  config = tiny(learning_rate=1.0, seed=3)
  files.write_json(path, as_json(config))
  assert config_file.read(path).to_dict() == config.to_dict()


@pytest.mark.parametrize(
  "changes, parts",
  [
    ({"hidden_size": "eight"}, ["hidden_size is 'eight'", "whole number"]),
    ({"hidden_size": 8.5}, ["hidden_size is 8.5", "whole number"]),
    ({"seed": True}, ["seed is True", "whole number"]),
    ({"compare_clients": 0}, ["compare_clients is 0", "true or false"]),
    ({"method": None}, ["method is None", "a text"]),
    ({"learning_rate": [1]}, ["learning_rate is [1]", "a number"]),
    ({"kd": 3}, ["kd is 3", "group of fields"]),
    ({"num_rounds": 0}, ["num_rounds must be at least 1"]),
    ({"method": "fedbrn"}, ["did you mean 'fedbnr'"]),
  ],
)
def test_a_value_that_cannot_be_is_named(path, changes, parts):
  files.write_json(path, as_json(tiny()) | changes)
  assert_refused(lambda: config_file.read(path), str(path), *parts)


def test_a_field_within_a_group_is_named_with_it(path):
  content = as_json(tiny())
  content["kd"]["alpha"] = "much"
  files.write_json(path, content)
  assert_refused(lambda: config_file.read(path), "kd.alpha is 'much'", "a number")
  del content["kd"]["alpha"]
  files.write_json(path, content)
  assert_refused(lambda: config_file.read(path), "'kd.alpha'", "another version")
