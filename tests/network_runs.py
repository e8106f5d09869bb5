"""Small federations of real sites in this process, and the simulation of the same."""

import functools
import json
import pathlib
import secrets
from typing import NamedTuple

import ml_collections
import numpy as np
import pandas as pd

from configs import csv
from fedbnr_jax import workflow
from fedbnr_jax.data import Dataset, Split
from fedbnr_jax.network import agreement as agreement_lib
from fedbnr_jax.network import preparation, rounds, site_rows
from fedbnr_jax.network import schema as schema_lib
from fedbnr_jax.network.agreement import Agreement
from fedbnr_jax.network.identity import PrivateIdentity
from fedbnr_jax.network.members import Members
from fedbnr_jax.network.schema import Quantity, Schema, SiteTable
from fedbnr_jax.network.site import Site
from fedbnr_jax.network.sums import Sums
from fedbnr_jax.network.transport import InProcess
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from fedbnr_jax.run.config import AUTO, base
from fedbnr_jax.run.experiment import Experiment
from tests.runs import StopError, timeless, tiny

NAMES = ("north", "south", "west")
SIZES = dict(zip(NAMES, (30, 30, 30), strict=True))
FEW = dict.fromkeys(NAMES, 12)
SCHEMA = Schema(
  "made", Quantity("y", 1.0), (Quantity("a", 1.0), Quantity("b", 1.0)), ()
)


@functools.cache
def identity(name: str) -> PrivateIdentity:
  """The identity of a site, one in all tests."""
  return PrivateIdentity.new()


def config(**fields: object) -> ml_collections.ConfigDict:
  """A tiny run over tables, in float64, without calibration unless asked for."""
  table = {"dtype": "float64", "data__source": "table", "data__name": ""}
  if fields["method"] == AUTO:  # It sets sizes itself.
    result = csv.get_config()
    result.data.update(calibration=0.0, calibration_folds=0)
  else:
    network = fields["method"] in ("fedavg", "fedprox", "pfedgp", "fedloc")
    result = tiny(kernel="deep" if network else "gaussian")
    usual = base()
    result.num_clients, result.data.num_rows = usual.num_clients, usual.data.num_rows
    result.data.inputs = "standard"
  for name, value in (table | fields).items():
    result.update_from_flattened_dict({name.replace("__", "."): value})
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
  """Three sites with folders of their own, which split their rows alike every time."""
  for seed, name in enumerate(NAMES):
    path = folder / "sites" / name / "split.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"seed": f"{seed:x}"}))
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


def simulation(some: Federation, chosen=None) -> Experiment:
  """The simulation on the same rows and splits, by the agreed config or another."""
  used = simulation_config(some) if chosen is None else chosen
  return experiment_lib.build(used, pooled(some).dataset)


def trained(some: Federation, transport=None) -> training.Result:
  """What the sites train together, without the files of a run."""
  reached = some.transport() if transport is None else transport
  members = Members(some.agreement, reached, secrets.token_hex(32))
  cards, _ = members.greet()
  if some.agreement.masking:
    members.hand_out_keys(cards)
  sums = Sums(members, some.folder.parent / "network")
  task = preparation.prepare(
    ml_collections.ConfigDict(some.agreement.config.to_dict()), sums
  )
  return training.train(task, rounds.program_of(task, sums))


def simulated(some: Federation, chosen=None) -> training.Result:
  """What the simulation trains on the same rows."""
  experiment = simulation(some, chosen)
  return training.train(experiment, workflow.program_for(experiment))


def assert_same_scores(one, other, tolerance: float = 1e-9) -> None:
  """Checks that two histories agree in every column but seconds, and who was in."""
  assert len(one) == len(other)
  for mine, theirs in zip(_told(one), _told(other), strict=True):
    assert list(mine) == list(theirs)
    np.testing.assert_allclose(
      list(mine.values()), list(theirs.values()), rtol=tolerance, atol=tolerance
    )


def _told(history):
  """What simulations tell too: they do not name their clients in each round."""
  return [
    {name: value for name, value in record.items() if not name.startswith("in_")}
    for record in timeless(history)
  ]


class StopsAt:
  """A transport that fails at one call, as when its process is stopped then."""

  def __init__(self, inner, number: int) -> None:
    self.sites, self.calls = inner.sites, 0
    self._inner, self._number = inner, number

  def ask(self, messages, seconds):
    self.calls += 1
    if self.calls == self._number:
      raise StopError
    return self._inner.ask(messages, seconds)
