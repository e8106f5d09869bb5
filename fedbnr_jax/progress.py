"""A progress bar over rounds, in a terminal or a notebook."""

import warnings

from fedbnr_jax.run.records import Record
from fedbnr_jax.run.task import Task

with warnings.catch_warnings(action="ignore"):
  # In a notebook without ipywidgets it warns, and draws a bar of text, which will do.
  from tqdm.auto import tqdm


class ProgressBar:
  """Shows rounds and the scores that early stopping looks at."""

  def __init__(self, disable: bool | None = False) -> None:
    """Prepares a bar that `start` draws.

    Args:
      disable: Draws nothing if True; if None, draws on a terminal only.
    """
    self._disable = disable
    self._bar: tqdm | None = None

  def trying(self, name: str) -> None:
    """Says which candidate method `auto` tries, as long as it does."""
    if self._bar is None:
      self._bar = tqdm(bar_format="{desc}", leave=False, disable=self._disable)
    self._bar.set_description_str(f"auto tries {name}")

  def start(self, task: Task, rounds_done: int, num_runs: int) -> None:
    """Draws the bar of `num_runs` trainings, some rounds of which may be done."""
    self.close()
    self._bar = tqdm(
      total=task.config.num_rounds * num_runs,
      initial=rounds_done,
      desc=f"{task.table.name} {task.config.method}",
      unit="round",
      disable=self._disable,
    )

  def update(self, record: Record) -> None:
    """Moves the bar by a round."""
    if self._bar is not None:
      self._bar.set_postfix_str(
        f"val rmse {record['val_rmse']:.4g}, ece {record['val_ece']:.3f}"
      )
      self._bar.update()

  def calibrating(self, fold: int, num_folds: int) -> None:
    """Says which further training calibrates the intervals, as long as it does."""
    self.close()
    self._bar = tqdm(bar_format="{desc}", leave=False, disable=self._disable)
    self._bar.set_description_str(
      f"calibrates the intervals, training {fold} of {num_folds}"
    )

  def close(self) -> None:
    """Leaves the bar where it is."""
    if self._bar is not None:
      self._bar.close()
