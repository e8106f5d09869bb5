"""report.html: what there is to know of a finished run, on one page."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedbnr_jax import candidates
from fedbnr_jax.candidates import Trial
from fedbnr_jax.errors import InputError
from fedbnr_jax.intervals import Calibration, gaussian_reach, percent
from fedbnr_jax.relevance import relevance
from fedbnr_jax.report import figures, page
from fedbnr_jax.report.page import Section, Tile
from fedbnr_jax.report.run import TestRows, unit
from fedbnr_jax.run import training
from fedbnr_jax.run.config import base, field_names, get
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.records import as_json
from fedbnr_jax.run.task import Task

_LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
_MOST_BARS = 25
# Width and height of pictures in inches: narrow ones can be read on a phone.
_SIZES = {
  "learning_curve": (4.6, 4.4),
  "reliability": (4.4, 4.4),
  "predicted": (4.6, 4.6),
  "function": (5.4, 4.4),
}


class Outcome(NamedTuple):
  """What a finished run has to show.

  Attributes:
    experiment: Of the run.
    result: Of its training.
    summary: The fields of `summary.json`.
    rows: Predictions of the test rows; None for a method with a model for each client.
    drawn: Its figures, by name.
    calibrated: What conformal intervals rest on, if there are any.
    trials: What method `auto` has tried.
    comparison: Scores of each client trained alone, a table as text, if there is one.
  """

  experiment: Experiment
  result: training.Result
  summary: Mapping[str, Any]
  rows: TestRows | None
  drawn: Mapping[str, Figure]
  calibrated: Calibration | None = None
  trials: Sequence[Trial] = ()
  comparison: str | None = None


def run_page(outcome: Outcome) -> str:
  """Makes the page of a run; its figures are changed and should be saved by now."""
  experiment, summary = outcome.experiment, outcome.summary
  chosen = "auto: " if outcome.trials else ""
  title = f"{summary['dataset']}, {chosen}{summary['method']}"
  lead = (
    f"One global model of {experiment.dataset.target_name!r} for "
    f"{summary['num_clients']} clients, seed {summary['seed']}. Scores are of test "
    f"rows that took no part in training, at round {summary['best_round']} of "
    f"{summary['rounds']}, which validation rows chose."
  )
  if outcome.rows is None:
    lead = lead.replace("One global model", "A model for each client", 1)
  sections = [
    *_of_pictures(outcome),
    *_intervals(outcome),
    *_by_client(outcome),
    *_relevance(outcome),
    *tried(outcome.trials, experiment.config),
    *_compared(outcome),
    _data(outcome),
    of_config(experiment.config),
  ]
  of = unit(experiment)
  return page.page(title, lead, tiles(summary, of), sections)


def tiles(summary: Mapping[str, Any], unit: str) -> list[Tile]:
  """Lists the numbers at the top, each with the rows that it rests on.

  Args:
    summary: The fields of `summary.json`.
    unit: Of errors.
  """
  rows = f"{summary['test_rows']:,} test rows"
  low, high = summary["test_coverage95_low"], summary["test_coverage95_high"]
  shown = [
    Tile("RMSE", f"{summary['test_rmse']:.4g}", f"{unit}, {rows}"),
    Tile(
      "in the 95 % intervals",
      f"{summary['test_coverage95']:.1%}",
      f"of {rows}; likely {low:.0%} to {high:.0%} of all",
    ),
    Tile("ECE", f"{summary['test_ece']:.3f}", "0 is calibrated, ½ the worst"),
    Tile("NLL", f"{summary['test_nll']:.3g}", "nats a row; less is better"),
    Tile("CRPS", f"{summary['test_crps']:.4g}", unit),
    Tile("seconds", f"{summary['seconds']:.1f}", f"{summary['rounds']} rounds"),
  ]
  conformal = summary.get("test_coverage95_conformal")
  if conformal is not None:
    counted = f"{summary['calibration_rows']:,} rows calibrate"
    shown.insert(2, Tile("in the conformal ones", f"{conformal:.1%}", counted))
  return shown


def _of_pictures(outcome: Outcome) -> list[Section]:
  """Makes a section of each figure that the run's folder has too."""
  titles = {
    "predicted": "Predicted against true",
    "reliability": "Are the error bars honest?",
    "learning_curve": "Error by round",
    "function": "The function",
  }
  sections = [
    Section(title, page.picture(outcome.drawn[name], _SIZES[name]))
    for name, title in titles.items()
    if name in outcome.drawn
  ]
  if outcome.rows is None:
    note = "Scores are means over the clients' models, of which no single one is drawn."
    sections.append(Section("Predictions", page.paragraph(note, "note")))
  return sections


def _intervals(outcome: Outcome) -> list[Section]:
  """Compares the levels of intervals with the test rows that they cover."""
  if outcome.rows is None:
    return []
  mean, variance, targets, _ = outcome.rows
  std = np.sqrt(variance)
  off = np.abs(targets - mean) / std

  def measured(reach: float) -> tuple[float, float]:
    return float(np.mean(off <= reach)), float(2 * reach * np.mean(std))

  rows = []
  for level in _LEVELS:
    covers, width = measured(gaussian_reach(level))
    row = {"level": f"{percent(level)} %", "Gaussian covers": covers, "width": width}
    if outcome.calibrated is not None:
      try:
        covers, width = measured(outcome.calibrated.threshold(level))
      except InputError:  # There are too few rows for this level.
        covers = width = np.nan
      row |= {"conformal covers": covers, "its width": width}
    rows.append(row)
  shares = dict.fromkeys(("Gaussian covers", "conformal covers"), "{:.1%}".format)
  text = (
    f"Share of the {len(off):,} test rows inside, and mean width in the unit of "
    f"{outcome.experiment.dataset.target_name!r}."
  )
  if outcome.calibrated is not None:
    by = "set aside" if outcome.calibrated.by == "rows" else "scored in folds"
    text += (
      f" Conformal intervals rest on {outcome.calibrated.num_rows:,} rows {by}; a dash "
      "means that these are too few for the level."
    )
  table = page.table(pd.DataFrame(rows), shares)
  return [Section("Intervals", page.paragraph(text, "note") + table)]


def _by_client(outcome: Outcome) -> list[Section]:
  """Shows the error of the one model on each client's test rows."""
  if outcome.rows is None:
    return []
  if outcome.rows.owners is None:
    text = (
      "Training rows were dealt to clients by a rule, so that test rows are nobody's. "
      "With a client column there is the error of each client here."
    )
    return [Section("Error by client", page.paragraph(text, "note"))]
  experiment, rows = outcome.experiment, outcome.rows
  scale = experiment.error_scale / experiment.preprocessor.target_std
  off = np.abs(rows.targets - rows.mean)
  frame = pd.DataFrame(
    {
      "client": rows.owners,
      "square": np.square(scale * off),
      "inside": np.abs(rows.targets - rows.mean)
      <= figures.Z95 * np.sqrt(rows.variance),
    }
  )
  found = frame.groupby("client").agg(
    rows=("square", "size"), square=("square", "mean"), inside=("inside", "mean")
  )
  found["RMSE"] = np.sqrt(found.pop("square"))
  found = found.sort_values("RMSE", ascending=False, kind="stable")
  shown = found["RMSE"].head(_MOST_BARS)
  of = f", the largest {len(shown)} of {len(found)}" if len(found) > len(shown) else ""
  figure = figures.bars(
    shown, label=f"RMSE [{unit(experiment)}]", title=f"Test rows of each client{of}"
  )
  table = found.reset_index().rename(columns={"rows": "test rows", "inside": "in 95 %"})
  body = page.picture(figure) + page.table(
    table[["client", "test rows", "RMSE", "in 95 %"]],
    {"in 95 %": "{:.0%}".format},
    sortable=True,
  )
  return [Section("Error by client", body)]


def _relevance(outcome: Outcome) -> list[Section]:
  """Shows which columns the model uses, where there are several."""
  experiment = outcome.experiment
  if outcome.rows is None or experiment.dataset.features.shape[1] < 2:
    return []
  return [of_relevance(experiment, outcome.result)]


def of_relevance(task: Task, result: training.Result) -> Section:
  """Shows how far predictions move when a column changes; no row is looked at."""
  found = relevance(task.config, task.preprocessor, result.state)
  shown = found.head(_MOST_BARS)
  of = f", the first {len(shown)} of {len(found)}" if len(found) > len(shown) else ""
  figure = figures.bars(
    shown,
    label=f"[{task.table.target}]",
    title=f"How far predictions move when one column is drawn anew{of}",
  )
  text = "This is what the model uses, which need not be what causes the target."
  body = page.picture(figure) + page.paragraph(text, "note")
  return Section("Which columns matter", body)


def tried(trials: Sequence[Trial], chosen: ml_collections.ConfigDict) -> list[Section]:
  """Lists the candidates of method `auto`, and which of them was chosen."""
  if not trials:
    return []
  frame = pd.DataFrame([trial._asdict() for trial in trials])
  frame = frame.rename(
    columns={"name": "candidate", "val_rmse": "validation RMSE", "val_nll": "NLL"}
  ).astype({"validation RMSE": float, "NLL": float})
  text = (
    "Method auto has trained each of these for a round and gone on with one: the best "
    "on validation rows or, where these are fewer than 100, by the evidence of all "
    "rows. Standardised inputs must be better than normal scores by a margin."
  )
  taken = candidates.taken(chosen)
  frame["taken"] = ["yes" if name == taken else "" for name in frame["candidate"]]
  columns = ["candidate", "taken", "validation RMSE", "NLL", "seconds"]
  table = page.table(frame[columns], {"seconds": "{:.1f}".format})
  return [Section("What was tried", page.paragraph(text, "note") + table)]


def _compared(outcome: Outcome) -> list[Section]:
  """Shows the global model beside clients that train alone."""
  if outcome.comparison is None:
    return []
  body = ""
  if "comparison" in outcome.drawn:
    body = page.picture(outcome.drawn["comparison"])
  body += f"<pre>{page.escape(outcome.comparison)}</pre>"
  return [Section("The global model, and a client alone", body, wide=True)]


def _data(outcome: Outcome) -> Section:
  """Tells what the run was trained on, and what its clients sent."""
  experiment, summary = outcome.experiment, outcome.summary
  counts = [len(rows) for rows in experiment.client_rows]
  known = {
    "target": experiment.dataset.target_name,
    "columns": len(experiment.dataset.features.columns),
    "inputs of the kernel": experiment.preprocessor.num_inputs,
    "training rows": len(experiment.split.train),
    "validation rows": summary["validation_rows"],
    "test rows": summary["test_rows"],
    "rows set aside for intervals": len(experiment.calibration_rows),
    "clients": experiment.num_clients,
    "training rows of a client": f"{min(counts):,} to {max(counts):,}, "
    f"{np.median(counts):,.0f} in the median",
    "floats a client has sent": summary["floats_up"],
    "floats a client has received": summary["floats_down"],
    "noise σ": summary["noise_std"],
    "prior λ": summary["prior_std"],
  }
  return Section("Data, messages, scales", page.facts(known))


def of_config(config: ml_collections.ConfigDict) -> Section:
  """Shows the fields that differ from their defaults, and all of them on demand."""
  usual = base()
  known = set(field_names(usual))
  changed = {
    name: str(get(config, name)) or "(empty)"
    for name in field_names(config)
    if name not in known or get(config, name) != get(usual, name)
  }
  body = page.paragraph("Fields that are not at their default.", "note")
  everything = page.unfold("all fields", as_json(config))
  return Section("Config", body + page.facts(changed) + everything)
