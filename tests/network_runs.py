"""Small federations of real sites in this process, and the simulation of the same."""

import functools
import pathlib
from typing import NamedTuple

import ml_collections
import numpy as np
import pandas as pd

from configs import csv
from fedbnr_jax.data import Dataset, Split
from fedbnr_jax.network import agreement as agreement_lib
from fedbnr_jax.network import schema as schema_lib
from fedbnr_jax.network import site_rows
from fedbnr_jax.network.agreement import Agreement
from fedbnr_jax.network.identity import PrivateIdentity
from fedbnr_jax.network.schema import Quantity, Schema, SiteTable
from fedbnr_jax.network.site import Site
from fedbnr_jax.network.transport import InProcess
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run.experiment import Experiment
from tests.runs import tiny

NAMES = ("north", "south", "west")
SIZES = dict(zip(NAMES, (30, 30, 30), strict=True))
SCHEMA = Schema(
  "made", Quantity("y", 1.0), (Quantity("a", 1.0), Quantity("b", 1.0)), ()
)


@functools.cache
def identity(name: str) -> PrivateIdentity:
  """The identity of a site, one in all tests."""
  return PrivateIdentity.new()


def config(**fields: object) -> ml_collections.ConfigDict:
  """A tiny run over tables, in float64, without calibration unless asked for."""
  usual = csv.get_config()
  result = tiny(
    **{
      "dtype": "float64",
      "kernel": "gaussian",
      "data__source": "table",
      "data__name": usual.data.name,
      "data__inputs": "standard",
      "data__num_rows": 200,
      "num_clients": 10,
      **fields,
    }
  )
  for name in ("fedavg", "fedprox"):
    if result.method == name:
      result.kernel = "deep"
  return result


def agreement(
  schema: Schema = SCHEMA, *, masking: bool = False, options=None, **fields: object
) -> Agreement:
  """An agreement of the three sites."""
  members = {name: identity(name).public.pem() for name in NAMES}
  made = config(**fields)
  return agreement_lib.make(made, schema, members, masking=masking, **(options or {}))


def frame(name: str, num_rows: int) -> pd.DataFrame:
  """The rows of a site: numbers, a category that not all sites have, missing cells."""
  rng = np.random.default_rng([NAMES.index(name), num_rows])
  a, b = rng.normal(size=(2, num_rows)) + NAMES.index(name)
  kinds = ["u", "v"] if name == "north" else ["u", "w"]
  kind = np.array(kinds)[rng.integers(2, size=num_rows)]
  y = 100 + 30 * np.sin(a) + 5 * b + 3 * rng.normal(size=num_rows)
  c = np.exp(rng.normal(size=num_rows))
  c[rng.random(num_rows) < 0.2] = np.nan
  return pd.DataFrame({"a": a, "b": b, "c": c, "kind": kind, "y": y})


def tables(schema: Schema = SCHEMA, sizes=None) -> dict[str, SiteTable]:
  """Each site's table, as its schema has it."""
  sizes = SIZES if sizes is None else sizes
  return {
    name: schema_lib.read_table(schema, frame(name, sizes[name])) for name in NAMES
  }


class Federation(NamedTuple):
  """An agreement, and the folder and the rows of each site."""

  agreement: Agreement
  folder: pathlib.Path
  tables: dict[str, SiteTable]

  def site(self, name: str) -> Site:
    """The site as it is when it has just been started."""
    folder = self.folder / name
    return Site(folder, name, self.agreement, self.tables[name], identity(name))

  def transport(self) -> InProcess:
    """Reaches sites that have just been started."""
    return InProcess({name: self.site(name).answer for name in NAMES})

  def splits(self) -> dict[str, site_rows.SiteSplit]:
    """How the sites split their rows."""
    share = self.agreement.config.data.calibration
    return {
      name: site_rows.split(
        site_rows.kept_seed(self.folder / name / "split.json"), table, share
      )
      for name, table in self.tables.items()
    }


def federation(
  folder: pathlib.Path, schema: Schema = SCHEMA, sizes=None, **options
) -> Federation:
  """Three sites with folders of their own."""
  return Federation(
    agreement(schema, **options), folder / "sites", tables(schema, sizes)
  )


class Pooled(NamedTuple):
  """The rows of all sites in one table, split as the sites have split them."""

  dataset: Dataset
  calibration: np.ndarray  # Row numbers.


def pooled(some: Federation) -> Pooled:
  """Puts the sites' rows together; nobody in a real federation could."""
  first, parts = 0, []
  for name, split in some.splits().items():
    parts.append([part + first for part in split])
    first += len(some.tables[name].targets)
  train, validation, test, calibration = map(np.concatenate, zip(*parts, strict=True))
  schema = some.agreement.schema
  dataset = Dataset(
    schema.name,
    pd.concat([table.features for table in some.tables.values()], ignore_index=True),
    np.concatenate([table.targets for table in some.tables.values()]),
    schema.target.name,
    clients=np.repeat(NAMES, [len(table.targets) for table in some.tables.values()]),
    split=Split(train, test, validation),
    missing=schema.missing,
  )
  return Pooled(dataset, calibration)


def simulation_config(some: Federation) -> ml_collections.ConfigDict:
  """The agreed config, for a simulation that has set its rows aside already."""
  result = ml_collections.ConfigDict(some.agreement.config.to_dict())
  result.data.calibration = 0.0
  result.mesh = 1
  return result


def simulation(some: Federation) -> Experiment:
  """The simulation on the same rows and splits."""
  return experiment_lib.build(simulation_config(some), pooled(some).dataset)
