"""The commands of a federation, as its administrators type them, but for the engine."""

import pytest
from absl import flags
from absl.testing import flagsaver

from configs import csv as csv_config
from fedbnr_jax.errors import InputError
from fedbnr_jax.network import agreement, kits, schema
from launch import common, network
from tests import network_runs


@pytest.fixture
def typed(monkeypatch, capsys):
  """Runs a command with flags; returns what it prints."""

  def run(command, **flags):
    monkeypatch.setattr(network, "_COMMAND", [command] if command else [])
    with flagsaver.flagsaver(**flags):
      network.main()
    return capsys.readouterr().out

  monkeypatch.setattr(network.signal, "signal", lambda *_: None)
  flags.FLAGS.mark_as_parsed()
  yield run
  flags.FLAGS.unparse_flags()


@pytest.fixture
def table(tmp_path):
  path = tmp_path / "north.csv"
  network_runs.frame("north", 40)[["a", "b", "y"]].to_csv(path, index=False)
  return str(path)


def test_administrators_come_to_an_agreement(typed, table, tmp_path, monkeypatch):
  fed, sites = tmp_path / "fed", network_runs.NAMES
  told = typed("init", sites=list(sites), server="localhost:9001", output=str(fed))
  assert all(site in told for site in sites)
  for site in sites:
    told = typed("request", kit=str(fed / site))
    fingerprint = told.rpartition(": ")[2]
    told = typed("approve", kit=str(fed), request=str(fed / site / kits.REQUEST))
    assert told.endswith(fingerprint)
  columns = str(tmp_path / "schema.json")
  typed("schema", data=table, target="y", output=columns)
  assert [column.name for column in schema.read(columns).numeric] == ["a", "b"]
  monkeypatch.setattr(common, "config", csv_config.get_config)
  path = str(tmp_path / "federation.json")
  told = typed("agree", kit=str(fed), schema=columns, output=path)
  made = agreement.read(path)
  assert agreement.fingerprint(made.digest()) in told
  assert made.masking
  assert sorted(made.members) == sorted(sites)
  kits.take_certificate(fed / "north", fed / "certificates" / "north.crt")
  with pytest.raises(InputError, match="does not exist"):
    typed("join", kit=str(fed / "north"), data="none.csv", approve=path)


def test_what_a_site_out_of_a_round_shows_is_said(typed, table, tmp_path, monkeypatch):
  fed, columns = tmp_path / "fed", str(tmp_path / "schema.json")
  kits.init(fed, ["a", "b", "c", "d"], "localhost:9001", keys_here=True)
  typed("schema", data=table, target="y", output=columns)
  monkeypatch.setattr(common, "config", csv_config.get_config)
  given = {"kit": str(fed), "schema": columns}
  path = str(tmp_path / "federation.json")
  assert "misses a round" not in typed("agree", output=path, **given)
  path = str(tmp_path / "fewer.json")
  assert "misses a round" in typed("agree", output=path, min_sites=3, **given)


def test_sums_that_are_not_masked_are_said_plainly(typed, table, tmp_path, monkeypatch):
  fed, columns = tmp_path / "fed", str(tmp_path / "schema.json")
  kits.init(fed, ["north", "south"], "localhost:9001", keys_here=True)
  typed("schema", data=table, target="y", output=columns)
  monkeypatch.setattr(common, "config", csv_config.get_config)
  path = str(tmp_path / "federation.json")
  told = typed("agree", kit=str(fed), schema=columns, output=path)
  assert "read the other's" in told


def test_sites_tell_their_own_errors_if_asked_for(typed, table, tmp_path, monkeypatch):
  fed, columns = tmp_path / "fed", str(tmp_path / "schema.json")
  kits.init(fed, ["a", "b", "c"], "localhost:9001", keys_here=True)
  typed("schema", data=table, target="y", output=columns)
  monkeypatch.setattr(common, "config", csv_config.get_config)
  path = str(tmp_path / "federation.json")
  for told in (False, True):
    given = {"kit": str(fed), "schema": columns, "output": path, "tell_scores": told}
    assert ("is told to all" in typed("agree", **given)) == told
    assert agreement.read(path).tell_scores == told


@pytest.mark.parametrize(
  ("command", "message"),
  [
    ("", "say what to do: demo, init"),
    ("serv", "'serve'"),
    ("init", "--output is missing"),
    ("join", "--kit is missing"),
    ("serve", "--kit is missing"),
  ],
)
def test_what_is_missing_is_said(typed, command, message):
  with pytest.raises(InputError, match=message):
    typed(command)
