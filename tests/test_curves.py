"""Figures of the studies: the numbers that reach the axes."""

import numpy as np
import pandas as pd
import pytest

from fedbnr_jax.report import curves


def _lines(ax):
  """Points [n, 2] of the lines of a panel, by their labels."""
  return {line.get_label(): np.asarray(line.get_xydata()) for line in ax.lines}


def _band(ax, index=0):
  """Lowest and highest value of a filled band."""
  values = ax.collections[index].get_paths()[0].vertices[:, 1]
  return values.min(), values.max()


def test_privacy_has_medians_over_draws_by_rising_epsilon():
  rows = [
    {"noise": noise, "epsilon": epsilon, "test_rmse": size + draw, "test_ece": 0.1}
    for noise, size in (("central", 1.0), ("client", 5.0))
    for epsilon in (np.inf, 0.5)
    for draw in range(11)
  ]
  figure = curves.privacy(pd.DataFrame(rows), unit="MW", title="ccpp, 3 clients")
  rmse, ece = figure.axes
  np.testing.assert_array_equal(_lines(rmse)["central"], [(0, 6.0), (1, 6.0)])
  np.testing.assert_array_equal(_lines(rmse)["client"], [(0, 10.0), (1, 10.0)])
  assert _band(rmse) == pytest.approx((2.0, 10.0))  # 80 % of the draws.
  assert [text.get_text() for text in rmse.get_xticklabels()] == ["0.5", "∞"]
  assert (rmse.get_ylabel(), ece.get_ylabel()) == ("test RMSE [MW]", "test ECE")
  width, height = figure.get_size_inches()
  assert width > height


def test_leakage_has_a_line_for_each_release():
  curve = pd.DataFrame(
    {
      "release": ["bare", "bare", "ε = 1", "ε = 1"],
      "rows": [1, 100, 1, 100],
      "advantage": [1.0, 0.6, 0.55, 0.5],
    }
  )
  figure = curves.leakage(curve, num_features=20)
  (ax,) = figure.axes
  lines = _lines(ax)
  np.testing.assert_array_equal(lines["bare"], [(1, 1.0), (100, 0.6)])
  np.testing.assert_array_equal(lines["ε = 1"], [(1, 0.55), (100, 0.5)])
  assert any(list(points[:, 0]) == [20, 20] for points in lines.values())
  assert ax.get_xscale() == "log"


def test_communication_has_one_label_for_each_method_and_the_goal():
  frame = pd.DataFrame({"floats": [10.0, 20.0], "test_rmse": [3.0, 2.0]})
  runs = {"fedbnr": [frame, frame * 2], "fedavg": [frame * 3]}
  figure = curves.communication(runs, unit="K", title="t", goal=2.5)
  (ax,) = figure.axes
  first, second, third, goal = ax.lines
  np.testing.assert_array_equal(first.get_xydata(), frame)
  np.testing.assert_array_equal(second.get_xydata(), frame * 2)
  np.testing.assert_array_equal(third.get_xydata(), frame * 3)
  assert list(goal.get_ydata()) == [2.5, 2.5]
  assert first.get_color() == second.get_color() != third.get_color()
  (legend,) = figure.legends
  labels = [text.get_text() for text in legend.get_texts()]
  assert labels == ["fedbnr", "fedavg", "paper's FedBNR, 2.5"]


def test_methods_of_one_colour_differ_in_style():
  frame = pd.DataFrame({"floats": [10.0, 20.0], "test_rmse": [3.0, 2.0]})
  runs = {f"method {number}": [frame] for number in range(8)}
  figure = curves.communication(runs, unit="K", title="t")
  lines = figure.axes[0].lines
  assert lines[0].get_color() == lines[7].get_color()
  assert lines[0].get_linestyle() != lines[7].get_linestyle()


def test_new_client_has_means_over_seeds_in_a_panel_for_each_range():
  rows = [
    {"range": name, "rows": count, "method": method, "mse": size * (1 + seed) / count}
    for name in ("[-5, 5]", "[5, 15]")
    for method, size in (("pfedgp", 1.0), ("fedbnr", 2.0))
    for count in (2, 20)
    for seed in range(3)
  ]
  figure = curves.new_client(pd.DataFrame(rows))
  axes = figure.axes
  assert [ax.get_title(loc="left") for ax in axes] == [
    *("new client on [-5, 5]", "new client on [5, 15]")
  ]
  for ax in axes:
    np.testing.assert_allclose(_lines(ax)["pfedgp"], [(2, 1.0), (20, 0.1)])
    np.testing.assert_allclose(_lines(ax)["fedbnr"], [(2, 2.0), (20, 0.2)])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_convergence_has_means_over_seeds_beside_the_rate():
  rows = [
    {"kernel": kernel, "num_samples": count, "error": size * (1 + seed) / count}
    for kernel, size in (("a", 1.0), ("b", 2.0), ("c", 3.0))
    for count in (4, 16)
    for seed in range(3)
  ]
  panels = {"one": ["b"], "two": ["a", "c"]}
  figure = curves.convergence(pd.DataFrame(rows), panels)
  one, two = figure.axes
  assert set(_lines(one)) == {"b", "1/√S"}
  np.testing.assert_allclose(_lines(one)["b"], [(4, 1.0), (16, 0.25)])
  np.testing.assert_allclose(_lines(two)["c"], [(4, 1.5), (16, 0.375)])
  np.testing.assert_allclose(_lines(two)["1/√S"], [(4, 0.5), (16, 0.25)])
