"""What a finished training of real sites leaves with its coordinator, made of sums."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedbnr_jax import calibration
from fedbnr_jax.candidates import Trial
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import conformal, metrics
from fedbnr_jax.intervals import Calibration, gaussian_reach, percent
from fedbnr_jax.names import listing
from fedbnr_jax.network.preparation import NetworkTask
from fedbnr_jax.network.question import OWN_SCORES, Question
from fedbnr_jax.network.rounds import model_arrays, place_of, score_sums
from fedbnr_jax.network.site_training import FEWEST_TO_TELL
from fedbnr_jax.network.sums import END, Sums
from fedbnr_jax.run import journal, seal, training
from fedbnr_jax.run.experiment import FEWEST_CALIBRATION_ROWS
from fedbnr_jax.run.records import RunFolder

_LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
_BY_SITE = "error_by_site"  # A figure.
_SCORED = {
  "rows": "sites have set aside",
  "folds": "were scored by models that were trained without them, fold by fold",
}


class Found(NamedTuple):
  """What sites tell of the model at its best round.

  Attributes:
    test: Sums by which their test rows are scored.
    test_counts: [B + 1] how many of these are off by how much; see gp/conformal.py.
    calibrated: The same of rows that were set aside or left out, if there are any.
    by_site: What sites tell of their own test rows, in columns "site", "test rows",
      "RMSE" and "in 95 %"; None if they have agreed to tell nothing.
  """

  test: metrics.ScoreSums
  test_counts: np.ndarray
  calibrated: Calibration | None
  by_site: pd.DataFrame | None = None


def write(
  task: NetworkTask,
  sums: Sums,
  result: training.Result,
  folder: RunFolder,
  by_folds: Calibration | None = None,
  trials: Sequence[Trial] = (),
) -> dict[str, Any]:
  """Writes all files of a run that follow from its training.

  Args:
    task, result: A training and what it left.
    sums: Reaches the sites.
    folder: Of the run.
    by_folds: What trainings without folds have told; see folds.py.
    trials: What method `auto` has tried before it, if it has.

  Returns:
    The fields of `summary.json`.
  """
  # Here, because Matplotlib takes long to import.
  from fedbnr_jax.report import page
  from fedbnr_jax.report import run as report

  sums.begin_round(task.name, END)
  found = ask(task, sums, result)
  if by_folds is not None:
    found = found._replace(calibrated=by_folds)
  number = len(result.history)
  if found.calibrated is not None:
    sealed = seal.of_folder(folder, number)
    calibration.write(folder, found.calibrated, sealed, number)
  summary = _summarise(task, result, found)
  drawn = _draw(task, result, found)
  report.write_figures(drawn, folder.figures)
  page.write(folder.report, _page(task, result, summary, found, drawn, trials))
  folder.write_summary(summary)  # Last: it is what marks the run as finished.
  return summary


def ask(task: NetworkTask, sums: Sums, result: training.Result) -> Found:
  """Asks the sites for what is told of the model at its best round."""
  _, test = score_sums(task, sums, result.state, result.best_round)
  model = model_arrays(task, result.state)
  place = place_of(task, result.best_round)
  counts = sums.tree(Question("conformal", task.name, 0, (), model, place))
  calibrated = None
  if counts["calibration"].sum():
    calibrated = Calibration(counts["calibration"], "rows")
  by_site = None
  if sums.members.agreement.tell_scores:
    told = sums.each(Question(OWN_SCORES, task.name, 0, (), model, place))
    by_site = _by_site(told, task.error_scale)
  return Found(test, counts["test"], calibrated, by_site)


def _by_site(told: Mapping[str, Any], scale: float) -> pd.DataFrame:
  """Makes a table of what sites tell; those with too few test rows are not in it."""
  rows = [
    {
      "site": name,
      "test rows": round(float(own["rows"])),
      "RMSE": scale * float(np.sqrt(own["squares"] / own["rows"])),
      "in 95 %": float(own["inside95"] / own["rows"]),
    }
    for name, own in told.items()
    if own["rows"]
  ]
  frame = pd.DataFrame(rows, columns=["site", "test rows", "RMSE", "in 95 %"])
  return frame.sort_values("RMSE", ascending=False, kind="stable", ignore_index=True)


def _summarise(
  task: NetworkTask, result: training.Result, found: Found
) -> dict[str, Any]:
  """The fields of `summary.json`."""
  summary = journal.summarise(task, result.history)
  if found.calibrated is None:
    return summary
  return summary | calibration.of_intervals(
    found.calibrated, lambda reach: conformal.share_within(found.test_counts, reach)
  )


def _draw(
  task: NetworkTask, result: training.Result, found: Found
) -> dict[str, Figure]:
  """Draws what can be drawn of sums."""
  from fedbnr_jax.report import figures

  history = pd.DataFrame(result.history)
  shares = np.asarray(metrics.shares_inside(found.test))
  drawn = {
    "learning_curve": figures.learning_curve(
      history, unit=task.table.target, best_round=result.best_round
    ),
    "reliability": figures.reliability_of_shares(shares, int(found.test.count)),
  }
  if found.by_site is not None and len(found.by_site):
    drawn[_BY_SITE] = figures.bars(
      found.by_site.set_index("site")["RMSE"],
      label=f"RMSE [{task.table.target}]",
      title="Test rows of each site",
    )
  return drawn


def _page(
  task: NetworkTask,
  result: training.Result,
  summary: Mapping[str, Any],
  found: Found,
  drawn: Mapping[str, Figure],
  trials: Sequence[Trial],
) -> str:
  """Makes the page of a run."""
  from fedbnr_jax.report import page, run_page

  chosen = "auto: " if trials else ""
  title = f"{summary['dataset']}, {chosen}{summary['method']}"
  what = "A model at each site" if task.parts.keeps else "One global model"
  lead = (
    f"{what} of {task.table.target!r} for {task.num_clients} sites, which "
    f"kept their rows, seed {summary['seed']}. All here is made of sums over sites. "
    f"Scores are of test rows that took no part in training, at round "
    f"{summary['best_round']} of {summary['rounds']}, which validation rows chose."
  )
  sections = [
    page.Section("Are the error bars honest?", page.picture(drawn["reliability"])),
    page.Section("Error by round", page.picture(drawn["learning_curve"])),
    _intervals(task, found),
  ]
  if found.by_site is not None:
    sections.append(_of_sites(task, found.by_site, drawn))
  if len(task.table.features) > 1 and not task.parts.keeps:
    sections.append(run_page.of_relevance(task, result))
  sections += [*run_page.tried(trials, task.config), _data(task, summary)]
  sections.append(run_page.of_config(task.config))
  return page.page(title, lead, run_page.tiles(summary, task.table.target), sections)


def _intervals(task: NetworkTask, found: Found) -> Any:
  """Compares the levels of intervals with the share of test rows that they cover."""
  from fedbnr_jax.report import page

  rows = []
  for level in _LEVELS:
    reach = gaussian_reach(level)
    row = {
      "level": f"{percent(level)} %",
      "Gaussian covers": conformal.share_within(found.test_counts, reach),
    }
    if found.calibrated is not None:
      try:
        reach = found.calibrated.threshold(level)
        row["conformal covers"] = conformal.share_within(found.test_counts, reach)
      except InputError:  # There are too few rows for this level.
        row["conformal covers"] = np.nan
    rows.append(row)
  text = (
    f"Share of the {found.test_counts.sum():,} test rows inside, by counts in bins."
  )
  if found.calibrated is not None:
    text += (
      f" Conformal intervals rest on {found.calibrated.num_rows:,} rows that "
      f"{_SCORED[found.calibrated.by]}; a dash means that these are too few for the "
      "level."
    )
    few = found.calibrated.num_rows < FEWEST_CALIBRATION_ROWS
    if few and found.calibrated.by == "rows" and not task.algorithm.one_model_each:
      text += (
        f" Fewer than {FEWEST_CALIBRATION_ROWS} say little: with data.calibration = 0 "
        "and data.calibration_folds = 5 in the agreement, all training rows do it."
      )
  shares = dict.fromkeys(("Gaussian covers", "conformal covers"), "{:.1%}".format)
  table = page.table(pd.DataFrame(rows), shares)
  return page.Section("Intervals", page.paragraph(text, "note") + table)


def _of_sites(
  task: NetworkTask, by_site: pd.DataFrame, drawn: Mapping[str, Figure]
) -> Any:
  """Shows the error of each site that has told it."""
  from fedbnr_jax.report import page

  text = (
    "All sites have agreed to tell this, which is no sum over sites. Those of fewer "
    f"than {FEWEST_TO_TELL} test rows tell nothing."
  )
  silent = [name for name in task.client_names if name not in set(by_site["site"])]
  if silent:
    text += f" There is nothing of {listing(silent)}."
  body = page.paragraph(text, "note")
  if _BY_SITE in drawn:
    body += page.picture(drawn[_BY_SITE])
    body += page.table(by_site, {"in 95 %": "{:.0%}".format}, sortable=True)
  return page.Section("Error by site", body)


def _data(task: NetworkTask, summary: Mapping[str, Any]) -> Any:
  """Tells what the run was trained on, and what its sites have sent."""
  from fedbnr_jax.report import page

  known = {
    "target": task.table.target,
    "columns": len(task.table.features),
    "inputs of the kernel": task.preprocessor.num_inputs,
    "training rows": task.counts.train,
    "validation rows": task.counts.validation,
    "test rows": task.counts.test,
    "rows set aside for intervals": task.num_calibration_rows,
    "sites": ", ".join(task.client_names),
    "floats a site has sent in rounds": summary["floats_up"],
    "floats a site has received in rounds": summary["floats_down"],
    "noise σ": summary["noise_std"],
    "prior λ": summary["prior_std"],
  }
  return page.Section("Data, messages, scales", page.facts(known))
