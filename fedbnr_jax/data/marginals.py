"""Marginals of inputs from sums: counts and sums in public bins, which clients add up.

The first pass has bins that are fixed beforehand; the second divides those that hold
many rows. For most inputs that is enough; where the tail is very long, nearly all rows
still share a few bins, and further passes divide these. A site tells how many of its
values fall into a bin and what they add up to, and nothing of their order or of which
row they belong to.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from scipy import special

NUM_QUANTILES = 256
CLIP = 3.0  # Normal scores end here.
_NUM_FINE = 4096
# A bin is divided again if the scores of its rows may differ by more than this. Counts
# do not tell whether it holds one value many times, so passes must end.
_NARROW = 0.01
_MOST_PASSES = 6
_FEWEST_PIECES = 16


class BinSums(NamedTuple):
  """What a client tells of one input; summable."""

  counts: np.ndarray  # [B] int64, values in each bin.
  sums: np.ndarray  # [B] what they add up to.


class Marginal(NamedTuple):
  """The distribution of one input over all training rows.

  Attributes:
    values: `[B]` mean value of each bin that is not empty, ascending.
    levels: `[B]` share of rows below that bin, with half of those in it.
    counts: `[B]` rows in that bin.
  """

  values: np.ndarray
  levels: np.ndarray
  counts: np.ndarray

  def median(self) -> float:
    """Returns the middle value, or the mean of the two middle ones."""
    above = np.cumsum(self.counts)
    low = np.searchsorted(2 * above, above[-1], side="left")
    high = np.searchsorted(2 * above, above[-1], side="right")
    return 0.5 * float(self.values[low] + self.values[high])

  def scores(self, x: np.ndarray) -> np.ndarray:
    """Maps values `[N]` to normal scores `[N]`, also values that were never seen.

    Between known values the score is interpolated; beyond them, and beyond ±3, it stays
    where it is. Equal values share the middle of their ranks.
    """
    return np.interp(x, self.values, normal_scores(self.levels))

  def quantiles(self) -> np.ndarray:
    """Returns quantiles `[Q]` at the levels (q + ½)/Q."""
    levels = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    return np.interp(levels, self.levels, self.values)


def normal_scores(levels: np.ndarray) -> np.ndarray:
  """Maps levels in [0, 1] to quantiles of the standard normal, clipped at ±3."""
  return np.clip(special.ndtri(levels), -CLIP, CLIP)


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


def finer_edges(
  edges: np.ndarray, counts: np.ndarray, chosen: np.ndarray | None = None
) -> np.ndarray:
  """Divides bins by how many rows `[B]` they hold, into about 4096 in all.

  Args:
    edges: `[B + 1]`, ascending.
    counts: `[B]` rows in each bin.
    chosen: `[B]` whether to divide a bin, in that case into 16 at least; None for all,
      as their rows demand.
  """
  fewest = np.ones_like(counts)
  if chosen is not None:
    counts, fewest = np.where(chosen, counts, 0), np.where(chosen, _FEWEST_PIECES, 1)
  share = counts / max(1, counts.sum())
  pieces = np.maximum(fewest, np.ceil(_NUM_FINE * share)).astype(int)
  first = np.cumsum(pieces) - pieces  # The place of a bin's first piece.
  place = np.arange(pieces.sum()) - np.repeat(first, pieces)
  steps = np.repeat(np.diff(edges) / pieces, pieces)
  return np.append(place * steps + np.repeat(edges[:-1], pieces), edges[-1])


def wide_bins(counts: np.ndarray) -> np.ndarray:
  """Marks the bins `[B]` whose rows differ in their scores, if they do in value."""
  above = np.cumsum(counts)
  levels = np.stack([above - counts, above]) / max(1, above[-1])
  low, high = normal_scores(levels)
  return (counts > 1) & (high - low > _NARROW)


def marginal(sums: BinSums) -> Marginal:
  """Reads the distribution off summed bins."""
  full = sums.counts > 0
  counts = sums.counts[full]
  levels = (np.cumsum(counts) - 0.5 * counts) / counts.sum()
  # Rounding of sums must not disturb the order.
  return Marginal(np.maximum.accumulate(sums.sums[full] / counts), levels, counts)


class Collect(Protocol):
  """A function that has clients count their inputs in public bins, and adds it up."""

  def __call__(self, edges: Sequence[np.ndarray]) -> Sequence[BinSums]:
    """Returns the sums of as many inputs as there are edges `[B + 1]`.

    Edges without a bin, `[0]`, are of an input that needs no further pass.
    """


def find(collect: Collect, num_inputs: int) -> list[Marginal]:
  """Finds the marginals of standardised inputs in a few passes over all clients."""
  edges = [coarse_edges()] * num_inputs
  first = collect(edges)
  edges = [finer_edges(e, s.counts) for e, s in zip(edges, first, strict=True)]
  found = list(collect(edges))
  for _ in range(_MOST_PASSES - 2):
    wide = [wide_bins(sums.counts) for sums in found]
    again = [bool(one.any()) for one in wide]
    if not any(again):
      break
    edges = [
      finer_edges(e, s.counts, w) if w.any() else e
      for e, s, w in zip(edges, found, wide, strict=True)
    ]
    asked = [e if one else e[:0] for e, one in zip(edges, again, strict=True)]
    found = [
      new if one else old
      for new, old, one in zip(collect(asked), found, again, strict=True)
    ]
  return [marginal(sums) for sums in found]


def fit(parts: Sequence[np.ndarray]) -> Marginal:
  """Finds the marginal of one standardised input, given in parts `[n_c]` by client.

  Example:
    >>> import numpy as np
    >>> from fedbnr_jax.data import marginals
    >>> one = marginals.fit([np.array([-1.0, 0.0]), np.array([0.0, 0.0, 900.0])])
    >>> one.scores(np.array([-1.0, 0.0, 900.0])).round(2).tolist()
    [-1.28, 0.0, 1.28]
  """

  def collect(edges: Sequence[np.ndarray]) -> list[BinSums]:
    return [add([bin_sums(values, edges[0]) for values in parts])]

  (found,) = find(collect, 1)
  return found


def correlation_factor(moments: np.ndarray) -> np.ndarray:
  """Returns the Cholesky factor `[D, D]` of a correlation.

  Args:
    moments: `[D, D]` mean products of centred scores, which are sums over clients.
  """
  deviation = np.sqrt(np.maximum(np.diag(moments), 1e-12))
  correlation = moments / np.outer(deviation, deviation)
  # Inputs that repeat each other make it singular.
  jitter = 1e-6 * np.eye(len(correlation))
  factor: np.ndarray = np.linalg.cholesky(correlation + jitter)
  return factor / np.sqrt(1.0 + 1e-6)
