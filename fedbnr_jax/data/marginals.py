"""Marginals of inputs from sums: counts and sums in public bins, which clients add up.

Two passes are enough. The first has bins that are fixed beforehand; the second divides
those that hold many rows. A site tells how many of its values fall into a bin and what
they add up to, and nothing of their order or of which row they belong to.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

NUM_QUANTILES = 256
CLIP = 3.0  # Normal scores end here.
_NUM_FINE = 4096


class BinSums(NamedTuple):
  """What a client tells of one input; summable."""

  counts: np.ndarray  # [B] int64, values in each bin.
  sums: np.ndarray  # [B] what they add up to.


class Marginal(NamedTuple):
  """The distribution of one input over all training rows.

  Attributes:
    values: `[B]` mean value of each bin that is not empty, ascending.
    levels: `[B]` share of rows below that bin, with half of those in it.
  """

  values: np.ndarray
  levels: np.ndarray

  def scores(self, x: np.ndarray) -> np.ndarray:
    """Maps values `[N]` to normal scores `[N]`, also values that were never seen.

    Between known values the score is interpolated; beyond them, and beyond ±3, it stays
    where it is. Equal values share the middle of their ranks.
    """
    return np.interp(x, self.values, np.clip(special.ndtri(self.levels), -CLIP, CLIP))

  def quantiles(self) -> np.ndarray:
    """Returns quantiles `[Q]` at the levels (q + ½)/Q."""
    levels = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    return np.interp(levels, self.levels, self.values)


def coarse_edges() -> np.ndarray:
  """Returns the public edges `[B + 1]` of the first pass, in standard deviations.

  They are dense around the mean and reach to 10¹², because tails may be long.
  """
  steps = np.sinh(np.linspace(0.0, np.arcsinh(1e13), 512)) / 10.0
  return np.concatenate([-steps[:0:-1], steps])


def bin_sums(values: np.ndarray, edges: np.ndarray) -> BinSums:
  """Counts and adds up values `[N]` in bins, the outermost of which are open."""
  num_bins = len(edges) - 1
  bins = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, num_bins - 1)
  return BinSums(
    np.bincount(bins, minlength=num_bins), np.bincount(bins, values, num_bins)
  )


def add(parts: Sequence[BinSums]) -> BinSums:
  """Adds up what clients tell."""
  counts, sums = zip(*parts, strict=True)
  return BinSums(np.sum(counts, axis=0), np.sum(sums, axis=0))


def finer_edges(edges: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Divides bins by how many rows `[B]` they hold, into about 4096 in all."""
  pieces = np.maximum(1, np.ceil(_NUM_FINE * counts / max(1, counts.sum()))).astype(int)
  inner = [
    np.linspace(low, high, number, endpoint=False)
    for low, high, number in zip(edges[:-1], edges[1:], pieces, strict=True)
  ]
  return np.concatenate([*inner, edges[-1:]])


def marginal(sums: BinSums) -> Marginal:
  """Reads the distribution off summed bins."""
  full = sums.counts > 0
  counts = sums.counts[full].astype(np.float64)
  levels = (np.cumsum(counts) - 0.5 * counts) / counts.sum()
  # Rounding of sums must not disturb the order.
  return Marginal(np.maximum.accumulate(sums.sums[full] / counts), levels)


def fit(parts: Sequence[np.ndarray]) -> Marginal:
  """Finds the marginal of one standardised input, given in parts `[n_c]` by client."""

  def collect(tell: Callable[[np.ndarray], BinSums]) -> BinSums:
    return add([tell(values) for values in parts])

  edges = coarse_edges()
  edges = finer_edges(edges, collect(lambda values: bin_sums(values, edges)).counts)
  return marginal(collect(lambda values: bin_sums(values, edges)))


def correlation_factor(scores: np.ndarray) -> np.ndarray:
  """Returns the Cholesky factor `[D, D]` of the correlation of scores `[N, D]`.

  The second moments are sums over rows, and so over clients.
  """
  centred = scores - scores.mean(axis=0)
  moments = centred.T @ centred / len(scores)
  deviation = np.sqrt(np.maximum(np.diag(moments), 1e-12))
  correlation = moments / np.outer(deviation, deviation)
  # Inputs that repeat each other make it singular.
  jitter = 1e-6 * np.eye(len(correlation))
  factor: np.ndarray = np.linalg.cholesky(correlation + jitter)
  return factor / np.sqrt(1.0 + 1e-6)
