"""Unifying random kernel: feature maps, made of a few constructions that add up."""

from fedbnr_jax.gp.urk.additive_inputs import additive
from fedbnr_jax.gp.urk.base import (
  FeatureMap,
  FeatureParams,
  Shared,
  Source,
  apply_shared,
  draw_omega,
  from_function,
  num_features,
  shared_part,
)
from fedbnr_jax.gp.urk.deep_kernels import deep, replicate
from fedbnr_jax.gp.urk.fourier import SPECTRA, random_fourier, sample_spectrum
from fedbnr_jax.gp.urk.inducing_inputs import BLEND, PROFILES, InputSummary, inducing
from fedbnr_jax.gp.urk.names import BASES, KERNELS, ard, build, parts
from fedbnr_jax.gp.urk.products import exponential, linear, polynomial
from fedbnr_jax.gp.urk.sums import add

__all__ = [
  "BASES",
  "BLEND",
  "KERNELS",
  "PROFILES",
  "SPECTRA",
  "FeatureMap",
  "FeatureParams",
  "InputSummary",
  "Shared",
  "Source",
  "add",
  "additive",
  "apply_shared",
  "ard",
  "build",
  "deep",
  "draw_omega",
  "exponential",
  "from_function",
  "inducing",
  "linear",
  "num_features",
  "parts",
  "polynomial",
  "random_fourier",
  "replicate",
  "sample_spectrum",
  "shared_part",
]
