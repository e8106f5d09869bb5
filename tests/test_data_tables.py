"""Tables: what any CSV or Parquet file becomes, and what is said of a bad one."""

import gzip

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbnr_jax.data import load_table, read_table
from fedbnr_jax.data.tables import RESERVED, parse_features
from tests.runs import assert_refused

GOOD = "a,b,site,y\n1,u,north,1.5\n2,v,south,2.5\n3,u,north,0.5\n"


@pytest.fixture
def write(tmp_path):
  """Gives a function that writes a file and returns its path."""

  def write_file(content: str | bytes, name: str = "table.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path

  return write_file


def test_kinds_and_owners(write):
  data = load_table(write(GOOD), target="y", client="site")
  assert data.name == "table"
  assert data.features["a"].dtype == np.float64
  assert data.features["b"].dtype == object
  assert data.features["b"].tolist() == ["u", "v", "u"]
  assert data.targets.tolist() == [1.5, 2.5, 0.5]
  assert data.clients.tolist() == ["north", "south", "north"]
  assert data.split is None


def test_chosen_features_and_categories(write):
  data = load_table(
    write(GOOD), target="y", features=["site", "a"], categorical=["a"], name="mine"
  )
  assert data.name == "mine"
  assert list(data.features.columns) == ["site", "a"]
  assert data.features["a"].tolist() == ["1", "2", "3"]
  assert data.clients is None


@pytest.mark.parametrize(
  "content, name",
  [
    (GOOD.replace("\n", "\r\n"), "t.csv"),
    (b"\xef\xbb\xbf" + GOOD.encode(), "t.csv"),
    (GOOD.replace(",", "\t"), "t.tsv"),
    (GOOD, "t.txt"),
    (gzip.compress(GOOD.encode(), mtime=0), "t.csv.gz"),
    ("\n" + GOOD.replace("\n", "\n\n"), "t.csv"),
    (GOOD.replace(",", " , "), "T.CSV"),
    (GOOD.rstrip(), "t.data"),
    ('"a","b","site","y"\n"1",u,north,1.5\n2,v,south,2.5\n3,u,north,.5', "t.csv"),
  ],
)
def test_forms_of_text(write, content, name):
  data = load_table(write(content, name), target="y", client="site")
  assert data.features["a"].tolist() == [1.0, 2.0, 3.0]
  assert data.features["b"].tolist() == ["u", "v", "u"]
  assert data.targets.tolist() == [1.5, 2.5, 0.5]


def test_latin_1(write):
  frame = read_table(write("T(°C),y\n1,é\n".encode("latin-1")))
  assert list(frame.columns) == ["T(°C)", "y"]
  assert frame["y"].tolist() == ["é"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
  st.lists(
    st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 2),
    min_size=2,
    max_size=20,
  ).filter(lambda rows: len({row[1] for row in rows}) > 1)
)
def test_floats_survive_a_csv_file(write, rows):
  text = "x,y\n" + "".join(f"{x!r},{y!r}\n" for x, y in rows)
  data = load_table(write(text), target="y")
  assert data.features["x"].tolist() == [x for x, _ in rows]
  assert data.targets.tolist() == [y for _, y in rows]


@pytest.mark.parametrize(
  "name, content, parts",
  [
    ("e.csv", "", ["e.csv is empty"]),
    ("e.csv", " \n\n", ["e.csv is empty"]),
    ("h.csv", "a,b\n", ["h.csv has column names but no rows"]),
    ("n.csv", b"a,b\n\x00\x01,2\n", ["n.csv is a binary file"]),
    ("n.csv", "a,b\n1,2\n".encode("utf-16"), ["n.csv is a binary file"]),
    ("p.parquet", GOOD, ["p.parquet cannot be read as Parquet"]),
    ("z.csv.gz", GOOD, ["z.csv.gz cannot be read"]),
    ("r.csv", "a,b\n1,2\n\n3\n", ["r.csv: line 4 has 1 fields", "2 columns"]),
    ("r.csv", "a,b\n1,2,3\n", ["r.csv: line 2 has 3 fields"]),
    ("r.csv", 'a,b\n1,"2\n3,4\n', ["r.csv: cannot read on after line 1", "quote"]),
    ("d.csv", "a,b,a\n1,2,3\n", ["d.csv: column name 'a' occurs twice"]),
    ("u.csv", ",b\n1,2\n", ["u.csv: column 1 has no name"]),
    ("s.csv", "a;b\n1;2\n", ["s.csv seems to be separated by ';'"]),
    ("x.xls", GOOD, ["x.xls has the unknown suffix '.xls'", "'.csv'"]),
  ],
)
def test_unreadable_files(write, name, content, parts):
  path = write(content, name)
  assert_refused(lambda: read_table(path), *parts)


def test_missing_file_and_folder(tmp_path):
  assert_refused(lambda: read_table(tmp_path / "no.csv"), "no.csv does not exist")
  assert_refused(lambda: read_table(tmp_path), f"{tmp_path} is a folder")


@pytest.mark.parametrize(
  "options, parts",
  [
    ({"target": "Y"}, ["no column 'Y'", "as target", "did you mean 'y'", "'site'"]),
    ({"target": ""}, ["no target is named", "'a', 'b', 'site', 'y'"]),
    ({"target": "y", "client": "sites"}, ["as client", "did you mean 'site'"]),
    ({"target": "y", "client": "y"}, ["'y' is named as target and as client"]),
    ({"target": "y", "features": ["q"]}, ["no column 'q'", "as feature"]),
    (
      {"target": "y", "features": ["a", "y"]},
      ["'y' is named as feature and as target"],
    ),
    ({"target": "y", "features": ["a", "a"]}, ["'a' is named twice"]),
    ({"target": "y", "features": []}, ["no feature left"]),
    ({"target": "y", "features": "a"}, ["give a list"]),
    ({"target": "y", "categorical": "b"}, ["give a list"]),
    ({"target": "y", "categorical": ["c"]}, ["no column 'c'", "as categorical"]),
    (
      {"target": "y", "categorical": ["y"]},
      ["categorical column 'y' is not a feature"],
    ),
    ({"target": "b"}, ["row 1 (line 2), column 'b'", "'u' is not a number"]),
  ],
)
def test_unusable_columns(write, options, parts):
  path = write(GOOD)
  assert_refused(lambda: load_table(path, **options), str(path), *parts)


@pytest.mark.parametrize(
  "old, new, parts",
  [
    ("3,u", "x3,u", ["row 3 (line 4), column 'a'", "'x3' is not a number"]),
    ("3,u", "1_0,u", ["row 3 (line 4), column 'a'", "'1_0' is not a number"]),
    ("3,u", ",u", ["row 3 (line 4), column 'a'", "the cell is empty"]),
    ("3,u", "NaN,u", ["row 3 (line 4), column 'a'", "'NaN' is not finite"]),
    ("3,u", "-inf,u", ["row 3 (line 4), column 'a'", "'-inf' is not finite"]),
    ("3,u", "1e999,u", ["row 3 (line 4), column 'a'", "'1e999' is not finite"]),
    ("2,v", "2,", ["row 2 (line 3), column 'b'", "the cell is empty"]),
    ("south", " ", ["row 2 (line 3), column 'site'", "the cell is empty"]),
    ("2.5", "high", ["row 2 (line 3), column 'y'", "'high' is not a number"]),
    ("2.5", "", ["row 2 (line 3), column 'y'", "the cell is empty"]),
    ("\n3,u", '\n\n\n"x\ny",u', ["row 3 (line 6), column 'a'", "'x\\ny'"]),
  ],
)
def test_unusable_cells(write, old, new, parts):
  path = write(GOOD.replace(old, new, 1))
  assert_refused(lambda: load_table(path, target="y", client="site"), str(path), *parts)


def test_constant_target(write):
  path = write("a,y\n1,3\n2,3\n")
  assert_refused(lambda: load_table(path, target="y"), "'y' is constant (value 3.0)")


def test_identifiers_are_warned_of(write):
  text = "id,y\n" + "".join(f"k{i},{i}\n" for i in range(200))
  with pytest.warns(UserWarning, match="column 'id' is text with 200"):
    load_table(write(text), target="y")


def test_parquet(tmp_path):
  frame = pd.DataFrame({"a": [1, 2], "b": ["u", "v"], "y": [0.5, 1.5]}, index=[7, 8])
  path = tmp_path / "t.parquet"
  frame.to_parquet(path)
  data = load_table(path, target="y")
  assert list(data.features.columns) == ["a", "b"]
  assert data.features["a"].tolist() == [1.0, 2.0]
  frame.assign(a=[1.0, np.nan]).to_parquet(path)
  assert_refused(
    lambda: load_table(path, target="y"), "t.parquet: row 2, column 'a'", "empty"
  )
  frame[:0].to_parquet(path)
  assert_refused(lambda: load_table(path, target="y"), "no rows")


@pytest.mark.parametrize(
  "values, expected",
  [
    (pd.Series([1, 2], dtype="Int64"), [1.0, 2.0]),
    (pd.Series([True, False]), [1.0, 0.0]),
    (pd.Series(["u", "v"], dtype="category"), ["u", "v"]),
    (pd.Series(["1", "2"], dtype="string"), [1.0, 2.0]),
    (pd.Series([1, "2.5"], dtype=object), [1.0, 2.5]),
    (pd.Series([1.0, 2.0], dtype="float32"), [1.0, 2.0]),
  ],
)
def test_frames_of_any_type(values, expected):
  data = load_table(pd.DataFrame({"a": values, "y": [0.0, 1.0]}), target="y")
  assert data.features["a"].tolist() == expected


@pytest.mark.parametrize(
  "values, part",
  [
    (pd.Series([1, None], dtype="Int64"), "row 2, column 'a': the cell is empty"),
    (pd.Series(["u", None], dtype="string"), "row 2, column 'a': the cell is empty"),
    (pd.Series([np.inf, 1.0]), "row 1, column 'a': 'inf' is not finite"),
    (pd.Series(pd.to_datetime(["2020-01-01", "2020-01-02"])), "holds dates or times"),
    (pd.Series(pd.to_datetime([None, "2020-01-02"])), "row 2, column 'a' holds dates"),
    (pd.Series([pd.NaT, pd.NaT]), "row 1, column 'a' holds dates or times"),
    (pd.Series([1j, 2j]), "complex"),
  ],
)
def test_frames_with_unusable_cells(values, part):
  frame = pd.DataFrame({"a": values, "y": [0.0, 1.0]})
  assert_refused(lambda: load_table(frame, target="y"), part)


def test_unusable_frames():
  load = lambda frame: load_table(frame, target="y")  # noqa: E731
  assert_refused(lambda: load(pd.DataFrame({"y": []})), "no rows")
  assert_refused(
    lambda: load(pd.DataFrame({0: [1.0], "y": [2.0]})), "0 is not a string"
  )
  twice = pd.DataFrame([[1.0, 2.0]], columns=["y", "y"])
  assert_refused(lambda: load(twice), "'y' occurs twice")


def test_categories_read_the_same_from_text_and_numbers(write):
  text = read_table(write("a\n3\n4\n"))
  typed = pd.DataFrame({"a": [3.0, 4.0]})
  for frame in (text, typed, typed.astype(int)):
    assert parse_features(frame, [], ["a"])["a"].tolist() == ["3", "4"]


def test_features_to_predict_for(write):
  raw = read_table(write(GOOD))
  parsed = parse_features(raw, ["a"], ["b"])
  assert parsed["a"].tolist() == [1.0, 2.0, 3.0]
  assert parsed["b"].tolist() == ["u", "v", "u"]
  assert_refused(lambda: parse_features(raw, ["b"], []), "row 1 (line 2), column 'b'")
  missing = ["table.csv", "'p', 'q' are missing"]
  assert_refused(lambda: parse_features(raw, ["a", "p"], ["q"]), *missing)


def test_rows_keep_their_number_when_some_are_taken_away(write):
  raw = read_table(write("a\n1\n2\nx\n"))
  assert_refused(lambda: parse_features(raw[1:], ["a"], []), "row 3 (line 4)")


# ------------------------------------------------ text that looks like numbers or dates


@pytest.mark.parametrize(
  "cells, parts",
  [
    (["1,5", "2,25", "-3,0"], ["row 1 (line 2)", "'1,5' looks like a number", "point"]),
    (["$1,200", "$950", "$2,100"], ["'$1,200' looks like a number"]),
    (["5 %", "12 %", "7 %"], ["'5 %' looks like a number"]),
    (["0x1F", "0xA0", "0xff"], ["'0x1F' looks like a number"]),
    (["unknown", "1,5", "2,5"], ["row 2 (line 3)", "'1,5' looks like a number"]),
    (["", "1,5", "2,5"], ["row 2 (line 3)", "'1,5' looks like a number"]),
    (["2024-03-01", "2024-03-02", "?"], ["row 1", "looks like a date", "days since"]),
    (["01.03.2024", "2.3.2024", "3.3.2024"], ["looks like a date"]),
    (["12", "1,5", "2"], ["row 2 (line 3)", "'1,5' is not a number", "decimal point"]),
  ],
)
def test_text_that_looks_like_numbers_or_dates_is_refused(write, cells, parts):
  rows = zip(cells, range(3), strict=True)
  path = write("a,y\n" + "".join(f'"{cell}",{number}\n' for cell, number in rows))
  assert_refused(
    lambda: load_table(path, target="y"),
    str(path),
    "column 'a'",
    "`categorical`",
    *parts,
  )
  if all(cells):
    data = load_table(path, target="y", categorical=["a"])
    assert data.features["a"].tolist() == cells


@pytest.mark.parametrize(
  "cells",
  [
    ["A12", "B7", "A3"],
    ["3-4 rooms", "5-6 rooms", "1 room"],
    ["True", "False", "True"],
    ["1,5", "low", "high"],  # Most of the cells are labels.
  ],
)
def test_labels_are_not_taken_for_numbers(cells):
  frame = pd.DataFrame({"a": cells, "y": [0.0, 1.0, 2.0]})
  assert load_table(frame, target="y").features["a"].tolist() == cells


def test_dates_of_any_type_are_labels_if_named_so(write):
  text = read_table(write("a,y\n2024-03-01,1\n2024-03-02,2\n"))
  typed = text.assign(a=pd.to_datetime(text["a"]))
  for frame in (text, typed, typed.assign(a=typed["a"].dt.date)):
    assert_refused(lambda frame=frame: load_table(frame, target="y"), "row 1", "'a'")
    data = load_table(frame, target="y", categorical=["a"])
    assert data.features["a"].tolist() == ["2024-03-01", "2024-03-02"]


# -------------------------------------------------------------------------- reserved


@pytest.mark.parametrize("role", ["feature", "client"])
@pytest.mark.parametrize("name", [*RESERVED])
def test_names_of_predicted_columns_are_refused_at_training(name, role):
  frame = pd.DataFrame({"a": [0.0, 1.0], name: ["u", "v"], "y": [0.0, 1.0]})
  client = name if role == "client" else None
  assert_refused(
    lambda: load_table(frame, target="y", client=client),
    f"the {role} {name!r}",
    "rename",
  )
  load_table(frame, target="y", features=["a"])  # One that has no role may stay.


@pytest.mark.parametrize("form", ["{} kg", "{},5km/h", "<{}", ">= {}.5", "{}A"])
def test_many_numbers_with_one_unit_are_refused(form):
  """A few are labels; more than twenty different ones are measurements."""

  def frame(count):
    cells = [form.format(number % count) for number in range(60)]
    return pd.DataFrame({"a": cells, "y": np.arange(60.0)})

  assert load_table(frame(20), target="y").features["a"].nunique() == 20
  cell = repr(form.format(0))
  assert_refused(
    lambda: load_table(frame(21), target="y"),
    *("row 1", "column 'a'", f"{cell} looks like a number", "`categorical`"),
  )
  labels = load_table(frame(21), target="y", categorical=["a"])
  assert labels.features["a"].nunique() == 21


def test_different_units_are_labels():
  cells = [f"{number} {unit}" for number in range(15) for unit in ("a", "b", "c", "d")]
  frame = pd.DataFrame({"a": cells, "y": np.arange(60.0)})
  assert load_table(frame, target="y").features["a"].nunique() == 60
