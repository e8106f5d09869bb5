"""Kits: what is in them, who gets a certificate, and that edited ones are refused."""

import json
import pathlib
import shutil
import tomllib

import pytest

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import certificates, engine_files, joining, kits, side
from fedbnr_jax.network.identity import PublicIdentity
from tests import network_runs

ROOT = pathlib.Path(__file__).resolve().parents[1]
SITES = network_runs.NAMES


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  folder = tmp_path_factory.mktemp("kits") / "fed"
  kits.init(folder, SITES, "localhost:9001", keys_here=True)
  return folder


@pytest.fixture
def fed(made, tmp_path):
  """A copy that a test may spoil."""
  shutil.copytree(made, tmp_path / "fed")
  return tmp_path / "fed"


def test_nobody_else_may_open_a_kit_or_read_a_key(made):
  folders = [made, made / "authority", made / "server", *(made / s for s in SITES)]
  assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
  keys = list(made.rglob("*.key"))
  assert len(keys) == 6  # Of the authority, the server, the coordinator, three sites.
  assert {key.stat().st_mode & 0o777 for key in keys} == {0o600}


def test_a_site_allows_no_code_no_shell_and_no_logs(made):
  local = made / "north" / "local"
  resources = json.loads((local / "resources.json").read_text())
  assert resources["class_list_enforcement_mode"] == "enforce"
  assert resources["class_allow_list"] == list(engine_files.SITE_CLASSES)
  assert resources["allow_log_streaming"] is False
  assert not any("log" in part["id"] for part in resources["components"])
  rights = json.loads((local / "authorization.json").read_text())["permissions"]
  (role,) = rights
  assert rights[role]["byoc"] == rights[role]["shell_commands"] == "none"
  assert rights[role]["download_job"] == rights[role]["operate"] == "none"


def test_a_job_names_classes_that_sites_allow_and_has_no_code():
  files = engine_files.job("federation", SITES)
  assert not [name for name in files if "custom" in name or name.endswith(".py")]
  for name, allowed in (
    ("site/config/config_fed_client.json", engine_files.SITE_CLASSES),
    ("server/config/config_fed_server.json", engine_files.SERVER_CLASSES),
  ):
    assert set(_paths(json.loads(files[name]))) == set(allowed)


def _paths(content):
  if isinstance(content, dict):
    yield from [content["path"]] if "path" in content else []
    content = list(content.values())
  for part in content if isinstance(content, list) else ():
    yield from _paths(part)


def test_the_engine_is_the_one_that_is_pinned():
  extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
  pinned = f"nvflare=={engine_files.VERSION}"
  assert pinned in extras["optional-dependencies"]["network"]
  assert pinned in extras["optional-dependencies"]["dev"]


def test_a_sound_kit_is_opened(made):
  assert kits.opened(made / "server").plan.sites == SITES
  assert kits.opened(made / "north").plan.sites == ("north",)


@pytest.mark.parametrize(
  "name",
  ["local/resources.json", "local/authorization.json", "startup/fed_client.json"],
)
def test_a_kit_whose_settings_were_edited_is_refused(fed, name):
  path = fed / "north" / name
  path.write_text(path.read_text().replace("none", "any").replace("false", "true"))
  path.write_text(path.read_text() + " ")
  with pytest.raises(InputError, match=f"{name} was edited"):
    kits.opened(fed / "north")


@pytest.mark.parametrize(
  "name", ["local/custom", "local/privacy.json", "startup/signature.json"]
)
def test_a_kit_with_something_more_in_it_is_refused(fed, name):
  (fed / "north" / name).write_text("{}")
  with pytest.raises(InputError, match="is not part of a kit"):
    kits.opened(fed / "north")


def test_a_kit_that_others_may_open_is_refused(fed):
  (fed / "north").chmod(0o755)
  with pytest.raises(InputError, match="chmod 700"):
    kits.opened(fed / "north")
  (fed / "north").chmod(0o700)
  kits.opened(fed / "north").key.chmod(0o644)
  with pytest.raises(InputError, match="chmod 600"):
    kits.opened(fed / "north")


def test_a_certificate_of_somebody_else_is_refused(fed):
  (fed / "north/startup/client.crt").write_bytes(
    (fed / "certificates/south.crt").read_bytes()
  )
  with pytest.raises(InputError, match="for another key"):
    kits.opened(fed / "north")


def test_a_certificate_of_another_authority_is_refused(fed):
  stranger = certificates.new_authority("federation")
  key = (fed / "north/startup/client.key").read_bytes()
  issued = certificates.issue(stranger, "north", certificates.public_of(key))
  (fed / "north/startup/client.crt").write_bytes(issued)
  with pytest.raises(InputError, match="no certificate of this federation"):
    kits.opened(fed / "north")


def test_a_site_makes_its_own_key_and_asks_for_a_certificate(tmp_path):
  fed = tmp_path / "fed"
  kits.init(fed, ["north"], "localhost:9001")
  assert not list((fed / "north").rglob("*.key"))
  with pytest.raises(InputError, match="no certificate"):
    kits.opened(fed / "north")
  with pytest.raises(InputError, match="have no certificate yet"):
    kits.members(fed)
  asked, fingerprint = kits.make_request(fed / "north")
  assert kits.make_request(fed / "north") == (asked, fingerprint)
  name, issued, told = kits.approve(fed, asked)
  assert (name, told) == ("north", fingerprint)
  kits.take_certificate(fed / "north", issued)
  kit = kits.opened(fed / "north")
  public = PublicIdentity.from_pem(kits.members(fed)["north"])
  assert public.verify(b"said", kit.identity().sign(b"said"))
  # A second key of the same name gets nothing.
  kit.key.unlink()
  kits.make_request(fed / "north")
  with pytest.raises(InputError, match="a certificate for another key"):
    kits.approve(fed, asked)


def test_a_request_of_a_stranger_or_a_damaged_one_is_refused(fed, tmp_path):
  path = tmp_path / "request.pem"
  path.write_bytes(certificates.request(certificates.new_key(), "nort"))
  with pytest.raises(InputError, match=r"not in this federation.*'north'"):
    kits.approve(fed, path)
  path.write_bytes(b"-----BEGIN CERTIFICATE REQUEST-----")
  with pytest.raises(InputError, match="no request for a certificate"):
    kits.approve(fed, path)


@pytest.mark.parametrize(
  ("sites", "server", "message"),
  [
    (["north", "North"], "a:1", "named twice"),
    (["server"], "a:1", "none of"),
    (["../north"], "a:1", "take up to 63 letters"),
    ([], "a:1", "has no sites"),
    (["north"], "a", "HOST:PORT"),
    (["north"], "a:70000", "HOST:PORT"),
  ],
)
def test_what_cannot_be_is_refused(sites, server, message, tmp_path):
  with pytest.raises(InputError, match=message):
    kits.init(tmp_path / "fed", sites, server)


def test_an_agreement_with_another_key_for_this_site_is_refused(fed, tmp_path):
  agreed = network_runs.agreement(method="fedridge")
  joining.agreements.write(tmp_path / "federation.json", agreed)
  network_runs.frame("north", 30).to_csv(tmp_path / "north.csv", index=False)
  with pytest.raises(InputError, match="another key for site 'north'"):
    joining.prepare(
      fed / "north", tmp_path / "north.csv", tmp_path / "federation.json", say=print
    )


def test_how_a_program_ended_is_noted_whatever_happens(tmp_path):
  for text, lost, status in (
    ("", (), side.FINISHED),
    ("InputError", (), side.REFUSED),
    ("InputError", ("north",), side.LOST),
    ("KeyError", (), side.FAILED),
  ):
    side.write(tmp_path, f"{__name__}:end_with", {"text": text})
    side.run_server_program(tmp_path, None, set(lost))
    assert side.outcome(tmp_path)["status"] == status
  assert "KeyError" in side.outcome(tmp_path)["text"]


def end_with(transport, text):
  """A coordinator's program that ends in a way that is asked for."""
  assert transport is None
  if text == "InputError":
    raise InputError("no")
  if text:
    raise KeyError(text)
