"""The records of a run as TensorBoard events; needs the extra `tensorboard`."""

import importlib.util
import os
import pathlib
from typing import Any

from fedbnr_jax.errors import InputError
from fedbnr_jax.run.records import Record
from fedbnr_jax.run.task import Task

FOLDER = "tensorboard"  # Of the events, in a run's folder.


class EventWriter:
  """Watches a run, and writes every number of its records as it comes."""

  def __init__(self, workdir: str | os.PathLike[str]) -> None:
    """Prepares to write into `workdir/tensorboard`.

    Raises:
      InputError: If the package tensorboardX is missing.
    """
    if importlib.util.find_spec("tensorboardX") is None:
      raise InputError(
        "TensorBoard events need the package 'tensorboardX': pip install "
        "'fedbnr-jax[tensorboard]'."
      )
    self._folder = pathlib.Path(workdir) / FOLDER
    self._writer: Any = None

  def trying(self, name: str) -> None:
    """Writes nothing: a candidate's only round is a record if it is chosen."""

  def start(self, task: Task, rounds_done: int, num_runs: int) -> None:
    """Opens a file of events; those of rounds that are done anew are dropped."""
    # Here, because nobody else needs it.
    from tensorboardX import SummaryWriter

    del task
    if num_runs > 1:
      raise InputError(
        "TensorBoard events are of one training: leave config.num_seeds at 1, or do "
        "without --tensorboard."
      )
    # Names have the second in them, and a run may be taken up within one.
    self._writer = SummaryWriter(
      str(self._folder),
      purge_step=rounds_done + 1,
      filename_suffix=f".from_round_{rounds_done + 1}",
    )

  def update(self, record: Record) -> None:
    """Writes a round: `val_rmse` is shown as rmse in the group val, and so on."""
    for name, value in record.items():
      if name != "round":
        self._writer.add_scalar(name.replace("_", "/", 1), value, record["round"])
    self._writer.flush()

  def calibrating(self, fold: int, num_folds: int) -> None:
    """Writes nothing: such a training is in no record."""

  def close(self) -> None:
    """Closes the file."""
    if self._writer is not None:
      self._writer.close()
