"""Figures of one run's scores: each function draws one figure from arrays.

Only matplotlib's object interface is used, so nothing depends on a display, on
a global current figure or on what ran before. `save` writes a PNG, which appears whole
or not at all; `svg` gives a picture for a page.
"""

import io
import os
import pathlib
import re
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbnr_jax.files import replacing
from fedbnr_jax.gp.metrics import central_level, interval_levels, observed_coverage

# The Okabe–Ito palette: hues that stay apart under common colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, ORANGE = COLOURS[:2]
INK, MUTED = "#222222", "#8A8A8A"
Z95 = 1.959963984540054  # The 97.5 % point of the standard normal.
_DPI = 150
_MAX_POINTS = 300  # Shown of a scatter plot, however many rows there are.

PathLike = str | os.PathLike[str]


def new_axes(
  rows: int, columns: int, size: tuple[float, float], **share: Any
) -> tuple[Figure, list[Axes]]:
  """Makes a figure with a grid of empty axes in the common style, rows first.

  Args:
    rows, columns: Of the grid.
    size: Width and height in inches.
    **share: Passed on to `Figure.subplots`, such as `sharex`.
  """
  figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
  grid = figure.subplots(rows, columns, squeeze=False, **share)
  axes = list(grid.ravel())
  for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, color="#E6E6E6", linewidth=0.7)
    ax.set_axisbelow(True)
  return figure, axes


def save(figure: Figure, path: PathLike) -> None:
  """Writes the figure as a PNG that is never seen half written."""
  target = pathlib.Path(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  with replacing(target) as part:
    # Without the software's version the same numbers give the same bytes.
    figure.savefig(part, format="png", dpi=_DPI, metadata={"Software": None})


# What stands for a colour in a page, which has a light and a dark mode.
_THEME = {
  **dict.fromkeys(("#000000", "#222222", "black"), "var(--ink)"),
  **{"#ffffff": "var(--card)", "#e6e6e6": "var(--grid)", "#8a8a8a": "var(--muted)"},
}


def svg(figure: Figure) -> str:
  """Draws the figure as SVG that stands in a page and takes the page's colours."""
  with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedbnr_jax"}):
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
  drawn = buffer.getvalue()
  head, _, rest = drawn[drawn.index("<svg") :].partition(">")
  # The page gives the size, and black is SVG's colour where none is named.
  head = re.sub(r' (width|height)="[^"]*"', "", head)
  # Groups are numbered in each figure, and pages have several.
  rest = re.sub(r'<g id="[^"]*"', "<g", rest)
  rest = re.sub(
    "|".join(_THEME), lambda found: _THEME[found[0].lower()], rest, flags=re.I
  )
  return f'{head} role="img" style="fill: var(--ink)">{rest}'


def learning_curve(metrics: pd.DataFrame, *, unit: str, best_round: int) -> Figure:
  """Draws error and calibration over the rounds, and marks the best round.

  Args:
    metrics: One row per round, with `round`, `val_rmse`, `test_rmse`, `val_ece` and
      `test_ece`.
    unit: Unit of the error, for the axis.
    best_round: The round that validation chose; it is marked.
  """
  figure, axes = new_axes(2, 1, (6.4, 5.4), sharex=True)
  rounds = metrics["round"].to_numpy()
  best = rounds == best_round
  # Without dots a run of one round would be invisible.
  marker = "." if len(rounds) <= 30 else None
  lines = (("val", "validation", BLUE, "-"), ("test", "test", ORANGE, "--"))
  scores = (("rmse", f"RMSE [{unit}]"), ("ece", "ECE [share of rows]"))
  for ax, (score, label) in zip(axes, scores, strict=True):
    for split, name, colour, style in lines:
      values = metrics[f"{split}_{score}"].to_numpy()
      ax.plot(rounds, values, style, color=colour, marker=marker, label=name)
      ax.plot(rounds[best], values[best], "o", color=colour, mec="white", ms=8)
    ax.axvline(best_round, c=MUTED, lw=1, ls=":", label=f"kept: round {best_round}")
    ax.set_ylabel(label)
  axes[0].set_xlim(rounds.min() - 0.5, rounds.max() + 0.5)
  axes[1].set_ylim(bottom=0.0, top=1.1 * max(axes[1].dataLim.ymax, 0.01))
  axes[1].set_xlabel("communication round")
  axes[1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
  axes[0].legend(frameon=False)
  axes[0].set_title("Learning curve", loc="left")
  return figure


def reliability(mean: np.ndarray, variance: np.ndarray, targets: np.ndarray) -> Figure:
  """Draws the observed against the nominal coverage of central intervals.

  Args:
    mean, variance, targets: [N] predicted means, their variances, true values.
  """
  reached = central_level(mean, variance, targets)
  share = np.asarray(observed_coverage(reached, interval_levels(100)))
  return reliability_of_shares(share, len(targets))


def reliability_of_shares(share: np.ndarray, num_rows: int) -> Figure:
  """Draws the observed coverage of central intervals against the nominal one.

  Args:
    share: [100] of the rows inside intervals of `metrics.interval_levels(100)`.
    num_rows: How many rows there are.
  """
  levels = interval_levels(100)
  ece = float(np.mean(np.abs(share - levels)))
  figure, (ax,) = new_axes(1, 1, (5.0, 5.0))
  # At levels 0 and 1 the coverage is 0 and 1 for any model.
  nominal = np.concatenate([[0.0], levels, [1.0]])
  observed = np.concatenate([[0.0], share, [1.0]])
  ax.fill_between(nominal, nominal, observed, color=BLUE, alpha=0.2, lw=0)
  ax.plot([0, 1], [0, 1], "--", color=INK, lw=1, label="perfectly calibrated")
  ax.plot(levels, share, color=BLUE, lw=2, label="this model (gap shaded)")
  ax.text(0.97, 0.05, "below the line: over-confident", ha="right", color=MUTED)
  ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
  ax.set_xlabel("level of the central interval")
  ax.set_ylabel("observed share of rows inside")
  ax.set_title(f"Reliability on {num_rows} rows: ECE {ece:.3f}", loc="left")
  ax.legend(frameon=False, loc="upper left")
  return figure


def predicted_against_true(
  mean: np.ndarray,
  variance: np.ndarray,
  targets: np.ndarray,
  *,
  target_name: str,
) -> Figure:
  """Draws predictions with their 95 % bars against the true values.

  Args:
    mean, variance, targets: [N] predicted means, their variances, true values.
    target_name: Name of the target, with its unit, for both axes.
  """
  mean, targets = np.asarray(mean), np.asarray(targets)
  half = Z95 * np.sqrt(np.asarray(variance))
  covered = np.abs(targets - mean) <= half
  # Rows evenly spaced over the sorted targets are shown, which keeps both extremes.
  order = np.argsort(targets, kind="stable")
  kept = np.linspace(0, len(order) - 1, min(len(order), _MAX_POINTS)).round()
  shown = order[kept.astype(int)]
  figure, (ax,) = new_axes(1, 1, (5.4, 5.4))
  for inside, colour, marker, label in (
    (True, BLUE, "o", "true value inside the 95 % interval"),
    (False, ORANGE, "D", "outside"),
  ):
    rows = shown[covered[shown] == inside]
    faint = mpl.colors.to_rgba(colour, 0.35)
    ax.vlines(targets[rows], (mean - half)[rows], (mean + half)[rows], faint, lw=1)
    ax.plot(targets[rows], mean[rows], marker, color=colour, ms=4, label=label)
  # The anchor extends the axes' limits, so it has to be one of the targets.
  anchor = (targets[shown[0]], targets[shown[0]])
  ax.axline(anchor, slope=1, ls="--", color=INK, lw=1, label="exact")
  ax.set_aspect("equal", adjustable="datalim")
  ax.set_xlabel(f"true {target_name}")
  ax.set_ylabel(f"predicted {target_name}")
  of = "" if len(shown) == len(order) else f", {len(shown)} of them shown"
  title = f"95 % intervals hold {covered.mean():.1%} of {len(order)} rows{of}"
  ax.set_title(title, loc="left", fontsize=11)
  ax.legend(frameon=False, loc="upper left")
  return figure


def bars(values: pd.Series, *, label: str, title: str) -> Figure:
  """Draws a bar for each name, the first one on top.

  Args:
    values: Numbers from 0 on, by name.
    label: Of the axis.
    title: Of the figure.
  """
  height = 1.2 + 0.28 * len(values)
  figure, (ax,) = new_axes(1, 1, (5.4, height))
  places = np.arange(len(values))
  ax.barh(places, values.to_numpy(), color=BLUE, height=0.7)
  names = [str(name) for name in values.index]
  ax.set_yticks(places, [n if len(n) <= 24 else f"{n[:22]}…" for n in names])
  ax.set_ylim(len(values) - 0.4, -0.6)
  ax.set_xlim(left=0.0)
  ax.grid(False, axis="y")
  ax.set_xlabel(label)
  ax.set_title(title, loc="left")
  return figure
