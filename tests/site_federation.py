"""A small federation of real sites in this process: folders, tables, an agreement."""

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from configs import csv
from fedbnr_jax.network import agreement as agreement_lib
from fedbnr_jax.network import schema as schema_lib
from fedbnr_jax.network.identity import PrivateIdentity
from fedbnr_jax.network.question import Question
from fedbnr_jax.network.schema import Quantity, Schema
from fedbnr_jax.network.site import Site

SCHEMA = Schema(
  "houses",
  Quantity("price", 100.0),
  (Quantity("size", 10.0), Quantity("age", 1.0)),
  (("kind", ("flat", "house")),),
)
# Rows of each site; the last is too small to hold rows out.
SIZES = {"east": 17, "north": 12, "south": 21, "west": 5}
# Of sites that come later.
_ROWS = {**SIZES, "fjord": 13, "hill": 9, "lake": 16, "moor": 11}


@functools.cache
def identity(name: str) -> PrivateIdentity:
  return PrivateIdentity.new()


def table(name: str) -> pd.DataFrame:
  """The rows of a site, unlike those of the others."""
  number, num_rows = list(_ROWS).index(name), _ROWS[name]
  rng = np.random.default_rng([7, number])
  size = 50.0 + 10.0 * number + 20.0 * rng.normal(size=num_rows)
  age = np.round(rng.gamma(2.0, 10.0, num_rows), 1)
  kind = np.array(["flat", "house"])[rng.integers(0, 2, num_rows)]
  price = 3.0 * size - age + 30.0 * (kind == "house")
  price += 10.0 * rng.normal(size=num_rows)
  return pd.DataFrame({"size": size, "age": age, "kind": kind, "price": price})


def config(**fields: object):
  """A config that trains in moments: few features, no network."""
  made = csv.get_config()
  common = {
    "method": "fedbnr-ev",
    "kernel": "gaussian",
    "dtype": "float64",
    "num_samples": 3,
    "num_rounds": 2,
    "num_local_steps": 2,
    "patience": 0,
    "data.inputs": "standard",
    "evidence.noise": "constant",
    "sparse.kernel": "matern32+linear",
    "sparse.start_samples": 2,
    "sparse.start_steps": 2,
    "sparse.num_samples": 3,
    "sparse.num_steps": 2,
    "sparse.posterior_samples": 4,
  }
  renamed = {name.replace("__", "."): value for name, value in fields.items()}
  for name, value in (common | renamed).items():
    made.update_from_flattened_dict({name: value})
  return made


# (what is asked, the answer) -> what is said instead.
Lie = Callable[[Question, Any], Any]


class LyingSite(Site):
  """A site whose program was changed: it masks and sends what its rows do not say."""

  def __init__(self, lie: Lie, *given: Any) -> None:
    super().__init__(*given)
    self._lie = lie

  def _tree(self, asked: Question) -> tuple[Any, str]:
    tree, what = super()._tree(asked)
    return self._lie(asked, tree), what


class Federation:
  """An agreement, and sites that can be started again from their folders."""

  def __init__(self, folder: pathlib.Path, made=None, names=tuple(SIZES), **options):
    """Args: where its folders are; a config; its members; options of `make`."""
    self.folder, self.names = folder, tuple(sorted(names))
    members = {name: identity(name).public.pem() for name in self.names}
    made = config() if made is None else made
    self.agreement = agreement_lib.make(made, SCHEMA, members, **options)
    self.sites: dict[str, Site] = {}  # As they run now.
    self.lies: dict[str, Lie] = {}  # What some sites say instead of their answers.

  def start(self, name: str):
    """Starts a site; returns how it answers."""
    rows = schema_lib.read_table(SCHEMA, table(name))
    seed = self.folder / name / "split.json"
    if not seed.exists():  # In all tests a site splits its rows alike.
      seed.parent.mkdir(parents=True)
      seed.write_text(json.dumps({"seed": f"{self.names.index(name):x}"}))
    given = (self.folder / name, name, self.agreement, rows, identity(name))
    site = LyingSite(self.lies[name], *given) if name in self.lies else Site(*given)
    self.sites[name] = site
    return site.answer

  def starts(self):
    """Returns for each site the function that starts it."""
    return {name: functools.partial(self.start, name) for name in self.names}
