"""The folder `released/`, which can be handed over: what stands in it.

It holds the kernel, the noisy statistics, the declared bounds, and what was promised:
nothing that was read off the rows without noise, but for the kernel's parameters and
inducing inputs, of which it says so.
"""

import importlib.metadata
import os
import pathlib
import shutil
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fedbnr_jax import files, precision, prediction
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import blr
from fedbnr_jax.model import Model
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import seal
from fedbnr_jax.run.records import RunFolder

NOT_COVERED = (
  "the kernel's parameters, which were trained on the rows without noise, and the "
  "round at which they were taken",
  "the declared bounds and the random draws of the kernel, which are taken as given: "
  "bounds that were read off the rows give them away, and inducing inputs, where the "
  "kernel has them, are drawn from exact counts of the inputs",
  "several rows together, such as all rows of one person or of one client, and how "
  "many clients there are: the promise is for one row",
  "what is computed from the same rows elsewhere: by other runs, by a copy of this "
  "run, or in the rest of the run's folder, which is not to be handed over",
)
_MODEL, _NOTE, _WORDS = "model.npz", "release.json", "README.txt"
_SCALES = ("noise_std", "prior_std")


def write(
  folder: RunFolder,
  trained: Model,
  stats: blr.SufficientStats,
  fitted: blr.Posterior,
  note: dict[str, Any],
) -> None:
  """Writes `released/` at one stroke; an earlier release moves aside.

  Args:
    folder: The run's; the caller holds its lock.
    trained: The model, of which the kernel and the declared bounds are taken.
    stats: With noise.
    fitted: The posterior of these.
    note: What was promised.
  """
  staged = RunFolder(folder.released.with_name(folder.released.name + files.PARTIAL))
  shutil.rmtree(staged.path, ignore_errors=True)
  staged.claim(_public(trained.config, trained.preprocessor.target_name))
  staged.write_preprocessing(trained.preprocessor)
  kernel = (trained.state.server.omega, trained.state.server.params.theta)
  arrays: dict[str, Any] = {
    f"kernel_{index}": leaf for index, leaf in enumerate(jax.tree.leaves(kernel))
  }
  arrays |= vars(stats) | {name: getattr(fitted, name) for name in _SCALES}
  seal.write_arrays(staged, _MODEL, jax.device_get(arrays))
  files.write_json(staged.path / _NOTE, note | {"not_covered": list(NOT_COVERED)})
  (staged.path / _WORDS).write_text(words(note), encoding="utf-8")
  if folder.released.exists():
    os.rename(folder.released, _free_name(folder.released))
  os.rename(staged.path, folder.released)


def load(workdir: str | os.PathLike[str]) -> Model:
  """Loads the model of a private release, from the run's folder or by itself.

  Raises:
    InputError: If there is none, or its files do not belong together.
  """
  folder = run = RunFolder(workdir)
  if (run.released / _MODEL).exists():
    folder = RunFolder(run.released)
  if not (folder.path / _MODEL).exists():
    raise InputError(
      f"{workdir} has no private release: make one by launch.privacy --release."
    )
  config, preprocessor = folder.config(), folder.preprocessing()
  if run.is_of_other_rows(preprocessor):
    raise InputError(f"{folder.path} is of another run than {workdir}: restore it.")
  arrays = seal.read_arrays(folder, _MODEL)
  with precision.float64():
    shapes = prediction.state_shapes(config, preprocessor)
    like = shapes.server
    leaves, structure = jax.tree.flatten((like.omega, like.params.theta))
    kernel = [arrays.get(f"kernel_{index}", ()) for index in range(len(leaves))]
    if [np.shape(one) for one in kernel] != [leaf.shape for leaf in leaves]:
      raise InputError(
        f"{folder.path / _MODEL} has another kernel than this version makes of its "
        "config: predict with the version that released it, or release again."
      )
    omega, theta = jax.tree.unflatten(structure, kernel)
    fields = ("gram", "moment", "energy", "count")
    stats = blr.SufficientStats(*(jnp.asarray(arrays[name]) for name in fields))
    fitted = blr.posterior(stats, *(arrays[name] for name in _SCALES))
    stats, fitted = jax.device_get((stats, fitted))
  params = like.params.replace(theta=theta)
  server = like.replace(omega=omega, params=params, stats=stats, posterior=fitted)
  return Model(config, preprocessor, shapes.replace(server=server))


def words(note: dict[str, Any]) -> str:
  """Says in words what a release promises, and what it does not."""
  total = note["spent_in_total"]
  added = "" if total["releases"] == 1 else f" ({total['releases']} releases)"
  promise = (
    f"The statistics in {_MODEL} are differentially private with ε = "
    f"{note['epsilon']:g}, δ = {note['delta']:g}: they protect {note['protects']}. "
    f"They are integers with discrete Gaussian noise, drawn by {note['sampler']}, "
    f"{note['noise_in_words']}. The run has spent ε = {total['epsilon']:.4g} in all"
    f"{added}, at the same δ, added up by zCDP. Numbers are in {_NOTE}; inputs and "
    "target are standardised by declared bounds, and by nothing that was read off the "
    "rows."
  )
  parts = [textwrap.fill(promise, 88), "", "Not covered:"]
  parts += [
    textwrap.fill(f"- {one}", 88, subsequent_indent="  ") for one in NOT_COVERED
  ]
  return "\n".join(parts) + "\n"


def version(package: str) -> str:
  """Returns a package's name and version."""
  return f"{package} {importlib.metadata.version(package)}"


def _public(
  config: ml_collections.ConfigDict, target: str
) -> ml_collections.ConfigDict:
  """A config that says how to predict, and nothing of the training or its files."""
  public = config_lib.base()
  for name in ("method", "kernel", "dtype", *kernels.field_names(config)):
    public[name] = config[name]
  public.data.source, public.data.name, public.data.target = "table", "", target
  return public


def _free_name(path: pathlib.Path) -> pathlib.Path:
  """Returns the first of released_1, released_2, ... that does not exist."""
  number = 1
  while (free := path.with_name(f"{path.name}_{number}")).exists():
    number += 1
  return free
