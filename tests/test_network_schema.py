"""A schema tells nothing of rows; sites parse by it as the pooled table is parsed."""

import json
import warnings

import hypothesis
import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st

from fedbnr_jax.data import Preprocessor, column_sums, load_table
from fedbnr_jax.network import schema as schema_lib
from fedbnr_jax.network.schema import Quantity, Schema
from fedbnr_jax.network.schema_proposal import propose, unit_of
from tests.runs import assert_refused

_SCHEMA = Schema(
  "houses",
  Quantity("price", 1e5),
  (Quantity("size", 10.0), Quantity("age", 1.0)),
  (("kind", ("house", "flat")), ("zone", ("1", "2"))),
)
_names = st.text(min_size=1).map(str.strip).filter(bool)


def _frame(num_rows=120, seed=0):
  rng = np.random.default_rng(seed)
  return pd.DataFrame(
    {
      "kind": rng.choice(["flat", "house", "hut"], num_rows),
      "size": rng.normal(90.0, 31.4159, num_rows),
      "zone": rng.integers(1, 4, num_rows),
      "age": rng.exponential(0.27182, num_rows),
      "price": rng.normal(3e5, 98765.4, num_rows),
    }
  )


def _proposed(frame, **options):
  with warnings.catch_warnings(action="ignore"):
    return propose(frame, "price", **{"categorical": ["zone"], **options})


def _json(**changed):
  return _SCHEMA.to_json() | changed


@st.composite
def _schemas(draw):
  names = draw(st.lists(_names, min_size=2, max_size=6, unique=True))
  names = [name for name in names if name not in schema_lib.tables.RESERVED]
  hypothesis.assume(len(names) > 1)
  split = draw(st.integers(1, len(names)))
  units = st.integers(-300, 300).map(schema_lib.power_of_ten)
  target, *numeric = (Quantity(name, draw(units)) for name in names[:split])
  labels = st.lists(_names, min_size=1, max_size=4, unique=True).map(tuple)
  return Schema(
    draw(_names),
    target,
    tuple(numeric),
    tuple((name, draw(labels)) for name in names[split:]),
    draw(st.sampled_from(["error", "impute"])),
  )


@hypothesis.given(_schemas())
def test_a_schema_survives_its_file(tmp_path_factory, schema):
  path = tmp_path_factory.mktemp("schema") / "schema.json"
  schema_lib.write(path, schema)
  assert schema_lib.read(path) == schema
  assert Schema.from_json(schema.to_json()) == schema


def test_what_means_the_same_is_the_same():
  other = _json(
    target={"name": "price", "unit": 100000},
    categorical=[
      {"name": "kind", "categories": ["house", "flat"]},
      {"name": "zone", "categories": ["2", "1"]},
    ],
  )
  assert Schema.from_json(other).to_json() == _SCHEMA.to_json()


def test_a_proposal_has_every_column_and_is_said_to_need_a_look():
  with pytest.warns(UserWarning, match="look them over") as caught:
    got = propose(_frame(), "price", categorical=["zone"], name="houses")
  (message,) = [str(one.message) for one in caught]
  assert "'kind', 'zone' were read from the table: look them over" in message
  assert got == Schema(
    "houses",
    Quantity("price", 1e5),
    (Quantity("size", 10.0), Quantity("age", 1.0)),
    (("kind", ("flat", "house", "hut")), ("zone", ("1", "2", "3"))),
  )


def test_a_proposal_takes_its_name_from_the_file_and_the_columns_asked_for(tmp_path):
  path = tmp_path / "north.csv"
  _frame().to_csv(path, index=False)
  got = propose(path, "price", features=["age"])
  assert got.name == "north"
  assert got.features == ("age",)


def test_labels_that_look_like_names_are_left_out():
  frame = _frame(200).assign(
    owner=[f"owner {n}" for n in range(200)],
    street=[f"street {n % 101}" for n in range(200)],
  )
  with warnings.catch_warnings(record=True, action="always") as caught:
    got = propose(frame, "price", categorical=["zone"])
  left_out = [str(one.message) for one in caught if "left out" in str(one.message)]
  assert len(left_out) == 1
  assert "'owner' (200 labels in 200 rows), 'street' (101" in left_out[0]
  assert got.features == ("size", "age", "kind", "zone")
  assert_refused(
    lambda: _proposed(frame, categorical=["owner"]), "'owner' has 200 labels", "by hand"
  )
  many = pd.concat([frame, frame], ignore_index=True)
  with warnings.catch_warnings(action="ignore"):
    assert "street" not in propose(many, "price", features=["size", "street"]).features
    assert "street" in propose(many, "price", categorical=["street"]).features


def test_a_table_of_names_alone_has_no_schema():
  frame = pd.DataFrame({"who": ["Ann", "Bob", "Eve"], "price": [1.0, 2.0, 3.0]})
  with pytest.warns(UserWarning, match="left out"):
    assert_refused(lambda: propose(frame, "price"), "no column to predict from")


@pytest.mark.parametrize("missing", ["error", "impute"])
def test_no_cell_but_a_label_is_in_the_file(tmp_path, missing):
  frame = _frame()
  if missing == "impute":
    frame.loc[::5, ["size", "age"]] = np.nan
    frame.loc[::7, "kind"] = None
  path = tmp_path / "schema.json"
  schema_lib.write(path, _proposed(frame, missing=missing))
  text = path.read_text()
  numbers = [n for n in map(_number, text.replace(",", " ").split()) if n is not None]
  cells = frame[["size", "age", "price"]].to_numpy().ravel()
  assert not set(numbers) & set(cells)
  assert all(n == 10.0 ** round(np.log10(n)) for n in numbers)  # The units.
  for column in ("size", "age", "price"):
    for digits in (f"{frame[column].min():.4g}", f"{frame[column].max():.4g}"):
      assert digits not in text
  assert '""' not in text  # A missing cell is no label.


def _number(word):
  try:
    return float(word)
  except ValueError:
    return None


@hypothesis.given(
  st.lists(
    st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20
  ).filter(any),
)
def test_a_unit_is_a_power_of_ten_near_the_spread(values):
  values = np.array(values)
  unit = unit_of(values)
  assert Schema("t", Quantity("y", unit), (Quantity("x", 1.0),), ()).target.unit == unit
  largest = np.abs(values).max()
  spread = largest * (values / largest).std()
  if 1e-290 < 1e-8 * np.abs(values / largest).mean() * largest < spread < 1e290:
    assert 0.3 < spread / unit < 3.2


def test_units_of_columns_that_tell_no_spread():
  assert unit_of(np.array([0.0, 0.0])) == 1.0
  assert unit_of(np.array([np.nan])) == 1.0
  assert unit_of(np.array([1230.0, 1230.0])) == 1000.0
  assert unit_of(np.array([np.nan, 0.0, 2e-5, np.nan])) == 1e-5
  assert schema_lib.units(_SCHEMA).tolist() == [1e5, 10.0, 1.0]


@pytest.mark.parametrize("missing", ["error", "impute"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_three_sites_parse_what_the_pooled_table_has(tmp_path, missing, suffix):
  frame = _frame()
  if missing == "impute":
    frame.loc[::5, "size"] = np.nan
    frame.loc[::7, "kind"] = None
  pooled = load_table(frame, target="price", categorical=["zone"], missing=missing)
  schema = _proposed(frame, missing=missing)
  parts = []
  # The third site has one category, one target, and the columns in another order.
  odd = frame.index[frame["kind"] == "hut"][:1]
  rest = frame.index.difference(odd)
  owners = [rest[:50], rest[50:], odd]
  for number, rows in enumerate(owners):
    path = tmp_path / f"site{number}.{suffix}"
    own = frame.loc[rows, frame.columns[::-1]].assign(patient=range(len(rows)))
    if suffix == "csv":
      own.to_csv(path, index=False)
    else:
      own.to_parquet(path, index=False)
    parts.append(schema_lib.read_table(schema, path))
  order = np.concatenate(owners)
  features = pd.concat([part.features for part in parts], ignore_index=True)
  expected = pooled.features[list(schema.features)].iloc[order].reset_index(drop=True)
  pd.testing.assert_frame_equal(features, expected)
  targets = np.concatenate([part.targets for part in parts])
  np.testing.assert_array_equal(targets, pooled.targets[order])
  assert parts[2].features.attrs["source"] == str(tmp_path / f"site2.{suffix}")


@pytest.mark.parametrize("missing", ["error", "impute"])
def test_sums_by_a_schema_give_the_pooled_preprocessor(missing):
  frame = _frame()
  if missing == "impute":
    frame.loc[::5, "size"] = np.nan
    frame.loc[::7, "kind"] = None
  pooled = load_table(frame, target="price", categorical=["zone"], missing=missing)
  schema = _proposed(frame, missing=missing)
  agreed = schema_lib.columns(schema)
  sites = [
    column_sums.Site(agreed, *schema_lib.read_table(schema, part))
    for part in (frame.iloc[:30], frame.iloc[30:])
  ]

  def ask(question, arguments):
    one, other = (site.answer(question, arguments) for site in sites)
    return {name: one[name] + other[name] for name in one}

  got = column_sums.fit(ask, agreed)
  expected = Preprocessor.fit(pooled.features, pooled.targets, "price", missing=missing)
  assert got.categories == expected.categories
  assert got.input_names == expected.input_names
  np.testing.assert_allclose(got.input_mean, expected.input_mean, rtol=1e-12)
  np.testing.assert_allclose(got.input_std, expected.input_std, rtol=1e-12)


def test_a_site_whose_rows_are_all_alike_takes_part():
  frame = pd.DataFrame(
    {"size": [1, 1], "age": 2, "kind": "flat", "zone": 1, "price": 3}
  )
  table = schema_lib.read_table(_SCHEMA, frame)
  assert table.targets.tolist() == [3.0, 3.0]
  assert table.features.columns.tolist() == ["size", "age", "kind", "zone"]


def _site(tmp_path, **cells):
  """A file of three rows, the second of which has these cells."""
  rows = [{"size": 1, "age": 2, "kind": "flat", "zone": 1, "price": 3}] * 3
  rows[1] = rows[1] | cells
  path = tmp_path / "north.csv"
  pd.DataFrame(rows).to_csv(path, index=False)
  return path


@pytest.mark.parametrize(
  "cells, parts",
  [
    ({"kind": "Flat"}, ("'kind': 'Flat' is no category", "did you mean 'flat'")),
    ({"kind": "x" * 99}, ("x…' is no category", "agree on a schema that lists it")),
    ({"zone": 3}, ("'zone': '3' is no category", "choose from '1', '2'")),
    ({"zone": ""}, ("'zone': the cell is empty: fill it in or drop that row",)),
    ({"size": "large"}, ("'size': 'large' is not a number: correct it",)),
    ({"size": ""}, ("'size': the cell is empty: correct it or drop that row",)),
    ({"price": "inf"}, ("'price'", "not finite")),
    ({"price": ""}, ("'price': the cell is empty",)),
  ],
)
def test_a_cell_that_was_not_agreed_on_is_named(tmp_path, cells, parts):
  path = _site(tmp_path, **cells)
  read = lambda: schema_lib.read_table(_SCHEMA, path)  # noqa: E731
  assert_refused(read, f"{path}: row 2 (line 3), column ", *parts)
  with pytest.raises(schema_lib.InputError) as caught:
    read()
  assert "data.missing" not in str(caught.value)  # Not for a site to choose.


def test_tables_that_lack_a_column_or_rows_are_refused(tmp_path):
  path = _site(tmp_path)
  frame = pd.read_csv(path)
  for name, other in (("size", "Size"), ("kind", "kinds"), ("price", "Price")):
    frame.rename(columns={name: other}).to_csv(path, index=False)
    assert_refused(
      lambda: schema_lib.read_table(_SCHEMA, path),
      f"{path} has no column {name!r}, which all sites have agreed on",
      f"did you mean {other!r}?",
    )
  assert_refused(lambda: schema_lib.read_table(_SCHEMA, frame[:0]), "has no rows")
  twice = pd.concat([frame, frame[["size"]]], axis=1)
  assert_refused(lambda: schema_lib.read_table(_SCHEMA, twice), "'size' occurs twice")
  missing = tmp_path / "south.csv"
  assert_refused(lambda: schema_lib.read_table(_SCHEMA, missing), "does not exist")


_WRONG = [
  ({"name": ""}, "the name of the table is ''"),
  ({"name": 3}, "the name of the table is 3"),
  ({"missing": "drop"}, "missing is 'drop': choose from 'error', 'impute'"),
  ({"missing": None}, "missing is None"),
  ({"format": "fedbnr-jax schema 2"}, "let all sites have the same version"),
  ({"numeric": {}}, "numeric is no list"),
  ({"numeric": [3]}, "a column in numeric is no object with the fields 'name'"),
  ({"numeric": [{"name": "size"}]}, "a column in numeric lacks 'unit'"),
  ({"numeric": [{"name": " size", "unit": 1}]}, "without blanks before or behind"),
  ({"numeric": [{"name": "price", "unit": 1}]}, "'price' is named twice"),
  ({"numeric": [{"name": "mean", "unit": 1}]}, "'mean' has the name of a column that"),
  ({"numeric": [], "categorical": []}, "no column to predict from"),
  ({"categorical": "kind"}, "categorical is no list"),
  (
    {"categorical": [{"name": "kind", "categories": "x"}]},
    "categories that are no lis",
  ),
  ({"categorical": [{"name": "kind", "categories": []}]}, "'kind' has no categories"),
  ({"categorical": [{"name": "kind", "categories": [1]}]}, "of column 'kind' is 1"),
  ({"categorical": [{"name": "kind", "categories": ["a ", "b"]}]}, "is 'a '"),
  ({"categorical": [{"name": "kind", "categories": ["a", "a"]}]}, "'a' twice"),
  ({"categorical": [{"name": 1, "categories": ["a"]}]}, "name of a column is 1"),
  *(
    ({"target": {"name": "price", "unit": unit}}, "unit of column 'price' is")
    for unit in (0, -1, 3.0, 0.02, True, "1", None, [1], 10**400)
  ),
]


@pytest.mark.parametrize("changed, part", _WRONG)
def test_fields_that_cannot_be_right_are_named(tmp_path, changed, part):
  path = tmp_path / "schema.json"
  path.write_text(json.dumps(_json(**changed)))
  assert_refused(lambda: schema_lib.read(path), str(path), part)


def test_files_that_are_no_schema_are_refused(tmp_path):
  path = tmp_path / "schema.json"
  assert_refused(lambda: schema_lib.read(path), "does not exist: check the path of the")
  assert_refused(lambda: schema_lib.read(tmp_path), "is a folder: name the schema")
  lacking = _json()
  del lacking["missing"]
  text = json.dumps(_json())
  for content, part in (
    ("", "no readable schema"),
    (text[:-1], "no readable schema"),
    ("[" * 100_000, "no readable schema"),
    ("[]", "holds no JSON object"),
    ("{}", "lacks 'format', 'name'"),
    (json.dumps(lacking), "lacks 'missing': add it"),
    (json.dumps(_json(targt=1)), "unknown field 'targt': did you mean 'target'?"),
    (text.replace('"missing"', '"name": "x", "missing"'), "'name' occurs twice"),
    (text.replace("100000.0", "1e999"), "1e999 is not a finite number"),
    (text.replace("100000.0", "NaN"), "NaN is not a finite number"),
  ):
    path.write_text(content)
    assert_refused(lambda: schema_lib.read(path), str(path), part)
  path.write_bytes(b"\xff{}")
  assert_refused(lambda: schema_lib.read(path), "no readable schema")
  nowhere = tmp_path / "none" / "schema.json"
  assert_refused(lambda: schema_lib.write(nowhere, _SCHEMA), "cannot use the schema")
