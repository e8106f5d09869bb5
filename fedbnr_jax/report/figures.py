"""Figures from arrays: each function draws one PNG and keeps no state.

Only matplotlib's object interface is used, so nothing depends on a display, on
a global current figure or on what ran before. A file appears whole or not at
all: it is written under a temporary name and then renamed.
"""

import dataclasses
import os
import pathlib
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedbnr_jax.metrics import central_level, interval_levels, observed_coverage

# The Okabe–Ito palette: hues that stay apart under common colour blindness.
_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"
COLOURS = (_BLUE, _ORANGE, _GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_CLIENT_COLOURS = (_ORANGE, _GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Shape repeats what colour says, for print in grey.
_CLIENT_MARKERS = ("o", "s", "^", "D", "v", "P")
_INK, _MUTED = "#222222", "#8A8A8A"
_Z95 = 1.959963984540054  # The 97.5 % point of the standard normal.
_DPI = 150
_MAX_POINTS = 300

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class BandPanel:
  """A one-dimensional prediction beside the rows it was or was not made from."""

  x: np.ndarray  # [G] grid of inputs, in any order.
  mean: np.ndarray  # [G] predicted means.
  variance: np.ndarray  # [G] predicted variances of the target.
  train_x: np.ndarray  # [N] inputs of the training rows.
  train_y: np.ndarray  # [N] targets of the training rows.
  train_client: np.ndarray  # [N] client of each row, counted from 0.
  truth: np.ndarray | None  # [G] the true function on the grid, if known.
  title: str
  used: np.ndarray | None = None  # [N] bool, rows the model saw; None is all.
  client_names: tuple[str, ...] | None = None  # "client 1", ... by default.


def new_axes(
  rows: int, columns: int, size: tuple[float, float], **share: Any
) -> tuple[Figure, list[Axes]]:
  """A figure with a grid of bare axes, drawn in the house style."""
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
  # The process id keeps two writers of one figure out of each other's way.
  partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
  try:
    # No software tag: the same numbers should give the same bytes.
    figure.savefig(partial, format="png", dpi=_DPI, metadata={"Software": None})
    os.replace(partial, target)
  finally:
    partial.unlink(missing_ok=True)


def learning_curve(
  metrics: pd.DataFrame, path: PathLike, *, unit: str, best_round: int
) -> None:
  """Draws error and calibration over the rounds, and the round that was kept.

  Args:
    metrics: a row a round, with `round`, `val_rmse`, `test_rmse`, `val_ece` and
      `test_ece`.
    path: the PNG to write.
    unit: unit of the error, for the axis.
    best_round: the round that validation chose, marked.
  """
  figure, axes = new_axes(2, 1, (6.4, 5.4), sharex=True)
  rounds = metrics["round"].to_numpy()
  best = rounds == best_round
  # A run of few rounds needs dots to be seen at all.
  marker = "." if len(rounds) <= 30 else None
  lines = (("val", "validation", _BLUE, "-"), ("test", "test", _ORANGE, "--"))
  scores = (("rmse", f"RMSE [{unit}]"), ("ece", "ECE [share of rows]"))
  for ax, (score, label) in zip(axes, scores, strict=True):
    for split, name, colour, style in lines:
      values = metrics[f"{split}_{score}"].to_numpy()
      ax.plot(rounds, values, style, color=colour, marker=marker, label=name)
      ax.plot(rounds[best], values[best], "o", color=colour, mec="white", ms=8)
    ax.axvline(best_round, c=_MUTED, lw=1, ls=":", label=f"kept: round {best_round}")
    ax.set_ylabel(label)
  axes[0].set_xlim(rounds.min() - 0.5, rounds.max() + 0.5)
  axes[1].set_ylim(bottom=0.0, top=1.1 * max(axes[1].dataLim.ymax, 0.01))
  axes[1].set_xlabel("communication round")
  axes[1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
  axes[0].legend(frameon=False)
  axes[0].set_title("Learning curve", loc="left")
  save(figure, path)


def reliability(
  mean: np.ndarray, variance: np.ndarray, targets: np.ndarray, path: PathLike
) -> None:
  """Draws the observed against the promised coverage of central intervals.

  Args:
    mean, variance, targets: [N] predicted means, their variances, true values.
    path: the PNG to write.
  """
  levels = interval_levels(100)
  reached = central_level(mean, variance, targets)
  share = np.asarray(observed_coverage(reached, levels))
  ece = float(np.mean(np.abs(share - levels)))
  figure, (ax,) = new_axes(1, 1, (5.0, 5.0))
  # The corners are certain: no interval holds no target, all of it holds all.
  promised = np.concatenate([[0.0], levels, [1.0]])
  observed = np.concatenate([[0.0], share, [1.0]])
  ax.fill_between(promised, promised, observed, color=_BLUE, alpha=0.2, lw=0)
  ax.plot([0, 1], [0, 1], "--", color=_INK, lw=1, label="perfectly calibrated")
  ax.plot(levels, share, color=_BLUE, lw=2, label="this model (gap shaded)")
  ax.text(0.97, 0.05, "below the line: over-confident", ha="right", color=_MUTED)
  ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
  ax.set_xlabel("level of the central interval")
  ax.set_ylabel("observed share of rows inside")
  ax.set_title(f"Reliability on {len(targets)} rows: ECE {ece:.3f}", loc="left")
  ax.legend(frameon=False, loc="upper left")
  save(figure, path)


def predicted_against_true(
  mean: np.ndarray,
  variance: np.ndarray,
  targets: np.ndarray,
  path: PathLike,
  *,
  target_name: str,
) -> None:
  """Draws predictions with their 95 % bars against the true values.

  Args:
    mean, variance, targets: [N] predicted means, their variances, true values.
    path: the PNG to write.
    target_name: name of the target, with its unit, for both axes.
  """
  mean, targets = np.asarray(mean), np.asarray(targets)
  half = _Z95 * np.sqrt(np.asarray(variance))
  covered = np.abs(targets - mean) <= half
  # Evenly spaced over the sorted targets: no randomness, and the tails stay.
  order = np.argsort(targets, kind="stable")
  kept = np.linspace(0, len(order) - 1, min(len(order), _MAX_POINTS)).round()
  shown = order[kept.astype(int)]
  figure, (ax,) = new_axes(1, 1, (5.4, 5.4))
  for inside, colour, marker, label in (
    (True, _BLUE, "o", "true value inside the 95 % interval"),
    (False, _ORANGE, "D", "outside"),
  ):
    rows = shown[covered[shown] == inside]
    faint = mpl.colors.to_rgba(colour, 0.35)
    ax.vlines(targets[rows], (mean - half)[rows], (mean + half)[rows], faint, lw=1)
    ax.plot(targets[rows], mean[rows], marker, color=colour, ms=4, label=label)
  # The anchor counts for the limits, so it has to be one of the targets.
  anchor = (targets[shown[0]], targets[shown[0]])
  ax.axline(anchor, slope=1, ls="--", color=_INK, lw=1, label="exact")
  ax.set_aspect("equal", adjustable="datalim")
  ax.set_xlabel(f"true {target_name}")
  ax.set_ylabel(f"predicted {target_name}")
  of = "" if len(shown) == len(order) else f", {len(shown)} of them shown"
  title = f"95 % intervals hold {covered.mean():.1%} of {len(order)} rows{of}"
  ax.set_title(title, loc="left", fontsize=11)
  ax.legend(frameon=False, loc="upper left")
  save(figure, path)


def _client_looks(clients: np.ndarray) -> dict[int, tuple[str, str]]:
  """Colour and marker of each client, the same in every panel of a figure."""
  names = [int(name) for name in np.unique(clients)]
  if len(names) <= len(_CLIENT_COLOURS):
    looks = zip(_CLIENT_COLOURS, _CLIENT_MARKERS, strict=True)
    return dict(zip(names, looks, strict=False))
  shades = mpl.colormaps["viridis"](np.linspace(0.0, 0.95, len(names)))
  return {names[i]: (mpl.colors.to_hex(shade), "o") for i, shade in enumerate(shades)}


def _draw_band(ax: Axes, panel: BandPanel, looks: dict[int, tuple[str, str]]) -> None:
  """Draws one panel: band, mean, truth, and rows solid where the model saw them."""
  order = np.argsort(panel.x, kind="stable")
  x, mean = np.asarray(panel.x)[order], np.asarray(panel.mean)[order]
  half = _Z95 * np.sqrt(np.asarray(panel.variance)[order])
  low, high = mean - half, mean + half
  ax.fill_between(x, low, high, color=_BLUE, alpha=0.18, lw=0, label="95 % interval")
  ax.plot(x, mean, color=_BLUE, lw=2, label="predicted mean")
  if panel.truth is not None:
    truth = np.asarray(panel.truth)[order]
    ax.plot(x, truth, "--", color=_INK, lw=1.2, label="true function")
  clients = np.asarray(panel.train_client)
  train_x, train_y = np.asarray(panel.train_x), np.asarray(panel.train_y)
  used = np.ones(clients.shape, bool) if panel.used is None else panel.used
  for client, (colour, marker) in looks.items():
    for solid, face, edge in ((False, "none", colour), (True, colour, "white")):
      rows = (clients == client) & (np.asarray(used, bool) == solid)
      dots = ax.scatter(train_x[rows], train_y[rows], 24, marker=marker, zorder=3)
      dots.set(facecolor=face, edgecolor=edge, linewidth=0.5 if solid else 1.0)
  ax.set_title(panel.title, loc="left")


def _row_legend(
  panels: list[BandPanel], looks: dict[int, tuple[str, str]]
) -> dict[str, Line2D]:
  """Legend entries of the training rows, by label."""
  given = panels[0].client_names
  named = {
    given[index] if given else f"client {index + 1}": look
    for index, look in looks.items()
  }
  if len(looks) > len(_CLIENT_COLOURS):
    # Beyond a handful of clients a list of names helps nobody.
    named = {f"rows of {len(looks)} clients": next(iter(looks.values()))}
  entries = {
    label: Line2D([], [], ls="", marker=marker, color=colour, ms=6)
    for label, (colour, marker) in named.items()
  }
  if any(panel.used is not None and not np.all(panel.used) for panel in panels):
    hollow = Line2D([], [], ls="", marker="o", color=_INK, mfc="none", ms=6)
    entries["hollow: not seen by the model"] = hollow
  return entries


def _draw_panels(
  panels: list[BandPanel], path: PathLike, input_name: str, target_name: str
) -> None:
  """Draws panels side by side on shared axes, with one legend for all."""
  size = (7.0, 4.6) if len(panels) == 1 else (5.2 * len(panels), 4.8)
  figure, axes = new_axes(1, len(panels), size, sharex=True, sharey=True)
  looks = _client_looks(np.concatenate([p.train_client for p in panels]))
  entries: dict[str, Artist] = {}
  for ax, panel in zip(axes, panels, strict=True):
    _draw_band(ax, panel, looks)
    ax.set_xlabel(input_name)
    entries |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
  entries |= _row_legend(panels, looks)
  axes[0].set_ylabel(target_name)
  ncols = min(len(entries), 4 if len(panels) == 1 else 5)
  labels, handles = list(entries), list(entries.values())
  figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False)
  save(figure, path)


def function_band(
  x: np.ndarray,
  mean: np.ndarray,
  variance: np.ndarray,
  path: PathLike,
  *,
  train_x: np.ndarray,
  train_y: np.ndarray,
  clients: np.ndarray,
  truth: np.ndarray | None = None,
  input_name: str,
  target_name: str,
  title: str,
  client_names: tuple[str, ...] | None = None,
) -> None:
  """Draws a one-dimensional model: mean, 95 % band and rows by client.

  Args:
    x, mean, variance, train_x, train_y, truth, title: as in `BandPanel`.
    path: the PNG to write.
    clients: [N] client of each training row, counted from 0.
    input_name, target_name: labels of the axes.
  """
  panel = BandPanel(
    *(x, mean, variance, train_x, train_y, clients, truth, title),
    client_names=client_names,
  )
  _draw_panels([panel], path, input_name, target_name)


def two_panels(
  left: BandPanel,
  right: BandPanel,
  path: PathLike,
  *,
  input_name: str = "x",
  target_name: str = "y",
) -> None:
  """Draws two models side by side on a shared y axis.

  Args:
    left, right: the models, such as a client's own and the global one.
    path: the PNG to write.
    input_name, target_name: labels of the axes.
  """
  _draw_panels([left, right], path, input_name, target_name)
