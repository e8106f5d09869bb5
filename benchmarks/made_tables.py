"""Regression tables made by a seed, each with a difficulty of its own."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

Generator = np.random.Generator


class Made(NamedTuple):
  """A table that is drawn from a seed of its own."""

  draw: Callable[[Generator], pd.DataFrame]
  seed: int
  why: str

  def make(self) -> pd.DataFrame:
    return self.draw(np.random.default_rng([2022, self.seed]))


def _friedman1(x: np.ndarray) -> np.ndarray:
  """Friedman's first function of the first five of inputs x [N, D] in [0, 1]: [N]."""
  wave = 10 * np.sin(np.pi * x[:, 0] * x[:, 1])
  return wave + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]


def _circuit(rng: Generator, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
  """Inputs [N, 4] of Friedman's second and third functions, and what they share [N]."""
  low = np.array([0.0, 40 * np.pi, 0.0, 1.0])
  high = np.array([100.0, 560 * np.pi, 1.0, 11.0])
  x = rng.uniform(low, high, size=(num_rows, 4))
  return x, x[:, 1] * x[:, 2] - 1.0 / (x[:, 1] * x[:, 3])


def _frame(x: np.ndarray, target: np.ndarray) -> pd.DataFrame:
  """A table of inputs x [N, D] and targets [N]."""
  columns = [f"x{number + 1}" for number in range(x.shape[1])]
  return pd.DataFrame(x, columns=columns).assign(target=target)


def _smooth(num_rows: int, num_inputs: int) -> Callable[[Generator], pd.DataFrame]:
  """Friedman's first function with noise of deviation one."""

  def draw(rng: Generator) -> pd.DataFrame:
    x = rng.uniform(size=(num_rows, num_inputs))
    return _frame(x, _friedman1(x) + rng.normal(size=num_rows))

  return draw


def _friedman2(rng: Generator) -> pd.DataFrame:
  x, shared = _circuit(rng, 1000)
  target = np.hypot(x[:, 0], shared)
  return _frame(x, target + 125.0 * rng.normal(size=len(x)))


def _friedman3(rng: Generator) -> pd.DataFrame:
  x, shared = _circuit(rng, 1000)
  target = np.arctan(shared / np.maximum(x[:, 0], 1e-3))
  return _frame(x, target + 0.1 * rng.normal(size=len(x)))


def _long_tails(rng: Generator) -> pd.DataFrame:
  """Inputs over several orders of magnitude; the function is smooth in their logs."""
  logs = rng.normal(size=(2000, 6))
  logs[:, 1] = 0.7 * logs[:, 0] + 0.7 * logs[:, 1]
  target = 3 * np.sin(logs[:, 0]) + logs[:, 1] * logs[:, 2] + np.abs(logs[:, 3])
  return _frame(np.exp(1.5 * logs), target + 0.3 * rng.normal(size=len(logs)))


def _long_target(rng: Generator) -> pd.DataFrame:
  """A target whose logarithm has noise, as prices and claims do."""
  x = rng.uniform(size=(3000, 8))
  log = 0.2 * _friedman1(x) + 0.3 * rng.normal(size=len(x))
  return _frame(x, np.exp(log))


def _heavy_noise(rng: Generator) -> pd.DataFrame:
  """Noise that is Student's t with 2.5 degrees of freedom."""
  x = rng.uniform(size=(3000, 8))
  return _frame(x, _friedman1(x) + 2.0 * rng.standard_t(2.5, size=len(x)))


def _uneven_noise(rng: Generator) -> pd.DataFrame:
  """Noise that is ten times as large at one end of an input as at the other."""
  x = rng.uniform(size=(2000, 6))
  noise = 0.3 * 10.0 ** x[:, 5]
  return _frame(x, _friedman1(x) + noise * rng.normal(size=len(x)))


def _wide(rng: Generator) -> pd.DataFrame:
  """300 columns that all measure the same five things, with errors."""
  hidden = rng.normal(size=(800, 5))
  x = hidden @ rng.normal(size=(5, 300)) + rng.normal(size=(800, 300))
  target = np.tanh(hidden[:, 0]) + hidden[:, 1] * hidden[:, 2] + hidden[:, 3]
  return _frame(x, target + 0.2 * rng.normal(size=len(x)))


def _steps(rng: Generator) -> pd.DataFrame:
  """A function of thresholds, which trees can be and smooth kernels cannot."""
  x = rng.normal(size=(4000, 8))
  target = np.zeros(len(x))
  for _ in range(30):
    first, second = rng.choice(8, size=2, replace=False)
    inside = (x[:, first] > rng.normal()) & (x[:, second] < rng.normal())
    target += rng.normal() * inside
  return _frame(x, target + 0.2 * rng.normal(size=len(x)))


def _categories(rng: Generator) -> pd.DataFrame:
  """Six columns of 4 to 40 categories, whose effects interact with a number's."""
  num_rows = 5000
  x = rng.normal(size=(num_rows, 3))
  frame, target = _frame(x, np.zeros(num_rows)), np.sin(2 * x[:, 0])
  for number, count in enumerate((4, 6, 10, 15, 25, 40)):
    share = rng.dirichlet(np.ones(count))
    drawn = rng.choice(count, size=num_rows, p=share)
    level, slope = 0.5 * rng.normal(size=count), 0.3 * rng.normal(size=count)
    target += level[drawn] + slope[drawn] * x[:, 1]
    frame[f"c{number + 1}"] = [f"kind {value}" for value in drawn]
  return frame.assign(target=target + 0.3 * rng.normal(size=num_rows))


def _sites(rng: Generator) -> pd.DataFrame:
  """Twenty clients of 30 to several hundred rows, each in a region of its own."""
  sizes = 30 + rng.geometric(1 / 120, size=20)
  site = np.repeat(np.arange(20), sizes)
  x = rng.normal(size=(len(site), 5))
  x[:, :2] = 1.5 * rng.normal(size=(20, 2))[site] + 0.5 * x[:, :2]
  target = np.sin(2 * x[:, 0]) * np.cos(x[:, 1]) + 0.3 * x[:, 2] * x[:, 3]
  frame = _frame(x, target + 0.15 * rng.normal(size=len(x)))
  return frame.assign(client=[f"site {number + 1}" for number in site])


TABLES: dict[str, Made] = {
  "tiny": Made(_smooth(100, 5), 0, "100 rows (Friedman 1)"),
  "friedman2": Made(_friedman2, 1, "inputs of unlike scales"),
  "friedman3": Made(_friedman3, 2, "a steep edge"),
  "long-tails": Made(_long_tails, 3, "inputs over orders of magnitude"),
  "long-target": Made(_long_target, 4, "noise in the target's logarithm"),
  "heavy-noise": Made(_heavy_noise, 5, "noise of Student's t"),
  "uneven-noise": Made(_uneven_noise, 6, "noise that grows with an input"),
  "irrelevant": Made(_smooth(1500, 205), 7, "200 columns that say nothing"),
  "wide": Made(_wide, 8, "300 columns of five things"),
  "steps": Made(_steps, 9, "thresholds"),
  "categories": Made(_categories, 10, "100 categories that interact"),
  "sites": Made(_sites, 11, "clients in regions of their own"),
  "large": Made(_smooth(80_000, 12), 12, "80,000 rows"),
}
