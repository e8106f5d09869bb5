"""A site's own split of its rows, by a seed that never leaves it.

Which rows are held out is the site's business: others need the sums over them only. The
seed is kept in the site's folder, so that a restart splits alike; with another one,
rows that were tested on would be trained on.
"""

import json
import os
import pathlib
import secrets
from typing import NamedTuple

import ml_collections
import numpy as np

from fedbnr_jax.data import held_out, random_split
from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors, replacing
from fedbnr_jax.lock import alone_in
from fedbnr_jax.network import strict_json
from fedbnr_jax.network.schema import SiteTable

FEWEST_TO_SPLIT = 6  # Rows; with fewer, none would be left for a part.
_SPLIT, _CALIBRATION, _FOLDS = range(
  3
)  # Streams of randomness drawn from the one seed.
_SEED_BITS = 128
_WHAT = "seed of a site's split"
_ROLE = "the folder of a site"


class SiteSplit(NamedTuple):
  """The row numbers of the parts of a site's table; every row is in one of them."""

  train: np.ndarray  # [num_train] integers; never empty.
  validation: np.ndarray  # [num_validation] integers
  test: np.ndarray  # [num_test] integers
  calibration: np.ndarray  # [num_calibration] integers


def split(seed: int, table: SiteTable, calibration: float = 0.0) -> SiteSplit:
  """Draws 80 % of a site's rows for training, and half of the rest for testing.

  A site of fewer than six rows trains on all of them.

  Args:
    seed: The site's own; see `kept_seed`.
    table: Only the number of its rows matters.
    calibration: Share of the training rows that is set aside to calibrate intervals,
      from 0 to one half. A site cannot know whether all sites together have enough
      rows for that: who has agreed on a share, or on none, decides it. Validation and
      test rows do not depend on it.

  Raises:
    InputError: If there is no row, or no such share.
  """
  num_rows = len(table.targets)
  if num_rows < 1:
    raise InputError("this site has no rows to train on: give at least one.")
  if not 0 <= calibration <= 0.5:
    raise InputError(
      f"the share of rows to calibrate with is {calibration}: agree on one from 0 to "
      "0.5."
    )
  nothing = np.zeros(0, np.int64)
  if num_rows < FEWEST_TO_SPLIT:
    return SiteSplit(np.arange(num_rows), nothing, nothing, nothing)
  drawn = random_split(np.random.default_rng([seed, _SPLIT]), num_rows)
  rng = np.random.default_rng([seed, _CALIBRATION])
  chosen = held_out.set_aside(rng, drawn.train, calibration)
  return SiteSplit(
    drawn.train[~chosen], drawn.validation, drawn.test, drawn.train[chosen]
  )


def num_folds(
  config: ml_collections.ConfigDict | ml_collections.FrozenConfigDict,
) -> int:
  """Returns into how many folds sites deal their training rows; 0 for none.

  A simulation decides between a share and folds when it has counted all rows. A site
  splits its rows before anybody has counted, and never anew: what was agreed on
  decides, and a share comes first.
  """
  return 0 if config.data.calibration else int(config.data.calibration_folds)


def folds(seed: int, num_rows: int, num_folds: int) -> np.ndarray:
  """Deals a site's training rows into folds.

  Args:
    seed: The site's own; see `kept_seed`.
    num_rows: How many rows train.
    num_folds: At least 2.

  Returns:
    [num_rows] the fold of each row, from 0 on; -1 for a site's only row.
  """
  rng = np.random.default_rng([seed, _FOLDS])
  dealt = held_out.folds(rng, np.arange(num_rows), num_folds)
  # Sites of few rows do not all fill the first folds and leave the last ones empty.
  turned = (dealt + rng.integers(num_folds)) % num_folds
  return np.where(dealt < 0, dealt, turned)


def kept_seed(path: str | os.PathLike[str]) -> int:
  """Reads a site's seed, or draws it and writes it where there is none yet.

  Args:
    path: A file in a folder of the site's own; the folder is made if need be.

  Raises:
    InputError: If the file is damaged, or cannot be read or written.
  """
  path = pathlib.Path(path)
  with alone_in(path.parent, f"{path.name}.lock"), explain_os_errors(path, _ROLE):
    if not path.exists():
      with replacing(path) as part:
        part.unlink(missing_ok=True)  # Of a process that was killed.
        part.touch(0o600)
        part.write_text(json.dumps({"seed": f"{secrets.randbits(_SEED_BITS):x}"}))
    content = strict_json.read(path, _WHAT)
  # Not drawn anew: a resumed run would train on rows that it has been tested on.
  strict_json.require_fields(content, ("seed",), str(path))
  try:
    seed = int(content["seed"], 16)
  except (TypeError, ValueError):
    seed = -1
  if not 0 <= seed < 2**_SEED_BITS:
    raise InputError(
      f"{path}: seed is {content['seed']!r}, and must be hexadecimal digits: restore "
      "it, or remove the file before another run begins."
    )
  return seed
