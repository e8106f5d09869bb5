"""An agreement has one digest and one reading; what sites cannot run is refused."""

import dataclasses
import functools
import json
import re

import hypothesis
import ml_collections
import pytest
from hypothesis import strategies as st

from configs import csv
from fedbnr_jax import algorithms
from fedbnr_jax.errors import InputError
from fedbnr_jax.network import agreement as agreement_lib
from fedbnr_jax.network import deployable
from fedbnr_jax.network.agreement import Agreement
from fedbnr_jax.network.framing import digest
from fedbnr_jax.network.identity import PrivateIdentity
from fedbnr_jax.network.schema import Quantity, Schema
from tests.runs import assert_refused

_SCHEMA = Schema(
  "houses", Quantity("price", 1e5), (Quantity("size", 10.0),), (("kind", ("a", "b")),)
)


@functools.cache
def _identity(name):
  return PrivateIdentity.new()


def _members(names=("north", "south", "west")):
  return {name: _identity(name).public.pem() for name in names}


def _config(**fields):
  config = csv.get_config()
  for name, value in fields.items():
    config.update_from_flattened_dict({name.replace("__", "."): value})
  return config


def _made(config=None, schema=_SCHEMA, members=None, **options):
  members = _members() if members is None else members
  return agreement_lib.make(config or _config(), schema, members, **options)


@functools.cache
def _evidence():
  return _made(_config(method="fedbnr-ev"))


def test_what_follows_is_filled_in():
  made = _made(_config(method="fedbnr-ev"))
  assert made.name == "houses"
  assert list(made.members) == ["north", "south", "west"]
  assert (made.masking, made.min_sites) == (True, 3)
  assert made.most_sums == agreement_lib.MOST_SUMS
  config = made.config
  assert (config.num_clients, config.data.target) == (3, "price")
  assert config.data.missing == "error"
  impute = dataclasses.replace(_SCHEMA, missing="impute")
  assert _made(schema=impute).config.data.missing == "impute"
  assert made.identities()["north"].verify(b"x", _identity("north").sign(b"x"))


def test_the_config_that_was_given_is_not_changed():
  config = _config()
  _made(config)
  assert config.to_dict() == csv.get_config().to_dict()


@pytest.mark.parametrize("num_members", [1, 2, 3, 4])
def test_three_members_or_more_are_masked(num_members):
  members = _members([f"site-{n}" for n in range(num_members)])
  assert _made(members=members).masking == (num_members >= 3)
  assert not _made(members=members, masking=False).masking
  if num_members < 3:
    assert_refused(
      lambda: _made(members=members, masking=True),
      f"takes 3 members or more, and here are {num_members}",
    )


@pytest.mark.parametrize("method", deployable.METHODS)
def test_an_agreement_survives_its_file(tmp_path, method):
  made = _made(_config(method=method, seed=5), min_sites=3, most_sums=9)
  path = tmp_path / "federation.json"
  agreement_lib.write(path, made)
  got = agreement_lib.read(path)
  assert got == made
  assert got.digest() == made.digest()
  assert isinstance(got.config, ml_collections.FrozenConfigDict)


def test_the_digest_is_of_the_canonical_text():
  made = _made()
  text = json.dumps(made.to_json(), sort_keys=True, separators=(",", ":"))
  assert made.digest() == digest("fedbnr-jax federation 2", text)
  told = agreement_lib.fingerprint(made.digest())
  assert re.fullmatch(r"([0-9a-f]{4} ){15}[0-9a-f]{4}", told)
  assert told.replace(" ", "") == made.digest()


def test_order_and_form_of_what_means_the_same_do_not_matter(tmp_path):
  made = _made()
  back = _made(members=dict(reversed(_members().items())))
  assert back.digest() == made.digest()
  path = tmp_path / "federation.json"
  path.write_text(json.dumps(dict(reversed(made.to_json().items())), indent=7))
  assert agreement_lib.read(path).digest() == made.digest()


def test_every_change_has_another_digest():
  made = _made()
  columns = (Quantity("size", 10.0), Quantity("age", 1.0))
  others = [
    dataclasses.replace(made, name="other"),
    dataclasses.replace(made, masking=False),
    dataclasses.replace(made, masking=False, min_sites=2),
    dataclasses.replace(made, most_sums=1),
    dataclasses.replace(made, tell_scores=True),
    _made(members=_members(["north", "south", "East"])),
    _made(members=_members() | {"west": _identity("another").public.pem()}),
    _made(_config(seed=1)),
    _made(_config(fedprox__mu=0.2)),
    _made(schema=dataclasses.replace(_SCHEMA, name="homes"), name="houses"),
    _made(schema=dataclasses.replace(_SCHEMA, missing="impute")),
    _made(schema=dataclasses.replace(_SCHEMA, numeric=columns)),
    _made(schema=dataclasses.replace(_SCHEMA, numeric=columns[::-1])),
  ]
  assert len({one.digest() for one in (made, *others)}) == 1 + len(others)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=300)
def test_a_changed_byte_is_refused_or_has_another_digest(tmp_path_factory, data):
  made = _evidence()
  path = tmp_path_factory.mktemp("agreement") / "federation.json"
  agreement_lib.write(path, made)
  text = bytearray(path.read_bytes())
  place = data.draw(st.integers(0, len(text) - 1))
  text[place] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789abn",:{}'))
  path.write_bytes(text)
  try:
    got = agreement_lib.read(path)
  except InputError as error:
    assert "\n" not in str(error)  # noqa: PT017
  else:
    assert (got.digest() == made.digest()) == (got.to_json() == made.to_json())
    # Nothing was passed over: what was read is what the file says, keys aside.
    raw, read = json.loads(text), got.to_json()
    raw.pop("members"), read.pop("members")
    for column in raw["schema"]["categorical"]:
      column["categories"].sort()  # Which is how they are read.
    assert raw == read


def test_damaged_files_are_refused(tmp_path):
  path = tmp_path / "federation.json"
  assert_refused(lambda: agreement_lib.read(path), "does not exist")
  good = _made().to_json()
  pem = good["members"]["north"]

  def changed(**fields):
    return json.dumps(good | fields)

  def config(**fields):
    return changed(config=good["config"] | fields)

  without_seed = {k: v for k, v in good["config"].items() if k != "seed"}
  for content, part in (
    (json.dumps(good)[:-9], "no readable federation"),
    ("[]", "no JSON object"),
    ("{}", "lacks 'format', 'name', 'config'"),
    (changed(format="x"), "let all sites have the same version"),
    (changed(rounds=3), "unknown field 'rounds'"),
    (changed(name=""), "the name of the federation is ''"),
    (changed(masking=1), "masking is 1: give true or false"),
    (changed(masking="yes"), "masking is 'yes'"),
    (changed(tell_scores=1), "tell_scores is 1: give true or false"),
    (changed(min_sites=2), "(of masked sums, which take 3 or more) is 2: give a whole"),
    (changed(min_sites=4), "number from 3 to 3"),
    (changed(min_sites=True, masking=False), "min_sites is True"),
    (changed(most_sums=0), "most_sums is 0"),
    (changed(most_sums=1.5), "most_sums is 1.5"),
    (changed(members=[]), "members are no names"),
    (changed(members={"north": 1}), "members are no names"),
    (changed(members={}), "no members"),
    (changed(members=good["members"] | {"west": "key"}), "'west' has no identity"),
    (changed(members=good["members"] | {"west": pem}), "'north' and 'west' have the"),
    (changed(schema=3), "schema is no object"),
    (changed(schema=good["schema"] | {"name": 3}), "schema: the name of the table"),
    (changed(config=3), "config is no object"),
    (changed(config=without_seed), "config lacks 'seed'"),
    (config(sede=1), "did you mean 'seed'? choose"),
    (config(ard=1), "config.ard is no object"),
    (config(ard=good["config"]["ard"] | {"x": 1}), "config.ard has an unknown field"),
    (config(seed="1"), "seed is '1', and must be a whole number"),
    (config(seed=-1), "config.seed must be from 0"),
    (config(method="fedbnr-x"), "config.method is 'fedbnr-x': did you mean"),
    (config(num_clients=10), "config.num_clients is 10, but there are 3 members"),
    (config(kernel="deeq"), "deeq"),
  ):
    path.write_text(content)
    assert_refused(lambda: agreement_lib.read(path), str(path), part)


@pytest.mark.parametrize("method", sorted(algorithms.METHODS))
def test_methods_that_sites_cannot_run_are_refused(method):
  config = _config(method=method)
  if method in deployable.METHODS:
    assert _made(config).config.method == method
    return
  why = "no site runs it yet"
  if "kd" in method:
    why = "needs rows at the server"
  elif method == "central":
    why = "needs all rows in one place"
  assert_refused(
    lambda: _made(config), f"{method!r} cannot be deployed", why, "fedprox"
  )


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"method": "fedavgg"}, ("did you mean 'fedavg'",)),
    ({"partition": "iid"}, ("partition is 'iid'", "leave it at 'auto'")),
    ({"num_clients": 4}, ("num_clients is 4, but there are 3 members: set it to 3",)),
    ({"participation": 0.5}, ("participation is 0.5", "who answers")),
    ({"dropout": 0.1}, ("dropout is 0.1", "leave it at 0.0")),
    ({"num_seeds": 2}, ("num_seeds is 2", "one seed at a time")),
    ({"compare_clients": True}, ("compare_clients is True",)),
    ({"stream_clients": 2}, ("stream_clients is 2", "computes for itself")),
    ({"client_batch_size": 2}, ("client_batch_size is 2",)),
    ({"mesh": 1}, ("mesh is 1", "leave it at 0")),
    ({"data__source": "uci"}, ("data.source is 'uci'", "configs/csv.py")),
    ({"data__path": "a.csv"}, ("data.path is 'a.csv'", "when it joins")),
    ({"data__directory": "a"}, ("data.directory is 'a'", "when it joins")),
    ({"data__client": "site"}, ("data.client is 'site'", "one client")),
    ({"data__features": "a"}, ("data.features is 'a'", "the schema says")),
    ({"data__categorical": "a"}, ("data.categorical is 'a'", "the schema says")),
    ({"data__bounds": '{"a": [0, 1]}'}, ("data.bounds is", "sums over all sites")),
    ({"data__raw_target": True}, ("data.raw_target is True",)),
    ({"data__target": "rent"}, ("data.target is 'rent', but the schema has 'price'",)),
    ({"data__missing": "impute"}, ("data.missing is 'impute'", "has 'error'")),
    ({"num_rounds": 0}, ("config.num_rounds must be at least 1",)),
    ({"method": "fedbnr-ev", "kernel": "deeq"}, ("deeq",)),
    ({"kernel": "linear"}, ("kernel is 'linear', but method 'auto' does not read it",)),
  ],
)
def test_what_only_a_simulation_gives_a_meaning_to_is_refused(fields, parts):
  assert_refused(lambda: _made(_config(**fields)), *parts)


def test_configs_of_other_kinds_are_refused():
  sweep = ml_collections.ConfigDict({"methods": ("fedbnr",)})
  assert_refused(lambda: _made(sweep), "no field 'method'")
  lacking = _config()
  del lacking.seed
  assert_refused(lambda: _made(lacking), "config lacks 'seed'", "same")
  strange = ml_collections.ConfigDict(_config().to_dict() | {"extra": 1})
  assert_refused(lambda: _made(strange), "unknown field 'extra'")


@pytest.mark.parametrize(
  "names, part",
  [
    ((), "no members"),
    (("north", "a b"), "a member is called 'a b'"),
    (("north", "../x"), "letters, digits, - and _"),
    (("north", ""), "a member is called ''"),
    (("north", "süd"), "a member is called 'süd'"),
    (("north", "x" * 65), "up to 64"),
    (("north\n",), "a member is called 'north\\n'"),
    (("North", "west", "north"), "'North', 'north' differ in upper and lower case"),
  ],
)
def test_names_of_members_are_checked(names, part):
  members = dict.fromkeys(names, b"")
  assert_refused(lambda: _made(members=members), part)


def test_members_have_identities_of_their_own():
  members = _members()
  members["west"] = members["north"]
  assert_refused(lambda: _made(members=members), "'north' and 'west' have the same")
  members["west"] = b"\xff"
  assert_refused(lambda: _made(members=members), "'west' has no identity", "PEM")


@hypothesis.given(st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True))
def test_any_other_name_is_fine(name):
  made = _made(members={name: _identity("north").public.pem()})
  assert Agreement.from_json(json.loads(json.dumps(made.to_json()))) == made
