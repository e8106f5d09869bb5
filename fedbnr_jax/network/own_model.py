"""The model of one site, where each has its own: the common part, and what it keeps."""

import os
from typing import Any

import jax
import numpy as np

from fedbnr_jax import calibration
from fedbnr_jax.run import checkpoints, seal
from fedbnr_jax.run.records import RunFolder


def complete(path: str | os.PathLike[str], name: str, own: Any, num_rows: int) -> None:
  """Makes the folder of a common model that of one site's.

  Args:
    path: The folder that came from the coordinator.
    name: The site's.
    own: What it kept at the best round.
    num_rows: Of its training, by which shapes may go.
  """
  folder = RunFolder(path)
  calibrated = calibration.read(folder)
  (file,) = folder.checkpoints.glob("*.npz")
  content = checkpoints.read(file)
  leaves = jax.tree_util.tree_leaves_with_path(own)
  arrays = {
    f"{state}.own{_below(key)}": np.asarray(leaf)[None]
    for state in ("state", "best")
    for key, leaf in leaves
  }
  folder.write_clients((name,), num_rows)
  sealed = seal.of_folder(folder, content.round)
  content = content._replace(arrays=content.arrays | arrays, seal=sealed)
  checkpoints.write(file, content)
  if calibrated is not None:
    calibration.write(folder, calibrated, sealed, content.round)


def _below(key: Any) -> str:
  """Names a leaf below a node of a tree, with a dot in front."""
  return "." + jax.tree_util.keystr(key, simple=True, separator=".")
