"""Figures: whole PNG files, the right numbers on the axes, nothing left behind."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from fedbnr_jax.gp import metrics
from fedbnr_jax.report import bands, figures
from tests.drawings import png_chunks, png_size


def _predictions(num_rows=1000):
  rng = np.random.default_rng(0)
  mean = rng.normal(size=num_rows)
  variance = rng.uniform(0.5, 1.0, num_rows)
  return mean, variance, mean + 1.5 * np.sqrt(variance) * rng.normal(size=num_rows)


def _records(num_rounds=40):
  rounds = np.arange(1, num_rounds + 1)
  names = ("val_rmse", "test_rmse", "val_ece", "test_ece")
  curves = {name: (i + 1) + 1.0 / rounds for i, name in enumerate(names)}
  return pd.DataFrame({"round": rounds, **curves})


def _panel(num_clients=3, **changes):
  rng = np.random.default_rng(1)
  x = rng.permutation(np.linspace(-2.0, 2.0, 50))
  clients = np.arange(60) % num_clients
  train_x = rng.uniform(-2.0, 2.0, 60)
  content = {
    "x": x,
    "mean": np.sin(x),
    "variance": np.full(50, 0.04),
    "train_x": train_x,
    "train_y": np.sin(train_x),
    "train_client": clients,
    "truth": np.sin(x),
    "title": "a model",
  }
  return bands.BandPanel(**(content | changes))


def _band(panel=None, **changes):
  panel = panel or _panel()
  return bands.function_band(
    panel.x,
    panel.mean,
    panel.variance,
    train_x=panel.train_x,
    train_y=panel.train_y,
    clients=panel.train_client,
    truth=changes.get("truth", panel.truth),
    input_name="input [s]",
    target_name="target [m]",
    title="a band",
  )


def _draw_all(folder):
  rows = _predictions()
  panel = _panel()
  for name, figure in {
    "a": figures.learning_curve(_records(), unit="MW", best_round=7),
    "b": figures.reliability(*rows),
    "c": figures.predicted_against_true(*rows, target_name="power [MW]"),
    "d": _band(),
    "e": bands.two_panels(panel, panel),
  }.items():
    figures.save(figure, folder / f"{name}.png")


def _legend_labels(figure):
  (legend,) = figure.legends
  return [text.get_text() for text in legend.get_texts()]


@pytest.fixture(scope="module")
def all_drawn(tmp_path_factory):
  """A folder of every figure, which was not there before."""
  folder = tmp_path_factory.mktemp("figures") / "not" / "there" / "yet"
  _draw_all(folder)
  return folder


def test_files_are_whole_png_and_nothing_else_is_left(all_drawn):
  folder = all_drawn
  assert sorted(file.name for file in folder.iterdir()) == [f"{n}.png" for n in "abcde"]
  inches = [(6.4, 5.4), (5.0, 5.0), (5.4, 5.4), (7.0, 4.6), (10.4, 4.8)]
  for name, (width, height) in zip("abcde", inches, strict=True):
    file = folder / f"{name}.png"
    assert png_size(file) == pytest.approx((150 * width, 150 * height), abs=1)
    # Nothing that differs between two days or versions of Matplotlib.
    assert set(png_chunks(file)) == {"IHDR", "pHYs", "IDAT", "IEND"}
    assert len(png_chunks(file)["IDAT"]) > 10_000


def test_same_numbers_same_bytes(all_drawn, tmp_path):
  _draw_all(tmp_path)
  for file in all_drawn.iterdir():
    assert file.read_bytes() == (tmp_path / file.name).read_bytes()


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / "figure.png"
  figures.save(figures.reliability(*_predictions()), path)
  before = path.read_bytes()

  def break_off(self, file, **kwargs):
    file.write_bytes(b"half")
    raise OSError("disk full")

  monkeypatch.setattr(Figure, "savefig", break_off)
  with pytest.raises(OSError, match="disk full"):
    figures.save(figures.reliability(*_predictions(10)), path)
  assert path.read_bytes() == before
  assert list(tmp_path.iterdir()) == [path]


def test_learning_curve_shows_the_columns_and_the_kept_round():
  records = _records()
  figure = figures.learning_curve(records, unit="MW", best_round=7)
  upper, lower = figure.axes
  for ax, score in ((upper, "rmse"), (lower, "ece")):
    by_label = {line.get_label(): line for line in ax.lines}
    for label, column in (("validation", f"val_{score}"), ("test", f"test_{score}")):
      np.testing.assert_array_equal(by_label[label].get_ydata(), records[column])
    assert list(by_label["kept: round 7"].get_xdata()) == [7, 7]
  assert upper.get_ylabel() == "RMSE [MW]"
  assert lower.get_xlabel() == "communication round"
  assert lower.get_ylim()[0] == 0.0


def test_learning_curve_of_one_round():
  figure = figures.learning_curve(_records(1), unit="1", best_round=1)
  assert figure.axes[1].get_xlim() == (0.5, 1.5)


def test_reliability_draws_the_calibration_it_names():
  rows = _predictions()
  figure = figures.reliability(*rows)
  (ax,) = figure.axes
  line = next(li for li in ax.lines if str(li.get_label()).startswith("this"))
  gap = np.abs(line.get_xdata() - line.get_ydata())
  ece = float(metrics.calibration(*rows)["ece"])
  np.testing.assert_allclose(np.mean(gap), ece, rtol=1e-12)
  assert f"ECE {ece:.3f}" in ax.get_title(loc="left")


@pytest.mark.parametrize("num_rows, shown", [(1, 1), (300, 300), (301, 300)])
def test_predictions_are_thinned_and_coverage_counts_all(num_rows, shown):
  mean, variance, targets = _predictions(num_rows)
  figure = figures.predicted_against_true(
    mean, variance, targets, target_name="power [MW]"
  )
  (ax,) = figure.axes
  dots = [line for line in ax.lines if line.get_label() != "exact"]
  drawn_targets = np.concatenate([line.get_xdata() for line in dots])
  assert len(drawn_targets) == shown
  assert drawn_targets.min() == targets.min()
  assert drawn_targets.max() == targets.max()
  share = float(metrics.coverage(mean, variance, targets))
  assert f"hold {share:.1%} of {num_rows} rows" in ax.get_title(loc="left")
  assert ax.get_xlabel() == "true power [MW]"


def test_predictions_far_from_zero_fill_the_axes():
  mean, variance, targets = _predictions()
  figure = figures.predicted_against_true(
    mean + 450.0, variance, targets + 450.0, target_name="power"
  )
  figure.draw_without_rendering()  # Which lays the axes out.
  low, high = figure.axes[0].get_xlim()
  assert 430.0 < low < high < 470.0


def test_band_is_sorted_and_labelled():
  panel = _panel()
  figure = _band(panel)
  (ax,) = figure.axes
  mean = next(line for line in ax.lines if line.get_label() == "predicted mean")
  np.testing.assert_array_equal(mean.get_xdata(), np.sort(panel.x))
  edges = ax.collections[0].get_paths()[0].vertices[:, 1]
  np.testing.assert_allclose(edges.max(), panel.mean.max() + 1.96 * 0.2, atol=1e-4)
  assert (ax.get_xlabel(), ax.get_ylabel()) == ("input [s]", "target [m]")
  assert _legend_labels(figure) == [
    "95 % interval",
    "predicted mean",
    "true function",
    "client 1",
    "client 2",
    "client 3",
  ]


def test_truth_may_be_unknown_and_clients_many():
  figure = _band(_panel(num_clients=20), truth=None)
  assert _legend_labels(figure) == [
    "95 % interval",
    "predicted mean",
    "rows of 20 clients",
  ]


def test_rows_the_model_did_not_see_are_hollow():
  left = _panel(used=np.arange(60) % 3 == 0)
  right = _panel(used=np.ones(60, bool))
  figure = bands.two_panels(left, right)

  def count(ax, hollow):
    rows = [c for c in ax.collections[1:] if (len(c.get_facecolor()) == 0) == hollow]
    return sum(len(c.get_offsets()) for c in rows)

  axes = figure.axes
  assert [(count(ax, False), count(ax, True)) for ax in axes] == [(20, 40), (60, 0)]
  assert axes[0].get_ylim() == axes[1].get_ylim()
  assert "hollow: not seen by the model" in _legend_labels(figure)
