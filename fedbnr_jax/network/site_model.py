"""The trained model as files: what the coordinator sends, and a site writes.

A site writes nothing but files of a run's folder, by their names, and reads them as it
reads any run: no file of them is code.
"""

import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Mapping

from fedbnr_jax.errors import InputError
from fedbnr_jax.files import explain_os_errors, replacing
from fedbnr_jax.run import checkpoints
from fedbnr_jax.run.records import RunFolder

POSTERIOR = "posterior.npz"  # What of a model has changed since its training.
_NAMES = (
  *("config.json", "data.json", "preprocessing.json", "clients.json"),
  *("candidates.json", "calibration.json", "metrics.csv", "report.html"),
)
_LAST = "summary.json"  # Marks a run as finished.
_BEST, _STATE = "best.", "state."  # Before the names of a checkpoint's arrays.
_CHECKPOINT = re.compile(r"checkpoint/\d{1,6}\.npz")


def collect(folder: RunFolder) -> dict[str, bytes]:
  """Reads the files that make up a trained model, by their names in its folder.

  Of the checkpoint's two states, the best one is sent: nobody trains on at a site.
  """
  paths = [folder.path / name for name in (*_NAMES, _LAST)]
  files = {path.name: path.read_bytes() for path in paths if path.exists()}
  newest = max(folder.checkpoints.glob("*.npz"), key=lambda path: int(path.stem))
  content = checkpoints.read(newest)
  best = {n: array for n, array in content.arrays.items() if n.startswith(_BEST)}
  with tempfile.TemporaryDirectory() as scratch:
    part = pathlib.Path(scratch) / newest.name
    checkpoints.write(part, content._replace(arrays=best))
    files[newest.relative_to(folder.path).as_posix()] = part.read_bytes()
  return files


def write(path: str | os.PathLike[str], files: Mapping[str, bytes]) -> None:
  """Writes a model into a folder, in place of the one that was there.

  Raises:
    InputError: If a file is none of a model's, or the folder cannot be written.
  """
  strangers = [
    name
    for name in files
    if name not in (*_NAMES, POSTERIOR, _LAST) and not _is_checkpoint(name)
  ]
  if strangers:
    raise InputError(f"{strangers[0]!r} is no file of a model: it is not written.")
  folder = pathlib.Path(path)
  with explain_os_errors(folder, "the folder of a site"):
    if folder.exists():
      shutil.rmtree(folder)
    for name in sorted(files, key=lambda name: name == _LAST):
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      with replacing(folder / name) as part:
        part.write_bytes(files[name])
      if _is_checkpoint(name):
        _fill_in(folder / name)


def _fill_in(path: pathlib.Path) -> None:
  """Puts the best state of a checkpoint in the place of the last one, too."""
  content = checkpoints.read(path)
  last = {
    _STATE + name.removeprefix(_BEST): array for name, array in content.arrays.items()
  }
  checkpoints.write(path, content._replace(arrays=content.arrays | last))


def _is_checkpoint(name: str) -> bool:
  return _CHECKPOINT.fullmatch(name) is not None
