"""Figures of one-dimensional models: predicted mean, 95 % band and training rows."""

import dataclasses

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedbnr_jax.report.figures import BLUE, COLOURS, INK, Z95, new_axes

_CLIENT_COLOURS = COLOURS[1:]  # The first one is the prediction's.
# Every client has a marker too, for print in grey.
_CLIENT_MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclasses.dataclass(frozen=True)
class BandPanel:
  """A one-dimensional model, and the training rows that are shown with it."""

  x: np.ndarray  # [G] grid of inputs, in any order.
  mean: np.ndarray  # [G] predicted means.
  variance: np.ndarray  # [G] predicted variances of the target.
  train_x: np.ndarray  # [N] inputs of the training rows.
  train_y: np.ndarray  # [N] targets of the training rows.
  train_client: np.ndarray  # [N] number of each row's client, from 0.
  truth: np.ndarray | None  # [G] the true function on the grid, if known.
  title: str
  used: np.ndarray | None = None  # [N] bool, rows the model saw; None: all.
  client_names: tuple[str, ...] | None = None  # None: "client 1", ...


def _client_looks(clients: np.ndarray) -> dict[int, tuple[str, str]]:
  """Assigns colours and markers to clients [N], the same in every panel."""
  names = [int(name) for name in np.unique(clients)]
  if len(names) <= len(_CLIENT_COLOURS):
    looks = zip(_CLIENT_COLOURS, _CLIENT_MARKERS, strict=True)
    return dict(zip(names, looks, strict=False))
  shades = mpl.colormaps["viridis"](np.linspace(0.0, 0.95, len(names)))
  return {names[i]: (mpl.colors.to_hex(shade), "o") for i, shade in enumerate(shades)}


def _draw_band(ax: Axes, panel: BandPanel, looks: dict[int, tuple[str, str]]) -> None:
  """Draws one panel: band, mean, truth, and rows, hollow where the model lacks them."""
  order = np.argsort(panel.x, kind="stable")
  x, mean = np.asarray(panel.x)[order], np.asarray(panel.mean)[order]
  half = Z95 * np.sqrt(np.asarray(panel.variance)[order])
  low, high = mean - half, mean + half
  ax.fill_between(x, low, high, color=BLUE, alpha=0.18, lw=0, label="95 % interval")
  ax.plot(x, mean, color=BLUE, lw=2, label="predicted mean")
  if panel.truth is not None:
    truth = np.asarray(panel.truth)[order]
    ax.plot(x, truth, "--", color=INK, lw=1.2, label="true function")
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
  """Returns the legend entries of the training rows, by label."""
  given = panels[0].client_names
  named = {
    given[index] if given else f"client {index + 1}": look
    for index, look in looks.items()
  }
  if len(looks) > len(_CLIENT_COLOURS):
    # Many clients share one entry, because their shades cannot be told apart.
    named = {f"rows of {len(looks)} clients": next(iter(looks.values()))}
  entries = {
    label: Line2D([], [], ls="", marker=marker, color=colour, ms=6)
    for label, (colour, marker) in named.items()
  }
  if any(panel.used is not None and not np.all(panel.used) for panel in panels):
    hollow = Line2D([], [], ls="", marker="o", color=INK, mfc="none", ms=6)
    entries["hollow: not seen by the model"] = hollow
  return entries


def _draw_panels(panels: list[BandPanel], input_name: str, target_name: str) -> Figure:
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
  return figure


def function_band(
  x: np.ndarray,
  mean: np.ndarray,
  variance: np.ndarray,
  *,
  train_x: np.ndarray,
  train_y: np.ndarray,
  clients: np.ndarray,
  truth: np.ndarray | None = None,
  input_name: str,
  target_name: str,
  title: str,
  client_names: tuple[str, ...] | None = None,
) -> Figure:
  """Draws a one-dimensional model: mean, 95 % band and rows by client.

  Args:
    x, mean, variance, train_x, train_y, truth, title, client_names: As in `BandPanel`.
    clients: [N] number of the client of each training row, counted from 0.
    input_name, target_name: Labels of the axes.
  """
  panel = BandPanel(
    *(x, mean, variance, train_x, train_y, clients, truth, title),
    client_names=client_names,
  )
  return _draw_panels([panel], input_name, target_name)


def two_panels(
  left: BandPanel,
  right: BandPanel,
  *,
  input_name: str = "x",
  target_name: str = "y",
) -> Figure:
  """Draws two models side by side on a shared y axis.

  Args:
    left, right: The models, such as a client's own and the global one.
    input_name, target_name: Labels of the axes.
  """
  return _draw_panels([left, right], input_name, target_name)
