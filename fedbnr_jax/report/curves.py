"""Figures of the studies: privacy, communication, new clients, kernels."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedbnr_jax.report.figures import COLOURS, new_axes


def privacy(curve: pd.DataFrame, *, unit: str, title: str) -> Figure:
  """Draws RMSE and ECE against ε, with a band that holds 80 % of the draws.

  Args:
    curve: One row per draw of the noise, with columns `epsilon` (may be infinite),
      `noise`, `test_rmse` and `test_ece`.
    unit: Unit of the error.
    title: Title of the figure.
  """
  figure, axes = new_axes(1, 2, (9.0, 3.6))
  epsilons = sorted(curve.epsilon.unique())
  places = np.arange(len(epsilons))
  labels = ["∞" if np.isinf(epsilon) else f"{epsilon:g}" for epsilon in epsilons]
  for colour, (noise, rows) in zip(
    COLOURS, curve.groupby("noise", sort=False), strict=False
  ):
    for ax, score in zip(axes, ("test_rmse", "test_ece"), strict=True):
      groups = rows.groupby("epsilon")[score]
      middle, low, high = (groups.quantile(q).to_numpy() for q in (0.5, 0.1, 0.9))
      ax.plot(places, middle, "o-", color=colour, label=noise)
      ax.fill_between(places, low, high, color=colour, alpha=0.2, lw=0)
  for ax, label in zip(axes, (f"test RMSE [{unit}]", "test ECE"), strict=True):
    ax.set_xticks(places, labels)
    ax.set_xlabel("ε")
    ax.set_ylabel(label)
  axes[0].legend(title="noise", frameon=False)
  figure.suptitle(title)
  return figure


def leakage(curve: pd.DataFrame, *, num_features: int) -> Figure:
  """Draws an attacker's advantage against the number of rows in a Gram matrix.

  Args:
    curve: Columns `rows`, `release` (label of a line) and `advantage`.
    num_features: M; it is marked, because more rows than that hide one another.
  """
  figure, (ax,) = new_axes(1, 1, (6.4, 3.8))
  for colour, (release, rows) in zip(
    COLOURS, curve.groupby("release", sort=False), strict=False
  ):
    ax.plot(rows["rows"], rows.advantage, "o-", color=colour, label=release)
  ax.axvline(num_features, color="#8A8A8A", lw=1, ls=":")
  ax.text(num_features, 0.46, " features", color="#8A8A8A", ha="left", va="bottom")
  ax.axhline(0.5, color="#8A8A8A", lw=1)
  ax.set_xscale("log")
  ax.set_ylim(0.45, 1.02)
  ax.set_xlabel("rows in the matrix that the attacker sees")
  ax.set_ylabel("probability that a row\nthat is in ranks first")
  ax.legend(frameon=False)
  return figure


def communication(
  runs: Mapping[str, Sequence[pd.DataFrame]],
  *,
  unit: str,
  title: str,
  goal: float | None = None,
) -> Figure:
  """Draws test RMSE at the best validation round so far against floats sent.

  Args:
    runs: The runs of each method; a run has columns `floats` and `test_rmse`.
    unit: Unit of the error.
    title: Title of the figure.
    goal: An error to reach; it is drawn as a line.
  """
  figure, (ax,) = new_axes(1, 1, (9.0, 4.2))
  for number, (method, frames) in enumerate(runs.items()):
    colour = COLOURS[number % len(COLOURS)]
    style = ("-", "--", ":")[
      number // len(COLOURS) % 3
    ]  # Tells methods of one colour apart.
    for index, frame in enumerate(frames):
      label = method if index == 0 else None
      ax.plot(frame.floats, frame.test_rmse, style, color=colour, label=label, lw=1.6)
  if goal is not None:
    ax.axhline(goal, color="#222222", lw=1, ls=":", label=f"paper's FedBNR, {goal:g}")
  ax.set_xscale("log")
  ax.set_yscale("log")
  ax.set_xlabel("floats sent and received by a client")
  ax.set_ylabel(f"test RMSE [{unit}]")
  ax.set_title(title)
  figure.legend(loc="outside right center", frameon=False, fontsize=8)
  return figure


def new_client(errors: pd.DataFrame) -> Figure:
  """Draws the squared error of a new client's predictions against its rows.

  A panel is a range of inputs; a band holds 80 % of the seeds.

  Args:
    errors: One row per seed, with columns `range`, `rows`, `method` and `mse`.
  """
  ranges = list(dict.fromkeys(errors["range"]))
  figure, axes = new_axes(1, len(ranges), (4.8 * len(ranges), 4.0), sharey=True)
  for ax, name in zip(axes, ranges, strict=True):
    own = errors[errors["range"] == name]
    for colour, marker, (method, rows) in zip(
      COLOURS, "os^DvPX", own.groupby("method", sort=False), strict=False
    ):
      groups = rows.groupby("rows").mse
      low, high = (groups.quantile(q).to_numpy() for q in (0.1, 0.9))
      counts = np.array(list(groups.groups))
      ax.plot(counts, groups.mean(), marker=marker, ms=5, color=colour, label=method)
      ax.fill_between(counts, low, high, color=colour, alpha=0.15, lw=0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("rows of the new client")
    ax.set_title(f"new client on {name}", loc="left")
  axes[0].set_ylabel("squared error on [-5, 5]")
  axes[0].legend(frameon=False, fontsize=9)
  return figure


def convergence(errors: pd.DataFrame, panels: Mapping[str, Sequence[str]]) -> Figure:
  """Draws the error of random features against S, beside the line 1/√S.

  A band holds 80 % of the seeds.

  Args:
    errors: One row per seed, with columns `kernel`, `num_samples` and `error`.
    panels: Names of the kernels in each panel, by the panel's title.
  """
  figure, axes = new_axes(1, len(panels), (5.0 * len(panels), 4.4), sharey=True)
  ends = np.array([errors.num_samples.min(), errors.num_samples.max()])
  for ax, (title, kernels) in zip(axes, panels.items(), strict=True):
    # Every kernel has a marker too, for print in grey.
    for colour, marker, kernel in zip(COLOURS, "os^DvPX", kernels, strict=False):
      groups = errors[errors.kernel == kernel].groupby("num_samples").error
      counts = np.array(list(groups.groups))
      low, high = (groups.quantile(q).to_numpy() for q in (0.1, 0.9))
      ax.plot(counts, groups.mean(), marker=marker, ms=5, color=colour, label=kernel)
      ax.fill_between(counts, low, high, color=colour, alpha=0.12, lw=0)
    ax.plot(ends, ends**-0.5, "--", color="#222222", lw=1.2, label="1/√S")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("S, draws of ω")
    ax.set_title(title, loc="left")
    ax.legend(frameon=False, fontsize=9, loc="lower left")
  axes[0].set_ylabel("RMS error / RMS of the kernel")
  return figure
