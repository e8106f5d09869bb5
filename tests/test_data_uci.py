"""The five UCI tables: their facts, their forms, and how they are fetched.

What needs the tables themselves is skipped where no folder holds them.
"""

import functools
import http.server
import io
import os
import threading
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import openpyxl
import pytest

from fedbnr_jax.data import Preprocessor, archives, random_split, uci
from tests.runs import assert_refused

# Read here because the tests change the variable.
BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
FOLDER = Path(os.environ.get("FEDBNR_DATA_DIR") or BESIDE).resolve()

FACTS = {
  # rows, split sizes, inputs, target deviation, best feature, its correlation
  "skillcraft": (3338, (2670, 334, 334), 18, 1.448, "ActionLatency", -0.660),
  "sml": (4137, (3309, 414, 414), 18, 3.311, "5:Weather_Temperature", 0.783),
  "parkinsons": (5875, (4700, 587, 588), 20, 10.70, "age", 0.310),
  "bike": (8760, (7008, 876, 876), 17, 645.0, "Temperature", 0.539),
  "ccpp": (9568, (7654, 957, 957), 4, 17.07, "AT", -0.948),
}


def data_folder() -> Path:
  """Finds the folder of real tables, or skips the test."""
  if not (FOLDER / "ccpp").is_dir():
    pytest.skip("no folder with the UCI tables: set FEDBNR_DATA_DIR")
  return FOLDER


@functools.cache
def real(name: str):
  return uci.load(name, data_folder())


def raw(name: str) -> dict[str, bytes]:
  """Gives the files of a table by name."""
  return {path.name: path.read_bytes() for path in (data_folder() / name).iterdir()}


def zipped(files: dict[str, bytes]) -> bytes:
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
    for name, content in files.items():
      archive.writestr(name, content)
  return buffer.getvalue()


def store(folder: Path, name: str, files: dict[str, bytes]) -> Path:
  """Writes files where the loader looks for a table; gives the folder to name."""
  (folder / name).mkdir(parents=True, exist_ok=True)
  for file, content in files.items():
    (folder / name / file).write_bytes(content)
  return folder


def assert_same(one, other) -> None:
  assert one.features.equals(other.features)
  assert np.array_equal(one.targets, other.targets)


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch, tmp_path):
  """Keeps the tests off the user's cache and off the network."""
  monkeypatch.delenv("FEDBNR_DATA_DIR", raising=False)
  monkeypatch.setenv("FEDBNR_CACHE_DIR", str(tmp_path / "cache"))
  monkeypatch.setattr(uci, "ARCHIVE_URL", (tmp_path / "nowhere").as_uri())


@pytest.mark.parametrize("name", uci.NAMES)
def test_facts(name):
  rows, sizes, inputs, deviation, best, correlation = FACTS[name]
  data = real(name)
  assert data.num_rows == rows
  assert data.targets.std() == pytest.approx(deviation, rel=1e-3)
  assert data.split is None
  assert data.standardised_error == (name == "bike")
  split = random_split(np.random.default_rng(0), rows)
  assert tuple(len(part) for part in split) == sizes
  rows_seen = data.features.iloc[split.train]
  fitted = Preprocessor.fit(rows_seen, data.targets[split.train], data.target_name)
  assert fitted.num_inputs == inputs
  numbers = data.features[list(fitted.numeric_columns)]
  found = numbers.apply(lambda column: np.corrcoef(column, data.targets)[0, 1])
  assert found.abs().idxmax() == best
  assert found[best] == pytest.approx(correlation, abs=0.005)


def test_bike_categories():
  fitted = Preprocessor.fit(real("bike").features, real("bike").targets, "n")
  assert len(fitted.numeric_columns) == 9
  assert [len(values) for _, values in fitted.categories] == [4, 2, 2]
  assert "Seasons=Winter" in fitted.input_names


def test_sml_clock():
  features = real("sml").features
  assert features["time_of_day"][0] == 11.75
  assert features["day_of_year"][0] == 73  # 13 March of a leap year.


def test_skillcraft_with_incomplete_rows_in_a_zip(tmp_path):
  (name, content), *_ = raw("skillcraft").items()
  header, *lines = content.decode().splitlines()
  quoted = ",".join(f'"{cell}"' for cell in header.split(","))
  hole = ",".join(["1093", "8", "?", "?", "?", *lines[0].split(",")[5:]])
  lines[5:5] = [hole] * 57
  archive = zipped({name: "\r\n".join([quoted, *lines]).encode()})
  folder = store(tmp_path, "skillcraft", {"skillcraft1.zip": archive})
  assert_same(uci.load("skillcraft", folder), real("skillcraft"))


def test_sml_in_a_zip_in_a_zip(tmp_path):
  files = {f"DATA/{name}": content for name, content in raw("sml").items()}
  archive = zipped({"readme.txt": b"", "NEW-DATA.ZIP": zipped(files)})
  folder = store(tmp_path, "sml", {"sml2010.zip": archive})
  assert_same(uci.load("sml", folder), real("sml"))


def test_bike_with_another_header(tmp_path):
  (name, content), *_ = raw("bike").items()
  renamed = content.replace(
    b",Temperature,Humidity,", b",Temperature(\xb0C),Humidity(%),"
  )
  assert renamed != content
  folder = store(tmp_path, "bike", {name: renamed})
  assert_same(uci.load("bike", folder), real("bike"))
  store(tmp_path, "bike", {name: renamed.decode("latin-1").encode("utf-8-sig")})
  assert_same(uci.load("bike", folder), real("bike"))


def test_ccpp_as_a_workbook_of_shuffles(tmp_path):
  (_, content), *_ = raw("ccpp").items()
  rows = [list(map(float, line.split(b","))) for line in content.splitlines()]
  book = openpyxl.Workbook()
  sheet = book.active
  sheet.append(["AT", "V", "AP", "RH", "PE"])
  for row in reversed(rows):
    sheet.append([np.nextafter(row[0], np.inf), *row[1:]])
  book.create_sheet("Sheet2").append(["other"])
  buffer = io.BytesIO()
  book.save(buffer)
  archive = zipped({"CCPP/Folds5x2_pp.xlsx": buffer.getvalue()})
  folder = store(tmp_path, "ccpp", {"ccpp.zip": archive})
  loaded = uci.load("ccpp", folder)
  np.testing.assert_allclose(loaded.features, real("ccpp").features, rtol=1e-12)
  assert np.array_equal(loaded.targets, real("ccpp").targets)


def test_unknown_name():
  assert_refused(
    lambda: uci.load("bikes"), "no UCI dataset 'bikes'", "did you mean 'bike'"
  )


def test_variable_is_the_only_source(monkeypatch, tmp_path):
  monkeypatch.setenv("FEDBNR_DATA_DIR", str(tmp_path))
  folder = str(tmp_path / "sml")
  parts = ["NEW-DATA-1.T15.txt and NEW-DATA-2.T15.txt", folder, "sml2010.zip"]
  assert_refused(lambda: uci.load("sml"), *parts)
  assert not (tmp_path / "cache").exists()
  monkeypatch.setenv("FEDBNR_DATA_DIR", str(data_folder()))
  assert_same(uci.load("sml"), real("sml"))


DAMAGES = {
  "a row less": (
    lambda text: text.rpartition("\n")[0].rpartition("\n")[0],
    "9567 rows",
  ),
  "a digit": (lambda text: text.replace("8.34", "8.35", 1), "digest"),
  "cut off": (lambda text: text[:-3].rpartition(",")[0], "line 9568 has 4 cells"),
  "text": (lambda text: text.replace("58.49", "x", 1), "line 2, column 'V': 'x'"),
  "no rows": (lambda text: "AT,V,AP,RH,PE\n", "holds no rows"),
  "binary": (lambda text: "\x00\x01\x02", "line 1 has 1 cells"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_text(tmp_path, damage):
  change, part = DAMAGES[damage]
  (name, content), *_ = raw("ccpp").items()
  folder = store(tmp_path, "ccpp", {name: change(content.decode()).encode()})
  assert_refused(
    lambda: uci.load("ccpp", folder), str(folder / "ccpp" / name), part, "294/"
  )


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nothing", zipped({"x": b"y"})])
def test_damaged_archives(tmp_path, content):
  for name in ("ccpp.zip", "Folds5x2_pp.xlsx"):
    folder = store(tmp_path / name, "ccpp", {name: content})
    assert_refused(lambda folder=folder: uci.load("ccpp", folder), str(folder))


def test_archive_with_a_damaged_member(tmp_path):
  content = bytearray(zipped({"Folds5x2_pp.csv": os.urandom(1000)}))
  content[200] ^= 255
  folder = store(tmp_path, "ccpp", {"ccpp.zip": bytes(content)})
  assert_refused(
    lambda: uci.load("ccpp", folder), "ccpp.zip", "not a usable zip", "CRC"
  )


def bombs() -> dict[str, bytes]:
  """Files of some kilobytes that hold more than a table can, by what they are."""
  zeros = zipped({"Folds5x2_pp.csv": bytes(8_000_000)})
  small = zipped({"x.csv": bytes(700_000)})
  return {
    "file": bytes(8_000_000),
    "member": zeros,
    "nested": zipped({"inner.zip": zeros}),
    "archive": zipped({"inner.zip": bytes(8_000_000)}),
    # Each is small enough, but not all of them; none holds what is looked for.
    "many": zipped({f"{n}.zip": bytes(400_000) + small for n in range(3)}),
    "workbook": zipped({f"sheet{n}.xml": bytes(400_000) for n in range(3)}),
  }


@pytest.mark.parametrize("kind", list(bombs()))
def test_a_bomb_is_refused_before_it_unpacks(tmp_path, monkeypatch, kind):
  monkeypatch.setattr(archives, "_MAX_BYTES", 1_000_000)
  name = {"file": "Folds5x2_pp.csv", "workbook": "Folds5x2_pp.xlsx"}.get(kind, "a.zip")
  content = bombs()[kind]
  folder = store(tmp_path, "ccpp", {name: content})
  tracemalloc.start()
  try:
    assert_refused(lambda: uci.load("ccpp", folder), name, "holds more than 1 MB")
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
  finally:
    tracemalloc.stop()


def test_unusable_date(tmp_path):
  files = raw("sml")
  first = "NEW-DATA-1.T15.txt"
  files[first] = files[first].replace(b"13/03/2012", b"33/03/2012", 1)
  folder = store(tmp_path, "sml", files)
  assert_refused(lambda: uci.load("sml", folder), first, "unusable date or time")


def test_no_network(tmp_path):
  folder = str(tmp_path / "cache" / "data" / "bike")
  parts = ["cannot download", "560/seoul+bike+sharing+demand.zip", folder]
  assert_refused(
    lambda: uci.load("bike"), *parts, "SeoulBikeData.csv", "FEDBNR_DATA_DIR"
  )


@pytest.fixture
def served(tmp_path, monkeypatch):
  """Serves a folder as if it were UCI's archive; gives the folder and a log."""
  folder, log = tmp_path / "served", []
  folder.mkdir()

  class Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *args):
      super().__init__(*args, directory=str(folder))

    def log_message(self, *args):
      log.append(args)

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  monkeypatch.setattr(uci, "ARCHIVE_URL", f"http://127.0.0.1:{server.server_port}")
  yield folder, log
  server.shutdown()
  thread.join()
  server.server_close()


def test_download_once_into_the_cache(served, tmp_path):
  folder, log = served
  store(
    folder, "272", {"skillcraft1+master+table+dataset.zip": zipped(raw("skillcraft"))}
  )
  assert_same(uci.load("skillcraft"), real("skillcraft"))
  kept = tmp_path / "cache" / "data" / "skillcraft"
  archive = kept / "skillcraft1+master+table+dataset.zip"
  assert list(kept.iterdir()) == [archive]
  assert len(log) == 1
  assert_same(uci.load("skillcraft"), real("skillcraft"))
  assert len(log) == 1


def test_download_larger_than_any_table_is_not_kept(served, tmp_path, monkeypatch):
  folder, _ = served
  monkeypatch.setattr(archives, "_MAX_BYTES", 1_000_000)
  content = zipped({"x": os.urandom(1_000_001)})
  store(folder, "294", {"combined+cycle+power+plant.zip": content})
  assert_refused(
    lambda: uci.load("ccpp"), "cannot download", "arrives has more than 1 MB"
  )
  assert list((tmp_path / "cache" / "data" / "ccpp").iterdir()) == []


def test_download_of_something_else_is_not_kept(served, tmp_path):
  folder, _ = served
  store(folder, "294", {"combined+cycle+power+plant.zip": b"<html>log in</html>"})
  assert_refused(
    lambda: uci.load("ccpp"), "not a complete zip archive", "Folds5x2_pp.xlsx"
  )
  assert list((tmp_path / "cache" / "data" / "ccpp").iterdir()) == []
  assert_refused(lambda: uci.load("bike"), "404")
